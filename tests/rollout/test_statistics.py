from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.messages import AssistantMessage, Message, ToolCall, ToolDefinition, ToolMessage, UserMessage
from rollout.statistics import RunFacts, RunStatistics
from rollout.trajectory import conversations

FACTS = RunFacts(
    run_name="r",
    distribution="default",
    total_prompts=4,
    total_batches=2,
    batch_size=2,
    model="m",
    completed_at="2026-01-02T03:04:05.000+00:00",
    duration_seconds=12.3456,
    legs=({"started_at": "x"},),
)
ORIGINAL_KEYS = (
    "run_name",
    "distribution",
    "total_prompts",
    "total_batches",
    "batch_size",
    "model",
    "completed_at",
    "duration_seconds",
    "tool_statistics",
    "reasoning_statistics",
    "discarded_no_reasoning",
)


def gpt(thought: str = "", *tools: str) -> dict[str, Any]:
    think = f"<think>\n{thought}\n</think>" if thought else "<think>\n</think>"
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in tools]
    return {"from": "gpt", "value": think, "tool_calls": calls}


def row(*turns: dict[str, Any], seconds: float = 1.0, index: int = 0, **other: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "reasoning_tokens": 2, "cached_tokens": 1}
    return {
        "prompt_index": index,
        "conversations": [{"from": "human", "value": "q"}, *turns],
        "metadata": {"duration_seconds": seconds, "usage": usage, "cost_usd": 0.5},
        "completed": True,
        "partial": False,
        "api_calls": 2,
        "toolsets_used": ["terminal"],
        "tool_stats": {
            "terminal": {"count": 3, "success": 2, "failure": 1},
            "patch": {"count": 0, "success": 0, "failure": 0},
        },
        **other,
    }


def failed(kind: str, message: str, **other: Any) -> dict[str, Any]:
    return row(gpt("x"), completed=False, failed=True, error={"kind": kind, "message": message}, **other)


def counted(*rows: dict[str, Any]) -> RunStatistics:
    statistics = RunStatistics()
    for each in rows:
        statistics.add(each, final=True)
    return statistics


def saved(statistics: RunStatistics) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(statistics.to_json(FACTS)))
    return read


def test_the_keys_and_shapes_of_the_original() -> None:
    statistics = saved(counted(row(gpt("x", "terminal"), gpt()), row(gpt(), discarded="no_reasoning")))
    assert tuple(key for key in statistics if key in ORIGINAL_KEYS) == ORIGINAL_KEYS
    assert statistics["duration_seconds"] == 12.35
    assert statistics["tool_statistics"] == {
        "terminal": {"count": 3, "success": 2, "failure": 1, "success_rate": 66.67, "failure_rate": 33.33},
    }
    assert statistics["reasoning_statistics"] == {
        "total_assistant_turns": 2,
        "turns_with_reasoning": 1,
        "turns_without_reasoning": 1,
    }
    assert statistics["discarded_no_reasoning"] == 1
    assert statistics["legs"] == [{"started_at": "x"}]


def test_an_empty_run() -> None:
    statistics = saved(RunStatistics())
    assert statistics["tool_statistics"] == {}
    assert statistics["outcomes"] == {
        "completed": 0,
        "not_completed": 0,
        "partial": 0,
        "discarded": 0,
        "failed": 0,
    }
    assert statistics["turns"] == {"total": 0, "median": 0.0}
    assert statistics["rollout_seconds"] == {"median": 0.0, "p95": 0.0}


def test_a_tool_without_a_result_has_rates_of_zero() -> None:
    unanswered = row(gpt("x"), tool_stats={"todo": {"count": 1, "success": 0, "failure": 0}})
    assert saved(counted(unanswered))["tool_statistics"]["todo"]["success_rate"] == 0.0


def test_outcomes_and_failures_by_kind_with_an_example() -> None:
    statistics = counted(
        row(gpt("x")),
        row(gpt("x"), completed=False),
        row(gpt("x"), completed=False, partial=True),
        row(gpt(), discarded="no_reasoning"),
        failed("timeout", "first"),
        failed("timeout", "second"),
        failed("auth", "x" * 10_000),
    )
    assert saved(statistics)["outcomes"] == {
        "completed": 1,
        "not_completed": 1,
        "partial": 1,
        "discarded": 1,
        "failed": 3,
    }
    failures = saved(statistics)["failures"]
    assert failures["timeout"] == {"count": 2, "example": "first"}
    assert list(failures) == ["timeout", "auth"]
    assert len(failures["auth"]["example"]) < 1000
    assert (statistics.rows, statistics.kept) == (7, 3)


def test_failed_and_discarded_rows_say_nothing_of_tools_and_reasoning() -> None:
    statistics = counted(failed("server", "500"), row(gpt(), discarded="no_reasoning"))
    assert statistics.tools == {}
    assert statistics.assistant_turns == 0


def test_attempts_that_were_tried_again_only_cost() -> None:
    statistics = RunStatistics()
    statistics.add(failed("timeout", "slow"), final=False)
    statistics.add(row(gpt("x")), final=True)
    read = saved(statistics)
    assert read["tokens"] == {
        "prompt_tokens": 20,
        "completion_tokens": 10,
        "reasoning_tokens": 4,
        "cached_tokens": 2,
    }
    assert (read["cost_usd"], read["api_calls"]) == (1.0, 4)
    assert read["failures"] == {}
    assert read["toolsets"] == {"terminal": {"drawn": 1, "percent": 100.0}}


