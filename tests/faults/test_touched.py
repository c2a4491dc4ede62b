"""What a person, a tool or a broken disk put into a run's files: a resume survives it, or it is refused at the door."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from endpoints.scripted import ScriptedEndpoint
from tests.faults.test_files import PROMPTS, assert_whole, resumed, run_to_the_end
from tests.program import Json, Workplace, answer, prompt_of

Put = Callable[[Path], None]


def strict(path: Path) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{path} holds {constant}")

    return json.loads(path.read_bytes(), parse_constant=refuse)


def assert_strict(place: Workplace) -> None:
    for name in ("checkpoint.json", "statistics.json"):
        strict(place.run_dir() / name)


def rewrite_checkpoint(place: Workplace, **changed: Any) -> None:
    path = place.run_dir() / "checkpoint.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changed}))


def rewrite_row(place: Workplace, change: Callable[[Json], None]) -> None:
    """Change the first row of the second batch file, which is of the third prompt."""
    path = place.run_dir() / "batch_1.jsonl"
    first, rest = path.read_text().split("\n", 1)
    row = json.loads(first)
    change(row)
    path.write_text(f"{json.dumps(row)}\n{rest}")


def test_damaged_legs_are_passed_over(place: Workplace) -> None:
    run_to_the_end(place)
    seconds: list[Any] = ["x", None, -5, 10**400, float("inf"), float("nan"), {}]
    legs = [{"duration_seconds": value, "model": "m"} for value in seconds]
    rewrite_checkpoint(place, legs=[*legs, {}, 7, None, {"duration_seconds": 1000.0, "first_batch": [0]}])
    ended, asked = resumed(place, max_hours=1)
    assert (ended.code, asked) == (0, [])
    assert_whole(place, PROMPTS)
    assert_strict(place)
    assert 1000 <= place.json("statistics.json")["duration_seconds"] < 1100


def test_parts_with_damaged_legs_are_merged(place: Workplace) -> None:
    run_to_the_end(place)
    rewrite_checkpoint(place, legs=[{"duration_seconds": "x", "first_batch": {}, "last_batch": []}, "x"])
    ended = place.run_words("--merge=r", "--run_name=all")
    assert ended.code == 0, ended.stderr
    assert len(place.trajectories("all")) == len(PROMPTS)
    strict(place.run_dir("all") / "statistics.json")


CHANGED: list[tuple[str, Any]] = [
    ("api_calls", float("inf")),
    ("api_calls", "x"),
    ("completed", "true"),
    ("toolsets_used", None),
    ("metadata.cost_usd", 10**400),
    ("metadata.duration_seconds", 10**400),
    ("metadata.usage", {"prompt_tokens": 10**400}),
    ("metadata.usage", None),
    ("metadata.model", 5),
]


@pytest.mark.slow
def test_rows_whose_fields_were_changed_are_told_and_run_again(place: Workplace) -> None:
    prompts = [f"{number}: {field}" for number, (field, _) in enumerate(CHANGED)]
    run_to_the_end(place, [*prompts, "left as it is"])
    rows = {prompt_of(row): row for row in place.rows()}
    for prompt, (field, value) in zip(prompts, CHANGED, strict=True):
        *way, name = field.split(".")
        (rows[prompt][way[0]] if way else rows[prompt])[name] = value
    for path in place.run_dir().glob("batch_*.jsonl"):
        there = [prompt_of(json.loads(line)) for line in path.read_text().splitlines()]
        path.write_text("".join(f"{json.dumps(rows[prompt])}\n" for prompt in there))
    ended, asked = resumed(place)
    assert (ended.code, asked) == (0, prompts)
    for field, _ in CHANGED:
        assert f'"{field}" is not what it is in a row of this program; ignored' in ended.stderr
    assert ended.stderr.count("is not what it is in a row") == len(CHANGED)
    assert_whole(place, [*prompts, "left as it is"])
    assert_strict(place)


def test_absurd_numbers_in_rows_of_the_original_count_as_none(place: Workplace) -> None:
    run_to_the_end(place)

    def change(row: Json) -> None:
        row["api_calls"] = 10**400
        row["metadata"] = {"timestamp": "", "model": "m", "cost_usd": 10**400, "usage": {"prompt_tokens": 10**400}}
        row["metadata"]["duration_seconds"] = 10**400
        row["tool_stats"] = {"terminal": {"count": 10**400, "success": float("inf"), "failure": "x"}}

    rewrite_row(place, change)
    ended, asked = resumed(place, max_cost_usd=5)
    assert (ended.code, asked) == (0, [])
    assert_whole(place, PROMPTS)
    assert_strict(place)
    assert place.trajectories()[2]["api_calls"] == 0


def test_absurd_bills_are_none(place: Workplace) -> None:
    place.dataset(PROMPTS)
    with ScriptedEndpoint(
        [answer("1", usage={"prompt_tokens": 7, "completion_tokens": 1e300, "cost": 1e308})]
    ) as model:
        ended = place.run(model.base_url)
    assert ended.code == 0
    assert "Cost: $0.0000" in ended.stdout
    assert_strict(place)
    assert place.json("statistics.json")["tokens"]["prompt_tokens"] == 7 * len(PROMPTS)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def a_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(here)


@pytest.mark.slow
@pytest.mark.parametrize("put", [pipe, link_to_itself, a_socket])
@pytest.mark.parametrize("name", ["run.log", ".lock", ".pid"])
def test_what_is_no_file_is_refused_at_the_door(place: Workplace, name: str, put: Put) -> None:
    run_to_the_end(place, PROMPTS[:1])
    (place.run_dir() / name).unlink(missing_ok=True)
    put(place.run_dir() / name)
    ended, asked = resumed(place)
    told = f"error: data/r/{name} is not a regular file: move it away\n"
    assert (ended.code, ended.stdout, ended.stderr, asked) == (2, "", told, [])


@pytest.mark.parametrize("put", [pipe, link_to_itself, a_socket])
def test_what_can_be_made_again_is_replaced(place: Workplace, put: Put) -> None:
    run_to_the_end(place, PROMPTS[:1])
    for name in ("checkpoint.json", "trajectories.jsonl", "statistics.json"):
        (place.run_dir() / name).unlink()
        put(place.run_dir() / name)
    ended, asked = resumed(place)
    assert (ended.code, asked) == (0, [])
    assert "the run goes on from its batch files" in ended.stderr
    assert_whole(place, PROMPTS[:1])
    assert all((place.run_dir() / name).is_file() for name in ("checkpoint.json", "statistics.json"))


@pytest.mark.slow
@pytest.mark.parametrize("put", [pipe, link_to_itself, Path.mkdir])
def test_a_batch_file_that_is_none_is_told(place: Workplace, put: Put) -> None:
    run_to_the_end(place, PROMPTS[:1])
    put(place.run_dir() / "batch_3.jsonl")
    with ScriptedEndpoint([answer("1")]) as model:
        ended = place.run(model.base_url, resume=True)
    assert ended.code == 0
    assert "batch_3.jsonl: not a batch file (batch_N.jsonl); ignored" in ended.stderr


def test_a_part_of_a_merge_with_a_pipe_for_a_checkpoint_is_refused(place: Workplace) -> None:
    run_to_the_end(place, PROMPTS[:1])
    (place.run_dir() / "checkpoint.json").unlink()
    pipe(place.run_dir() / "checkpoint.json")
    ended = place.run_words("--merge=r", "--run_name=all")
    assert ended.code == 2
    assert ended.stderr.startswith("error: --merge: data/r/checkpoint.json tells no dataset")
