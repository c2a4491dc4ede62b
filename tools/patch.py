"""The patch tool: an edit by quoting, or a V4A patch over several files.

Everything is checked before anything is written: a patch that cannot be applied as a whole leaves every file as it was.
Where the place of an edit is, ``tools.fuzzy`` decides; what is put there, ``tools.splice``.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import unified_diff
from typing import Annotated, Literal

from pydantic import Field

from sandboxes.base import Sandbox
from tools.base import JsonObject, ToolContext, ToolError, tool
from tools.fuzzy import MatchError
from tools.lint import lint
from tools.splice import edit
from tools.text_files import (
    PROBE_TIMEOUT_SECONDS,
    FileState,
    Place,
    TextFile,
    clean,
    load,
    locate,
    parent_of,
    refuse_protected,
    refuse_unless_file,
    shown,
    store,
)
from tools.v4a import Change, PatchError, apply_hunks, parse

MAX_DIFF_CHARS = 20_000
MAX_DIFF_LINE_CHARS = 500
MAX_DIFF_LINES = 10_000
_DIFF_CONTEXT = 3
_HUNK_START = re.compile(r"@@ -(\d+)(.*) \+(\d+)(.*) @@")
_V4A = "*** Begin Patch\n*** Update File: path\n@@ line above the hunk\n context\n-old\n+new\n*** End Patch"
_STUBBORN = 3  # failures in a row on one file, from which on the hint is stronger


@dataclass(frozen=True)
class _Step:
    """One change that was checked and can be carried out."""

    kind: Literal["update", "add", "delete", "move"]
    place: Place
    before: str = ""
    after: TextFile = field(default=TextFile(""))
    to: Place | None = None  # of a move


@tool("file")
async def patch(  # noqa: PLR0913, PLR0917 - the arguments are the tool's schema
    context: ToolContext,
    mode: Literal["replace", "patch"] = "replace",
    path: str = "",
    old_string: Annotated[str, Field(description="Text to replace; must be unique without replace_all")] = "",
    new_string: Annotated[str | None, Field(description="Empty text deletes")] = None,
    replace_all: bool = False,
    patch: Annotated[str, Field(description=_V4A)] = "",
) -> JsonObject:
    """Edit files. mode=replace: path, old_string, new_string. mode=patch: a V4A patch (Update/Add/Delete/Move File)."""
    try:
        if mode == "patch" or (patch and not old_string):
            steps = await _planned_patch(context, clean(patch))
        else:
            steps = await _planned_edit(context, path, (old_string, new_string), replace_all)
        return await _carry_out(context, steps)
    except ToolError as error:
        error.details.setdefault("success", False)
        raise


async def _planned_edit(
    context: ToolContext, path: str, strings: tuple[str, str | None], replace_all: bool
) -> list[_Step]:
    if not path or strings[1] is None:
        raise ToolError("mode=replace needs path, old_string and new_string")
    sandbox = await context.open_sandbox()
    place = await locate(sandbox, path)
    refuse_protected(place)
    before = await load(sandbox, place)
    old, new = clean(strings[0]), clean(strings[1])
    try:
        edited = await asyncio.to_thread(edit, before.text, old, new, replace_all=replace_all)
    except MatchError as error:
        raise _failed(context, place, error) from None
    return [_Step("update", place, before.text, TextFile(edited.text, before.bom))]


async def _planned_patch(context: ToolContext, text: str) -> list[_Step]:
    if not text.strip():
        raise ToolError("mode=patch needs patch")
    try:
        changes = parse(text)
    except PatchError as error:
        raise ToolError(f"{error}; nothing was changed") from None
    draft = _Draft(context, await context.open_sandbox())
    for change in changes:
        await draft.add(change)
    return draft.steps


class _Draft:
    """A patch's files as they would be: later changes see earlier ones, and nothing is written."""

    def __init__(self, context: ToolContext, sandbox: Sandbox) -> None:
        self.steps: list[_Step] = []
        self._context = context
        self._sandbox = sandbox
        self._files: dict[str, TextFile | Place | None] = {}  # None: no such file; a Place: the file that moves here

    async def add(self, change: Change) -> None:
        """Check one change and note its steps. Raises ToolError."""
        place = await self._place(change.path)
        if change.kind == "add":
            self._refuse_existing(place)
            self._note(_Step("add", place, after=TextFile(change.content)))
            return
        if not self._exists(place):
            raise ToolError(f"File not found: {change.path}; nothing was changed")
        if change.kind == "delete":
            self._refuse_other(place)
            self._note(_Step("delete", place))
        if change.hunks and change.kind == "update":
            self._note(await self._updated(place, change))
        if change.to:
            self._refuse_other(place)
            to = await self._place(change.to)
            self._refuse_existing(to)
            self._note(_Step("move", place, to=to))

    async def _updated(self, place: Place, change: Change) -> _Step:
        before = self._files.get(place.path, place)
        if not isinstance(before, TextFile):
            before = await load(self._sandbox, before or place)
        try:
            text = await asyncio.to_thread(apply_hunks, before.text, change.hunks)
        except MatchError as error:
            raise _failed(self._context, place, error) from None
        return _Step("update", place, before.text, TextFile(text, before.bom))

    async def _place(self, path: str) -> Place:
        place = await locate(self._sandbox, path)
        refuse_protected(place)
        return place

    def _note(self, step: _Step) -> None:
        self.steps.append(step)
        if step.to:
            self._files[step.to.path] = self._files.get(step.place.path, step.place)
        self._files[step.place.path] = step.after if step.kind in ("update", "add") else None

    def _exists(self, place: Place) -> bool:
        return self._files[place.path] is not None if place.path in self._files else place.kind != "missing"

    def _refuse_existing(self, place: Place) -> None:
        if self._exists(place):
            raise ToolError(f"{place.given} exists already; nothing was changed")

    def _refuse_other(self, place: Place) -> None:
        if place.path not in self._files:
            refuse_unless_file(place)


