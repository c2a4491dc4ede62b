"""The row: one rollout's outcome as one JSON line of a batch file.

Owns the row's keys and types: every row of a rollout that gave a result has all of ``KEYS``, always of the same types,
which is what lets Arrow take any file of them. A failed row has the same keys, with what was spent and said before the
failure, and ``failed``, ``error`` {kind, message} and ``prompt`` on top; a discarded row is a whole row with
``discarded``; a row in whose question something secret is masked also has ``asked``, which tells what it answers
(rollout/content.py). Rows of the original runner, which have fewer keys, can be read here too. Pure: no file is
touched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from math import isfinite
from typing import Any, Literal, Protocol

from rollout.content import ASKED, row_key
from rollout.messages import AssistantMessage, Failure, Message, ToolDefinition, ToolMessage, Usage
from rollout.samples import Sample
from rollout.secrecy import hold_any, masked
from rollout.texts import clean_text
from rollout.trajectory import answers_in_text, conversations, json_text, parse_container, saved_calls
from toolsets import KNOWN_TOOLS

Row = dict[str, Any]
Outcome = Literal["completed", "not_completed", "partial", "discarded", "failed"]

KEYS = (
    "prompt_index",
    "conversations",
    "metadata",
    "completed",
    "partial",
    "api_calls",
    "toolsets_used",
    "tool_stats",
    "tool_error_counts",
)
FAILED = "failed"
ERROR = "error"
PROMPT = "prompt"
DISCARDED = "discarded"

# Valid inside JSON, but str.splitlines() takes them for the end of a line.
_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


@dataclass(frozen=True)
class RowFacts:
    """What a row says of its rollout besides the sample and the result."""

    batch_num: int
    model: str
    sandbox: str  # the kind it ran in
    toolsets_used: Sequence[str]  # as drawn
    definitions: Sequence[ToolDefinition]  # the tools that were offered
    timestamp: datetime  # of the row; with an offset
    duration_seconds: float


class Result(Protocol):
    """What the row needs to know of a rollout's end."""

    @property
    def messages(self) -> Sequence[Message]:
        """The live messages, from the prompt on, without the prefill."""

    @property
    def stop_reason(self) -> str:
        """Why the rollout stopped."""

    @property
    def completed(self) -> bool:
        """Whether the model came to an end on its own."""

    @property
    def partial(self) -> bool:
        """Whether it was cut short but is kept."""

    @property
    def failure(self) -> Failure | None:
        """What went wrong, when there is no result."""

    @property
    def api_calls(self) -> int:
        """Requests that returned an answer."""

    @property
    def usage(self) -> Usage:
        """Tokens of all requests."""

    @property
    def cost_usd(self) -> float:
        """What the endpoint says it cost; 0.0 where it names nothing."""


@dataclass(frozen=True)
class NoResult:
    """The end of a rollout of which nothing is known but the failure."""

    failure: Failure
    messages: tuple[Message, ...] = ()
    stop_reason: str = "failed"
    completed: bool = False
    partial: bool = False
    api_calls: int = 0
    usage: Usage = field(default_factory=Usage)
    cost_usd: float = 0.0


def build_row(sample: Sample, result: Result, facts: RowFacts) -> Row:
    """Return the row of one rollout; a failed row when ``result.failure`` is set."""
    failure = result.failure
    stats = tool_stats(result.messages)
    row: Row = {
        "prompt_index": sample.index,
        "conversations": conversations(sample.prompt, result.messages, facts.definitions) if result.messages else [],
        "metadata": _metadata(sample, result, facts),
        "completed": result.completed and failure is None,
        "partial": result.partial and failure is None,
        "api_calls": result.api_calls,
        "toolsets_used": list(facts.toolsets_used),
        "tool_stats": stats,
        "tool_error_counts": {name: counts["failure"] for name, counts in stats.items()},
    }
    if failure is not None:
        row[FAILED] = True
        row[ERROR] = {"kind": failure.kind, "message": clean_text(failure.message)}
        row[PROMPT] = clean_text(sample.prompt)
    return row


def discarded_row(row: Row, reason: str) -> Row:
    """Return the row marked as discarded: it counts as done and stays out of the trajectories."""
    return {**row, DISCARDED: reason}


def summary(row: Row) -> dict[str, Any]:
    """Return what a run wants to know of a row at once, without its text: see the keys."""
    error = row.get(ERROR, {})
    return {
        "outcome": outcome(row),
        "stop_reason": row["metadata"]["stop_reason"],
        "error_kind": error.get("kind", ""),
        "error_message": error.get("message", ""),
        "calls_as_text": _calls_as_text(row),
        "cost_usd": row["metadata"]["cost_usd"],
        **row["metadata"]["usage"],
    }


