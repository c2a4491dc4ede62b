"""The run folder when the disk is full or read-only, and when its process is killed: all of it for real."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rollout.files import DiskFullError
from rollout.row_scan import scan_rows
from rollout.run_dir import RunDir, RunDirError
from tests.rollout.run_files import a_row, line, open_run

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def files_no_longer_than(size: int) -> Iterator[None]:
    """A disk that fills up, made of what every user has: a write beyond the limit is cut short, then refused."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB that can be filled and made read-only."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", mount], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("mounting a small file system takes root")
    yield mount
    subprocess.run(["umount", mount], check=True)


def append_many(run_dir: RunDir) -> None:
    for index in range(1, 1000):
        run_dir.append(0, line(a_row(index, "b" * 1000)))


def test_a_row_that_did_not_fit_is_taken_back_and_the_next_starts_on_its_own_line(tmp_path: Path) -> None:
    with open_run(tmp_path) as run_dir:
        run_dir.append(0, line(a_row(0, "a")))
        told = r"cannot write .*batch_0\.jsonl: File too large"
        run_dir.append(0, line(a_row(1, "b" * 5000)))
        run_dir.append(0, line(a_row(2, "c")))
        with files_no_longer_than(1000), pytest.raises(RunDirError, match=told):
            run_dir.sync()
        rows = scan_rows(tmp_path / "r")
        assert list(rows.indices) == [0, 2]
        assert not rows.problems.count
        run_dir.sync()
    rows = scan_rows(tmp_path / "r")
    assert list(rows.indices) == [0, 2, 1]
    assert not rows.problems.count


def test_rows_behind_one_that_cannot_be_saved_are_saved(tmp_path: Path) -> None:
    with open_run(tmp_path) as run_dir:
        (run_dir.path / "batch_1.jsonl").mkdir()
        for index in range(4):
            run_dir.append(index, line(a_row(index, "a")))
        with pytest.raises(RunDirError, match=r"cannot write .*batch_1\.jsonl: Is a directory"):
            run_dir.sync()
        assert list(scan_rows(run_dir.path).indices) == [0, 2, 3]
        (run_dir.path / "batch_1.jsonl").rmdir()
    assert sorted(scan_rows(tmp_path / "r").indices) == [0, 1, 2, 3]


@contextmanager
def a_disk_full_now_and_then(chance: Random) -> Iterator[None]:
    """The system's calls as on a disk without room, or beyond a quota, which some file systems tell late: at a sync."""

    def sometimes(call: Callable[..., int | None]) -> Callable[..., int | None]:
        def as_on_a_full_disk(*arguments: Any) -> int | None:
            if chance.random() < 0.3:
                number = chance.choice([errno.ENOSPC, errno.EDQUOT])
                raise OSError(number, os.strerror(number))
            return call(*arguments)

        return as_on_a_full_disk

    write = os.write

    def some_of_it(handle: int, data: bytes) -> int:
        return write(handle, data[: chance.randint(1, len(data))])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "write", sometimes(some_of_it))
        patched.setattr(os, "open", sometimes(os.open))
        patched.setattr(os, "fsync", sometimes(os.fsync))
        yield


@pytest.mark.parametrize("seed", range(10))
def test_however_a_disk_is_full_each_row_is_saved_once_and_whole(tmp_path: Path, seed: int) -> None:
    chance = Random(seed)
    failures = 0
    with open_run(tmp_path) as run_dir:
        for start in range(0, 200, 20):
            for index in range(start, start + 20):
                run_dir.append(index // 2, line(a_row(index, "b" * chance.randint(1, 100))))
            saved = False
            while not saved:
                with a_disk_full_now_and_then(chance):
                    try:
                        run_dir.sync()
                        saved = True
                    except DiskFullError:
                        failures += 1
            rows = scan_rows(run_dir.path)
            assert sorted(rows.indices) == list(range(start + 20))
            assert not rows.problems.count
    assert failures


def test_a_disk_that_cannot_save_what_it_took_gets_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunDirError, match="nothing more is written"), open_run(tmp_path) as run_dir:  # noqa: PT012
        run_dir.append(0, line(a_row(0, "a")))
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", _input_output_error)
            with pytest.raises(RunDirError, match=r"cannot save rows in .*: Input/output error"):
                run_dir.sync()
        run_dir.sync()


