from __future__ import annotations

import copy
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from rollout.filters import drop_reason
from rollout.messages import AssistantMessage, Failure, ToolCall, UserMessage
from rollout.original_rows import complete_row
from rollout.rows import KEYS, NoResult, RowFacts, build_row, encode_row
from rollout.samples import Sample

CALL = '<tool_call>\n{"name": "terminal", "arguments": {"command": "echo \'</tool_call>\'"}}\n</tool_call>'
ORIGINAL = {
    "prompt_index": 4,
    "conversations": [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": f"<think>\nhm\n</think>\n{CALL}\n{CALL}"},
        {
            "from": "tool",
            "value": '<tool_response>\n{"tool_call_id": "c1", "name": "terminal", "content": "x"}\n</tool_response>',
        },
        {"from": "gpt", "value": "<think>\n</think>\n4"},
    ],
    "metadata": {"batch_num": 2, "timestamp": "2026-01-02T03:04:05", "model": "m"},
    "completed": True,
    "partial": False,
    "api_calls": 2,
    "toolsets_used": ["terminal"],
    "tool_stats": {
        "terminal": {"count": 2, "success": 2, "failure": 0},
        "memory": {"count": 0, "success": 0, "failure": 0},
    },
    "tool_error_counts": {"terminal": 0, "memory": 0},
}


def our_row(failure: Failure | None = None) -> dict[str, Any]:
    facts = RowFacts(0, "m", "local", ["terminal"], (), datetime.now(UTC), 1.5)
    messages = (UserMessage("q"), AssistantMessage("4", "hm", (ToolCall("a", "terminal", {}),)))
    result = NoResult(failure or Failure("internal", ""), messages)
    row = build_row(Sample(1, "q"), result, facts)
    return row if failure else {key: row[key] for key in KEYS}


def types(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: types(item) for key, item in value.items() if key != "conversations"}
    return type(value)


def test_a_row_of_the_original_gets_the_shape_of_ours() -> None:
    row = copy.deepcopy(ORIGINAL)
    assert complete_row(row)
    assert tuple(row) == KEYS
    assert types(row) == types(our_row())
    assert row["metadata"]["timestamp"] == "2026-01-02T03:04:05.000"  # type: ignore[index]
    assert (row["prompt_index"], row["completed"], row["api_calls"]) == (4, True, 2)
    assert row["tool_stats"]["terminal"]["count"] == 2  # type: ignore[index]
    encode_row(row)


def test_its_calls_get_the_openai_form_with_the_ids_of_their_answers() -> None:
    row: dict[str, Any] = copy.deepcopy(ORIGINAL)
    complete_row(row)
    turns = row["conversations"]
    assert [(call["id"], call["function"]["name"]) for call in turns[2]["tool_calls"]] == [
        ("c1", "terminal"),
        ("", "terminal"),
    ]
    assert json.loads(turns[2]["tool_calls"][0]["function"]["arguments"]) == {"command": "echo '</tool_call>'"}
    assert turns[4]["tool_calls"] == []
    assert [set(turn) for turn in turns[:2]] == [{"from", "value"}] * 2


def test_completing_hides_no_unknown_tool() -> None:
    row = json.loads(json.dumps(ORIGINAL).replace("terminal", "foo_bar"))
    assert complete_row(row)
    assert drop_reason(row) == "unknown tool: foo_bar"


def test_our_rows_are_left_alone() -> None:
    row = our_row()
    before = copy.deepcopy(row)
    assert not complete_row(row)
    assert row == before
    completed = copy.deepcopy(ORIGINAL)
    complete_row(completed)
    assert not complete_row(completed)


@pytest.mark.parametrize("mark", [{"discarded": "no_reasoning"}, {"failed": True}])
def test_rows_that_never_reach_the_trajectories_are_left_alone(mark: dict[str, Any]) -> None:
    row = {"prompt_index": 1, "prompt": "q", **mark}
    assert not complete_row(row)
    assert row == {"prompt_index": 1, "prompt": "q", **mark}
    assert not complete_row(our_row(Failure("timeout", "slow")))


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"conversations": "x", "metadata": [], "tool_stats": 1, "toolsets_used": "web", "completed": "yes"},
        {"conversations": ["x", {"from": "gpt"}, {"from": 1, "value": None}], "failed": False, "more": 1},
        {"metadata": {"duration_seconds": 3, "cost_usd": "much", "timestamp": 12}, "toolsets_used": ["web", 1]},
    ],
)
def test_odd_rows_get_the_shape_of_ours(odd: dict[str, Any]) -> None:
    assert complete_row(odd)
    assert tuple(odd) == KEYS
    assert types(odd) == types(our_row())
