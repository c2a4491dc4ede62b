from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.content import content_key, row_key
from rollout.messages import AssistantMessage, Failure, Message, ToolCall, ToolMessage, Usage, UserMessage
from rollout.rows import (
    KEYS,
    NoResult,
    RowFacts,
    build_row,
    discarded_row,
    encode_row,
    encode_row_without,
    outcome,
    result_failed,
    summary,
    tool_stats,
)
from rollout.samples import Sample
from toolsets import KNOWN_TOOLS


@dataclass(frozen=True)
class Ended:
    """A rollout's end, as the agent tells it."""

    messages: tuple[Message, ...] = ()
    stop_reason: str = "stop"
    completed: bool = True
    partial: bool = False
    failure: Failure | None = None
    api_calls: int = 2
    usage: Usage = Usage(100, 20, 5, 50)  # noqa: RUF009 - frozen
    cost_usd: float = 0.25


FACTS = RowFacts(
    batch_num=3,
    model="some/model",
    sandbox="local",
    toolsets_used=("terminal", "web"),
    definitions=(),
    timestamp=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    duration_seconds=1.23456,
)
MESSAGES = (
    UserMessage("q"),
    AssistantMessage("", "hm", (ToolCall("a", "terminal", {"command": "x"}), ToolCall("b", "read_file", {}))),
    ToolMessage("a", "terminal", '{"output": "", "exit_code": 1, "error": null}'),
    ToolMessage("b", "read_file", '{"error": "no such file"}'),
    AssistantMessage("done"),
)


def shape(value: Any) -> Any:
    """The key tree with types, as Arrow sees it; the turns of a conversation aside."""
    if isinstance(value, dict):
        return {key: "list" if key == "conversations" else shape(item) for key, item in value.items()}
    return type(value)


def test_the_row_of_a_rollout() -> None:
    row = build_row(Sample(7, "q", "img:1", "/app", '{"id": 1}'), Ended(MESSAGES), FACTS)
    assert tuple(row) == KEYS
    assert [turn["from"] for turn in row["conversations"]] == ["system", "human", "gpt", "tool", "gpt"]
    assert row["metadata"] == {
        "batch_num": 3,
        "timestamp": "2026-01-02T03:04:05.000+00:00",
        "model": "some/model",
        "image": "img:1",
        "cwd": "/app",
        "sandbox": "local",
        "stop_reason": "stop",
        "duration_seconds": 1.235,
        "usage": {"prompt_tokens": 100, "completion_tokens": 20, "reasoning_tokens": 5, "cached_tokens": 50},
        "cost_usd": 0.25,
        "sample_json": '{"id": 1}',
    }
    assert (row["prompt_index"], row["completed"], row["partial"], row["api_calls"]) == (7, True, False, 2)
    assert row["toolsets_used"] == ["terminal", "web"]
    assert row["tool_stats"]["terminal"] == {"count": 1, "success": 1, "failure": 0}
    assert row["tool_stats"]["read_file"] == {"count": 1, "success": 0, "failure": 1}
    assert tuple(row["tool_stats"]) == tuple(row["tool_error_counts"]) == KNOWN_TOOLS
    assert row["tool_error_counts"] == {**dict.fromkeys(KNOWN_TOOLS, 0), "read_file": 1}


def test_every_row_has_the_same_keys_and_types() -> None:
    unknown = AssistantMessage("", "", (ToolCall("a", "foo_bar", {}),))
    rows = [
        build_row(Sample(0, "q"), Ended(MESSAGES), FACTS),
        build_row(Sample(1, "q", "img", "/w", "{}"), Ended((UserMessage("q"), unknown), partial=True), FACTS),
        build_row(Sample(2, "q"), Ended((), cost_usd=0, usage=Usage()), FACTS),
        build_row(Sample(3, "q"), Ended(MESSAGES, cost_usd=float("nan")), FACTS),
        discarded_row(build_row(Sample(4, "q"), Ended(MESSAGES), FACTS), "no_reasoning"),
        build_row(Sample(5, "q"), NoResult(Failure("worker_died", "killed")), FACTS),
    ]
    for row in rows:
        read = json.loads(encode_row(row))
        assert shape({key: read[key] for key in KEYS}) == shape(rows[0])


@pytest.mark.parametrize("failure", [None, Failure("server", "no s3cr3t-word here")])
@pytest.mark.parametrize(
    "sample", [Sample(0, "say s3cr3t-word"), Sample(0, "hi", "reg/s3cr3t-word:1"), Sample(0, "hi")]
)
def test_a_row_without_its_secrets_still_tells_what_it_answers(sample: Sample, failure: Failure | None) -> None:
    row = build_row(
        sample, Ended((UserMessage(sample.prompt), AssistantMessage("s3cr3t-word")), failure=failure), FACTS
    )
    line = encode_row_without(["s3cr3t-word"], row)
    assert b"s3cr3t" not in line
    shown = json.loads(line)
    assert row_key(shown) == content_key(sample.prompt, sample.image, sample.cwd)
    assert ("asked" in shown) == (sample != Sample(0, "hi"))
    assert encode_row_without(["another-word"], row) == encode_row(row)


@pytest.mark.parametrize("asked", ["", "00", "zz" * 24, 7, None, ["00" * 24]])
def test_a_row_that_says_badly_what_it_answers_is_read_as_if_it_did_not(asked: Any) -> None:
    row = build_row(Sample(0, "q"), Ended(MESSAGES), FACTS)
    assert row_key({**row, "asked": asked}) == row_key(row)


