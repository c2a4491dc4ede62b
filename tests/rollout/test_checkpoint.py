from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from rollout.checkpoint import BatchStats, Checkpoint, DatasetFacts, Past, load_past
from rollout.resume import match_rows
from rollout.run_dir import RunDir
from tests.rollout.run_files import a_failure, a_row, keys_of, line, open_run, write_batch

CONFIG = {"model": "m", "distribution": "default", "seed": 0, "base_url": "http://localhost"}


def start(run_dir: RunDir, prompts: list[str], config: dict[str, Any] | None = None) -> Checkpoint:
    rows = run_dir.scan()
    match = match_rows(keys_of(prompts), rows)
    facts = DatasetFacts("prompts.jsonl", "abc", len(prompts))
    return run_dir.start_checkpoint(config or CONFIG, facts, rows, match)


def saved(run_dir: RunDir) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir.path / "checkpoint.json").read_bytes())
    return content


def test_progress_is_saved_with_all_its_keys(tmp_path: Path) -> None:
    with open_run(tmp_path) as run_dir:
        checkpoint = start(run_dir, ["a", "b", "c", "d"])
        for index, outcome in ((3, "partial"), (0, "completed"), (1, "failed")):
            run_dir.append(index // 2, line(a_row(index, "abcd"[index])))
            checkpoint.record(index // 2, index, outcome)  # type: ignore[arg-type]
        checkpoint.record(1, 2, "discarded")
        assert run_dir.save_checkpoint(checkpoint)
        content = saved(run_dir)
    assert list(content) == [
        "format",
        "run_name",
        "completed_prompts",
        "batch_stats",
        "config",
        "dataset",
        "legs",
        "last_updated",
    ]
    assert content["format"] == 1
    assert content["run_name"] == "r"
    assert content["completed_prompts"] == [0, 2, 3]
    assert content["batch_stats"] == {
        "0": {"processed": 2, "skipped": 0, "failed": 1, "discarded_no_reasoning": 0},
        "1": {"processed": 2, "skipped": 0, "failed": 0, "discarded_no_reasoning": 1},
    }
    assert content["config"] == CONFIG
    assert content["dataset"] == {"path": "prompts.jsonl", "sha256": "abc", "samples": 4}
    assert datetime.fromisoformat(content["last_updated"]).tzinfo is not None
    (leg,) = content["legs"]
    assert leg["ended_at"] >= leg["started_at"]
    assert leg["duration_seconds"] >= 0
    assert {
        name: leg[name] for name in ("model", "seed", "dataset_sha256", "samples", "first_batch", "last_batch", "rows")
    } == {
        "model": "m",
        "seed": 0,
        "dataset_sha256": "abc",
        "samples": 4,
        "first_batch": 0,
        "last_batch": 1,
        "rows": 4,
    }


def test_rows_are_durable_before_the_checkpoint_says_so(tmp_path: Path) -> None:
    with open_run(tmp_path) as run_dir:
        checkpoint = start(run_dir, ["a"])
        run_dir.append(0, line(a_row(0, "a")))
        checkpoint.record(0, 0, "completed")
        run_dir.save_checkpoint(checkpoint)
        assert sorted(path.name for path in run_dir.path.iterdir()) == [".lock", "batch_0.jsonl", "checkpoint.json"]


def test_a_second_leg_adds_itself_and_counts_the_rows_of_all(tmp_path: Path) -> None:
    with open_run(tmp_path) as run_dir:
        checkpoint = start(run_dir, ["a", "b"])
        run_dir.append(0, line(a_row(0, "a")))
        run_dir.append(0, line(a_failure(1, "b")))
        checkpoint.record(0, 0, "completed")
        checkpoint.record(0, 1, "failed")
        run_dir.save_checkpoint(checkpoint)
    with open_run(tmp_path, resume=True) as run_dir:
        assert run_dir.past.config == CONFIG
        assert run_dir.past.dataset["sha256"] == "abc"
        assert run_dir.warnings == []
        checkpoint = start(run_dir, ["b", "a", "c"], CONFIG | {"model": "other"})
        run_dir.save_checkpoint(checkpoint)
        assert saved(run_dir)["completed_prompts"] == [1]
        checkpoint.record(1, 0, "completed")
        run_dir.save_checkpoint(checkpoint)
        content = saved(run_dir)
    assert content["completed_prompts"] == [0, 1]
    assert content["batch_stats"]["0"] == {"processed": 2, "skipped": 0, "failed": 1, "discarded_no_reasoning": 0}
    assert content["batch_stats"]["1"]["processed"] == 1
    assert [leg["model"] for leg in content["legs"]] == ["m", "other"]
    assert [leg["first_batch"] for leg in content["legs"]] == [0, 1]


def test_batches_whose_files_are_gone_keep_their_counts_and_others_are_counted_anew(tmp_path: Path) -> None:
    stats = {"0": {"processed": 9, "skipped": 3, "failed": 9}, "4": {"processed": 2}}
    write_batch(tmp_path / "r", 0, [a_row(0, "a"), a_row(1, "b", discarded="no_reasoning")])
    (tmp_path / "r" / "checkpoint.json").write_text(
        json.dumps({"run_name": "r", "batch_stats": stats}), encoding="utf-8"
    )
    with open_run(tmp_path, resume=True) as run_dir:
        assert run_dir.first_batch == 5
        checkpoint = start(run_dir, ["a", "b"])
        run_dir.save_checkpoint(checkpoint)
        assert saved(run_dir)["batch_stats"] == {
            "0": {"processed": 2, "skipped": 3, "failed": 0, "discarded_no_reasoning": 1},
            "4": {"processed": 2, "skipped": 0, "failed": 0, "discarded_no_reasoning": 0},
        }


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"run_name": "r", "comp', "is damaged"),
        (b"", "is damaged"),
        (b"\xff\xfe\0", "is damaged"),
        (b"\0" * 100, "is damaged"),
        (b"[" * 100_000, "is damaged"),
        (b"[]", "belongs to another run"),
        (b'{"run_name": "other", "batch_stats": {"5": {}}}', "belongs to another run"),
        (b'{"completed_prompts": [0]}', "belongs to another run"),
        (None, "is missing"),
    ],
)
def test_a_checkpoint_that_is_no_use_is_told_and_made_again(tmp_path: Path, content: bytes | None, told: str) -> None:
    write_batch(tmp_path / "r", 0, [a_row(1, "b")])
    if content is not None:
        (tmp_path / "r" / "checkpoint.json").write_bytes(content)
    with open_run(tmp_path, resume=True) as run_dir:
        assert len(run_dir.warnings) == 1
        assert told in run_dir.warnings[0]
        assert run_dir.warnings[0].endswith("the run goes on from its batch files")
        assert run_dir.first_batch == 1
        run_dir.save_checkpoint(start(run_dir, ["a", "b"]))
        assert saved(run_dir)["completed_prompts"] == [1]
        assert saved(run_dir)["batch_stats"]["0"]["processed"] == 1


