"""Whether a row has the types that every row of ours has. Pure, and quick: each row of a run is asked about.

A row is ours by the keys of its metadata, which no other program writes. One that has them and other types was changed
by something else since: it would spoil the column for every other row, so it is taken for no row. Rows of the original
are not looked at here: whatever they lack is filled in when they are merged. Nor are the
counts of tools that nobody called, which are nearly all: a 0.0 or false for 0 is not seen there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.amounts import MAX_AMOUNT, is_count

_METADATA_TEXTS = ("timestamp", "model", "image", "cwd", "sandbox", "stop_reason", "sample_json")
_METADATA_NUMBERS = ("duration_seconds", "cost_usd")  # whole ones were rewritten by some tool, and mean the same
_METADATA_KEYS = frozenset({"batch_num", "usage", *_METADATA_NUMBERS, *_METADATA_TEXTS})
_USAGE_KEYS = frozenset({"prompt_tokens", "completion_tokens", "reasoning_tokens", "cached_tokens"})
_BLANK_TOOL = {"count": 0, "success": 0, "failure": 0}


def wrong_field(row: Mapping[str, Any]) -> str:
    """Return the field of a row of ours that has not the type it always has; "" when all have, and for other rows."""
    metadata = row.get("metadata")
    if not isinstance(metadata, dict) or metadata.keys() != _METADATA_KEYS:
        return ""
    for name, value in row.items():
        if name in _FITS and not _FITS[name](value):
            return name
    return next((name for name in _FITS if name not in row), "") or _wrong_in_metadata(metadata)


def _wrong_in_metadata(metadata: Mapping[str, Any]) -> str:
    for name in _METADATA_TEXTS:
        if type(metadata[name]) is not str:
            return f"metadata.{name}"
    for name in _METADATA_NUMBERS:
        if not _is_number(metadata[name]):
            return f"metadata.{name}"
    if not is_count(metadata["batch_num"]):
        return "metadata.batch_num"
    usage = metadata["usage"]
    fits = isinstance(usage, dict) and usage.keys() == _USAGE_KEYS and all(map(is_count, usage.values()))
    return "" if fits else "metadata.usage"


def _is_number(value: Any) -> bool:
    return (type(value) is float or type(value) is int) and 0 <= value <= MAX_AMOUNT


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _are_names(value: Any) -> bool:
    return type(value) is list and {*map(type, value)} <= {str}


def _are_stats(value: Any) -> bool:
    if type(value) is not dict:
        return False
    called = [counts for counts in value.values() if counts != _BLANK_TOOL]
    return all(
        type(counts) is dict and counts.keys() == _BLANK_TOOL.keys() and all(map(is_count, counts.values()))
        for counts in called
    )


def _are_counts(value: Any) -> bool:
    if type(value) is not dict:
        return False
    numbers = value.values()
    return {*map(type, numbers)} <= {int} and (not any(numbers) or all(map(is_count, numbers)))


def _are_turns(value: Any) -> bool:
    return type(value) is list and all(map(_is_turn, value))


def _is_turn(turn: Any) -> bool:
    if type(turn) is not dict or type(turn.get("from")) is not str or type(turn.get("value")) is not str:
        return False
    if turn["from"] != "gpt":
        return len(turn) == len(("from", "value"))
    calls = turn.get("tool_calls")
    return len(turn) == len(("from", "value", "tool_calls")) and type(calls) is list and all(map(is_call, calls))


def is_call(call: Any) -> bool:
    """Tell whether it is one entry of a gpt turn's ``tool_calls``."""
    if type(call) is not dict or call.keys() != {"id", "type", "function"}:
        return False
    function = call["function"]
    if type(function) is not dict or function.keys() != {"name", "arguments"}:
        return False
    return all(type(text) is str for text in (call["id"], call["type"], *function.values()))


_FITS = {
    "conversations": _are_turns,
    "completed": _is_bool,
    "partial": _is_bool,
    "api_calls": is_count,
    "toolsets_used": _are_names,
    "tool_stats": _are_stats,
    "tool_error_counts": _are_counts,
}
