"""The disk is full, read-only, gone or slow: one line says so, and the run goes on when that is mended."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from endpoints.scripted import ScriptedEndpoint
from tests.faults.shims import SLOW_DISK, preloaded
from tests.program import Ended, Workplace, answer, ending, prompt_of, prompts_of, terminal, wait_until

SIZE = 1 << 20
BIG_ROW = answer("x", content_chars=300_000)
ENOSPC = "No space left on device"


@pytest.fixture
def disk(place: Workplace) -> Iterator[Path]:
    """A disk of 1 MB under the run's folder ``data``; what sandboxes need is elsewhere."""
    path = place.path / "data"
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", path], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"mounting a small file system takes root: {made.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


def fill(disk: Path, leave_bytes: int = 0) -> Path:
    """Fill the disk, but for so much."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        with suppress(OSError):
            while file.write(b"x" * 4096):
                pass
        file.truncate(max(0, file.tell() - leave_bytes))
    return ballast


def assert_told(ended: Ended, *words: str) -> None:
    """One line says what is wrong, and how to go on."""
    assert ended.code == 1, ended.stderr
    assert (ended.stdout, ended.told.count("\n")) == ("", 1), ended.stderr
    assert ended.told.startswith("error: cannot ")
    assert all(word in ended.told for word in words), ended.stderr
    assert ended.told.endswith(" --resume\n")


def recorded(place: Workplace) -> list[str]:
    """The prompts of all rows; a line that is none fails."""
    return sorted(prompt_of(row) for row in place.rows())


def finish(place: Workplace, prompts: list[str]) -> None:
    """Resume: what is recorded is not asked for again, all is there at the end, and no line is torn."""
    done = recorded(place)
    with ScriptedEndpoint([answer("1")]) as endpoint:
        ended = place.run(endpoint.base_url, resume=True)
        assert sorted([*done, *prompts_of(endpoint)]) == sorted(prompts)
    assert ended.code == 0, ended.stderr
    assert "ignored" not in ended.stderr
    assert [prompt_of(row) for row in place.trajectories()] == prompts
    assert recorded(place) == sorted(prompts)
    assert not list(place.run_dir().glob(".*.tmp"))


def test_a_disk_that_is_full_in_the_middle_of_a_row(place: Workplace, disk: Path) -> None:
    prompts = [f"question {number}" for number in range(8)]
    place.dataset(prompts)
    with ScriptedEndpoint([BIG_ROW]) as endpoint:
        ended = place.run(endpoint.base_url, concurrency=2)
    assert_told(ended, "cannot write data/r/batch_", ENOSPC)
    assert recorded(place)
    assert (place.run_dir() / "run.log").exists()
    (disk / "more").touch()
    subprocess.run(["mount", "-o", f"remount,size={4 * SIZE}", disk], check=True)
    finish(place, prompts)


@pytest.mark.slow
def test_a_disk_that_is_full_in_the_middle_of_the_checkpoint(place: Workplace, disk: Path) -> None:
    """The rows still fit into the page that their file has; a new file does not."""
    prompts = [f"question {number}" for number in range(6)]
    place.dataset(prompts)
    with (
        ScriptedEndpoint([answer("1", delay_seconds=0.4)]) as endpoint,
        ending(place.start(endpoint.base_url, batch_size=3, concurrency=1)) as process,
    ):
        wait_until((place.run_dir() / "batch_0.jsonl").exists, "the first row is there")
        before = (place.run_dir() / "checkpoint.json").read_bytes()
        ballast = fill(disk)
        ended = place.ended(process)
    if "batch_0" not in ended.stderr:
        assert_told(ended, "cannot write data/r/checkpoint.json", ENOSPC)
    assert (place.run_dir() / "checkpoint.json").read_bytes() == before
    ballast.unlink()
    finish(place, prompts)


@pytest.mark.slow
def test_a_disk_that_is_full_in_the_middle_of_the_merge(place: Workplace, disk: Path) -> None:
    prompts = [f"question {number}" for number in range(2)]
    place.dataset(prompts)
    with ScriptedEndpoint([BIG_ROW]) as endpoint:
        ended = place.run(endpoint.base_url)
        assert_told(ended, "cannot write data/r/trajectories.jsonl", ENOSPC)
        assert len(endpoint.requests) == 2
    assert recorded(place) == prompts
    assert place.json("checkpoint.json")["completed_prompts"] == [0, 1]
    assert not (place.run_dir() / "trajectories.jsonl").exists()
    subprocess.run(["mount", "-o", f"remount,size={4 * SIZE}", disk], check=True)
    finish(place, prompts)


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_start(place: Workplace, disk: Path) -> None:
    place.dataset(["one"])
    ballast = fill(disk)
    with ScriptedEndpoint([answer("1")]) as endpoint:
        assert_told(place.run(endpoint.base_url), ENOSPC)
        assert not endpoint.requests, "nothing is paid for that cannot be kept"
    ballast.unlink()
    finish(place, ["one"])


@pytest.mark.slow
def test_a_disk_without_inodes(place: Workplace, disk: Path) -> None:
    place.dataset(["one", "two"])
    subprocess.run(["mount", "-o", "remount,nr_inodes=5", disk], check=True)
    with ScriptedEndpoint([answer("1")]) as endpoint:
        assert_told(place.run(endpoint.base_url), ENOSPC)
    subprocess.run(["mount", "-o", "remount,nr_inodes=500", disk], check=True)
    finish(place, ["one", "two"])


@pytest.mark.slow
def test_a_folder_that_turns_read_only(place: Workplace, disk: Path) -> None:
    prompts = [f"question {number}" for number in range(6)]
    place.dataset(prompts)
    with ScriptedEndpoint([answer("1", delay_seconds=0.3)]) as endpoint:
        with ending(place.start(endpoint.base_url, concurrency=1)) as process:
            wait_until((place.run_dir() / "batch_1.jsonl").exists, "a batch is done")
            subprocess.run(["mount", "--bind", disk, disk], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", disk], check=True)
            ended = place.ended(process)
        assert_told(ended, "Read-only file system")
        assert_told(place.run(endpoint.base_url, resume=True), "Read-only file system")
    subprocess.run(["umount", disk], check=True)
    finish(place, prompts)


@pytest.mark.slow
def test_a_folder_that_is_removed(place: Workplace) -> None:
    prompts = [f"question {number}" for number in range(6)]
    place.dataset(prompts)
    with (
        ScriptedEndpoint([answer("1", delay_seconds=0.3)]) as endpoint,
        ending(place.start(endpoint.base_url, concurrency=1)) as process,
    ):
        wait_until((place.run_dir() / "batch_1.jsonl").exists, "a batch is done")
        place.run_dir().rename(place.path / "elsewhere")
        ended = place.ended(process)
    assert_told(ended, "No such file or directory")
    (place.path / "elsewhere").rename(place.run_dir())
    finish(place, prompts)


STANDING_IN_THE_WAY = (
    ".lock",
    ".pid",
    "run.log",
    "checkpoint.json",
    "trajectories.jsonl",
    "statistics.json",
    ".checkpoint.json.tmp",
    ".trajectories.jsonl.tmp",
    ".statistics.json.tmp",
)


def test_folders_where_files_should_be(place: Workplace) -> None:
    place.dataset(["one"])
    with ScriptedEndpoint([answer("1")]) as endpoint:
        for name in STANDING_IN_THE_WAY:
            (place.run_dir() / name).mkdir(parents=True)
            ended = place.run(endpoint.base_url)
            told = f"error: data/r/{name} is not a regular file: move it away\n"
            assert (ended.code, ended.stdout, ended.stderr) == (2, "", told)
            (place.run_dir() / name).rmdir()
        assert not endpoint.requests
    finish(place, ["one"])


@pytest.mark.slow
def test_a_full_disk_under_the_sandboxes_is_the_failure_of_these_rollouts(place: Workplace, disk: Path) -> None:
    place.env["TMPDIR"] = str(disk)
    inside = Workplace(place.path / "inside", place.env)
    inside.path.mkdir()
    inside.dataset(["one", "two"])
    with ScriptedEndpoint([terminal("echo 1", delay_seconds=0.5), answer("1")]) as endpoint:
        with ending(inside.start(endpoint.base_url, concurrency=1)) as process:
            wait_until(lambda: prompts_of(endpoint)[-1:] == ["two"], "the second one begins")
            ballast = fill(disk)
            subprocess.run(["mount", "-o", "remount,nr_inodes=5", disk], check=True)
            assert inside.ended(process).code == 1
        (failed,) = [row for row in inside.rows() if row.get("failed")]
        assert failed["error"]["kind"] == "sandbox"
        assert ENOSPC in failed["error"]["message"]
        ballast.unlink()
        subprocess.run(["mount", "-o", "remount,nr_inodes=500", disk], check=True)
        assert inside.run(endpoint.base_url, resume=True).code == 0


def slow_disk(place: Workplace, tmp_path: Path, milliseconds: int) -> None:
    place.env.update(preloaded(SLOW_DISK, tmp_path), FSYNC_MILLISECONDS=str(milliseconds))


@pytest.mark.slow
def test_a_slow_disk_holds_nobody_up_longer_than_needed(place: Workplace, tmp_path: Path) -> None:
    """Rows that arrive together are saved together."""
    slow_disk(place, tmp_path, 300)
    prompts = [f"question {number:02}" for number in range(40)]
    place.dataset(prompts)
    with ScriptedEndpoint([answer("1", delay_seconds=0.2)]) as endpoint:
        started = time.monotonic()
        ended = place.run(endpoint.base_url, batch_size=20, concurrency=10)
        assert time.monotonic() - started < 0.3 * len(prompts)
    assert ended.code == 0
    assert recorded(place) == prompts


@pytest.mark.slow
def test_an_interrupt_on_a_slow_disk(place: Workplace, tmp_path: Path) -> None:
    slow_disk(place, tmp_path, 400)
    place.dataset([f"question {number:02}" for number in range(24)])
    with (
        ScriptedEndpoint([answer("1", delay_seconds=0.2)]) as endpoint,
        ending(place.start(endpoint.base_url, concurrency=10)) as process,
    ):
        wait_until(lambda: len(endpoint.requests) > 10, "it works")
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        ended = place.ended(process)
        assert time.monotonic() - started < 10
    assert ended.code == 130
    assert "resume with: " in ended.stdout + ended.stderr
    asked = set(recorded(place))
    with ScriptedEndpoint([answer("1")]) as endpoint:
        place.env["FSYNC_MILLISECONDS"] = "0"
        assert place.run(endpoint.base_url, resume=True).code == 0
        assert not {prompt_of(row) for row in place.rows() if not row.get("failed")} - asked - set(prompts_of(endpoint))
    assert len(place.trajectories()) == 24