def _calls_as_text(row: Row) -> bool:
    """Tell a rollout that ended with calls in its text: its server has no parser for them, and nothing ran them."""
    last = row["conversations"][-1] if row["conversations"] else {}
    if last.get("from") != "gpt" or last["tool_calls"]:
        return False
    return "<\\tool_call>\n{" in last["value"].partition("</think>")[2]


def encode_row(row: Row) -> bytes:
    """Return the row as one line of UTF-8, newline included; text that is no valid Unicode is replaced."""
    return (json_text(row).translate(_LINE_ENDS) + "\n").encode()


def encode_row_without(secrets: Collection[str], row: Row) -> bytes:
    """Return the row as ``encode_row`` does, with these texts masked in it, whoever said them."""
    line = encode_row(row)
    if not hold_any(line, secrets):
        return line
    shown = masked(row, secrets)
    if row_key(shown) != (asked := row_key(row)):
        shown[ASKED] = asked.hex()
    return encode_row(shown)


def outcome(row: Mapping[str, Any]) -> Outcome:
    """Tell how the rollout of a row ended; rows of the original are understood."""
    if row.get(FAILED):
        return "failed"
    if row.get(DISCARDED):
        return "discarded"
    if row.get("partial"):
        return "partial"
    return "completed" if row.get("completed") else "not_completed"


def tool_stats(messages: Sequence[Message]) -> dict[str, dict[str, int]]:
    """Count each known tool's calls, and how many of them worked; a call that was never answered is a failure."""
    stats = {name: {"count": 0, "success": 0, "failure": 0} for name in KNOWN_TOOLS}
    open_calls: dict[str, str] = {}
    for message in messages:
        if isinstance(message, AssistantMessage):
            for call in message.tool_calls:
                open_calls[call.id] = call.name
                if call.name in stats:
                    stats[call.name]["count"] += 1
        elif isinstance(message, ToolMessage):
            name = open_calls.pop(message.tool_call_id, "")
            if name in stats and not result_failed(message.content):
                stats[name]["success"] += 1
    for counts in stats.values():
        counts["failure"] = counts["count"] - counts["success"]
    return stats


def saved_tool_stats(row: Mapping[str, Any], names: Collection[str]) -> dict[str, dict[str, int]]:
    """Count these tools as ``tool_stats`` does, from the row's conversation: it has no columns for them."""
    stats = {name: {"count": 0, "success": 0, "failure": 0} for name in names}
    open_calls: dict[str, str] = {}
    for turn in filter(_is_object, row["conversations"]):
        for call_id, name in saved_calls(turn) if turn.get("from") == "gpt" else ():
            open_calls[call_id] = name
            if name in stats:
                stats[name]["count"] += 1
        for answer in answers_in_text(str(turn.get("value", ""))) if turn.get("from") == "tool" else ():
            name = open_calls.pop(str(answer.get("tool_call_id")), "")
            content = answer.get("content")
            if name in stats and not result_failed(content if isinstance(content, str) else json_text(content)):
                stats[name]["success"] += 1
    for counts in stats.values():
        counts["failure"] = counts["count"] - counts["success"]
    return stats


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def result_failed(content: str) -> bool:
    """Tell whether a tool result counts as a failure: an error that is not null, ``success: false``, or error text.

    A non-zero exit code with no error is a success: the command ran.
    """
    result = parse_container(content)
    if isinstance(result, list):
        return False
    if isinstance(result, dict):
        inner = result.get("content")
        errors = (result.get("error"), inner.get("error") if isinstance(inner, dict) else None)
        return any(error is not None for error in errors) or result.get("success") is False
    text = content.strip().lower()
    return not text or text.startswith("error:")


def _metadata(sample: Sample, result: Result, facts: RowFacts) -> dict[str, Any]:
    return {
        "batch_num": facts.batch_num,
        # Always with a fraction: Arrow reads a text without one as a timestamp, and one with it as text.
        "timestamp": facts.timestamp.isoformat(timespec="milliseconds"),
        "model": facts.model,
        "image": sample.image,
        "cwd": sample.cwd,
        "sandbox": facts.sandbox,
        "stop_reason": result.stop_reason,
        "duration_seconds": round(float(facts.duration_seconds), 3),
        "usage": asdict(result.usage),
        "cost_usd": float(result.cost_usd) if isfinite(result.cost_usd) else 0.0,
        "sample_json": sample.extra_json,
    }
