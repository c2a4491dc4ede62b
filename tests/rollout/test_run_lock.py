from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollout.files import RunDirError
from rollout.run_dir import check_run
from rollout.run_lock import RunLock
from tests.rollout import nfs_locks
from tests.rollout.run_files import a_row, line, open_run

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import sys
from pathlib import Path
from rollout.run_dir import RunDir
with RunDir.open("r", resume=True, data=Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextmanager
def other_process(data: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", HOLDER, str(data)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def test_a_second_process_is_told_who_has_the_run_and_changes_nothing(tmp_path: Path) -> None:
    with other_process(tmp_path) as process:
        lock = (tmp_path / "r" / ".lock").read_bytes()
        for resume in (False, True):
            with pytest.raises(RunDirError, match=rf"another process \(pid {process.pid}\) is running this run"):
                open_run(tmp_path, resume=resume)
        with pytest.raises(RunDirError, match="another process"):
            check_run("r", resume=False, data=tmp_path)
        assert (tmp_path / "r" / ".lock").read_bytes() == lock
        with open_run(tmp_path, run_name="another"):
            pass


def test_who_starts_afresh_over_a_living_run_hears_of_the_process_not_of_its_rows(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "batch_0.jsonl").write_bytes(line(a_row(0, "a")) + b"\n")
    with other_process(tmp_path), pytest.raises(RunDirError, match="another process"):
        open_run(tmp_path)
    with pytest.raises(RunDirError, match="pass --resume"):
        open_run(tmp_path)


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    with other_process(tmp_path):
        pass
    with open_run(tmp_path, resume=True):
        assert (tmp_path / "r" / ".lock").read_text(encoding="utf-8") == str(os.getpid())


def test_a_lock_is_free_again_after_close_and_after_a_start_that_failed(tmp_path: Path) -> None:
    with open_run(tmp_path) as run_dir:
        run_dir.append(0, line(a_row(0, "a")))
        with pytest.raises(RunDirError, match=f"pid {os.getpid()}"):
            open_run(tmp_path, resume=True)
    (tmp_path / "r" / "checkpoint.json").mkdir()
    with pytest.raises(RunDirError, match=r"checkpoint\.json is not a regular file: move it away"):
        open_run(tmp_path, resume=True)
    (tmp_path / "r" / "checkpoint.json").rmdir()
    with open_run(tmp_path, resume=True):
        pass


@pytest.fixture(params=[errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def _no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks cannot be had here, so the system call answers as on one."""

    def refuse(_handle: int, _operation: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("_no_locks")
def test_without_locks_a_pid_file_guards_the_folder_and_says_so(tmp_path: Path) -> None:
    with open_run(tmp_path) as run_dir:
        assert run_dir.warnings == [f"locks do not work on the file system of {tmp_path / 'r'}; .pid guards it instead"]
        with pytest.raises(RunDirError, match=rf"another process \(pid {os.getpid()}\)"):
            open_run(tmp_path, resume=True)
        assert (tmp_path / "r" / ".pid").exists()
    assert not (tmp_path / "r" / ".pid").exists()


@pytest.mark.usefixtures("_no_locks")
@pytest.mark.parametrize("start", ["gone", "alive", "123"])
def test_a_pid_file_of_a_dead_process_is_in_nobodys_way(tmp_path: Path, start: str) -> None:
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    for pid in (dead.pid, os.getpid()):  # a living process that started later than the one in the file is another
        (tmp_path / ".pid").write_text(f"{pid} {socket.gethostname()} {start}", encoding="utf-8")
        RunLock.acquire(tmp_path).release()


@pytest.mark.usefixtures("_no_locks")
@pytest.mark.parametrize("owner", ["17 another-machine 123", "", "junk", f"x {socket.gethostname()} 1"])
def test_a_pid_file_that_may_be_alive_is_left_to_a_person(tmp_path: Path, owner: str) -> None:
    (tmp_path / ".pid").write_text(owner, encoding="utf-8")
    with pytest.raises(RunDirError, match=r"\.pid says that a process .* if not so, remove it"):
        RunLock.acquire(tmp_path)
    assert (tmp_path / ".pid").read_text(encoding="utf-8") == owner


def test_on_nfs_a_run_is_gone_on_with_and_guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", nfs_locks.flock)
    with open_run(tmp_path) as run_dir:
        run_dir.append(0, line(a_row(0, "a")))
    with open_run(tmp_path, resume=True):
        assert not (tmp_path / "r" / ".pid").exists(), "the lock is the kernel's"
    with other_process(tmp_path) as process:
        assert RunLock.held(tmp_path / "r")
        with pytest.raises(RunDirError, match=rf"another process \(pid {process.pid}\) is running this run"):
            check_run("r", resume=True, data=tmp_path)


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.EIO])
def test_a_lock_that_cannot_be_looked_at_is_not_taken_for_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(_handle: int, _operation: int) -> None:
        raise OSError(number, os.strerror(number))

    RunLock.acquire(tmp_path).release()
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert not RunLock.held(tmp_path)


def test_releasing_twice_does_no_harm(tmp_path: Path) -> None:
    lock = RunLock.acquire(tmp_path)
    assert RunLock.held(tmp_path)
    lock.release()
    lock.release()
    assert not RunLock.held(tmp_path)
    assert not RunLock.held(tmp_path / "nowhere")


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDirError, match=r"\.lock is not a regular file: move it away"):
        RunLock.acquire(tmp_path)
    assert not (tmp_path / "elsewhere").exists()
