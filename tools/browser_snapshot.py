"""A page as text: Playwright's accessibility snapshot, made short enough for a context window. Pure: no browser here.

A line is ``- role "name" [attributes] [ref=e12]``, its children indented. References are what a model names to click or
type. What does not fit is left out by the view: first what lies above it, then what lies far below, each with a notice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_CHARS = 8_000
MAX_FULL_CHARS = 40_000
_NOTICE_CHARS = 200  # room for what is said of the lines left out
_LINE_CHARS = 500
_FULL_LINE_CHARS = 2_000

_MASK = "***"
_FIELD = re.compile(r"\s*- '?(?:textbox|text)\b")
_ROLE = re.compile(r"\s*- '?([a-z]+)")
_REF = re.compile(r" \[ref=(?:f\d+)?e\d+\]")
_BOX = re.compile(r" \[box=(-?[\d.]+),(-?[\d.]+),(-?[\d.]+),(-?[\d.]+)\]")
_GROUP = re.compile(r"- generic(?: \[active\])?:?")
_POINTER = " [cursor=pointer]"
_INTERACTIVE = re.compile(
    r"(?:button|checkbox|combobox|link|listbox|menuitem|menuitemcheckbox|menuitemradio|option|radio|searchbox|slider"
    r"|spinbutton|switch|tab|textbox|treeitem)"
)


@dataclass(frozen=True)
class Snapshot:
    """What the model is shown of a page."""

    text: str
    element_count: int  # that have a reference, the ones left out too


@dataclass(frozen=True)
class _Line:
    depth: int  # in characters
    text: str  # without indentation
    is_above: bool  # the view


def shown(raw: str, *, full: bool, passwords: Iterable[str] = ()) -> Snapshot:
    """Return the snapshot of Playwright's text, which has boxes.

    Unless ``full``, only what can be acted on keeps its reference, and mere groups are left out. ``passwords`` are
    masked where they are the text of a field.
    """
    endings = tuple({f": {spelling}" for password in passwords if password for spelling in _spellings(password)})
    masked = (_masked(line, endings) for line in raw.splitlines() if line.strip())
    lines = [_parsed(line, full=full) for line in masked]
    count = sum(1 for line in lines if _REF.search(line.text))
    return Snapshot(_fitting(lines if full else _flattened(lines), MAX_FULL_CHARS if full else MAX_CHARS), count)


def _spellings(password: str) -> tuple[str, ...]:
    """Return how a text may be written: as it is, or quoted where it would not be plain YAML."""
    plain = " ".join(password.split())
    return password, plain, json.dumps(password, ensure_ascii=False), json.dumps(plain, ensure_ascii=False)


def _masked(line: str, endings: tuple[str, ...]) -> str:
    found = [ending for ending in endings if line.endswith(ending) and _FIELD.match(line)]
    return f"{line[: -len(max(found, key=len))]}: {_MASK}" if found else line


def _parsed(line: str, *, full: bool) -> _Line:
    text = line.lstrip(" ")
    box = _BOX.search(text)
    is_above = box is not None and float(box[2]) + float(box[4]) <= 0
    kept = _BOX.sub("", text)
    if not full:
        role = _ROLE.match(text)
        if _POINTER not in kept and not (role and _INTERACTIVE.fullmatch(role[1])):
            kept = _REF.sub("", kept)
        kept = kept.replace(_POINTER, "")
    max_chars = _FULL_LINE_CHARS if full else _LINE_CHARS
    if len(kept) > max_chars:
        ref = _REF.search(kept, max_chars)
        kept = f"{kept[:max_chars]}… [{len(kept) - max_chars} characters more]{ref[0] if ref else ''}"
    return _Line(len(line) - len(text), kept, is_above)


def _flattened(lines: list[_Line]) -> list[_Line]:
    """Leave out groups that say nothing, and move what is in them to the left."""
    kept: list[_Line] = []
    left_out: list[int] = []  # depths of the groups around the line
    for line in lines:
        while left_out and left_out[-1] >= line.depth:
            left_out.pop()
        if _GROUP.fullmatch(line.text):
            left_out.append(line.depth)
        else:
            kept.append(_Line(line.depth - 2 * len(left_out), line.text, line.is_above))
    return kept


def _fitting(lines: list[_Line], max_chars: int) -> str:
    written = [" " * line.depth + line.text for line in lines]
    if sum(map(len, written)) + len(written) <= max_chars:
        return "\n".join(written)
    below = _without_above(lines)
    fitting: list[str] = []
    left = max_chars - 2 * _NOTICE_CHARS
    for line in below:
        text = " " * line.depth + line.text
        left -= len(text) + 1
        if left < 0:
            break
        fitting.append(text)
    notices = []
    if above := len(lines) - len(below):
        notices.append(f"[{above} lines above the view left out; scroll up to see them]")
    if rest := len(below) - len(fitting):
        notices.append(f"[{rest} lines further down left out; scroll down to see them]")
    return "\n".join([*notices[:-1], *fitting, *notices[-1:]] if rest else [*notices, *fitting])


def _without_above(lines: list[_Line]) -> list[_Line]:
    """Leave out what lies above the view, with all that is in it."""
    kept: list[_Line] = []
    above: int | None = None  # depth of the element that is left out
    for line in lines:
        if above is not None and line.depth > above:
            continue
        above = line.depth if line.is_above else None
        if above is None:
            kept.append(line)
    return kept