def test_a_failed_row_says_why_and_keeps_what_was_spent_and_said() -> None:
    failure = Failure("rate_limit", "429 slow down \ud800")
    row = build_row(Sample(1, "q\0"), Ended(MESSAGES[:2], failure=failure), FACTS)
    assert list(row) == [*KEYS, "failed", "error", "prompt"]
    assert row["failed"] is True
    assert row["error"] == {"kind": "rate_limit", "message": "429 slow down \ufffd"}
    assert row["prompt"] == row["conversations"][1]["value"] == "q\ufffd"
    assert (row["completed"], row["partial"]) == (False, False)
    assert row["metadata"]["usage"]["prompt_tokens"] == 100


def test_a_rollout_of_which_nothing_is_known() -> None:
    row = build_row(Sample(1, "q"), NoResult(Failure("worker_died", "killed by signal 9")), FACTS)
    assert row["conversations"] == []
    assert row["metadata"]["cost_usd"] == 0.0
    assert outcome(row) == "failed"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"completed": True, "partial": False}, "completed"),
        ({"completed": False, "partial": False}, "not_completed"),
        ({"completed": False, "partial": True}, "partial"),
        ({"completed": True, "discarded": "no_reasoning"}, "discarded"),
        ({"prompt_index": 1, "discarded": "no_reasoning", "prompt": "q"}, "discarded"),
        ({"completed": False, "failed": True}, "failed"),
        ({"completed": True, "failed": False}, "completed"),
        ({"prompt_index": 0, "conversations": []}, "not_completed"),
    ],
)
def test_the_outcome_of_a_row(row: dict[str, Any], expected: str) -> None:
    assert outcome(row) == expected


@pytest.mark.parametrize(
    ("content", "thought", "told"), [("4", "CALL", False), ("CALL", "hm", True), ("4", "hm", False)]
)
def test_calls_as_text_are_told_from_thoughts_of_them(content: str, thought: str, told: bool) -> None:
    as_text = '<tool_call>\n{"name": "t"}\n</tool_call>'
    answer = AssistantMessage(content.replace("CALL", as_text), thought.replace("CALL", as_text))
    row = build_row(Sample(1, "q"), Ended((UserMessage("q"), answer)), FACTS)
    assert summary(row)["calls_as_text"] is told


def test_the_summary_has_what_a_run_watches() -> None:
    failed = build_row(Sample(1, "q"), Ended(failure=Failure("auth", "401")), FACTS)
    assert summary(failed) == {
        "outcome": "failed",
        "stop_reason": "stop",
        "error_kind": "auth",
        "error_message": "401",
        "calls_as_text": False,
        "cost_usd": 0.25,
        "prompt_tokens": 100,
        "completion_tokens": 20,
        "reasoning_tokens": 5,
        "cached_tokens": 50,
    }
    assert summary(build_row(Sample(1, "q"), Ended(), FACTS))["error_kind"] == ""


@pytest.mark.parametrize(
    ("content", "failed"),
    [
        ('{"error":"x"}', True),
        ('{"error":""}', True),
        ('{"success":false}', True),
        ('{"success":0}', False),
        ('{"success":false,"error":null}', True),
        ('{"output":"","exit_code":1,"error":null}', False),
        ('{"output":"","exit_code":124,"error":"timed out"}', True),
        ('{"content":{"error":"x"}}', True),
        ('{"content":{"error":null}}', False),
        ('{"content":"error: in a file"}', False),
        ('[{"error":"x"}]', False),
        ('"Error: in a string"', False),
        ("null", False),
        ("Error: boom", True),
        ("  ERROR: boom", True),
        ("no error: fine", False),
        ("{broken", False),
        ("", True),
        (" \n", True),
    ],
)
def test_what_counts_as_a_tool_failure(content: str, failed: bool) -> None:
    assert result_failed(content) is failed


def test_results_are_counted_by_id_and_unanswered_calls_fail() -> None:
    stats = tool_stats(
        [
            AssistantMessage("", "", (ToolCall("a", "terminal", {}), ToolCall("b", "patch", {}))),
            ToolMessage("b", "patch", "ok"),
            ToolMessage("zzz", "patch", "ok"),
            AssistantMessage("", "", (ToolCall("a", "todo", {}), ToolCall("c", "foo_bar", {}))),
            ToolMessage("a", "todo", "ok"),
            ToolMessage("c", "foo_bar", "ok"),
        ],
    )
    assert "foo_bar" not in stats
    assert stats["terminal"] == {"count": 1, "success": 0, "failure": 1}
    assert stats["patch"] == stats["todo"] == {"count": 1, "success": 1, "failure": 0}


@given(st.lists(st.tuples(st.sampled_from([*KNOWN_TOOLS[:3], "nonsense"]), st.sampled_from(["ok", "", "Error: x"]))))
def test_count_is_success_and_failure(calls: list[tuple[str, str]]) -> None:
    made = tuple(ToolCall(str(number), name, {}) for number, (name, _) in enumerate(calls))
    results = [ToolMessage(call.id, call.name, content) for call, (_, content) in zip(made, calls, strict=True)]
    stats = tool_stats([AssistantMessage("", "", made), *results[1:]])
    assert sum(counts["count"] for counts in stats.values()) == sum(name != "nonsense" for name, _ in calls)
    assert all(counts["count"] == counts["success"] + counts["failure"] for counts in stats.values())


@given(st.text(alphabet=st.characters(exclude_categories=()) | st.sampled_from("\ud800\udfff\0\n\r\u2028\u2029\x85\\")))
def test_a_line_is_one_line_whatever_the_text(text: str) -> None:
    sample = Sample(0, text, text, text, text)
    line = encode_row(build_row(sample, Ended((UserMessage(text), AssistantMessage(text, text))), FACTS))
    read = line.decode()
    assert read.splitlines() == [read[:-1]]
    row = json.loads(read)
    cleaned = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").replace("\0", "\ufffd")
    assert row["metadata"]["cwd"] == row["conversations"][1]["value"] == cleaned
