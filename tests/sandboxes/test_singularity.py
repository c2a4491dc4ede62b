"""What instances promise beyond the contract, on the stand-in for Apptainer: it was never run on the real one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from sandboxes import folders, select, singularity_images, singularity_instance
from sandboxes.base import Sandbox, SandboxError
from sandboxes.docker_settings import DEFAULT_IMAGE
from sandboxes.singularity import SingularityBackend
from sandboxes.singularity_images import source_of
from sandboxes.singularity_instance import of_image, words
from tests.sandboxes.instances import StandIn
from tests.sandboxes.support import MINUTE, SPEC, in_sandbox, running, until, wait_until

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
WORKER = """
import asyncio, os, sys
from sandboxes.base import SandboxSpec
from sandboxes.singularity import SingularityBackend

async def main():
    backend = SingularityBackend()
    if sys.argv[1] == "build":
        await backend.ensure_image(sys.argv[2])
        return
    sandbox = await backend.open(SandboxSpec(run_name="dead run", rollout_id="r"))
    await sandbox.start("sleep 1000.71")
    print("up", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn.install(tmp_path).use(monkeypatch)


def run(body: Callable[[Sandbox], Awaitable[T]], backend: SingularityBackend | None = None, **changes: Any) -> T:
    return in_sandbox(backend or SingularityBackend(), replace(SPEC, **changes), body)


def output(command: str, **changes: Any) -> str:
    async def body(sandbox: Sandbox) -> str:
        return (await sandbox.exec(command, timeout_seconds=MINUTE)).output

    return run(body, **changes)


def other_process(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", WORKER, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def start_options(stand_in: StandIn) -> list[str]:
    return [line for line in stand_in.lines("log") if line.startswith("instance start")]


class TestAtTheDoor:
    def test_no_program(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        problem = select("singularity", wants_image=True).problem
        assert problem.startswith("sandbox singularity needs apptainer or singularity on PATH; install")
        assert "\n" not in problem

    def test_a_program_that_does_not_work(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        broken = tmp_path / "apptainer"
        broken.write_text("#!/bin/sh\necho 'FATAL:   no configuration' >&2; exit 255\n")
        broken.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert f"{broken} does not work here (FATAL: no configuration)" in SingularityBackend().unavailable()

    def test_either_program(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        StandIn.install(tmp_path, "singularity").use(monkeypatch)
        chosen = select("singularity", wants_image=True)
        assert (chosen.problem, chosen.backend and chosen.backend.name) == ("", "singularity")

    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [
            ("TERMINAL_CONTAINER_CPU", "many", "must be a number"),
            ("TERMINAL_DOCKER_NETWORK", "docs.example", "set TERMINAL_DOCKER_NETWORK to true or false"),
        ],
    )
    def test_settings(self, name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(name, value)
        assert words in SingularityBackend().unavailable()

    def test_how_many_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert SingularityBackend().max_sandboxes() >= 1
        monkeypatch.setenv("TERMINAL_MAX_CONTAINERS", "3")
        assert SingularityBackend().max_sandboxes() == 3


class TestImages:
    @pytest.mark.parametrize(
        ("name", "source"),
        [
            ("python:3.12", "docker://python:3.12"),
            ("reg.example/a/b@sha256:1", "docker://reg.example/a/b@sha256:1"),
            ("library://a/b", "library://a/b"),
            ("docker-daemon:a:latest", "docker-daemon:a:latest"),
            ("images/a.sif", ""),
            ("/images/a", ""),
            ("./a", ""),
        ],
    )
    def test_names(self, name: str, source: str) -> None:
        assert source_of(name) == source

    def test_built_once_for_many_samples(self, stand_in: StandIn) -> None:
        stand_in.add_image("docker://some/image:1", "export FLAVOUR=vanilla")
        told: list[str] = []

        async def many() -> None:
            backend = SingularityBackend()
            await asyncio.gather(*(backend.ensure_image("some/image:1", told.append) for _ in range(20)))

        asyncio.run(many())
        assert told == [
            "building image docker://some/image:1, once for this machine; that may take minutes",
            "image docker://some/image:1 is here",
        ]
        assert stand_in.lines("builds") == ["docker://some/image:1"]
        assert output("echo $FLAVOUR", image="some/image:1") == "vanilla\n"
        assert output("echo $FLAVOUR", image="docker://some/image:1") == "vanilla\n"
        assert stand_in.lines("builds") == ["docker://some/image:1"]

    def test_built_once_for_many_workers(self, stand_in: StandIn) -> None:
        stand_in.switch("slow", "0.5")
        workers = [other_process("build", "") for _ in range(3)]
        for worker in workers:
            assert worker.communicate(timeout=MINUTE)[0] == ""
            assert worker.returncode == 0
        assert stand_in.lines("builds") == [f"docker://{DEFAULT_IMAGE}"]

    def test_what_cannot_be_had(self, stand_in: StandIn) -> None:
        async def many() -> list[Any]:
            backend = SingularityBackend()
            return await asyncio.gather(*(backend.ensure_image("no/such") for _ in range(5)), return_exceptions=True)

        errors = asyncio.run(many())
        assert {(type(error), error.kind) for error in errors} == {(SandboxError, "image_unavailable")}
        assert str(errors[0]).startswith("Singularity image not available: docker://no/such: FATAL: While performing")
        assert "requested access to the resource is denied" in str(errors[0])
        assert stand_in.lines("builds") == ["docker://no/such"]
        assert not list((stand_in.root / "cache").iterdir())
        assert output("echo others are fine") == "others are fine\n"

    def test_a_build_that_takes_too_long(self, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
        stand_in.switch("slow", "1000.72")
        monkeypatch.setattr(singularity_images, "BUILD_SECONDS", 1)
        with pytest.raises(SandboxError, match="it was not built within 1 s"):
            asyncio.run(SingularityBackend().ensure_image(""))
        assert not running("1000.72")

    def test_a_build_ends_with_its_owner(self, stand_in: StandIn) -> None:
        stand_in.switch("slow", "1000.73")
        with other_process("build", "") as worker:
            assert wait_until(lambda: bool(running("1000.73")))
            worker.kill()
        assert wait_until(lambda: not running("1000.73"))
        stand_in.switch("slow", "0")
        asyncio.run(SingularityBackend().ensure_image(""))
        assert [path.suffix for path in (stand_in.root / "cache").iterdir() if path.is_file()] == [".sif"]

    def test_what_dead_builds_left_is_cleared(self, stand_in: StandIn) -> None:
        old, new = stand_in.root / "cache/building-old", stand_in.root / "cache/building-new"
        for folder in (old, new):
            folder.mkdir()
            (folder / "image.sif").write_text("half of it")
        os.utime(old, (0, 0))
        asyncio.run(SingularityBackend().ensure_image(""))
        assert (old.exists(), new.exists()) == (False, True)

    def test_files_and_folders(self, stand_in: StandIn) -> None:
        file = stand_in.root / "own.sif"
        file.write_text("export FLAVOUR=plain\n")
        assert output("echo $FLAVOUR", image=str(file)) == "plain\n"
        assert not stand_in.lines("builds")
        for name, complaint in (("/no/such.sif", "no such file"), ("/etc", "no image"), ("x.sif", "no such file")):
            with pytest.raises(SandboxError, match=complaint) as caught:
                asyncio.run(SingularityBackend().ensure_image(name))
            assert caught.value.kind == "image_unavailable"

    def test_default(self, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
        stand_in.add_image("library://lab/tools")
        monkeypatch.setenv("TERMINAL_SINGULARITY_IMAGE", "library://lab/tools")
        asyncio.run(SingularityBackend().ensure_image(""))
        assert stand_in.lines("builds") == ["library://lab/tools"]


class TestCommandLine:
    def test_isolation_and_limits(self, stand_in: StandIn) -> None:
        output("true")
        (line,) = start_options(stand_in)
        folder = rf"{folders.base()}/{os.getpid()}-"
        for part in (
            "--containall --no-home --hostname sandbox --no-privs --add-caps CAP_CHOWN,",
            f"--workdir {folder}",
            "--scratch /run/channel --scratch /run/home",
            f"--overlay {folder}",
            "--pids-limit 512 --memory 5120M --cpus 1 ",
        ):
            assert part in line
        assert "--network" not in line

    def test_what_the_user_wishes(self, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "data").write_text("of the host\n")
        monkeypatch.setenv("TERMINAL_CONTAINER_CPU", "2.5")
        monkeypatch.setenv("TERMINAL_CONTAINER_MEMORY", "0")
        monkeypatch.setenv("TERMINAL_DOCKER_NETWORK", "false")
        monkeypatch.setenv("TERMINAL_DOCKER_VOLUMES", json.dumps([f"{tmp_path}:/data:ro"]))
        monkeypatch.setenv("TERMINAL_DOCKER_ENV", json.dumps({"COLOUR": "red"}))
        monkeypatch.setenv("TERMINAL_CWD", "/somewhere")
        command = "cat /data/data; touch /data/x 2>/dev/null || echo $COLOUR; pwd; grep -c : /proc/net/dev"
        assert output(command) == "of the host\nred\n/somewhere\n1\n"
        (line,) = start_options(stand_in)
        assert "--net --network none" in line
        assert "--cpus 2.5" in line
        assert "--memory" not in line

    def test_network_of_the_spec(self, stand_in: StandIn) -> None:
        assert output("grep -c : /proc/net/dev", network=False) == "1\n"
        assert "--net --network none" in start_options(stand_in)[0]

    @pytest.mark.parametrize(
        ("missing", "attempts", "last"),
        [
            ("no-cgroups", 2, ("--overlay", None)),
            ("no-overlay", 3, ("--writable-tmpfs", "--pids-limit")),
            ("no-cgroups no-overlay", 4, ("--writable-tmpfs", None)),
        ],
    )
    def test_what_the_machine_does_not_allow_is_left_out(
        self, stand_in: StandIn, missing: str, attempts: int, last: tuple[str, str | None]
    ) -> None:
        for name in missing.split():
            stand_in.switch(name)
        backend = SingularityBackend()

        async def body(sandbox: Sandbox) -> str:
            return (await sandbox.exec("echo fine", timeout_seconds=MINUTE)).output

        assert run(body, backend) == run(body, backend) == "fine\n"
        lines = start_options(stand_in)
        assert len(lines) == attempts + 1  # it is remembered
        for option in ("--overlay", "--writable-tmpfs", "--pids-limit"):
            assert (option in lines[-1]) == (option in last), option
        assert not stand_in.instances()

    def test_an_instance_that_does_not_start(self, stand_in: StandIn) -> None:
        (stand_in.root / "instances").rmdir()
        before = own_folders()
        with pytest.raises(SandboxError, match=r"no instance of .*: FATAL: instance .* already exists") as caught:
            output("true")
        assert caught.value.kind == "sandbox"
        assert own_folders() <= before

    def test_an_instance_that_takes_too_long(self, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
        stand_in.switch("slow-start", "1000.81")
        monkeypatch.setattr(singularity_instance, "START_SECONDS", 1)
        with pytest.raises(SandboxError, match="it did not start within 1 s"):
            output("true")
        assert len(start_options(stand_in)) == 1
        assert not running("1000.81")


class TestInside:
    def test_nothing_of_the_hosts_environment(self, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("OPENROUTER_API_KEY", "APPTAINERENV_LEAK", "SINGULARITY_BIND", "APPTAINER_DOCKER_PASSWORD"):
            monkeypatch.setenv(name, "sk-secret")
        image = "export PATH=/opt/bin:/usr/bin:/bin LD_LIBRARY_PATH=/opt/lib OWN='a b'"
        stand_in.add_image(f"docker://{DEFAULT_IMAGE}", image)
        env = output("env; cat /proc/*/environ")
        assert "secret" not in env
        assert "OWN=a b\n" in env
        assert "PATH=/opt/bin:/usr/bin:/bin\n" in env
        seen = {line.partition("=")[0] for line in output("env").splitlines()}
        assert seen == {"HOME", "OLDPWD", "OWN", "PATH", "PWD", "SHLVL", "TMPDIR", "_"}
        told = set(stand_in.lines("environment"))
        assert not told & {"OPENROUTER_API_KEY", "APPTAINERENV_LEAK", "SINGULARITY_BIND"}

    def test_the_programs_own_variables(self) -> None:
        told = {"APPTAINER_NAME": "x", "LD_LIBRARY_PATH": "/opt/lib:/.singularity.d/libs", "PS1": "> ", "A": "1"}
        assert of_image(told) == {"LD_LIBRARY_PATH": "/opt/lib", "A": "1"}
        assert of_image({"LD_LIBRARY_PATH": "/.singularity.d/libs"}) == {}

    def test_a_home_that_can_be_written_to(self, stand_in: StandIn) -> None:
        stand_in.add_image(f"docker://{DEFAULT_IMAGE}", "export HOME=/proc/none")
        assert output('echo "$HOME"; cd; touch x; pwd') == "/run/home\n/run/home\n"

    @pytest.mark.parametrize(("cwd", "shown"), [("/app", "/app"), ("~/x", "/root/x"), ("a/b", "/workspace/a/b")])
    @pytest.mark.usefixtures("stand_in")
    def test_working_folder_of_the_spec(self, cwd: str, shown: str) -> None:
        assert output("pwd; touch x", cwd=cwd) == f"{shown}\n"

    @pytest.mark.usefixtures("stand_in")
    def test_sandboxes_do_not_see_each_other(self) -> None:
        async def body(sandbox: Sandbox) -> None:
            other = await SingularityBackend().open(SPEC)
            try:
                await sandbox.exec("touch ~/mine /tmp/mine mine; sleep 1000.74 &", timeout_seconds=MINUTE)
                look = "ls -A ~ /tmp . | grep mine; grep -l 1000.74 /proc/*/cmdline 2>/dev/null; echo ."
                assert ".\n" in (await other.exec(look, timeout_seconds=MINUTE)).output
                assert "mine" not in (await other.exec(look, timeout_seconds=MINUTE)).output
            finally:
                await other.close()

        run(body)


class TestEnd:
    def test_an_instance_that_is_gone_is_noticed(self, stand_in: StandIn) -> None:
        async def body(sandbox: Sandbox) -> None:
            task = asyncio.create_task(sandbox.exec("sleep 1000.75", timeout_seconds=MINUTE))
            assert await until(lambda: bool(running("1000.75")))
            (name,) = stand_in.instances()
            assert singularity_instance._run("instance", "stop", "--force", name, seconds=20) is not None
            for call in (task, sandbox.exec("echo", timeout_seconds=MINUTE)):
                with pytest.raises(SandboxError, match="no instance found"):
                    await call

        run(body)

    def test_killed_with_its_owner(self, stand_in: StandIn) -> None:
        with other_process("open") as worker:
            assert worker.stdout
            assert worker.stdout.readline() == "up\n"
            assert stand_in.instances()[0].startswith(f"batch-runner.dead-run.{worker.pid}-")
            worker.kill()
        assert wait_until(lambda: not stand_in.instances() and not running("1000.71"))
        assert wait_until(lambda: not any(path.name.startswith(f"{worker.pid}-") for path in folders.base().iterdir()))

    def test_what_is_left_when_all_was_killed_is_swept(self, stand_in: StandIn) -> None:
        async def body(sandbox: Sandbox) -> list[str]:
            with other_process("open") as worker:
                assert worker.stdout
                assert worker.stdout.readline() == "up\n"
                assert SingularityBackend().sweep() == []
                doomed = keepers(worker.pid)
                assert doomed
                worker.send_signal(signal.SIGSTOP)  # so that it does not see them die
                for pid in doomed:
                    os.kill(pid, signal.SIGKILL)
                worker.kill()
            swept = [line for line in SingularityBackend().sweep() if f".{worker.pid}-" in line]
            assert (await sandbox.exec("echo alive", timeout_seconds=MINUTE)).output == "alive\n"
            assert len(stand_in.instances()) == 1
            return swept

        (line,) = run(body)
        assert line.startswith("instance batch-runner.dead-run.")
        assert wait_until(lambda: not running("1000.71"))

    def test_whose_keeper_was_killed(self, stand_in: StandIn) -> None:
        async def body(sandbox: Sandbox) -> None:
            for pid in keepers(os.getpid()):
                os.kill(pid, signal.SIGKILL)
            assert (await sandbox.exec("echo alive", timeout_seconds=MINUTE)).output == "alive\n"

        before = own_folders()
        run(body)
        assert not stand_in.instances()
        assert own_folders() <= before

    def test_cancelled_while_it_starts(self, stand_in: StandIn) -> None:
        stand_in.switch("slow-start", "0.5")

        async def main() -> None:
            opening = asyncio.ensure_future(SingularityBackend().open(SPEC))
            assert await until(lambda: bool(start_options(stand_in)))
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)

        before = own_folders()
        asyncio.run(main())
        assert not stand_in.instances()
        assert own_folders() <= before


def own_folders() -> set[Path]:
    """Return the folders of this process's sandboxes, those of other tests too."""
    return {path for path in folders.base().iterdir() if path.name.startswith(f"{os.getpid()}-")}


def keepers(owner: int) -> list[int]:
    """Return the pids of the shells that look after a worker's instances."""
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(owner)], capture_output=True, text=True, check=True
    )
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if "instance start" in line]


def test_words_of_the_program() -> None:
    said = "INFO:    Starting build...\nGetting image source\nFATAL:   While performing build:\tno such image\n"
    assert words(said) == "FATAL: While performing build: no such image"
    assert words("a\nb\n\nc\nd\n") == "b c d"
    assert words("") == ""
