"""Files that somebody touched between two starts, and runs that are started twice."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from endpoints.scripted import ScriptedEndpoint
from tests.faults.shims import NO_LOCKS, preloaded
from tests.program import Ended, Json, Workplace, answer, ending, prompt_of, prompts_of, wait_until

PROMPTS = [f"question {number}" for number in range(6)]  # two to a batch file
Damage = Callable[[Path], None]


def run_to_the_end(place: Workplace, prompts: list[str] = PROMPTS) -> None:
    place.dataset(prompts)
    with ScriptedEndpoint([answer("1")]) as endpoint:
        assert place.run(endpoint.base_url, concurrency=1).code == 0


def resumed(place: Workplace, **flags: object) -> tuple[Ended, list[str]]:
    """Resume; return the end and what was asked for."""
    before = {path: path.read_bytes() for path in place.run_dir().glob("batch_*")}
    with ScriptedEndpoint([answer("2")]) as endpoint:
        ended = place.run(endpoint.base_url, resume=True, **flags)
        asked = sorted(prompts_of(endpoint))
    assert "Traceback" not in ended.stderr
    assert {path: path.read_bytes() for path in before} == before, "batch files that are there are never changed"
    return ended, asked


def assert_whole(place: Workplace, prompts: list[str]) -> None:
    assert [(row["prompt_index"], prompt_of(row)) for row in place.trajectories()] == list(enumerate(prompts))
    assert place.json("checkpoint.json")["completed_prompts"] == list(range(len(prompts)))
    assert place.json("statistics.json")["outcomes"]["completed"] == len(prompts)


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def cut_newline(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def cut_front(path: Path) -> None:
    path.write_bytes(path.read_bytes()[100:])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def junk(path: Path) -> None:
    bad = [
        b"\n",
        b"7\n",
        b'"text"\n',
        b"[1, 2]\n",
        b"null\n",
        b"{}\n",
        b"\xff\xfe\x00\n",
        b"\0" * 5000 + b"\n",
        b"{" * 3000 + b"\n",
    ]
    path.write_bytes(b"".join([*bad, *lines(path), *bad, b'{"prompt_index": 1, "conversa']))


def joined(path: Path) -> None:
    """Two rows on one line, as an editor leaves them."""
    path.write_bytes(path.read_bytes().replace(b"\n", b"", 1))


def holes(path: Path) -> None:
    """What a crash of the machine leaves of rows that were not saved."""
    first, second = lines(path)
    path.write_bytes(first + b"\0" * len(second))


def windows(path: Path) -> None:
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))


def twice(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


def other_order(path: Path) -> None:
    path.write_bytes(b"".join(reversed(lines(path))))


def pretty(path: Path) -> None:
    rows = [json.loads(line) for line in lines(path)]
    path.write_text("".join(json.dumps(row, indent=1) + "\n" for row in rows))


# What happens to a batch file of two rows, and which of them are lost by it.
DAMAGES: list[tuple[Damage, list[int]]] = [
    (cut, [1]),
    (cut_newline, []),
    (cut_front, [0]),
    (empty, [0, 1]),
    (remove, [0, 1]),
    (junk, []),
    (joined, [0, 1]),
    (holes, [1]),
    (windows, []),
    (twice, []),
    (other_order, []),
    (pretty, [0, 1]),
]


def test_batch_files_that_were_touched(place: Workplace) -> None:
    prompts = [f"question {number:02}" for number in range(2 * len(DAMAGES))]
    run_to_the_end(place, prompts)
    for number, (damage, _) in enumerate(DAMAGES):
        damage(place.run_dir() / f"batch_{number}.jsonl")
    lost = [2 * number + row for number, (_, rows) in enumerate(DAMAGES) for row in rows]
    ended, asked = resumed(place)
    assert (ended.code, asked) == (0, [prompts[number] for number in lost]), ended.stderr
    assert_whole(place, prompts)
    again, asked = resumed(place)
    assert (again.code, asked) == (0, [])
    assert_whole(place, prompts)


@pytest.mark.slow
def test_batch_files_that_are_renamed_or_copied(place: Workplace) -> None:
    run_to_the_end(place)
    shutil.copy(place.run_dir() / "batch_0.jsonl", place.run_dir() / "batch_7.jsonl")
    (place.run_dir() / "batch_1.jsonl").rename(place.run_dir() / "batch_100.jsonl")
    (place.run_dir() / "batch_2.jsonl").rename(place.run_dir() / "batch_2.jsonl.bak")
    (place.run_dir() / "batch_3.jsonl").symlink_to("batch_100.jsonl")
    ended, asked = resumed(place)
    assert (ended.code, asked) == (0, PROMPTS[4:])
    assert "batch_2.jsonl.bak: not a batch file" in ended.stderr
    assert (place.run_dir() / "batch_101.jsonl").exists()
    assert_whole(place, PROMPTS)


CHECKPOINTS = {
    "none": None,
    "empty": b"",
    "cut": b'{"run_name": "r", "comp',
    "another run's": b'{"run_name": "other", "completed_prompts": [0, 1, 2, 3, 4, 5], "batch_stats": {"90": {}}}',
    "one that lies": b'{"run_name": "r", "completed_prompts": [0, 1, 4, 5], "batch_stats": {"1": {"processed": 99}}}',
    "odd types": b'{"run_name": "r", "completed_prompts": "x", "batch_stats": [1], "config": 7, "legs": {"a": 1}}',
    "deep": b"[" * 100_000,
}


@pytest.mark.slow
def test_checkpoints_that_tell_nothing_or_lie(place: Workplace) -> None:
    run_to_the_end(place)
    (place.run_dir() / "batch_2.jsonl").unlink()
    checkpoint = place.run_dir() / "checkpoint.json"
    missing = PROMPTS[4:]
    for name, content in CHECKPOINTS.items():
        if content is None:
            checkpoint.unlink()
        else:
            checkpoint.write_bytes(content)
        ended, asked = resumed(place)
        assert (ended.code, asked) == (0, missing), name
        missing = []
        assert_whole(place, PROMPTS)
        assert place.json("checkpoint.json")["batch_stats"]["1"]["processed"] == 2, name
        assert ("checkpoint.json" in ended.stderr) == (name not in ("one that lies", "odd types")), name


@pytest.mark.slow
def test_other_files_of_the_run_that_were_touched_are_made_anew(place: Workplace) -> None:
    run_to_the_end(place)
    wanted = (place.run_dir() / "trajectories.jsonl").read_bytes()
    (place.run_dir() / "trajectories.jsonl").write_bytes(wanted[:-10] + b"junk")
    (place.run_dir() / "statistics.json").unlink()
    (place.run_dir() / ".trajectories.jsonl.tmp").write_bytes(b"left by a run that was killed")
    (place.run_dir() / ".lock").write_bytes(b"12345678 somebody")
    (place.run_dir() / "run.log").unlink()
    ended, asked = resumed(place)
    assert (ended.code, asked) == (0, [])
    assert (place.run_dir() / "trajectories.jsonl").read_bytes() == wanted
    assert not (place.run_dir() / ".trajectories.jsonl.tmp").exists()
    assert_whole(place, PROMPTS)


def original_row(index: int, **more: Json) -> bytes:
    """As the original runner writes it."""
    said = [{"from": "system", "value": "s"}, {"from": "human", "value": PROMPTS[index]}, {"from": "gpt", "value": "4"}]
    row = {
        "prompt_index": index,
        "conversations": said,
        "metadata": {"batch_num": 0, "timestamp": "2026-01-02T03:04:05", "model": "m"},
        "completed": True,
        "partial": False,
        "api_calls": 1,
        "toolsets_used": ["terminal"],
        "tool_stats": {"terminal": {"count": 0, "success": 0, "failure": 0}},
        "tool_error_counts": {"terminal": 0},
    }
    return json.dumps({**row, **more}).encode() + b"\n"


@pytest.mark.slow
def test_a_run_of_the_original_that_was_killed_goes_on(place: Workplace) -> None:
    place.dataset(PROMPTS)
    place.run_dir().mkdir(parents=True)
    (place.run_dir() / "batch_0.jsonl").write_bytes(original_row(0) + original_row(1))
    (place.run_dir() / "batch_1.jsonl").write_bytes(original_row(2) + original_row(3)[:50])
    checkpoint = {
        "run_name": "r",
        "completed_prompts": [0, 1, 1, 5],
        "batch_stats": {"0": {"processed": 2, "skipped": 0}},
    }
    (place.run_dir() / "checkpoint.json").write_text(json.dumps(checkpoint))
    ended, asked = resumed(place)
    assert (ended.code, asked) == (0, PROMPTS[3:])
    assert_whole(place, PROMPTS)
    rows = place.trajectories()
    assert all(row.keys() == rows[0].keys() for row in rows)


@pytest.mark.slow
def test_another_number_of_samples_at_each_start(place: Workplace) -> None:
    place.dataset(PROMPTS)
    done = 0
    for samples in (3, 2, None):
        ended, asked = resumed(place, max_samples=samples)
        assert (ended.code, asked) == (0, PROMPTS[done : samples or 6])
        done = max(done, samples or 6)
        assert [prompt_of(row) for row in place.trajectories()] == PROMPTS[: samples or 6]


@pytest.mark.slow
def test_two_runs_that_are_started_at_once(place: Workplace) -> None:
    place.dataset(PROMPTS)
    with ScriptedEndpoint([answer("1", delay_seconds=1)]) as endpoint:
        both = [place.start(endpoint.base_url), place.start(endpoint.base_url)]
        ends = [place.ended(process) for process in both]
        assert sorted(prompts_of(endpoint)) == PROMPTS
    refused, done = sorted(ends, key=lambda ended: -ended.code)
    assert (done.code, done.told) == (0, "")
    assert refused.code in (1, 2)
    assert (refused.stdout, refused.told.count("\n")) == ("", 1)
    assert "is running this run in data/r" in refused.stderr
    assert_whole(place, PROMPTS)


@pytest.mark.slow
def test_two_runs_where_locks_do_not_work(place: Workplace, tmp_path: Path) -> None:
    place.env.update(preloaded(NO_LOCKS, tmp_path))
    place.dataset(PROMPTS)
    with (
        ScriptedEndpoint([answer("1", delay_seconds=30), answer("1")]) as endpoint,
        ending(place.start(endpoint.base_url)) as process,
    ):
        wait_until(lambda: endpoint.requests, "the first one works")
        second = place.run(endpoint.base_url, resume=True)
        assert second.code in (1, 2)
        assert f"another process (pid {process.pid}) is running this run in data/r" in second.stderr
        process.kill()
        process.communicate()
    ended, asked = resumed(place)
    assert ended.code == 0
    assert asked
    assert "locks do not work on the file system of data/r" in ended.stderr
    assert_whole(place, PROMPTS)
    assert not (place.run_dir() / ".pid").exists()


@pytest.mark.slow
def test_a_pid_file_of_another_machine_is_believed(place: Workplace, tmp_path: Path) -> None:
    place.env.update(preloaded(NO_LOCKS, tmp_path))
    place.dataset(PROMPTS)
    place.run_dir().mkdir(parents=True)
    (place.run_dir() / ".pid").write_text(f"{os.getpid()} not-{socket.gethostname()} 1")
    with ScriptedEndpoint([answer("1")]) as endpoint:
        ended = place.run(endpoint.base_url)
        assert not endpoint.requests
    assert ended.code in (1, 2)
    assert "if not so, remove it" in ended.stderr
