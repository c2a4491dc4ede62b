"""Keep a row or not, with the reason. Pure: a filter reads a row and answers; when to ask is the caller's choice.

The no-reasoning filter belongs to the end of a rollout (the row is marked and counts as done), the corrupted-entry
filter to the merge (the row stays in its batch file). Rows of the original runner are read as well: only the
conversation is looked at, never ``tool_stats``, whose columns there are another catalogue's. A tool that the row's own
system turn offers is known there, whatever the catalogue says: the user's own tools and those of MCP servers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rollout.texts import shown_name
from rollout.trajectory import Turn, called_tools, offered_tools, turn_thinks
from toolsets import KNOWN_TOOLS

NO_REASONING = "no_reasoning"
UNKNOWN_TOOL = "unknown_tool"
_NAME_CHARS = 64  # shown of a name that a model made up


def reasoning_turns(row: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many turns the model had, and in how many of them it showed reasoning."""
    thinks = [turn_thinks(turn) for turn in gpt_turns(row)]
    return len(thinks), sum(thinks)


def no_reasoning(row: Mapping[str, Any]) -> bool:
    """Tell whether the model showed no reasoning in any turn: discarded as ``NO_REASONING``."""
    return not any(map(turn_thinks, gpt_turns(row)))


def unknown_tools(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names the row calls that neither the catalogue has nor the row offers; with any it is dropped."""
    return other_tools(row)[1]


def other_tools(row: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names the row calls that are no tools of the program: those it offers, and those that nobody has."""
    names = dict.fromkeys(name for turn in gpt_turns(row) for name in called_tools(turn) if name not in KNOWN_TOOLS)
    if not names:
        return (), ()
    offered = _offered(row)
    return tuple(name for name in names if name in offered), tuple(name for name in names if name not in offered)


def drop_reason(row: Mapping[str, Any]) -> str:
    """Say why the merge drops a row, for people to read; "" when it stays."""
    names = unknown_tools(row)
    return f"unknown tool: {', '.join(shown_name(name, _NAME_CHARS) for name in names)}" if names else ""


def _offered(row: Mapping[str, Any]) -> tuple[str, ...]:
    first = row["conversations"][0]  # there are gpt turns, so there is a first one
    is_system = isinstance(first, dict) and first.get("from") == "system"
    return offered_tools(str(first.get("value", ""))) if is_system else ()


def gpt_turns(row: Mapping[str, Any]) -> Iterator[Turn]:
    """Go through the model's turns of a row; nothing where there is no conversation."""
    turns = row.get("conversations")
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, dict) and turn.get("from") == "gpt":
            yield turn
