"""Dataset, run folder and matching together, as a run uses them: legs that stop, files that were touched, merges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.checkpoint import DatasetFacts
from rollout.filters import drop_reason
from rollout.jsonl import JsonObject
from rollout.merge import Fate, MergeRules
from rollout.original_rows import complete_row
from rollout.resume import match_rows
from rollout.rows import KEYS
from rollout.samples import Dataset
from rollout.statistics import RunStatistics
from tests.rollout.run_files import Row, a_row, an_original_row, line, open_run, write_batch, write_dataset


def leg(
    folder: Path, *, resume: bool = True, limit: int | None = None, stop_after: int = 1000, size: int = 2
) -> list[int]:
    """Run what is left, at most ``stop_after`` samples, then merge; return the indices that ran."""
    with Dataset.open(folder / "prompts.jsonl", limit) as dataset, open_run(folder, resume=resume) as run_dir:
        rows = run_dir.scan()
        match = match_rows(dataset.keys, rows)
        facts = DatasetFacts(str(dataset.path), dataset.sha256, len(dataset))
        checkpoint = run_dir.start_checkpoint({"seed": 0}, facts, rows, match)
        ran = list(match.pending())[:stop_after]
        for position, index in enumerate(ran):
            sample, batch_num = dataset[index], run_dir.first_batch + position // size
            run_dir.append(batch_num, line(a_row(index, sample.prompt, image=sample.image, cwd=sample.cwd)))
            checkpoint.record(batch_num, index, "completed")
        run_dir.save_checkpoint(checkpoint, at_any_cost=True)
        run_dir.scan_own(rows)
        run_dir.merge(rows, match_rows(dataset.keys, rows), MergeRules(lambda _row: "", lambda _row, _fate: None))
    return ran


def indices(folder: Path) -> list[int]:
    return [row["prompt_index"] for row in trajectories(folder)]


def trajectories(folder: Path) -> list[JsonObject]:
    return [json.loads(text) for text in (folder / "r" / "trajectories.jsonl").read_bytes().splitlines()]


def checkpoint_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "r" / "checkpoint.json").read_bytes())
    return content


def test_repeated_prompts_are_not_dropped(tmp_path: Path) -> None:
    write_dataset(tmp_path / "prompts.jsonl", ["roll a die"] * 3)
    write_batch(tmp_path / "r", 0, [a_row(0, "roll a die")])
    assert leg(tmp_path) == [1, 2]
    assert indices(tmp_path) == [0, 1, 2]


def test_later_batches_go_above_earlier_ones_which_stay_as_they_are(tmp_path: Path) -> None:
    write_dataset(tmp_path / "prompts.jsonl", ["a", "b", "c", "d"])
    assert leg(tmp_path, resume=False, stop_after=2) == [0, 1]
    before = (tmp_path / "r" / "batch_0.jsonl").read_bytes()
    assert leg(tmp_path) == [2, 3]
    assert (tmp_path / "r" / "batch_0.jsonl").read_bytes() == before
    assert list(checkpoint_of(tmp_path)["batch_stats"]) == ["0", "1"]
    assert checkpoint_of(tmp_path)["completed_prompts"] == [0, 1, 2, 3]
    assert len(checkpoint_of(tmp_path)["legs"]) == 2
    assert indices(tmp_path) == [0, 1, 2, 3]


def test_odd_lines_in_the_dataset_and_in_the_batches(tmp_path: Path) -> None:
    lines = [
        b'{"prompt":123}',
        b'{"prompt":null}',
        b"42",
        b'["prompt"]',
        b'{"prompt":"ok"}',
        b"",
        b'{"prompt":"bad json"',
    ]
    (tmp_path / "prompts.jsonl").write_bytes(b"\n".join(lines))
    write_batch(tmp_path / "r", 0, [a_row(0, "123"), b"7\n", b'{"prompt_index": 1, "conv'])
    assert leg(tmp_path) == [1]
    assert indices(tmp_path) == [0, 1]


def test_a_half_row_runs_again_on_a_line_of_its_own(tmp_path: Path) -> None:
    write_dataset(tmp_path / "prompts.jsonl", ["a", "b"])
    torn = write_batch(tmp_path / "r", 0, [a_row(0, "a"), b'{"prompt_index": 1, "conversa'])
    before = torn.read_bytes()
    assert leg(tmp_path) == [1]
    assert torn.read_bytes() == before
    assert indices(tmp_path) == [0, 1]
    assert leg(tmp_path) == []


def test_a_raised_limit_runs_just_the_new_samples(tmp_path: Path) -> None:
    write_dataset(tmp_path / "prompts.jsonl", [f"p{number}" for number in range(10)])
    assert leg(tmp_path, resume=False, limit=3) == [0, 1, 2]
    assert leg(tmp_path, limit=6) == [3, 4, 5]
    assert indices(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert leg(tmp_path, limit=2) == []
    assert indices(tmp_path) == [0, 1]  # what was asked for; the other rows stay in their batch files
    assert leg(tmp_path, limit=6) == []
    assert indices(tmp_path) == [0, 1, 2, 3, 4, 5]


def test_a_dataset_that_is_reordered_and_grows_between_legs(tmp_path: Path) -> None:
    write_dataset(tmp_path / "prompts.jsonl", ["a", "b", "c", "d"])
    leg(tmp_path, resume=False, stop_after=3)
    write_dataset(tmp_path / "prompts.jsonl", ["new", "d", "c", "b", "a"])
    assert leg(tmp_path) == [0, 1]
    assert [(row["prompt_index"], row["conversations"][1]["value"]) for row in trajectories(tmp_path)] == [
        (0, "new"),
        (1, "d"),
        (2, "c"),
        (3, "b"),
        (4, "a"),
    ]


@pytest.mark.parametrize("damage", ["removed", "emptied", "doubled"])
def test_a_batch_file_that_somebody_touched(tmp_path: Path, damage: str) -> None:
    write_dataset(tmp_path / "prompts.jsonl", ["a", "b", "c", "d"])
    leg(tmp_path, resume=False)
    path = tmp_path / "r" / "batch_1.jsonl"
    if damage == "removed":
        path.unlink()
    elif damage == "emptied":
        path.write_bytes(b"")
    else:
        (tmp_path / "r" / "batch_5.jsonl").write_bytes(path.read_bytes())
    assert leg(tmp_path) == ([] if damage == "doubled" else [2, 3])
    assert indices(tmp_path) == [0, 1, 2, 3]
    assert not (tmp_path / "r" / "batch_1.jsonl").exists() or damage != "removed"


def test_nothing_left_to_do_rebuilds_the_trajectories_all_the_same(tmp_path: Path) -> None:
    write_dataset(tmp_path / "prompts.jsonl", ["a", "b"])
    leg(tmp_path, resume=False)
    before = (tmp_path / "r" / "trajectories.jsonl").read_bytes()
    (tmp_path / "r" / "trajectories.jsonl").unlink()
    assert leg(tmp_path) == []
    assert (tmp_path / "r" / "trajectories.jsonl").read_bytes() == before


def key_tree(value: Any) -> Any:
    return {key: key_tree(item) for key, item in value.items()} if isinstance(value, dict) else type(value).__name__


def test_the_originals_rows_and_ours_make_one_file_of_one_type(tmp_path: Path) -> None:
    stats = {"terminal": {"count": 1, "success": 1, "failure": 0}, "cronjob": {"count": 0, "success": 0, "failure": 0}}
    original = an_original_row(0, "a", api_calls=1, toolsets_used=["terminal"], tool_stats=stats, tool_error_counts={})
    ours: Row = dict(original) | {"prompt_index": 1, "conversations": [{"from": "human", "value": "b"}]}
    complete_row(ours)
    ours["metadata"]["cwd"] = ""
    tombstone = {"prompt_index": 2, "discarded": "no_reasoning", "prompt": "c"}
    write_dataset(tmp_path / "prompts.jsonl", ["a", "b", "c"])
    write_batch(tmp_path / "r", 0, [original, tombstone])
    write_batch(tmp_path / "r", 1, [ours])
    statistics = RunStatistics()

    def count(row: JsonObject, fate: Fate) -> None:
        statistics.add(row, final=fate != "superseded")

    with Dataset.open(tmp_path / "prompts.jsonl") as dataset, open_run(tmp_path, resume=True) as run_dir:
        rows = run_dir.scan()
        match = match_rows(dataset.keys, rows)
        assert not match.pending()
        run_dir.merge(rows, match, MergeRules(drop_reason, count, complete_row))
    first, second = trajectories(tmp_path)
    assert [list(first), list(second)] == [list(KEYS), list(KEYS)]
    assert {key: key_tree(first[key]) for key in KEYS} == {key: key_tree(second[key]) for key in KEYS}
    assert statistics.kept == 2
    assert statistics.outcomes == {"completed": 2, "discarded": 1}
