"""A container's life: how it is made, what it gets, and that it is gone at the end, whatever the end is."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import docker
import pytest

from sandboxes import docker_owners
from sandboxes.base import ExecResult, Sandbox, SandboxError, SandboxFileError
from sandboxes.container_sandbox import ContainerSandbox
from sandboxes.docker import DockerBackend
from tests import engines
from tests.sandboxes.containers import SPEC, api, exec_all, image, inspected, ours, output, run
from tests.sandboxes.support import MINUTE, descriptors, wait_until

pytestmark = pytest.mark.docker
ROOT = Path(__file__).parents[2]
GONE_SECONDS = 5.0


def look(engine: str, **changes: Any) -> dict[str, Any]:
    """Return what the engine says about a sandbox's container."""

    async def body(_: Sandbox) -> dict[str, Any]:
        return await asyncio.to_thread(inspected, engine)

    return run(body, **changes)


class TestHowItIsMade:
    def test_rights_and_limits(self, engine: str) -> None:
        found = look(engine)
        host = found["HostConfig"]
        assert (host["Init"], host["AutoRemove"], host["Privileged"]) == (True, True, False)
        assert any("no-new-privileges" in option for option in host["SecurityOpt"])
        assert host["PidsLimit"] == 512
        assert (host["Memory"], host["MemorySwap"]) == (5120 << 20, 5120 << 20)
        assert found["Mounts"] == []
        assert not host["Binds"]
        assert found["Config"]["Hostname"] == "sandbox"
        assert found["Config"]["StopSignal"] in ("SIGKILL", "9")
        if engine == "docker":  # Podman tells what is left instead
            assert host["CapDrop"] == ["ALL"]
            assert sorted(host["CapAdd"]) == ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID"]
            assert host["NanoCpus"] == 1_000_000_000

    @pytest.mark.usefixtures("docker")
    def test_capabilities_inside(self) -> None:
        status = output("grep -E 'Cap|NoNewPrivs' /proc/self/status")
        values = dict(line.split(":\t") for line in status.splitlines())
        few = 0b11101011  # CHOWN, DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID by their numbers
        assert int(values["CapEff"], 16) == int(values["CapBnd"], 16) == few
        assert values["NoNewPrivs"] == "1"

    @pytest.mark.usefixtures("docker")
    def test_labels(self) -> None:
        labels = look("docker")["Config"]["Labels"]
        stat = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        assert labels["batch-runner.run"] == "tests"
        assert labels["batch-runner.rollout"] == SPEC.rollout_id
        assert labels["batch-runner.owner-pid"] == str(os.getpid())
        assert labels["batch-runner.owner-start"] == stat[19]
        assert (
            Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            in labels["batch-runner.machine"]
        )

    @pytest.mark.usefixtures("docker")
    def test_limits_of_the_users(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERMINAL_CONTAINER_CPU", "0.5")
        monkeypatch.setenv("TERMINAL_CONTAINER_MEMORY", "256")
        host = look("docker")["HostConfig"]
        assert (host["NanoCpus"], host["Memory"]) == (500_000_000, 256 << 20)

    @pytest.mark.usefixtures("docker")
    def test_no_limits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("CPU", "MEMORY", "DISK"):
            monkeypatch.setenv(f"TERMINAL_CONTAINER_{name}", "0")
        host = look("docker")["HostConfig"]
        assert (host["NanoCpus"], host["Memory"]) == (0, 0)

    @pytest.mark.usefixtures("docker")
    def test_more_processors_than_there_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERMINAL_CONTAINER_CPU", "4096")
        with api() as client:
            assert look("docker")["HostConfig"]["NanoCpus"] == client.info()["NCPU"] * 1_000_000_000

    @pytest.mark.usefixtures("docker")
    def test_volumes_the_user_asks_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("of the host")
        monkeypatch.setenv("TERMINAL_DOCKER_VOLUMES", f'["{tmp_path}:/data:ro"]')
        assert output("cat /data/file; touch /data/x 2>/dev/null || echo no") == "of the hostno\n"

    @pytest.mark.usefixtures("docker")
    def test_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cards = "cut -d: -f1 /proc/net/dev | tail -n +3 | tr -d ' ' | sort | xargs"
        assert output(cards).split() != ["lo"]
        assert output(cards, network=False) == "lo\n"
        monkeypatch.setenv("TERMINAL_DOCKER_NETWORK", "false")
        assert output(cards) == "lo\n"


class TestEnvironment:
    def test_nothing_of_the_hosts(self, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPENROUTER_API_KEY", "sk-secret-of-the-host")
        monkeypatch.setenv("HTTP_PROXY", "http://user:secret-of-the-host@proxy")
        names = output("cat /proc/[0-9]*/environ | tr '\\0' '\\n'; env | cut -d= -f1 | sort | xargs").splitlines()
        assert not any("secret-of-the-host" in line for line in names)
        assert set(names[-1].split()) <= {"HOME", "OLDPWD", "PATH", "PWD", "SHLVL", "TMPDIR", "_"}
        assert engine

    @pytest.mark.usefixtures("docker")
    def test_the_images_own(self) -> None:
        config = {"Env": ["PATH=/opt/x:/bin", "LANG=C.UTF-8", "WITH=a 'b' $c", "odd.name=x", "TMPDIR=/var"]}
        layer = engines.busybox_layer()
        with image("localhost/batch-runner-tests/env:1", layer, config) as name:
            shown = output('echo "$PATH|$LANG|$WITH|$TMPDIR|$HOME"', image=name)
            unset = output("unset WITH; export LANG=x", 'echo "$LANG ${WITH-none}"', image=name)
        assert shown == "/opt/x:/bin|C.UTF-8|a 'b' $c|/var|/root\n"
        assert unset == "x none\n"

    @pytest.mark.usefixtures("docker")
    def test_the_users(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FORWARDED", "from the host")
        monkeypatch.setenv("TERMINAL_DOCKER_FORWARD_ENV", '["FORWARDED"]')
        monkeypatch.setenv("TERMINAL_DOCKER_ENV", '{"SET": "here", "BOTH": "user"}')
        assert output('echo "$FORWARDED, $SET, $BOTH"', env={"BOTH": "sample"}) == "from the host, here, sample\n"

    @pytest.mark.usefixtures("docker")
    def test_a_name_that_no_shell_can_hold(self) -> None:
        with pytest.raises(SandboxError, match="'A B' cannot be the name of a variable"):
            output("true", env={"A B": "x"})


class TestFirstFolder:
    @pytest.mark.usefixtures("docker")
    def test_workspace(self) -> None:
        assert output("pwd; touch x && ls") == "/workspace\nx\n"

    @pytest.mark.parametrize(
        ("cwd", "folder"),
        [("/app", "/app"), ("/a/b c/$d'", "/a/b c/$d'"), ("sub", "/workspace/sub"), ("~", "/root"), ("~/x", "/root/x")],
    )
    @pytest.mark.usefixtures("docker")
    def test_the_samples(self, cwd: str, folder: str) -> None:
        assert output("pwd; touch made", cwd=cwd) == f"{folder}\n"

    @pytest.mark.parametrize(
        ("setting", "folder"), [(".", "/workspace"), ("/home/me/proj", "/workspace"), ("/srv/app", "/srv/app")]
    )
    @pytest.mark.usefixtures("docker")
    def test_the_users(self, setting: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERMINAL_CWD", setting)
        assert output("pwd") == f"{folder}\n"
        assert output("pwd", cwd="/app") == "/app\n"

    @pytest.mark.usefixtures("docker")
    def test_the_images(self) -> None:
        with image("localhost/batch-runner-tests/dir:1", engines.busybox_layer(), {"WorkingDir": "/testbed"}) as name:
            assert output("pwd", image=name) == "/testbed\n"
            assert output("pwd", image=name, cwd="/app") == "/app\n"
            assert output("pwd", image=name, cwd="sub") == "/testbed/sub\n"

    @pytest.mark.usefixtures("docker")
    def test_one_that_cannot_be(self) -> None:
        with pytest.raises(SandboxError, match=r"did not start.*[Nn]ot a directory"):
            output("pwd", cwd="/etc/passwd/x")
        assert ours() == []


class TestEnd:
    def test_nothing_is_left(self, engine: str) -> None:
        async def body(sandbox: Sandbox) -> int:
            await sandbox.exec("sleep 1000.51 & setsid sleep 1000.51 &", timeout_seconds=MINUTE)
            await sandbox.start("sleep 1000.51")
            return len(await asyncio.to_thread(ours, engine))

        assert run(body) == 1
        assert ours(engine) == []

    @pytest.mark.usefixtures("docker")
    def test_no_descriptor_is_kept(self) -> None:
        backend = DockerBackend()

        async def body(sandbox: Sandbox) -> None:
            await sandbox.exec("sleep 1000.52 & echo x", timeout_seconds=MINUTE)
            await sandbox.start("cat")

        run(body, backend)
        before = descriptors()
        for _ in range(3):
            run(body, backend)
        assert wait_until(lambda: descriptors() <= before)

    @pytest.mark.parametrize("delay", [0, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5])
    @pytest.mark.usefixtures("docker")
    def test_cancelled_while_it_is_made(self, delay: float) -> None:
        async def main() -> float:
            opening = asyncio.create_task(DockerBackend().open(SPEC))
            await asyncio.sleep(delay)
            started = time.monotonic()
            opening.cancel()
            (end,) = await asyncio.gather(opening, return_exceptions=True)
            if isinstance(end, ContainerSandbox):  # it was quicker
                await end.close()
            return time.monotonic() - started

        assert asyncio.run(main()) < 3
        assert ours() == []

    @pytest.mark.usefixtures("docker")
    def test_many_at_once(self) -> None:
        backend = DockerBackend()

        async def one(number: int) -> str:
            sandbox = await backend.open(SPEC)
            try:
                return (await sandbox.exec(f"echo {number}", timeout_seconds=MINUTE)).output
            finally:
                await sandbox.close()

        async def main() -> list[str]:
            return await asyncio.gather(*map(one, range(12)))

        assert asyncio.run(main()) == [f"{number}\n" for number in range(12)]
        assert ours() == []

    @pytest.mark.usefixtures("docker")
    def test_the_loop_is_never_blocked(self) -> None:
        longest = 0.0
        took: list[float] = []

        async def watch() -> None:
            nonlocal longest
            while True:
                started = time.monotonic()
                await asyncio.sleep(0.005)
                longest = max(longest, time.monotonic() - started)

        async def body(sandbox: Sandbox) -> None:
            watching = asyncio.create_task(watch())
            other = await backend.open(SPEC)
            times = [time.monotonic()]
            await sandbox.write_file("big", os.urandom(20_000_000))
            times.append(time.monotonic())
            await sandbox.read_file("big", max_bytes=20_000_000)
            times.append(time.monotonic())
            took.extend(later - earlier for earlier, later in pairwise(times))
            await other.close()
            watching.cancel()

        backend = DockerBackend()
        run(body, backend)
        assert longest < max(0.3, min(took) / 2)  # on a busy machine all takes longer


class TestDeath:
    def test_of_the_container(self, engine: str) -> None:
        async def body(sandbox: Sandbox) -> None:
            running = asyncio.create_task(sandbox.exec("sleep 1000.53", timeout_seconds=MINUTE))
            process = await sandbox.start("sleep 1000.53")
            with api(engine) as client:
                await asyncio.to_thread(client.remove_container, ours(engine)[0], force=True)
            with pytest.raises(SandboxError):
                await running
            assert await process.wait(MINUTE)
            for _ in range(2):
                with pytest.raises(SandboxError, match="the sandbox is gone"):
                    await sandbox.exec("echo next", timeout_seconds=MINUTE)
            with pytest.raises(SandboxError):
                await sandbox.read_file("/etc/passwd", max_bytes=10)

        run(body)

    def test_of_the_memory_in_other_words(self, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERMINAL_CONTAINER_MEMORY", "64")
        commands = ("tail /dev/zero; echo after", "kill -9 $$", "echo Killed", "tail /dev/zero; true")
        told = ["ran out of memory" in result.output for result in exec_all(*commands, timeout_seconds=MINUTE)]
        assert told == [True, False, False, True]
        assert engine

    @pytest.mark.usefixtures("docker")
    def test_of_the_memory_is_the_commands_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERMINAL_CONTAINER_MEMORY", "64")
        first, second = exec_all("echo part; tail /dev/zero", "echo next", timeout_seconds=MINUTE)
        assert (first.exit_code, first.output.startswith("part\n")) == (137, True)
        assert first.output.endswith("\n[a process was killed because the sandbox ran out of memory]\n")
        assert second == ExecResult("next\n", 0, total_chars=5)


OWNER = """
import asyncio, sys
from dataclasses import replace
from sandboxes.container_sandbox import ContainerSandbox
from sandboxes.docker import DockerBackend
from tests.sandboxes.containers import SPEC

async def main():
    backend = DockerBackend()
    sandboxes = [await backend.open(replace(SPEC, rollout_id=f"{sys.argv[1]}-{number}")) for number in range(3)]
    for sandbox in sandboxes:
        await sandbox.exec("trap '' HUP TERM; setsid sleep 1000.54 & nohup sleep 1000.54 &", timeout_seconds=60)
        await sandbox.start("sleep 1000.54")
    print("ready", flush=True)
    await sandboxes[0].exec("sleep 1000.54", timeout_seconds=60)

asyncio.run(main())
"""


def swept() -> list[str]:
    """Sweep as a run does that has chosen this kind of sandbox."""
    backend = DockerBackend()
    assert not backend.unavailable()
    return backend.sweep()


def owned(engine: str) -> list[str]:
    return [name for number in range(3) for name in ours(engine, f"{SPEC.rollout_id}-{number}")]


class TestOwner:
    def test_killed(self, engine: str) -> None:
        with subprocess.Popen(
            [sys.executable, "-c", OWNER, SPEC.rollout_id], stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as owner:
            assert owner.stdout
            assert owner.stdout.readline() == "ready\n"
            assert len(owned(engine)) == 3
            assert not any(SPEC.rollout_id in line for line in swept())  # it lives
            owner.kill()
        assert wait_until(lambda: not owned(engine), GONE_SECONDS)  # without anybody's help

    @pytest.mark.usefixtures("docker")
    def test_stopped_for_a_while(self) -> None:
        with subprocess.Popen(
            [sys.executable, "-c", OWNER, SPEC.rollout_id], stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as owner:
            assert owner.stdout
            assert owner.stdout.readline() == "ready\n"
            owner.send_signal(signal.SIGSTOP)
            assert not any(SPEC.rollout_id in line for line in swept())
            assert len(owned("docker")) == 3
            owner.kill()


class TestSweep:
    def test_dead_owners_only(self, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is made here belongs to a machine of its own, for runs of other tests sweep the same engine."""
        machine = f"of this test, {uuid4()}"
        mine = {**docker_owners.labels(SPEC), docker_owners.MACHINE: machine}
        dead = {docker_owners.OWNER_PID: "999999999"}
        every: dict[str, dict[str, str]] = {
            "living": mine,
            "dead": {**mine, **dead},
            "another": {**mine, docker_owners.OWNER_START: "1"},  # this pid, but not this process
            "elsewhere": {**mine, **dead, docker_owners.MACHINE: "another"},
            "stranger": {"somebody": "else", **dead},
        }
        monkeypatch.setattr(docker_owners, "machine", lambda: machine)
        with api(engine) as client, ExitStack() as cleanup:
            made = {}
            for name, labels in every.items():
                made[name] = client.create_container(engines.TOOLS, ["true"], labels=labels)["Id"]
                cleanup.callback(gone, client, made[name])
            assert {line.split()[1] for line in swept()} == {made[name][:12] for name in ("dead", "another")}
            left = {item["Id"] for item in client.containers(all=True)}
            assert [name for name, made_id in made.items() if made_id in left] == ["living", "elsewhere", "stranger"]
            assert swept() == []


def gone(client: docker.APIClient, container: str) -> None:
    """Remove a container that may be gone."""
    with suppress(docker.errors.NotFound):
        client.remove_container(container, force=True)


class TestFiles:
    def test_large_and_binary(self, engine: str) -> None:
        data = os.urandom(20_000_000)

        async def body(sandbox: Sandbox) -> bytes:
            await sandbox.write_file("deep/er/big", data)
            assert (await sandbox.exec("wc -c <deep/er/big", timeout_seconds=MINUTE)).output.strip() == "20000000"
            return await sandbox.read_file("deep/er/big", max_bytes=30_000_000)

        assert run(body) == data
        assert engine

    @pytest.mark.usefixtures("docker")
    def test_every_size(self) -> None:
        sizes = (0, 1, 1000, 65_536, 65_537, 300_000)
        contents = [(bytes(range(256)) * (size // 256 + 1))[:size] for size in sizes]

        async def body(sandbox: Sandbox) -> None:
            for data in contents:
                for content in (data, b" " + data, data + b"\n\t", b"%s\\c" + data, "é 中文 🙂\n".encode() + data):
                    await sandbox.write_file("file", content)
                    assert await sandbox.read_file("file", max_bytes=1_000_000) == content

        run(body)

    @pytest.mark.usefixtures("docker")
    def test_odd_names(self) -> None:
        names = ["it's", 'say "hi"', "a\nb", "-rf", "--", "$HOME", "`id`", "a b/c d", "é🙂", "\\n", "*", "~x", " "]

        async def body(sandbox: Sandbox) -> None:
            for index, name in enumerate(names):
                await sandbox.write_file(name, f"{index}".encode())
            for index, name in enumerate(names):
                assert await sandbox.read_file(name, max_bytes=10) == f"{index}".encode()

        run(body)

    @pytest.mark.usefixtures("docker")
    def test_what_cannot_be_written(self) -> None:
        async def body(sandbox: Sandbox) -> None:
            for data in (b"small", b"x" * 500_000):
                with pytest.raises(SandboxFileError, match=r"/proc/version|directory"):
                    await sandbox.write_file("/proc/version/x", data)
                with pytest.raises(SandboxFileError, match="Is a directory"):
                    await sandbox.write_file("/etc", data)
            assert (await sandbox.exec("echo next", timeout_seconds=MINUTE)).output == "next\n"

        run(body)
