"""The disk is full, read-only, gone or slow: one line says so, and the run goes on when that is mended.

A run that is under way waits for room by itself; whatever else goes wrong is gone on from with --resume.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from batch_runner import BatchRunner
from endpoints.scripted import ScriptedEndpoint
from rollout import full_disk
from rollout.files import RunDirError
from rollout.flags import to_config
from rollout.pool import SILENCE_SECONDS
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


def last_told(ended: Ended) -> Ended:
    """Only how it ended."""
    return Ended(ended.code, ended.stdout, ended.told.splitlines(keepends=True)[-1])


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


WAITS = "free some space, and the run goes on; it waits for 10 minutes"
GOES_ON = "there is room on the disk again, and the run goes on"


@dataclass
class UnderWay:
    """A run whose stderr can be read before it ends."""

    process: subprocess.Popen[str]
    file: Path

    @property
    def stderr(self) -> str:
        return self.file.read_text(encoding="utf-8")

    def ended(self) -> Ended:
        ended = Workplace.ended(self.process)
        return Ended(ended.code, ended.stdout, self.stderr)


@contextmanager
def under_way(place: Workplace, base_url: str, **flags: Any) -> Iterator[UnderWay]:
    file = place.path / "stderr"
    with file.open("wb") as stderr:
        process = place.start_command(place.command(base_url, flags), stderr=stderr)
    with ending(process):
        yield UnderWay(process, file)


def more_room(disk: Path) -> None:
    subprocess.run(["mount", "-o", f"remount,size={8 * SIZE}", disk], check=True)


def assert_nobody_was_asked_twice(endpoint: ScriptedEndpoint, prompts: list[str]) -> None:
    assert sorted(prompts_of(endpoint)) == sorted(prompts)


def test_a_disk_that_is_full_in_the_middle_of_a_row_is_waited_for(place: Workplace, disk: Path) -> None:
    prompts = [f"question {number}" for number in range(8)]
    place.dataset(prompts)
    with ScriptedEndpoint([BIG_ROW]) as endpoint, under_way(place, endpoint.base_url, concurrency=2) as run:
        wait_until(lambda: WAITS in run.stderr, "it tells")
        assert recorded(place), "what there was room for is whole"
        time.sleep(1)
        assert len(endpoint.requests) <= len(recorded(place)) + 2 * 2, "nothing more is begun"
        more_room(disk)
        ended = run.ended()
        assert_nobody_was_asked_twice(endpoint, prompts)
    assert ended.code == 0, ended.stderr
    told, mended = ended.told.splitlines()
    assert told.startswith("error: cannot write data/r/batch_")
    assert ENOSPC in told
    assert mended == GOES_ON
    assert recorded(place) == prompts
    assert (place.run_dir() / "run.log").exists()


def test_an_interrupt_while_the_disk_is_full(place: Workplace, disk: Path) -> None:
    prompts = [f"question {number}" for number in range(8)]
    place.dataset(prompts)
    with ScriptedEndpoint([BIG_ROW]) as endpoint, under_way(place, endpoint.base_url, concurrency=2) as run:
        wait_until(lambda: WAITS in run.stderr, "it tells")
        started = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        ended = run.ended()
        assert time.monotonic() - started < 10
    assert ended.code == 130, ended.stderr
    waits, cannot, interrupted = ended.told.splitlines()
    assert WAITS in waits
    assert cannot.startswith("error: cannot write data/r/batch_")
    assert interrupted.endswith(" --resume")
    more_room(disk)
    finish(place, prompts)


def test_a_disk_that_stays_full_ends_the_run(place: Workplace, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [f"question {number}" for number in range(8)]
    place.dataset(prompts)
    monkeypatch.chdir(place.path)
    monkeypatch.setattr(full_disk, "WAIT_SECONDS", 0.5)
    with ScriptedEndpoint([BIG_ROW]) as endpoint:
        config = to_config(dict(word[2:].split("=", 1) for word in place.command(endpoint.base_url, {})[2:]))
        with pytest.raises(RunDirError, match=rf"^cannot write data/r/batch_\d\.jsonl: {ENOSPC}$"):
            BatchRunner(config).run()
    assert recorded(place)
    more_room(disk)
    finish(place, prompts)


@pytest.mark.parametrize("to_the_end", [False, True])
def test_a_checkpoint_that_cannot_be_written_ends_nothing(place: Workplace, to_the_end: bool) -> None:
    prompts = [f"question {number}" for number in range(12)]
    place.dataset(prompts)
    with (
        ScriptedEndpoint([answer("1", delay_seconds=0.2)]) as endpoint,
        under_way(place, endpoint.base_url, concurrency=1) as run,
    ):
        wait_until((place.run_dir() / "batch_0.jsonl").exists, "the first row is there")
        in_the_way = place.run_dir() / ".checkpoint.json.tmp"
        in_the_way.mkdir()
        wait_until((place.run_dir() / "batch_3.jsonl").exists, "batches are done without")
        if not to_the_end:
            in_the_way.rmdir()
        ended = run.ended()
        assert_nobody_was_asked_twice(endpoint, prompts)
    assert ended.code == 0, ended.stderr
    (told,) = ended.told.splitlines()
    assert told.startswith("warning: cannot write data/r/checkpoint.json: ")
    assert len(place.trajectories()) == place.json("statistics.json")["outcomes"]["completed"] == 12
    completed = place.json("checkpoint.json")["completed_prompts"]
    assert completed == list(range(12)) or to_the_end


@pytest.mark.slow
def test_a_disk_that_is_full_in_the_middle_of_the_checkpoint(place: Workplace, disk: Path) -> None:
    """The rows still fit into the page that their file has; a new file does not."""
    prompts = [f"question {number}" for number in range(6)]
    place.dataset(prompts)
    with (
        ScriptedEndpoint([answer("1", delay_seconds=0.4)]) as endpoint,
        under_way(place, endpoint.base_url, batch_size=3, concurrency=1) as run,
    ):
        wait_until((place.run_dir() / "batch_0.jsonl").exists, "the first row is there")
        before = (place.run_dir() / "checkpoint.json").read_bytes()
        ballast = fill(disk)
        wait_until(lambda: WAITS in run.stderr, "rows do not fit either")
        assert (place.run_dir() / "checkpoint.json").read_bytes() == before
        ballast.unlink()
        ended = run.ended()
        assert_nobody_was_asked_twice(endpoint, prompts)
    assert ended.code == 0, ended.stderr
    assert recorded(place) == prompts
    assert place.json("checkpoint.json")["completed_prompts"] == list(range(6))


@pytest.mark.slow
def test_workers_are_not_taken_for_stuck_while_the_disk_is_full(place: Workplace, disk: Path) -> None:
    prompts = [f"question {number}" for number in range(8)]
    place.dataset(prompts)
    with (
        ScriptedEndpoint([BIG_ROW]) as endpoint,
        under_way(place, endpoint.base_url, concurrency=2, num_workers=2) as run,
    ):
        wait_until(lambda: WAITS in run.stderr, "it tells")
        time.sleep(SILENCE_SECONDS + 3)
        more_room(disk)
        ended = run.ended()
        assert_nobody_was_asked_twice(endpoint, prompts)
    assert ended.code == 0, ended.stderr
    assert "worker" not in ended.told
    assert recorded(place) == prompts


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
    more_room(disk)
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
    with ScriptedEndpoint([answer("1")]) as endpoint, under_way(place, endpoint.base_url) as run:
        wait_until(lambda: WAITS in run.stderr, "it tells")
        subprocess.run(["mount", "-o", "remount,nr_inodes=500", disk], check=True)
        ended = run.ended()
        assert_nobody_was_asked_twice(endpoint, ["one", "two"])
    assert ended.code == 0, ended.stderr
    assert recorded(place) == ["one", "two"]


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
        assert_told(last_told(ended), "cannot write data/r/batch_", "Read-only file system")
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
    assert_told(last_told(ended), " data/r", "No such file or directory")  # for a row, or for what was new beside it
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
    slow_disk(place, tmp_path, 500)
    prompts = [f"question {number:02}" for number in range(40)]
    place.dataset(prompts)
    with ScriptedEndpoint([answer("1", delay_seconds=0.2)]) as endpoint:
        started = time.monotonic()
        ended = place.run(endpoint.base_url, batch_size=20, concurrency=10)
        assert time.monotonic() - started < 0.5 * len(prompts)  # what one after the other would take
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