def test_resuming_what_never_ran_tells_nothing(tmp_path: Path) -> None:
    with open_run(tmp_path, resume=True) as run_dir:
        assert run_dir.warnings == []
        assert run_dir.first_batch == 0


def test_only_what_has_the_right_type_is_believed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    odd = {
        "run_name": "r",
        "config": [],
        "dataset": "x",
        "legs": [{"model": "m"}, 7, None],
        "batch_stats": {
            "0": {"processed": "2", "failed": 1},
            "01": {},
            "-1": {},
            "x": {},
            "3": 4,
            "9" * 40: {},
            "9" * 18: {},
            "2": {},
        },
    }
    path.write_text(json.dumps(odd), encoding="utf-8")
    past = load_past(path, "r")
    assert (past.config, past.dataset, past.legs) == ({}, {}, [{"model": "m"}])
    assert past.batch_stats == {0: BatchStats(failed=1), 2: BatchStats()}


def test_a_checkpoint_of_the_original_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    stats = {"0": {"processed": 2, "skipped": 1, "discarded_no_reasoning": 1}}
    original = {
        "run_name": "r",
        "completed_prompts": [0, 1],
        "batch_stats": stats,
        "last_updated": "2026-01-01T00:00:00",
    }
    path.write_text(json.dumps(original), encoding="utf-8")
    past = load_past(path, "r")
    assert past.warning == ""
    assert past.batch_stats == {0: BatchStats(processed=2, skipped=1, discarded_no_reasoning=1)}


def test_completed_prompts_are_sorted_and_unique_whatever_comes_when(tmp_path: Path) -> None:
    checkpoint = Checkpoint("r", CONFIG, DatasetFacts("p", "s", 4), Past())
    for index in (2, 0, 2, 1):
        checkpoint.record(0, index, "completed")
    checkpoint.record(0, 1, "failed")
    assert checkpoint.to_json()["completed_prompts"] == [0, 2]
    assert list(tmp_path.iterdir()) == []


def test_saving_is_rationed_only_when_it_has_cost_too_much(tmp_path: Path) -> None:
    with open_run(tmp_path) as run_dir:
        checkpoint = start(run_dir, ["a"])
        assert all(run_dir.save_checkpoint(checkpoint) for _ in range(20))
        checkpoint.spent(2.0)
        assert not run_dir.save_checkpoint(checkpoint)
        checkpoint.record(0, 0, "completed")
        assert run_dir.save_checkpoint(checkpoint, at_any_cost=True)
        assert saved(run_dir)["completed_prompts"] == [0]


@pytest.mark.parametrize("seconds", ["x", None, -1, 10**401, 1e10, float("inf"), float("nan"), True, [1]])
def test_a_leg_is_believed_where_it_can_be_true(tmp_path: Path, seconds: Any) -> None:
    legs = [{"duration_seconds": seconds, "model": "m", "first_batch": [0], "rows": "x", "other": seconds}, {}, "x"]
    good = {"duration_seconds": 2.5, "model": 7, "seed": -3, "first_batch": None}
    path = tmp_path / "r" / "checkpoint.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"run_name": "r", "legs": [*legs, good]}), encoding="utf-8")
    with open_run(tmp_path, resume=True) as run_dir:
        assert run_dir.past.legs == [{"model": "m"}, {"duration_seconds": 2.5, "seed": -3, "first_batch": None}]
        checkpoint = start(run_dir, ["a"])
        assert checkpoint.past_seconds == 2.5
        assert 2.5 <= checkpoint.all_seconds < 60
        run_dir.save_checkpoint(checkpoint)
        assert len(saved(run_dir)["legs"]) == 3


def test_what_is_no_strict_json_is_never_written(tmp_path: Path) -> None:
    with open_run(tmp_path) as run_dir:
        with pytest.raises(ValueError, match="not JSON compliant"):
            run_dir.write_json("statistics.json", {"cost_usd": float("inf")})
        assert not (run_dir.path / "statistics.json").exists()


def test_a_pipe_in_its_place_is_passed_over_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "r" / "checkpoint.json"
    write_batch(path.parent, 0, [a_row(1, "b")])
    os.mkfifo(path)
    with open_run(tmp_path, resume=True) as run_dir:
        assert run_dir.warnings == [f"{path} is not a regular file; the run goes on from its batch files"]
        run_dir.save_checkpoint(start(run_dir, ["a", "b"]))
        assert saved(run_dir)["completed_prompts"] == [1]
