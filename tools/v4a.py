"""The V4A patch format: text to changes, and changes to a file's text. Pure; the patch tool does the writing.

    *** Begin Patch
    *** Update File: path          hunks follow; "*** Move to: path" may stand first
    @@ a line above the hunk       optional, and repeatable: class, then method
     context
    -removed
    +added
    *** End of File                optional: the hunk is at the end
    *** Add File: path             every line with "+"
    *** Delete File: path
    *** Move File: path -> path
    *** End Patch

A patch without its last line is taken for cut and refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from tools.fuzzy import Found, MatchError, Span, find
from tools.splice import place_list, splice

BEGIN, END, END_OF_FILE, MOVE_TO = "*** Begin Patch", "*** End Patch", "*** End of File", "*** Move to:"
_HEADER = re.compile(r"\*\*\* (Update|Add|Delete|Move) File: *(\S.*?) *")
_RANGE = re.compile(r"[-+0-9, ]+@@(.*)")  # what unified diffs write after "@@"
_ARROW = re.compile(r" *-> *")


class PatchError(ValueError):
    """The text is no V4A patch. The message is meant for the model."""


@dataclass
class Hunk:
    """One place of an update."""

    number: int  # its first line in the patch, from 1
    anchors: list[str] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)  # " ", "-" or "+", and the line
    at_end: bool = False

    def block(self, mark: Literal["-", "+"]) -> str:
        """Return the lines before ("-") or after ("+") the change, each with its line end."""
        return "".join(f"{line}\n" for kind, line in self.lines if kind in (" ", mark))


@dataclass
class Change:
    """What a patch does to one file."""

    kind: Literal["update", "add", "delete", "move"]
    path: str
    to: str = ""  # of a move, or of an update that also moves
    hunks: list[Hunk] = field(default_factory=list)

    @property
    def content(self) -> str:
        """Return the text of a new file."""
        return "".join(hunk.block("+") for hunk in self.hunks)


def parse(patch: str) -> list[Change]:
    """Return what a patch says, in its order. Raises PatchError."""
    lines = patch.replace("\r\n", "\n").split("\n")
    markers = [line.rstrip() for line in lines]
    first = markers.index(BEGIN) + 1 if BEGIN in markers else 0
    if END not in markers[first:]:
        raise PatchError(f'no "{END}" at the end: the patch is cut off, or is no V4A patch')
    changes: list[Change] = []
    for number, line in enumerate(lines[first : markers.index(END, first)], first + 1):
        header = _HEADER.fullmatch(line)
        if header:
            changes.append(_started(header[1], header[2], number))
        elif changes:
            _continue(changes[-1], line, number)
        elif line.strip():
            raise PatchError(f'line {number}: expected "*** Update File: path", got {line[:80]!r}')
    if not changes:
        raise PatchError("the patch names no file")
    for change in changes:
        _check(change)
    return changes


def _started(word: str, path: str, number: int) -> Change:
    if word == "Update":
        return Change("update", path)
    if word == "Add":
        return Change("add", path)
    if word == "Delete":
        return Change("delete", path)
    source, *targets = _ARROW.split(path)
    if len(targets) != 1 or not source or not targets[0]:
        raise PatchError(f'line {number}: expected "*** Move File: old path -> new path"')
    return Change("move", source, to=targets[0])


def _continue(change: Change, line: str, number: int) -> None:
    if change.kind == "update":
        _continue_update(change, line, number)
    elif change.kind == "add" and line[:1] in ("+", ""):
        change.hunks = change.hunks or [Hunk(number)]
        change.hunks[0].lines.append((line[:1], line[1:]))
    elif line.strip():
        expected = 'a line that starts with "+"' if change.kind == "add" else "nothing"
        raise PatchError(f"line {number}: expected {expected} under {change.kind} {change.path}, got {line[:80]!r}")


def _continue_update(change: Change, line: str, number: int) -> None:
    if line.startswith(MOVE_TO):
        change.to = line.removeprefix(MOVE_TO).strip()
    elif line.startswith("@@"):
        if not change.hunks or change.hunks[-1].lines:
            change.hunks.append(Hunk(number))
        anchor = line[2:].strip()
        ranges = _RANGE.fullmatch(anchor)
        anchor = (ranges[1] if ranges else anchor).removesuffix("@@").strip()
        change.hunks[-1].anchors += [anchor] if anchor else []
    elif line.rstrip() == END_OF_FILE and change.hunks:
        change.hunks[-1].at_end = True
    elif not line.startswith("\\"):  # "\ No newline at end of file"
        if not change.hunks:
            change.hunks.append(Hunk(number))
        marked = line[:1] in (" ", "-", "+")  # a bare line is context whose blank was forgotten
        change.hunks[-1].lines.append((line[0], line[1:]) if marked else ("", line))


def _check(change: Change) -> None:
    for hunk in change.hunks:
        while hunk.lines and hunk.lines[-1] == ("", ""):  # an empty line before the next header
            hunk.lines.pop()
        hunk.lines = [(mark or " ", line) for mark, line in hunk.lines]
    change.hunks = [hunk for hunk in change.hunks if hunk.lines or hunk.anchors]
    for hunk in change.hunks:
        if all(mark == " " for mark, _ in hunk.lines):
            raise PatchError(f'{change.path}: the hunk at line {hunk.number} has no line with "+" or "-"')
    if change.kind == "update" and not change.hunks and not change.to:
        raise PatchError(f"{change.path}: the update has no hunk")


def apply_hunks(text: str, hunks: list[Hunk]) -> str:
    """Return the text with every hunk applied, one after the other.

    Raises MatchError when one has no place, or no single one.
    """
    for hunk in hunks:
        try:
            text = _applied(text, hunk)
        except MatchError as error:
            raise MatchError(f"hunk at line {hunk.number} of the patch: {error}") from None
    return text


def _applied(text: str, hunk: Hunk) -> str:
    old, new = hunk.block("-"), hunk.block("+")
    if not old:
        return _inserted(text, hunk, new)
    if not old.strip():
        raise MatchError("its context is blank; add a line with text")
    if old == new:
        raise MatchError("it would change nothing")
    found = find(text, old, new, whole_lines=True)
    return splice(found, [_chosen(found, hunk)])


def _inserted(text: str, hunk: Hunk, new: str) -> str:
    """Put added lines without context below the anchor, or at the end where there is none."""
    if not hunk.anchors:
        return _appended(text, new)
    lines = text.split("\n")
    below = _below(lines, hunk.anchors)
    if len(below) != 1:
        raise MatchError(f'"@@ {hunk.anchors[-1]}" is in {len(below)} places; add context lines')
    at = below[0] + 1
    if at == len(lines):  # the anchor has no line end to go by
        return _appended(text, new)
    line_end = "\r" if lines[at - 1].endswith("\r") else ""
    added_lines = [line + line_end for line in new.split("\n")[:-1]]
    return "\n".join([*lines[:at], *added_lines, *lines[at:]])


def _appended(text: str, new: str) -> str:
    """Put lines at the end of a text, which ends with a line end if it did before."""
    line_end = "\r\n" if "\r\n" in text else "\n"
    gap = line_end if text and not text.endswith("\n") else ""
    added = new.replace("\n", line_end)
    return text + gap + (added.removesuffix(line_end) if gap else added)


def _below(lines: list[str], anchors: list[str]) -> list[int]:
    """Return the 0-based lines where the last of the anchors stands, each one below the one before."""
    places: list[int] | None = None
    for anchor in anchors:
        hits = [index for index, line in enumerate(lines) if line.strip() == anchor]
        hits = hits or [index for index, line in enumerate(lines) if anchor in line]
        if places is None:
            places = hits
        else:
            firsts = (next((hit for hit in hits if hit > place), None) for place in places)
            places = sorted({hit for hit in firsts if hit is not None})
    return places or []


def _chosen(found: Found, hunk: Hunk) -> Span:
    """Return the place of a hunk that its anchors, or the end of the file, leave over."""
    spans = [span for span in found.spans if not hunk.at_end or span[1] == len(found.view.text)] or list(found.spans)
    below = _below(found.view.lines, hunk.anchors)
    if hunk.anchors and not below:
        raise MatchError(f'"@@ {hunk.anchors[-1]}" is not in the file; quote a line of it, or leave it out')
    if below:
        firsts = (next((span for span in spans if found.view.line_number(span[0]) > index), None) for index in below)
        spans = sorted({span for span in firsts if span is not None})
    if len(spans) == 1:
        return spans[0]
    if not spans:
        raise MatchError(f'its lines are not below "@@ {hunk.anchors[-1]}" ({place_list(found)})')
    raise MatchError(
        f'its lines are in several places ({place_list(found)}); add context lines or a deciding "@@ line"'
    )
