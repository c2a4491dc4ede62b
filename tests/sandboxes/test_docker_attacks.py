"""What a command in a container may do harm to: that container."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from sandboxes.base import ExecResult, Sandbox, SandboxError
from sandboxes.docker import DockerBackend
from tests import engines
from tests.sandboxes.containers import SPEC, exec_all, image, ours, output, run, use
from tests.sandboxes.support import MINUTE

pytestmark = pytest.mark.docker
OF_THE_PROTOCOL = "$(grep -la /run/channel /proc/[0-9]*/cmdline | cut -d/ -f3)"  # resident and lanes, by their pids
PUMPS = "$(grep -lax cat /proc/[0-9]*/comm | cut -d/ -f3)"
BOMB = "f() { f | f & }; f; sleep 60"
MISCHIEF = {
    "the resident and the lanes are killed": f"kill -9 {OF_THE_PROTOCOL}; sleep 1",
    "they are stopped": f"kill -STOP {OF_THE_PROTOCOL}; sleep 0.1",
    "the pumps are killed": f"kill -9 {PUMPS.replace('/proc/[0-9]*', '/proc/[0-9][0-9]*')}; sleep 0.2",
    "their files are removed": "rm -rf /run/channel/*",
    "frames are forged": r"for f in /run/channel/shell/*.ctl; do printf 'x0\000z\000d/nowhere\000' >$f; done; exit 3",
    "output is forged": "for f in /run/channel/shell/*.out; do head -c 100000 /dev/urandom >$f; done",
    "the mount is full": "head -c 100000000 /dev/zero >/run/channel/big",
    "everything is closed": 'exec <&- >&- 2>&-; for i in 3 4 5 6 7 8 9; do eval "exec $i>&-"; done',
    "memory": "tail /dev/zero",
    "processes": "i=0; while [ $i -lt 700 ]; do sleep 1000.61 & i=$((i+1)); done 2>/dev/null",
}

PROGRAMS = ("setsid", "ps", "nohup")  # that poor images lack
OUT_OF_REACH = (
    "python3 -c 'import os; os.mknod(\"/tmp/disk\", 0o60600, os.makedev(254, 0))'",
    'python3 -c \'import ctypes; c = ctypes.CDLL(None); exit(-c.mount(b"/", b"/mnt", None, 4096, None))\'',
    "python3 -c 'import ctypes; c = ctypes.CDLL(None); exit(-c.unshare(0x10000000))'",
    "python3 -c 'import ctypes; c = ctypes.CDLL(None); exit(-c.setns(0, 0))'",
    "python3 -c 'import time; time.clock_settime(0, 1.0)'",
    "python3 -c 'import os; os.nice(-5)'",
    "echo b >/proc/sysrq-trigger",
    "echo 1 >/proc/sys/kernel/panic",
    "echo x >/proc/sys/kernel/core_pattern",
    "echo 1 >/sys/power/state",
    "cat /proc/kcore | head -c 1 | grep -q .",
    "cat /proc/keys | grep -q .",
    "chroot /tmp /bin/sh",
)


@pytest.fixture(autouse=True)
def _docker(monkeypatch: pytest.MonkeyPatch) -> None:
    use("docker", monkeypatch)
    monkeypatch.setenv("TERMINAL_CONTAINER_MEMORY", "128")


@pytest.mark.parametrize("name", MISCHIEF)
@pytest.mark.parametrize("of", [engines.TOOLS, engines.BUSYBOX])
def test_after_any_mischief_the_next_command_is_healthy(name: str, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandboxes.container_job.START_SECONDS", 2)
    monkeypatch.setattr("sandboxes.command_shell.ANSWER_SECONDS", 1)

    async def body(sandbox: Sandbox) -> ExecResult:
        await sandbox.exec("cd /usr; export KEPT=yes", timeout_seconds=MINUTE)
        await sandbox.exec(MISCHIEF[name], timeout_seconds=3)
        for _ in range(3):  # some of it is noticed at the second glance
            result = await sandbox.exec('pwd; echo "$KEPT"', timeout_seconds=10)
            if result.exit_code == 0 and result.output:
                return result
        return result

    assert run(body, image=of) == ExecResult("/usr\nyes\n", 0, total_chars=9)


class TestTheHost:
    def test_its_files(self, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("of the host")
        shown = output(
            f"cat {tmp_path}/secret /proc/1/root{tmp_path}/secret /proc/*/cwd/../{tmp_path}/secret 2>/dev/null; ls /"
        )
        assert "of the host" not in shown
        assert "batch_runner.py" not in output("find / -name 'batch_runner*' -not -path '/proc/*' 2>/dev/null")

    def test_the_engines_socket(self) -> None:
        assert output("find / -xdev -type s 2>/dev/null; ls /var/run/docker.sock /run/docker.sock 2>/dev/null") == ""

    def test_its_loopback(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            reached = output(
                f"python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", {port}), 2)' 2>&1 | tail -n 1"
            )
        assert "refused" in reached

    def test_is_out_of_reach(self) -> None:
        results = dict(zip(OUT_OF_REACH, exec_all(*OUT_OF_REACH), strict=True))
        assert not [command for command, result in results.items() if result.exit_code == 0]

    def test_programs_of_root(self) -> None:
        layer = engines.busybox_layer([("bin/become", Path("/bin/busybox").read_bytes())])
        with image("localhost/batch-runner-tests/user:1", layer, {"User": "1000"}) as name:
            shown = output(
                "chmod u+s /bin/become 2>/dev/null; id -u; kill -9 1; grep CapEff /proc/self/status", image=name
            )
        assert shown.split()[0] == "1000"
        assert shown.split()[-1] == "0000000000000000"


class TestOthers:
    def test_are_served_while_one_explodes(self) -> None:
        backend = DockerBackend()

        async def main() -> tuple[ExecResult, ExecResult, ExecResult, float]:
            bad, good = await asyncio.gather(backend.open(SPEC), backend.open(SPEC))
            try:
                exploding = asyncio.create_task(bad.exec(BOMB, timeout_seconds=4))
                await asyncio.sleep(1)
                started = time.monotonic()
                meanwhile = await good.exec("echo fine; ls /proc | grep -c '^[0-9]'", timeout_seconds=MINUTE)
                seconds = time.monotonic() - started
                return await exploding, await bad.exec("echo next", timeout_seconds=MINUTE), meanwhile, seconds
            finally:
                await asyncio.gather(bad.close(), good.close())

        bomb, after, meanwhile, seconds = asyncio.run(main())
        assert bomb.timed_out
        assert (after.output, after.exit_code) == ("next\n", 0)
        assert meanwhile.output.startswith("fine\n")
        assert int(meanwhile.output.split()[1]) < 30  # it sees no process but its own
        assert seconds < 3

    def test_a_container_that_kills_itself(self) -> None:
        backend = DockerBackend()

        async def main() -> str:
            bad, good = await asyncio.gather(backend.open(SPEC), backend.open(SPEC))
            try:
                with pytest.raises(SandboxError):
                    await bad.exec("kill -9 -1; sleep 5", timeout_seconds=MINUTE)
                return (await good.exec("echo fine", timeout_seconds=MINUTE)).output
            finally:
                await asyncio.gather(bad.close(), good.close())

        assert asyncio.run(main()) == "fine\n"
        assert ours() == []

    def test_files_of_another(self) -> None:
        backend = DockerBackend()

        async def main() -> str:
            first, second = await asyncio.gather(backend.open(SPEC), backend.open(SPEC))
            try:
                await first.write_file("/workspace/secret", b"mine")
                return (await second.exec("ls -A /workspace", timeout_seconds=MINUTE)).output
            finally:
                await asyncio.gather(first.close(), second.close())

        assert asyncio.run(main()) == ""


class TestPoorImages:
    """Semantics are the same whatever there is inside."""

    COMMANDS = (
        "cd /usr && export A='x y'; exit 3",
        'pwd; echo "$A"; sleep 1000.62 & echo started',
        'read x; echo "[$x]"',
        "echo part; sleep 1000.62",
        "echo next",
    )

    @pytest.mark.parametrize(
        ("user", "missing"),
        [("", ()), ("", PROGRAMS), ("1000", PROGRAMS), ("user", ()), ("65534:65534", PROGRAMS)],
    )
    def test_same_semantics(self, user: str, missing: tuple[str, ...]) -> None:
        layer = engines.busybox_layer(without=missing)
        with image("localhost/batch-runner-tests/poor:1", layer, {"User": user}) as name:
            results = exec_all(*self.COMMANDS, timeout_seconds=2, image=name)
        assert [result.output for result in results] == ["", "/usr\nx y\nstarted\n", "[]\n", "part\n", "next\n"]
        assert [result.exit_code for result in results] == [3, 0, 0, 124, 0]

    def test_files_of_a_user(self) -> None:
        async def body(sandbox: Sandbox) -> str:
            await sandbox.write_file("~/a b", b"x" * 200_000)
            await sandbox.write_file("small", b"y")
            return (await sandbox.exec("pwd; id -u; ls -l ~ | wc -l; stat -c %u small", timeout_seconds=MINUTE)).output

        layer = engines.busybox_layer()
        with image("localhost/batch-runner-tests/poor:1", layer, {"User": "user", "WorkingDir": "/home/user"}) as name:
            assert run(body, image=name) == "/home/user\n1000\n3\n1000\n"

    def test_a_user_without_a_home(self) -> None:
        layer = engines.busybox_layer()
        with image("localhost/batch-runner-tests/poor:1", layer, {"User": "4321:4321"}) as name:
            assert output("cd; pwd; id -u; touch /tmp/x && echo fine", image=name) == "/\n4321\nfine\n"
