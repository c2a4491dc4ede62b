"""What local and bubblewrap promise each for itself, and how one of them is chosen."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxes import BACKENDS, bubblewrap, folders, select
from sandboxes.base import CommandRefused, Sandbox, SandboxError
from sandboxes.local import LocalBackend
from tests.sandboxes.support import MINUTE, SPEC, exec_all, outputs, run, running

ROOT = Path(__file__).parents[2]


def resident(sandbox: Sandbox) -> int:
    return int(sandbox._host_shell.processes[-1].pid)  # type: ignore[attr-defined]


class TestLocal:
    def test_commands_that_harm_the_host_are_refused(self) -> None:
        # "false &&": should the guard ever fail, this test must not be what harms the host.
        async def body(sandbox: Sandbox) -> None:
            with pytest.raises(CommandRefused, match="recursive removal of /"):
                await sandbox.exec("false && sudo rm -rf /", timeout_seconds=MINUTE)
            with pytest.raises(CommandRefused, match="every process"):
                await sandbox.start("false && kill -9 -1")
            await sandbox.exec("cd /", timeout_seconds=MINUTE)
            with pytest.raises(CommandRefused):
                await sandbox.exec("false && rm -rf ./*", timeout_seconds=MINUTE)
            with pytest.raises(CommandRefused):
                await sandbox.exec("false && rm -rf *", timeout_seconds=MINUTE, cwd="/etc")
            result = await sandbox.exec("echo 'rm -rf /'; mkdir -p ~/x; rm -rf ~/x", timeout_seconds=MINUTE)
            assert (result.output, result.exit_code) == ("rm -rf /\n", 0)

        run("local", body)

    @pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
    def test_a_resident_that_is_killed_is_replaced(self, stop: signal.Signals) -> None:
        async def body(sandbox: Sandbox) -> None:
            await sandbox.exec("cd /usr; export A=1", timeout_seconds=MINUTE)
            process = await sandbox.start("read -r line; echo $line")
            killing = f"kill -{stop.value} {resident(sandbox)}; sleep 0.3; echo own end; export A=2"
            result = await sandbox.exec(killing, timeout_seconds=MINUTE)
            assert (result.output, result.exit_code) == ("own end\n", 0)
            assert (await sandbox.exec("pwd; echo $A", timeout_seconds=MINUTE)).output == "/usr\n2\n"
            await process.write(b"still there\n")
            assert await process.wait(MINUTE)
            assert process.output() == "still there\n"

        run("local", body)

    def test_a_resident_that_is_stopped_is_replaced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sandboxes.command_shell.ANSWER_SECONDS", 0.5)

        async def body(sandbox: Sandbox) -> None:
            stopping = f"kill -STOP {resident(sandbox)}; sleep 1000.51"
            assert (await sandbox.exec(stopping, timeout_seconds=0.3)).timed_out
            assert (await sandbox.exec("echo next", timeout_seconds=MINUTE)).output == "next\n"
            assert not running("1000.51")

        run("local", body)

    def test_working_folder_of_the_spec(self, tmp_path: Path) -> None:
        assert outputs("local", "pwd", spec=replace(SPEC, cwd=str(tmp_path))) == [f"{tmp_path}\n"]
        assert outputs("local", "pwd", spec=replace(SPEC, cwd="a/b"))[0].endswith("/workspace/a/b\n")
        assert outputs("local", "pwd", spec=replace(SPEC, cwd="~/a"))[0].endswith("/home/a\n")
        with pytest.raises(SandboxError, match="/no/such cannot be used: No such file"):
            outputs("local", "pwd", spec=replace(SPEC, cwd="/no/such"))

    def test_a_shell_that_does_not_start(self, tmp_path: Path) -> None:
        broken = tmp_path / "sh"
        broken.write_text("#!/bin/sh\necho it is broken >&2; exit 3\n")
        broken.chmod(0o755)

        def left() -> list[Path]:
            return [path for path in folders.base().iterdir() if path.name.startswith(f"{os.getpid()}-")]

        for program, reason in ((str(broken), "it is broken"), ("/no/such/shell", "cannot be started")):
            with pytest.raises(SandboxError, match=reason):
                asyncio.run(LocalBackend(program).open(SPEC))
            assert not left()

    def test_names_no_shell_can_hold(self) -> None:
        with pytest.raises(SandboxError, match="'A-B'"):
            outputs("local", "pwd", spec=replace(SPEC, env={"A-B": "1"}))


class TestBubblewrap:
    def test_the_places_inside(self) -> None:
        lines = outputs("bubblewrap", 'pwd; echo "$HOME $TMPDIR"; cd; pwd; id -un; ls -A ~ /tmp /workspace | grep -c .')
        assert lines[0].splitlines() == ["/workspace", "/home/user /tmp", "/home/user", "user", "3"]

    @pytest.mark.parametrize(
        ("cwd", "shown"),
        [
            ("/app", "/app"),
            ("/home/user/x", "/home/user/x"),
            ("~", "/home/user"),
            ("a/b", "/workspace/a/b"),
            ("/usr/bin", "/usr/bin"),
        ],
    )
    def test_working_folder_of_the_spec(self, cwd: str, shown: str) -> None:
        assert (
            outputs("bubblewrap", "pwd; [ -w . ] && touch x", "pwd", spec=replace(SPEC, cwd=cwd)) == [f"{shown}\n"] * 2
        )

    def test_a_working_folder_the_system_has_not(self) -> None:
        with pytest.raises(SandboxError, match="/usr/no/such does not exist"):
            outputs("bubblewrap", "pwd", spec=replace(SPEC, cwd="/usr/no/such"))

    def test_the_system_is_read_only(self) -> None:
        places = "/ /usr /usr/bin /etc /run /proc/sys/vm /lib /var /home /run/channel"
        result = exec_all("bubblewrap", f"for p in {places}; do touch $p/x 2>/dev/null && echo $p; done; echo done")[0]
        assert result.output == "done\n"
        writes = "for f in /proc/sys/kernel/hostname /proc/sysrq-trigger /etc/hosts /etc/passwd /run/channel/save; do"
        assert outputs("bubblewrap", f"{writes} (: >>$f) 2>/dev/null && echo $f; done; echo done") == ["done\n"]

    def test_homes_and_projects_are_not_there(self, tmp_path: Path) -> None:
        home = os.path.expanduser("~")  # noqa: PTH111 (as the shell sees it)
        for path in (
            home + "/.ssh",
            home + "/.bashrc",
            str(ROOT),
            str(Path.cwd()),
            str(tmp_path),
            "/etc/shadow",
            "/var/lib",
        ):
            assert outputs("bubblewrap", f"ls -d {path} 2>/dev/null; echo .") == [".\n"], path

    def test_processes_and_environment_of_the_host_are_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SOME_TOKEN", "sk-secret")
        (shown,) = outputs(
            "bubblewrap", "cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'; ls -d /proc/[0-9]* | wc -l"
        )
        assert "secret" not in shown
        assert "python" not in shown
        assert int(shown.split()[-1]) < 8

    def test_sandboxes_do_not_see_each_other(self) -> None:
        async def body(sandbox: Sandbox) -> None:
            other = await BACKENDS["bubblewrap"].open(SPEC)
            try:
                await sandbox.exec("touch ~/mine /tmp/mine mine; sleep 1000.52 &", timeout_seconds=MINUTE)
                look = "ls -A ~ /tmp . | grep mine; grep -l 1000.52 /proc/*/cmdline 2>/dev/null; echo ."
                assert ".\n" in (await other.exec(look, timeout_seconds=MINUTE)).output
                assert "mine" not in (await other.exec(look, timeout_seconds=MINUTE)).output
            finally:
                await other.close()

        run("bubblewrap", body)

    def test_no_privileges(self) -> None:
        status = "grep -E '^(NoNewPrivs|CapEff|CapPrm|CapInh|CapAmb):' /proc/self/status"
        values = {line.partition(":\t")[2] for line in outputs("bubblewrap", status)[0].splitlines()}
        assert values == {"1", "0" * 16}
        refused = "unshare -U true; mount -t tmpfs x /tmp; mknod d b 8 0; chroot / true; kill -0 1"
        assert (
            exec_all("bubblewrap", f"({refused}) 2>/dev/null; ls /dev/sd* /dev/vd* 2>/dev/null; echo .")[0].output
            == ".\n"
        )

    def test_network_on_request(self) -> None:
        count = "grep -c : /proc/net/dev"
        assert outputs("bubblewrap", count, spec=replace(SPEC, network=False)) == ["1\n"]
        assert outputs("bubblewrap", count) == [f"{Path('/proc/net/dev').read_text().count(':')}\n"]

    def test_nothing_a_command_does_ends_it(self) -> None:
        async def body(sandbox: Sandbox) -> None:
            first = await sandbox.exec("cat /proc/1/cmdline", timeout_seconds=MINUTE)
            assert "resident" in first.output  # else what follows would not stay inside
            for mischief in ("kill -9 -1", "kill -9 1", "kill -TERM 1; kill -HUP 1; kill -STOP 1", "kill -9 $PPID"):
                await sandbox.exec(f"cd /usr; {mischief}", timeout_seconds=MINUTE)
                assert (await sandbox.exec("echo next", timeout_seconds=MINUTE)).output == "next\n"

        run("bubblewrap", body)

    def test_when_it_is_killed_from_outside(self) -> None:
        async def body(sandbox: Sandbox) -> None:
            task = asyncio.create_task(sandbox.exec("sleep 1000.53", timeout_seconds=MINUTE))
            process = await sandbox.start("cat")
            os.killpg(resident(sandbox), signal.SIGKILL)
            with pytest.raises(SandboxError, match="died"):
                await task
            with pytest.raises(SandboxError, match="died"):
                await sandbox.exec("echo", timeout_seconds=MINUTE)
            assert await process.wait(MINUTE)
            assert process.exit_code() == 137

        run("bubblewrap", body)
        assert not running("1000.53")

    def test_python_works(self) -> None:
        result = exec_all(
            "bubblewrap", "python3 -c 'import ssl, ctypes, sqlite3; print(6 * 7)'", timeout_seconds=MINUTE
        )[0]
        assert result.output == "42\n"

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
    @pytest.mark.skipif(not Path("/usr/bin/python3.11").exists(), reason="needs a Python that every user can run")
    def test_for_an_ordinary_user(self) -> None:
        script = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from sandboxes import BACKENDS
from sandboxes.base import SandboxSpec

async def main():
    sandbox = await BACKENDS["bubblewrap"].open(SandboxSpec("tests", "r1"))
    print((await sandbox.exec("id -u", timeout_seconds=20)).output)
    flood = "sh -c 'i=0; while [ $i -lt 1500 ]; do sleep 3 & i=$((i+1)); done'; set -- /proc/[0-9]*; echo $#"
    print((await sandbox.exec(flood, timeout_seconds=20)).output.split()[-1])
    await asyncio.sleep(3)
    print((await sandbox.exec("echo next", timeout_seconds=20)).output)
    await sandbox.close()

asyncio.run(main())
"""
        as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env", "-i", "PATH=/usr/bin:/bin"]
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o755)
            shutil.copytree(ROOT / "sandboxes", Path(folder, "sandboxes"), ignore=shutil.ignore_patterns("__pycache__"))
            command = [*as_nobody, "/usr/bin/python3.11", "-c", script, folder]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
        assert done.stderr == ""
        user, processes, after = done.stdout.split()
        assert (user, after) == ("1000", "next")
        assert 100 < int(processes) <= bubblewrap.MAX_PROCESSES + 1


@pytest.fixture
def _without_bwrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PATH", str(tmp_path))
    bubblewrap._users.cache_clear()
    yield
    bubblewrap._users.cache_clear()


class TestSelection:
    def test_a_kind_by_name(self) -> None:
        assert select("local", wants_image=False).backend is BACKENDS["local"]

    def test_images(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "cannot run images" in select("local", wants_image=True).problem
        monkeypatch.setenv("DOCKER_HOST", "unix:///no/such.sock")
        assert "no Docker engine answers at /no/such.sock" in select("auto", wants_image=True).problem

    def test_auto_takes_what_isolates(self) -> None:
        chosen = select("auto", wants_image=False)
        if BACKENDS["bubblewrap"].unavailable():
            assert chosen.backend is BACKENDS["local"]
        else:
            assert (chosen.backend, chosen.warning) == (BACKENDS["bubblewrap"], "")

    @pytest.mark.usefixtures("_without_bwrap")
    def test_auto_without_bubblewrap_warns(self) -> None:
        chosen = select("auto", wants_image=False)
        assert chosen.backend is BACKENDS["local"]
        assert "not isolated: bubblewrap is not installed" in chosen.warning
        assert "install the package bubblewrap" in select("bubblewrap", wants_image=False).problem
