"""What is left when a sandbox, or the process that owns it, has ended: nothing."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from sandboxes import BACKENDS, folders
from sandboxes.base import Sandbox, SandboxError
from tests.sandboxes.support import HOST_KINDS, MINUTE, SPEC, backend, descriptors, run, running, until, wait_until

ROOT = Path(__file__).parents[2]


class TestEnd:
    @pytest.mark.parametrize("kind", HOST_KINDS)
    def test_nothing_is_left(self, kind: str) -> None:
        async def body(sandbox: Sandbox) -> str:
            await sandbox.exec("sleep 1000.8 & setsid sleep 1000.8 & nohup sleep 1000.8 &", timeout_seconds=MINUTE)
            await sandbox.exec("(setsid sh -c 'sleep 1000.8 & :' >/dev/null 2>&1 &)", timeout_seconds=MINUTE)
            await sandbox.start("sleep 1000.8")
            await sandbox.exec(
                "mkdir -p a/b; touch a/b/c; chmod 0 a/b a; mkdir ../ro 2>/dev/null", timeout_seconds=MINUTE
            )
            return str(sandbox._plan.folder.root)  # type: ignore[attr-defined]

        folder = Path(run(kind, body))
        assert not running("1000.8")
        assert not folder.exists()

    def test_twice(self, kind: str) -> None:
        async def body(sandbox: Sandbox) -> None:
            await asyncio.gather(sandbox.close(), sandbox.close())
            await sandbox.close()

        run(kind, body)

    def test_with_commands_running(self, kind: str) -> None:
        async def body(sandbox: Sandbox) -> None:
            task = asyncio.create_task(sandbox.exec("sleep 1000.9", timeout_seconds=MINUTE))
            assert await until(lambda: bool(running("1000.9")))
            await sandbox.close()
            (error,) = await asyncio.gather(task, return_exceptions=True)
            assert type(error).__name__ == "SandboxError"
            assert not running("1000.9")

        run(kind, body)

    @pytest.mark.parametrize("kind", HOST_KINDS)
    def test_a_process_whose_first_thread_has_ended_while_others_go_on(self, kind: str) -> None:
        code = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(1000,)).start()"
        code += "; ctypes.CDLL(None).pthread_exit(0)"

        async def body(sandbox: Sandbox) -> list[int]:
            await sandbox.exec(f"python3 -c {shlex.quote(code)} >/dev/null 2>&1 &", timeout_seconds=MINUTE)
            assert await until(lambda: bool(headless()))
            return headless()

        (left,) = run(kind, body)
        assert wait_until(lambda: left not in headless())

    def test_descriptors_are_given_back(self, kind: str) -> None:
        async def body(sandbox: Sandbox) -> None:
            await sandbox.exec("sleep 1000.11 & echo x", timeout_seconds=MINUTE)
            await sandbox.start("cat")

        run(kind, body)
        before = descriptors()
        run(kind, body)
        assert wait_until(lambda: descriptors() <= before)


def headless() -> list[int]:
    """The processes whose first thread has ended while others live."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    found = []
    for pid in pids:
        with suppress(OSError):
            is_zombie = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
            if is_zombie and len(list(Path(f"/proc/{pid}/task").iterdir())) > 1:
                found.append(pid)
    return found


OWNER = """
import asyncio, os, signal, sys
from sandboxes import BACKENDS
from sandboxes.base import SandboxSpec

async def main():
    sandboxes = [await BACKENDS[sys.argv[1]].open(SandboxSpec("tests", "r1")) for _ in range(5)]
    for sandbox in sandboxes:
        for command in ("sleep 1000.21 &", "setsid sleep 1000.21 &", "nohup sleep 1000.21 >/dev/null 2>&1 &"):
            await sandbox.exec(command, timeout_seconds=60)
        await sandbox.exec("mkdir a; touch a/b; chmod 0 a", timeout_seconds=60)
        await sandbox.start("trap '' TERM HUP INT; while :; do sleep 1000.21; done")
    print(*(sandbox._plan.folder.root for sandbox in sandboxes), flush=True)
    if left := int(sys.argv[2]):
        def count(event, _):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(count)
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
    await sandboxes[0].exec("sleep 1000.21", timeout_seconds=60)

asyncio.run(main())
"""


