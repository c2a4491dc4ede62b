"""Rows of the original runner become rows of ours, so that a file of both kinds has one type.

The original's rows lack most of the metadata and the turns' ``tool_calls``, and their tool columns are another
catalogue's. What cannot be known is empty or 0. Pure.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rollout.amounts import amount, is_count
from rollout.row_types import is_call
from rollout.rows import KEYS, Row, encode_row, outcome
from rollout.trajectory import Turn, calls_in_text
from toolsets import KNOWN_TOOLS

_BLANK: Row = {
    "prompt_index": 0,
    "metadata": {
        "batch_num": 0,
        "timestamp": "",
        "model": "",
        "image": "",
        "cwd": "",
        "sandbox": "",
        "stop_reason": "",
        "duration_seconds": 0.0,
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "reasoning_tokens": 0, "cached_tokens": 0},
        "cost_usd": 0.0,
        "sample_json": "",
    },
    "completed": False,
    "partial": False,
    "api_calls": 0,
    "tool_stats": {name: {"count": 0, "success": 0, "failure": 0} for name in KNOWN_TOOLS},
    "tool_error_counts": dict.fromkeys(KNOWN_TOOLS, 0),
}

_COLUMNS = tuple((name, frozenset(_BLANK[name])) for name in ("metadata", "tool_stats", "tool_error_counts"))


def complete_row(row: Row) -> bool:
    """Give a finished row all keys and types of ours, in place, and no others; False when there is nothing to do."""
    if outcome(row) in ("failed", "discarded") or _has_our_keys(row):
        return False
    shaped = {
        **_shaped(row, _BLANK),
        "conversations": _turns(row.get("conversations")),
        "toolsets_used": [name for name in _list(row.get("toolsets_used")) if isinstance(name, str)],
    }
    shaped["metadata"]["timestamp"] = _with_fraction(shaped["metadata"]["timestamp"])
    shaped = {key: shaped[key] for key in KEYS}
    if encode_row(shaped) == encode_row(row):  # 0 equals 0.0, but is not written like it
        return False
    row.clear()
    row.update(shaped)
    return True


def _has_our_keys(row: Row) -> bool:
    """Tell a row of ours by its keys, which is quick: nearly all rows are ours, and those have the right types."""
    if tuple(row) != KEYS:
        return False
    for name, keys in _COLUMNS:
        if not isinstance(row[name], dict) or row[name].keys() != keys:
            return False
    if any(type(row["metadata"][name]) is not float for name in ("duration_seconds", "cost_usd")):
        return False
    turns = [turn for turn in _list(row["conversations"]) if isinstance(turn, dict)]
    return bool(turns) and not [turn for turn in turns if ("tool_calls" in turn) != (turn.get("from") == "gpt")]


def _shaped(value: Any, blank: Any) -> Any:
    """Return what of ``value`` fits ``blank``, and the blank's own where it does not."""
    if isinstance(blank, dict):
        known = value if isinstance(value, dict) else {}
        return {key: _shaped(known.get(key), default) for key, default in blank.items()}
    if isinstance(blank, float):
        return float(amount(value))
    if type(blank) is int:
        return value if is_count(value) else blank
    return value if type(value) is type(blank) else blank


def _turns(value: Any) -> list[Turn]:
    turns = [turn for turn in _list(value) if isinstance(turn, dict)]
    return [_turn(turn, answer) for turn, answer in zip(turns, [*turns[1:], {}], strict=False)]


def _turn(turn: Turn, answer: Turn) -> Turn:
    shaped = {"from": str(turn.get("from", "")), "value": str(turn.get("value", ""))}
    if shaped["from"] != "gpt":
        return shaped
    calls = turn.get("tool_calls")
    if not (isinstance(calls, list) and all(map(is_call, calls))):
        calls = calls_in_text(shaped["value"], str(answer.get("value", "")))
    return {**shaped, "tool_calls": calls}


def _with_fraction(timestamp: str) -> str:
    """Write a time as our rows do: with a fraction, without which Arrow does not take it for text."""
    try:
        return datetime.fromisoformat(timestamp).isoformat(timespec="milliseconds")
    except ValueError:
        return timestamp


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
