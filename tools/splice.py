"""Putting new text in the place of old text. Pure.

What is outside the places stays as it is, byte for byte. Inside, only what the model changed is changed: a line that
it repeats stays the file's own line, with its own blanks, quotes and line end; a new line gets the indentation and the
line ends of the file. The file ends with a line end if it did before.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise

from tools.fuzzy import Found, MatchError, Span, View, find

_STEPS = (2, 3, 4, 8)  # blanks a level of indentation may have; others align something
_DEFAULT_STEP = 4
_SHOWN_PLACES = 10


@dataclass(frozen=True)
class Edit:
    """A text that was edited."""

    text: str
    strategy: str
    line_numbers: tuple[int, ...]  # 1-based first line of each place, before the edit


def edit(text: str, old: str, new: str, *, replace_all: bool = False) -> Edit:
    """Replace the one place of ``old``, or all of them. Raises MatchError with words for the model."""
    if not old.strip():
        raise MatchError(
            "old_string is empty or blank; to add text, quote a line beside it and repeat it in new_string"
        )
    if old == new:
        raise MatchError("old_string and new_string are identical; nothing would change")
    found = find(text, old, new)
    spans = found.spans
    if replace_all:
        if found.by_likeness:
            lines = found.line_numbers()
            raise MatchError(f"replace_all needs the text as the file has it; line {lines[0]} is only like it")
        spans = tuple(_apart(spans))
    elif len(spans) > 1:
        raise MatchError(
            f"old_string was found {len(spans)} times ({place_list(found)}); "
            "add lines around it to single one out, or pass replace_all=true"
        )
    edited = splice(found, spans)
    if edited == text:
        raise MatchError("the edit would change nothing")
    return Edit(edited, found.strategy, tuple(found.view.line_number(start) for start, _ in spans))


def place_list(found: Found) -> str:
    """Return "lines 3, 20, …" for the places found."""
    numbers = found.line_numbers()
    more = ", …" if len(numbers) > _SHOWN_PLACES else ""
    return "lines " + ", ".join(map(str, numbers[:_SHOWN_PLACES])) + more


def splice(found: Found, spans: Iterable[Span]) -> str:
    """Return the original text with the new one at ``spans``, which are in order and do not overlap."""
    view = found.view
    pieces = []
    done = 0
    for span in spans:
        start, end = (view.original_offset(offset) for offset in span)
        pieces += [view.original[done:start], _replacement(found, span, view.original[start:end])]
        done = end
    return "".join([*pieces, view.original[done:]])


def _apart(spans: Iterable[Span]) -> Iterable[Span]:
    end = 0
    for span in spans:
        if span[0] >= end:
            end = span[1]
            yield span


def _replacement(found: Found, span: Span, own: str) -> str:
    """Return what stands at ``span`` afterwards; ``own`` is the file's text there, with its line ends."""
    view = found.view
    new = _ending_as_before(found, span)
    line_end = _line_end_near(view, span)
    if own == found.old and line_end == "\n":
        return new
    pieces = re.split(r"(\r?\n)", own)
    own_lines, own_ends = pieces[::2], [*pieces[1::2], ""]
    old_lines, new_lines = found.old.split("\n"), new.split("\n")
    if len(own_lines) < len(old_lines):  # the file ends without the last line end that was asked for
        own_lines, own_ends = [*own_lines, ""], [*own_ends, ""]
    within_line = not view.starts_line(span[0])
    indented = _indenter(list(zip(old_lines, own_lines, strict=True))[int(within_line) :], new_lines, view.lines)
    result: list[tuple[str, str]] = []
    for tag, old_from, old_to, new_from, new_to in SequenceMatcher(None, old_lines, new_lines, False).get_opcodes():
        if tag == "equal":
            result += zip(own_lines[old_from:old_to], own_ends[old_from:old_to], strict=True)
            continue
        for index in range(new_from, new_to):
            line, end, beside = new_lines[index], line_end, old_from + index - new_from
            replaced = old_lines[beside] if beside < old_to else ""
            if beside < old_to:
                end = own_ends[beside] or line_end
            if replaced.strip() and _indent_of(line) == _indent_of(replaced):
                line = _indent_of(own_lines[beside]) + line.lstrip(" \t")
            elif index > 0 or not within_line:
                line = indented(line)
            result.append((line, end))
    return "".join(line + (end or line_end) for line, end in result[:-1]) + result[-1][0]


def _ending_as_before(found: Found, span: Span) -> str:
    """Return the new text, made to end the file as it ended where the place is at its end."""
    view, new = found.view, found.new
    if found.strategy != "exact" and found.old.endswith("\n") and new and not new.endswith("\n"):
        new += "\n"  # whole lines were matched: the next one is not to be joined
    at_end = view.original_offset(span[1]) == len(view.original)
    if not at_end or found.old.rstrip("\n") == new.rstrip("\n"):  # else the final line end is what the edit is about
        return new
    if not view.original.endswith("\n"):
        return new.removesuffix("\n")
    before_end = new or view.text[: span[0]]
    return new + "\n" if before_end and not before_end.endswith("\n") else new


def _line_end_near(view: View, span: Span) -> str:
    """Return the line end at the place, or that of the line before, or LF."""
    start = view.original_offset(span[0])
    near = view.original.find("\n", start)
    if near < 0:
        near = view.original.rfind("\n")
    return "\r\n" if near > 0 and view.original[near - 1] == "\r" else "\n"


def _indent_of(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]


def _indenter(pairs: list[tuple[str, str]], new_lines: list[str], file_lines: list[str]) -> Callable[[str], str]:
    """Return what moves a new line from the model's indentation to the file's, as the pairs of equal lines show it."""
    known: dict[str, str] = {}
    for old, own in pairs:
        if old.strip():
            known.setdefault(_indent_of(old), _indent_of(own))
    if all(theirs == ours for theirs, ours in known.items()):
        return lambda line: line
    model_step = _usual_step([old for old, _ in pairs] + new_lines)
    file_step = "\t" if any("\t" in ours for ours in known.values()) else " " * _usual_step(file_lines)

    def levels(indent: str) -> int | None:
        if indent.strip("\t") == "":
            return len(indent)
        return None if "\t" in indent or len(indent) % model_step else len(indent) // model_step

    def moved(indent: str) -> str:
        if indent in known:
            return known[indent]
        base = max((theirs for theirs in known if indent.startswith(theirs)), key=len, default=None)
        if base is not None:
            deeper = indent[len(base) :]
            steps = levels(deeper)
            return known[base] + (deeper if steps is None else file_step * steps)
        shallowest = min(known, key=len)
        steps = (levels(shallowest) or 0) - (levels(indent) or 0)
        return known[shallowest][: max(0, len(known[shallowest]) - len(file_step) * max(0, steps))]

    def indented(line: str) -> str:
        return moved(_indent_of(line)) + line.lstrip(" \t") if line.strip() else line

    return indented


def _usual_step(lines: list[str]) -> int:
    """Return by how many blanks a line is mostly indented more than the one before."""
    widths = [len(_indent_of(line)) for line in lines if line.strip() and "\t" not in _indent_of(line)]
    steps = Counter(wide - narrow for narrow, wide in pairwise(widths) if wide - narrow in _STEPS)
    return min(steps, key=lambda step: (-steps[step], step), default=_DEFAULT_STEP)