def _input_output_error(_handle: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_file_that_did_not_fit_leaves_the_old_one(tmp_path: Path) -> None:
    with open_run(tmp_path) as run_dir:
        run_dir.write_json("checkpoint.json", {"old": True})
        told = r"cannot write .*checkpoint\.json: File too large"
        with files_no_longer_than(1000), pytest.raises(RunDirError, match=told):
            run_dir.write_json("checkpoint.json", {"new": "x" * 5000})
        assert (run_dir.path / "checkpoint.json").read_bytes() == b'{"old": true}\n'
        assert sorted(path.name for path in run_dir.path.iterdir()) == [".lock", "checkpoint.json"]


def test_a_full_disk_is_told_in_one_line_and_the_run_goes_on_when_there_is_room(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    with open_run(small_disk) as run_dir:
        run_dir.append(0, line(a_row(0, "a")))
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(b"x" * 4096):
                pass
        append_many(run_dir)
        with pytest.raises(DiskFullError, match=r"cannot write .*/r/batch_0\.jsonl: No space left on device"):
            run_dir.sync()
        with pytest.raises(RunDirError, match=r"cannot write .*/r/statistics\.json: No space left on device"):
            run_dir.write_json("statistics.json", {"x": "y" * 10_000})
        ballast.unlink()
        with pytest.raises(DiskFullError):  # there is room for some
            run_dir.sync()
        subprocess.run(["mount", "-o", "remount,size=8M", small_disk], check=True)
        run_dir.sync()
    with open_run(small_disk, resume=True) as run_dir:
        rows = run_dir.scan()
        assert not rows.problems.count
        assert sorted(rows.indices) == list(range(1000))
        assert not list(run_dir.path.glob(".*.tmp"))
        run_dir.append(run_dir.first_batch, line(a_row(1, "b" * 1000)))


def test_a_start_on_a_full_disk_is_told_in_one_line(small_disk: Path) -> None:
    with (small_disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    with pytest.raises(DiskFullError, match="No space left on device"), open_run(small_disk) as run_dir:
        append_many(run_dir)


def test_a_folder_that_turns_read_only_is_told_in_one_line(small_disk: Path) -> None:
    with open_run(small_disk) as run_dir:
        run_dir.append(0, line(a_row(0, "a")))
        run_dir.finish_batch(0)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for resume, run_name in ((True, "r"), (False, "new")):
        with pytest.raises(RunDirError, match="Read-only file system"):
            open_run(small_disk, resume=resume, run_name=run_name)
    assert list(scan_rows(small_disk / "r").indices) == [0]


ENDLESS_WRITER = """
import sys
from pathlib import Path
from rollout.run_dir import RunDir
from tests.rollout.run_files import a_row, line
with RunDir.open("r", resume=True, data=Path(sys.argv[1])) as run_dir:
    index = len(run_dir.scan())
    while True:
        run_dir.append(run_dir.first_batch + index // 5, line(a_row(index, f"naïve {index}", filler="x" * 20_000)))
        run_dir.sync()
        index += 1
        print(index, flush=True)
"""


def test_a_process_that_is_killed_loses_no_row_it_had_saved(tmp_path: Path) -> None:
    environ = os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    for _ in range(3):
        command = [sys.executable, "-c", ENDLESS_WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, cwd=ROOT) as writer:
            assert writer.stdout is not None
            saved = [int(writer.stdout.readline()) for _ in range(12)][-1]
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
        with open_run(tmp_path, resume=True) as run_dir:
            rows = run_dir.scan()
            assert len(rows) >= saved
            assert sorted(rows.indices) == list(range(len(rows)))
            assert rows.problems.count <= 1