class TestOwnerThatIsKilled:
    @pytest.mark.parametrize("kind", HOST_KINDS)
    def test_leaves_nothing(self, kind: str) -> None:
        backend(kind)
        owner = subprocess.Popen([sys.executable, "-c", OWNER, kind, "0"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert owner.stdout
        with owner, owner.stdout:
            paths = [Path(path) for path in owner.stdout.readline().split()]
            assert len(paths) == 5
            assert wait_until(lambda: len(running("1000.21")) == 21)
            owner.kill()
        assert wait_until(lambda: not running("1000.21") and not any(path.exists() for path in paths), 5)

    @pytest.mark.parametrize("step", [1, 3, 10, 30, 100])  # that the interpreter tells of
    @pytest.mark.parametrize("kind", HOST_KINDS)
    def test_while_it_closes_them(self, kind: str, step: int) -> None:
        backend(kind)
        owner = [sys.executable, "-c", OWNER, kind, str(step)]
        ended = subprocess.run(owner, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        paths = [Path(path) for path in ended.stdout.split()]
        assert wait_until(lambda: not running("1000.21") and not any(path.exists() for path in paths), 5)

    def test_what_outlives_its_resident_is_swept(self) -> None:
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, "local", "0"], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert owner.stdout
        with owner, owner.stdout:
            paths = [Path(path) for path in owner.stdout.readline().split()]
            assert wait_until(lambda: len(running("1000.21")) == 21)
            assert BACKENDS["local"].sweep() == []  # the owner lives
            residents = [pid for path in paths for pid in running(str(path))]
            owner.send_signal(signal.SIGSTOP)
            for pid in residents:
                os.kill(pid, signal.SIGKILL)
            owner.kill()
        assert running("1000.21")
        assert len(BACKENDS["local"].sweep()) == 5
        assert wait_until(lambda: not running("1000.21") and not any(path.exists() for path in paths))
        assert BACKENDS["local"].sweep() == []


class TestSweep:
    @pytest.mark.parametrize("taken", [False, True])
    def test_without_room_in_memory_all_is_on_disk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, taken: bool
    ) -> None:
        monkeypatch.setattr(folders, "_MEMORY", tmp_path)
        there = tmp_path / f"batch-runner-{os.getuid()}"
        if taken:
            there.touch()  # by somebody else, say
        else:
            monkeypatch.setattr(folders, "_ROOM_BYTES", 1 << 62)
            namespace = Path("/proc/self/ns/pid").stat().st_ino
            (there / f"999999999-1-{namespace}-1").mkdir(parents=True)
            there.chmod(0o700)
        with folders.fresh() as mine:
            assert mine.channel == mine.root / "channel"
            assert len(folders.sweep()) == (0 if taken else 1)  # what was put there while there was room
            mine.remove()
        assert taken or not list(there.iterdir())

    def test_folders_of_dead_owners_only(self) -> None:
        namespace = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116
        dead = folders.base() / f"999999999-1-{namespace}-1"
        reused = folders.base() / f"{os.getpid()}-1-{namespace}-1"  # this pid, but not this process
        strange = folders.base() / "notes"
        for path in (dead, reused, strange):
            path.mkdir()
            (path / "file").touch()
        try:
            with folders.fresh() as mine:
                assert len(folders.sweep()) == 2
                assert (dead.exists(), reused.exists(), strange.exists(), mine.root.exists()) == (
                    False,
                    False,
                    True,
                    True,
                )
                mine.remove()
        finally:
            folders.remove_tree(strange)

    def test_what_somebody_still_writes_to_is_removed_all_the_same(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, rmtree, late = tmp_path / "sandbox", shutil.rmtree, ["one", "two"]
        path.mkdir()

        def remove(what: Path, *, ignore_errors: bool) -> None:
            rmtree(what, ignore_errors=ignore_errors)
            if late:  # it was made before the folder was gone
                (what / late.pop()).mkdir(parents=True)

        monkeypatch.setattr("shutil.rmtree", remove)
        folders.remove_tree(path)
        assert not late
        assert not path.exists()

    def test_folders_of_other_pid_namespaces_are_let_be(self) -> None:
        foreign = folders.base() / "999999998-1-1-1"  # in a namespace that has the number 1, which this one has not
        foreign.mkdir()
        folders.sweep()
        assert foreign.exists()
        folders.remove_tree(foreign)

    def test_a_base_that_is_not_ours_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        (tmp_path / f"batch-runner-{os.getuid()}").mkdir(mode=0o777)
        (tmp_path / f"batch-runner-{os.getuid()}").chmod(0o777)
        with pytest.raises(SandboxError, match="not a private folder"):
            folders.base()


def test_opening_that_is_cancelled(kind: str) -> None:
    chosen = backend(kind)

    async def main() -> None:
        for delay in (0, 0.001, 0.005):
            task = asyncio.ensure_future(chosen.open(SPEC))
            await asyncio.sleep(delay)
            task.cancel()
            (opened,) = await asyncio.gather(task, return_exceptions=True)
            if not isinstance(opened, BaseException):
                await opened.close()

    asyncio.run(main())
    assert not [path for path in folders.base().iterdir() if path.name.startswith(f"{os.getpid()}-")]


def test_two_hundred_at_once() -> None:
    async def main() -> int:
        sandboxes = await asyncio.gather(*(BACKENDS["local"].open(SPEC) for _ in range(200)))
        try:
            results = await asyncio.gather(*(sandbox.exec("echo hi", timeout_seconds=MINUTE) for sandbox in sandboxes))
            assert {result.output for result in results} == {"hi\n"}
            await sandboxes[0].exec("sleep 0.2", timeout_seconds=MINUTE)
            return descriptors()
        finally:
            await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))

    assert asyncio.run(main()) < 450