def test_rows_with_unknown_tools_are_filtered_and_named() -> None:
    statistics = counted(
        row(gpt("x", "foo_bar", "foo_bar"), index=3),
        row(gpt("x", "terminal", "foo_bar", "y" * 1000), index=5),
        row(gpt("x", "terminal")),
    )
    filtered = saved(statistics)["filtered"]["unknown_tool"]
    assert filtered == {"rows": 2, "tools": {"foo_bar": 2, "y" * 64: 1}, "prompt_indices": [3, 5]}
    assert statistics.kept == 1


def test_turns_seconds_and_toolsets() -> None:
    statistics = counted(
        *(row(*[gpt("x")] * turns, seconds=turns, toolsets_used=["web", "file"][:turns]) for turns in (1, 2, 2, 5)),
    )
    read = saved(statistics)
    assert read["turns"] == {"total": 10, "median": 2.0}
    assert read["rollout_seconds"] == {"median": 2.0, "p95": 5.0}
    assert read["toolsets"] == {
        "web": {"drawn": 4, "percent": 100.0},
        "file": {"drawn": 3, "percent": 75.0},
    }


@given(st.lists(st.integers(0, 6), min_size=1))
def test_medians_are_medians(counts: Sequence[int]) -> None:
    statistics = counted(*(row(*[gpt("x")] * count, seconds=count) for count in counts))
    in_order = sorted(counts)
    median = (in_order[(len(counts) - 1) // 2] + in_order[len(counts) // 2]) / 2
    assert statistics.median_turns() == statistics.median_seconds() == median


SOME_ROWS = (
    row(gpt("x", "terminal"), gpt(), seconds=3.5),
    row(gpt("x", "foo_bar"), index=9),
    row(gpt(), discarded="no_reasoning", toolsets_used=["web"]),
    failed("timeout", "slow"),
    failed("auth", "401", toolsets_used=[]),
    {"prompt_index": 1, "discarded": "no_reasoning", "prompt": "q"},
)
some_rows = st.lists(st.tuples(st.sampled_from(SOME_ROWS), st.booleans()))


@given(some_rows, some_rows)
def test_counts_add_up(here: list[tuple[Any, bool]], there: list[tuple[Any, bool]]) -> None:
    parts = []
    for rows in (here, there, [*here, *there]):
        statistics = RunStatistics()
        for each, final in rows:
            statistics.add(each, final=final)
        parts.append(statistics)
    assert saved(parts[0] + parts[1]) == saved(parts[2])
    assert saved(RunStatistics() + parts[2]) == saved(parts[2])


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"prompt_index": 1, "discarded": "no_reasoning", "prompt": "q"},
        {"failed": True, "error": "some text"},
        {"failed": True},
        {"conversations": "text", "metadata": None, "tool_stats": None, "toolsets_used": None, "api_calls": None},
        {"conversations": [{"from": "gpt", "value": "4"}], "metadata": {"batch_num": 0}, "tool_stats": {"x": 1}},
    ],
)
def test_rows_of_the_original_and_odd_ones_are_counted(odd: dict[str, Any]) -> None:
    statistics = counted(odd)
    assert sum(saved(statistics)["outcomes"].values()) == 1
    statistics.add(odd, final=False)


def test_the_words_of_an_original_failure_are_its_example() -> None:
    failures = saved(counted({"failed": True, "error": "boom"}))["failures"]
    assert failures == {"internal": {"count": 1, "example": "boom"}}


def test_tools_of_another_catalogue_are_counted() -> None:
    stats = {"memory": {"count": 2, "success": 2, "failure": 0}}
    statistics = counted({"conversations": [], "completed": True, "tool_stats": stats})
    assert saved(statistics)["tool_statistics"]["memory"]["success_rate"] == 100.0


def test_added_tools_are_counted_from_the_conversation() -> None:
    calls = (ToolCall("a", "mcp_x_add", {}), ToolCall("b", "mcp_x_add", {}), ToolCall("c", "roll", {}))
    messages: list[Message] = [
        UserMessage("q"),
        AssistantMessage("", "x", calls),
        ToolMessage("a", "mcp_x_add", '{"result": "</tool_response>"}'),
        ToolMessage("b", "mcp_x_add", '{"error": "it is gone"}'),
        ToolMessage("c", "roll", "plain words"),
        AssistantMessage("", "y", (ToolCall("d", "roll", {}),)),
    ]
    offered = [ToolDefinition(name, "", {}) for name in ("mcp_x_add", "roll")]
    talk = {"conversations": conversations("q", messages, offered), "completed": True, "metadata": {}}
    tools = saved(counted(talk))["tool_statistics"]
    assert {name: tuple(counts.values())[:3] for name, counts in tools.items()} == {
        "mcp_x_add": (2, 1, 1),
        "roll": (2, 1, 1),
    }
    assert counted(talk).filtered == 0


def test_memory_does_not_grow_with_the_rows_text() -> None:
    statistics = RunStatistics()
    turns = [gpt("x" * 100, "terminal")] * 3
    tracemalloc.start()
    for number in range(5_000):
        statistics.add(row(*turns, seconds=number / 7, index=number), final=True)
        statistics.add(failed("timeout", f"message {number}"), final=True)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 500_000
