"""The readers of the trajectories: any file of ours loads, and survives Parquet."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rollout.messages import AssistantMessage, Message, ToolCall, ToolDefinition, ToolMessage, Usage, UserMessage
from rollout.original_rows import complete_row
from rollout.rows import KEYS, RowFacts, build_row, encode_row
from rollout.samples import Sample

datasets = pytest.importorskip("datasets")
parquet = pytest.importorskip("pyarrow.parquet")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

DEFINITIONS = (ToolDefinition("terminal", "Run </tools> a command", {"type": "object"}),)
PLAIN = (AssistantMessage("4", "two and two"),)
CALLING = (
    AssistantMessage("é 🙂 \u2028", "", (ToolCall("a", "terminal", {"command": ["</tool_call>", None, 1.5]}),)),
    ToolMessage("a", "terminal", '{"output": "\\u0000", "exit_code": 0, "error": null}'),
    AssistantMessage("4"),
)
LONG = (AssistantMessage("x" * 400_000, "hm"),)


class Ended:
    """A rollout that gave these messages."""

    stop_reason = "stop"
    completed = True
    partial = False
    failure = None
    api_calls = 1
    usage = Usage()
    cost_usd = 0.0

    def __init__(self, messages: tuple[Message, ...]) -> None:
        self.messages = messages


def write(path: Path, *rollouts: tuple[Message, ...]) -> list[dict[str, Any]]:
    rows = []
    for number, said in enumerate(rollouts):
        facts = RowFacts(
            batch_num=number // 10,
            model="m",
            sandbox="local",
            toolsets_used=["terminal"],
            definitions=DEFINITIONS,
            timestamp=datetime.fromtimestamp(number, tz=UTC),
            duration_seconds=number / 3,
        )
        rows.append(build_row(Sample(number, "q"), Ended((UserMessage("q"), *said)), facts))
    path.write_bytes(b"".join(map(encode_row, rows)))
    return rows


def load(tmp_path: Path, *files: Path) -> Any:
    names = [str(file) for file in files]
    return datasets.load_dataset("json", data_files=names, split="train", cache_dir=str(tmp_path / "cache"))


FILES = {
    "no turn calls": (PLAIN, PLAIN),
    "every row calls": (CALLING, CALLING),
    "some rows call": (PLAIN, CALLING, PLAIN),
    "one row": (CALLING,),
    "the first call comes after 12 MB": (*[LONG] * 30, CALLING),
    "the only call comes first": (CALLING, *[LONG] * 30),
}


@pytest.mark.parametrize("rollouts", FILES.values(), ids=FILES)
def test_any_file_loads_and_survives_parquet(tmp_path: Path, rollouts: tuple[tuple[Message, ...], ...]) -> None:
    rows = write(tmp_path / "trajectories.jsonl", *rollouts)
    loaded = load(tmp_path, tmp_path / "trajectories.jsonl")
    assert loaded.column_names == list(KEYS)
    assert loaded.to_list() == rows
    loaded.to_parquet(str(tmp_path / "rows.parquet"))
    again = datasets.Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path / "cache"))
    assert again.to_list() == rows
    assert parquet.read_table(tmp_path / "rows.parquet").num_rows == len(rows)


def test_files_of_different_runs_load_together(tmp_path: Path) -> None:
    rows = write(tmp_path / "a.jsonl", PLAIN) + write(tmp_path / "b.jsonl", CALLING)
    assert load(tmp_path, tmp_path / "a.jsonl", tmp_path / "b.jsonl").to_list() == rows


def test_rows_of_the_original_load_beside_ours(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", CALLING)
    turns = [{key: turn[key] for key in ("from", "value")} for turn in rows[0]["conversations"]]
    stamp = {"batch_num": 0, "timestamp": "2026-01-02T03:04:05", "model": "m"}
    original = {"prompt_index": 1, "conversations": turns, "metadata": stamp, "tool_stats": {"memory": {"count": 0}}}
    assert complete_row(original)
    with (tmp_path / "rows.jsonl").open("ab") as file:
        file.write(encode_row(original))
    assert load(tmp_path, tmp_path / "rows.jsonl").to_list() == [*rows, original]


def test_all_files_have_the_same_features(tmp_path: Path) -> None:
    features = []
    for number, rollouts in enumerate(FILES.values()):
        write(tmp_path / f"{number}.jsonl", *rollouts)
        features.append(load(tmp_path, tmp_path / f"{number}.jsonl").features)
    assert all(each == features[0] for each in features)
    assert features[0]["metadata"]["timestamp"] == datasets.Value("string")