async def _carry_out(context: ToolContext, steps: list[_Step]) -> JsonObject:
    """Write what was planned, in order. Raises ToolError that says how far it came."""
    done: dict[str, list[str]] = {"files_modified": [], "files_created": [], "files_deleted": []}
    state = context.state(FileState)
    for step in steps:
        try:
            await _carry_out_one(context, step)
        except ToolError as error:
            raise ToolError(str(error), **{key: paths for key, paths in done.items() if paths}) from None
        state.failed_patches.pop(step.place.path, None)
        if step.kind in ("delete", "move"):
            done["files_deleted"].append(step.place.given)
        if step.kind in ("add", "move"):
            done["files_created"].append((step.to or step.place).given)
        if step.kind == "update":
            done["files_modified"].append(step.place.given)
    written = [step for step in steps if step.kind in ("update", "add")]
    checks = {step.place.given: lint(step.place.path, step.after.text) for step in written}
    lints = {path: check for path, check in checks.items() if check}
    diff = await asyncio.to_thread(lambda: "\n".join(filter(None, map(_diff, steps))))
    return {
        "success": True,
        "diff": _bounded(diff),
        **{key: list(dict.fromkeys(paths)) for key, paths in done.items() if paths},
        **({"lint": lints if len(checks) > 1 else next(iter(lints.values()))} if lints else {}),
    }


async def _carry_out_one(context: ToolContext, step: _Step) -> None:
    if step.kind in ("update", "add"):
        await store(context, step.place, step.after)
        return
    source = shlex.quote(step.place.entry)
    if step.to:
        target = shlex.quote(step.to.path)
        command = f"(mkdir -p {shlex.quote(parent_of(step.to))} && mv {source} {target})"
    else:
        command = f"rm -f {source}"
    sandbox = await context.open_sandbox()
    context.state(FileState).forget_reads(step.place.path)
    result = await sandbox.exec_plain(command, timeout_seconds=PROBE_TIMEOUT_SECONDS)
    if result.exit_code:
        raise ToolError(f"{step.place.given} could not be {step.kind}d: {result.output.strip()[-300:]}")


def _failed(context: ToolContext, place: Place, error: MatchError) -> ToolError:
    """Count a failure on a file and return what the model is told about it."""
    failures = context.state(FileState).failed_patches
    times = failures[place.path] = failures.get(place.path, 0) + 1
    hint = f"Read {place.given} again with read_file and quote it exactly."
    if times >= _STUBBORN:
        hint = (
            f"{times} patches of {place.given} in a row have failed. Stop guessing: read_file it again and copy the "
            "lines as they are, or write the whole file with write_file."
        )
    return ToolError(f"{place.given}: {shown(str(error))}", _hint=hint)


def _diff(step: _Step) -> str:
    path = step.place.given
    if step.to:
        return f"# Moved: {path} -> {step.to.given}"
    if step.kind == "delete":
        return f"# Deleted: {path}"
    return "\n".join(unified(step.before, step.after.text, path))


def unified(before: str, after: str, path: str) -> Iterator[str]:
    """Yield the lines of a unified diff; only the part between the first and the last difference is compared."""
    old, new = (
        shown(text.replace("\r\n", "\n")).removesuffix("\n").split("\n") if text else [] for text in (before, after)
    )
    shortest = min(len(old), len(new))
    same = next((i for i in range(shortest) if old[i] != new[i]), shortest)
    same_end = next((i for i in range(shortest - same) if old[-1 - i] != new[-1 - i]), shortest - same)
    skipped, skipped_end = max(0, same - _DIFF_CONTEXT), max(0, same_end - _DIFF_CONTEXT)
    old, new = old[skipped : len(old) - skipped_end], new[skipped : len(new) - skipped_end]
    if len(old) + len(new) > MAX_DIFF_LINES:
        yield f"# Changed: {path}, from line {same + 1} on; too many lines to show"
        return
    for line in unified_diff(old, new, f"a/{path}", f"b/{path}", n=_DIFF_CONTEXT, lineterm=""):
        start = _HUNK_START.fullmatch(line)
        if start:
            yield f"@@ -{int(start[1]) + skipped}{start[2]} +{int(start[3]) + skipped}{start[4]} @@"
        else:
            yield line[:MAX_DIFF_LINE_CHARS]


def _bounded(diff: str) -> str:
    if len(diff) <= MAX_DIFF_CHARS:
        return diff
    cut = diff[:MAX_DIFF_CHARS].rpartition("\n")[0]
    return f"{cut}\n... [{diff.count(chr(10)) - cut.count(chr(10))} more lines]"
