from __future__ import annotations

import copy
import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollout.filters import drop_reason
from rollout.merge import MergeRules, merge_rows
from rollout.messages import AssistantMessage, Failure, Message, ToolCall, ToolMessage, UserMessage
from rollout.original_rows import complete_row
from rollout.resume import match_rows
from rollout.row_scan import scan_rows
from rollout.row_types import wrong_field
from rollout.rows import NoResult, Row, RowFacts, build_row, discarded_row, encode_row
from rollout.samples import Sample
from tests.rollout.run_files import an_original_row, keys_of, write_batch

MESSAGES: tuple[Message, ...] = (
    UserMessage("p"),
    AssistantMessage("", "hm", (ToolCall("c", "terminal", {"command": "ls"}),)),
    ToolMessage("c", "terminal", '{"output": "", "exit_code": 0, "error": null}'),
    AssistantMessage("done", "so"),
)
METADATA_TEXTS = ("timestamp", "model", "image", "cwd", "sandbox", "stop_reason", "sample_json")


def our_row(failure: Failure | None = None) -> Row:
    facts = RowFacts(3, "m", "local", ("terminal",), (), datetime.now(UTC), 1.5)
    result = NoResult(failure or Failure("server", ""), MESSAGES, "completed", completed=True, api_calls=2)
    row = build_row(Sample(0, "p"), result, facts)
    if failure is None:
        for key in ("failed", "error", "prompt"):
            del row[key]
        row["completed"] = True
    return json.loads(encode_row(row))  # type: ignore[no-any-return]


def changed(field: str, value: Any) -> Row:
    row = our_row()
    place: Any = row
    *way, last = field.split(".")
    for name in way:
        place = place[int(name) if name.isdecimal() else name]
    place[last] = value
    return row


@pytest.mark.parametrize("row", [our_row(), our_row(Failure("server", "boom")), discarded_row(our_row(), "x")])
def test_rows_as_the_program_writes_them_are_right(row: Row) -> None:
    assert wrong_field(row) == ""


def each(value_of: str, *values: Any) -> list[tuple[str, Any]]:
    return [(value_of, value) for value in values]


WRONG = [
    *each("api_calls", "x", None, -1, 1.5, True, math.inf, 10**401, [1]),
    *each("completed", "true", 1, None),
    *each("partial", 0),
    *each("toolsets_used", "terminal", None, [1], {"terminal": 1}),
    *each("tool_stats", None, [], {"terminal": None}, {"terminal": {}}, {"terminal": {"count": 1}}),
    *each("tool_stats.terminal.count", "1", None, -1, 1.0, True, 10**401),
    *each("tool_error_counts", None, []),
    *each("tool_error_counts.terminal", "1", None, 1.0, 10**401),
    *each("conversations", None, "x", ["x"]),
    *each("conversations.2.from", None, 5, "human"),
    *each("conversations.2.value", None, 5),
    *each("conversations.2.tool_calls", None, 5, ["x"], [{}], [{"id": "c", "type": "f", "function": None}]),
    *[wrong for name in METADATA_TEXTS for wrong in each(f"metadata.{name}", None, 7, ["x"])],
    *each("metadata.batch_num", "0", None, 0.5, -1),
    *each("metadata.duration_seconds", "1", None, math.nan, math.inf, 10**401, -1.0, True),
    *each("metadata.cost_usd", "1", None, math.nan, math.inf, 10**401, -1.0, True),
    *each("metadata.usage", None, {}, 5, []),
    *each("metadata.usage.prompt_tokens", "1", None, 1.5, 10**401),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_field_of_another_type_is_named(field: str, value: Any) -> None:
    named = wrong_field(changed(field, value))
    assert named
    assert field.startswith(named)


def test_a_key_that_is_gone_is_named() -> None:
    row = our_row()
    del row["api_calls"]
    assert wrong_field(row) == "api_calls"


@pytest.mark.parametrize(
    "row",
    [an_original_row(0, "p"), an_original_row(0, "p", api_calls="x"), {}, {"metadata": 5}, {"prompt": "p"}],
)
def test_rows_of_others_are_not_judged(row: Row) -> None:
    assert wrong_field(row) == ""


fields = st.sampled_from([field for field, _ in WRONG if ".2." not in field])
values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=2) | st.lists(st.none(), max_size=1)


@given(fields, values, st.booleans())
def test_what_is_merged_has_the_types_of_a_row_of_ours(
    tmp_path_factory: pytest.TempPathFactory, field: str, value: Any, originals: bool
) -> None:
    assume(value != 0 or not field.startswith("tool_stats."))  # of tools that were not called
    folder = tmp_path_factory.mktemp("run")
    row = changed(field, value)
    if originals:
        row["metadata"] = {"batch_num": 0, "timestamp": "", "model": value}
    write_batch(folder, 0, [row])
    rows = scan_rows(folder)
    merge_rows(folder, rows, match_rows(keys_of(["p"]), rows), MergeRules(drop_reason, lambda *_: None, complete_row))
    for line in (folder / "trajectories.jsonl").read_bytes().splitlines():
        merged = json.loads(line)
        assert shape(merged) == shape(copy.deepcopy(our_row()))


def shape(value: Any) -> Any:
    """Types alone; of lists the set of what they hold, if anything."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items() if key not in ("conversations", "toolsets_used")}
    return type(value)


def test_such_a_row_is_told_by_line_and_its_sample_is_open(tmp_path: Path) -> None:
    path = write_batch(tmp_path, 0, [our_row(), changed("metadata.usage", None)])
    rows = scan_rows(tmp_path)
    assert len(rows) == 1
    assert rows.problems.lines() == [
        f'{path}:2: "metadata.usage" is not what it is in a row of this program; ignored',
    ]


@pytest.mark.parametrize("index", [True, 0.0, "0", None])
def test_an_index_of_another_type_is_written_as_a_number(tmp_path: Path, index: Any) -> None:
    write_batch(tmp_path, 0, [our_row() | {"prompt_index": index}])
    rows = scan_rows(tmp_path)
    keys = keys_of(["p", "q"])
    merge_rows(tmp_path, rows, match_rows(keys, rows), MergeRules(drop_reason, lambda *_: None, complete_row))
    assert b'{"prompt_index": 0, "conv' in (tmp_path / "trajectories.jsonl").read_bytes()


def test_whole_numbers_where_others_have_a_fraction_are_the_same_to_readers(tmp_path: Path) -> None:
    row = changed("metadata.cost_usd", 0)
    write_batch(tmp_path, 0, [row])
    rows = scan_rows(tmp_path)
    keys = keys_of(["p"])
    merge_rows(tmp_path, rows, match_rows(keys, rows), MergeRules(drop_reason, lambda *_: None, complete_row))
    merged = json.loads((tmp_path / "trajectories.jsonl").read_bytes())
    assert type(merged["metadata"]["cost_usd"]) is float
