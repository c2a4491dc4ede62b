"""read_file and write_file.

A file of any size can be read: a small one is fetched whole, of a large one only the range asked for leaves the
sandbox. The same unchanged range is not sent twice. What is written keeps the mode, BOM and CRLF of the file it
replaces.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import posixpath
import shlex
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from sandboxes.base import Sandbox
from tools.base import JsonObject, ToolContext, ToolError, tool
from tools.lint import lint
from tools.text_files import (
    JUDGED_BYTES,
    PROBE_TIMEOUT_SECONDS,
    FileState,
    Place,
    TextFile,
    clean,
    decode,
    is_binary,
    is_image,
    locate,
    parent_of,
    read_bytes,
    refuse_binary,
    refuse_protected,
    refuse_unless_file,
    shown,
    store,
)

MAX_LINES = 2000
MAX_LINE_CHARS = 2000
WHOLE_FILE_BYTES = 512_000  # up to here a file is fetched whole; above it, the model is advised to read parts
_CUT_MARK = "... [truncated]"
_MAX_LINE_BYTES = 4 * (MAX_LINE_CHARS + 1)  # enough for one character more than is shown
_LARGEST_OFFSET = 10**12


@dataclass(frozen=True)
class _Part:
    lines: list[str]
    total_lines: int  # of the whole file


@tool("file")
async def read_file(
    context: ToolContext,
    path: str,
    offset: Annotated[int, Field(description="First line, from 1")] = 1,
    limit: Annotated[int, Field(description="Number of lines, at most 2000")] = 500,
) -> JsonObject:
    """Read a text file. Lines come as "N|text"; N| is not part of the file."""
    offset, limit = min(max(1, offset), _LARGEST_OFFSET), min(max(1, limit), MAX_LINES)
    sandbox = await context.open_sandbox()
    place = await locate(sandbox, path)
    if place.kind == "missing":
        raise ToolError(f"File not found: {path}", similar_files=await _similar_files(sandbox, place))
    refuse_unless_file(place)
    head = await read_bytes(sandbox, place, WHOLE_FILE_BYTES + 1)
    refuse_binary(place, head)

    seen = context.state(FileState).reads
    key = (place.path, offset, limit)
    version = f"{place.stamp} {hashlib.sha256(head).hexdigest()}"
    known_version, times = seen.get(key, ("", 0))
    if known_version == version and not context.by_script:
        seen[key] = (version, times + 1)
        return _unchanged(path, times)
    if len(head) <= WHOLE_FILE_BYTES:
        part = _part_of(decode(head).text, offset, limit)
    else:
        part = await _part_of_large_file(context, sandbox, place, offset, limit)
    result = _result(part, offset, limit, max(place.size, len(head)))
    _refuse_long(result, limit, context.limits.max_result_chars)
    if not context.by_script:
        seen[key] = (version, 1)
    return result


def _unchanged(path: str, times: int) -> JsonObject:
    if times > 1:
        raise ToolError(
            f"BLOCKED: you have read these lines of {path} {times} times already and they have not changed. "
            "Go on with what you know."
        )
    return {
        "status": "unchanged",
        "path": path,
        "message": "These lines have not changed since you last read them; see the earlier result.",
    }


def _part_of(text: str, offset: int, limit: int) -> _Part:
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()  # what follows the last line end is no line
    return _Part(lines[offset - 1 : offset - 1 + limit], len(lines))


async def _part_of_large_file(context: ToolContext, sandbox: Sandbox, place: Place, offset: int, limit: int) -> _Part:
    """Let the sandbox count the lines and cut out the range, so that the worker never holds the file."""
    file = shlex.quote(place.path)
    command = (
        f"(wc -l < {file}; tail -c 1 {file} | wc -l; "
        f"tail -n +{offset} {file} | head -n {limit} | LC_ALL=C cut -b 1-{_MAX_LINE_BYTES})"
    )
    done = await sandbox.exec_plain(
        command,
        timeout_seconds=context.limits.max_call_seconds / 2,
        max_output_chars=5 * context.limits.max_result_chars,  # a line may come with four times what is shown of it
    )
    ends, _, rest = done.output.partition("\n")
    if done.timed_out or not ends.strip().isdigit():
        raise ToolError(f"{place.given} could not be read: {done.output[-300:]}")
    if done.omitted_chars:
        raise _too_long(limit, done.total_chars, context.limits.max_result_chars)
    last_line_ended, *lines = rest.split("\n")
    total_lines = int(ends) + (last_line_ended.strip() == "0")
    count = max(0, min(limit, total_lines - offset + 1))
    lines = [*lines, *[""] * count][:count]
    if offset == 1:
        lines[0] = lines[0].removeprefix("\ufeff")
    return _Part(lines, total_lines)


def _result(part: _Part, offset: int, limit: int, file_size: int) -> JsonObject:
    last = offset + len(part.lines) - 1
    truncated = last < part.total_lines and bool(part.lines)
    hints = []
    if not part.total_lines:
        hints.append("The file is empty.")
    elif not part.lines:
        hints.append(f"offset {offset} is beyond the end: the file has {part.total_lines} lines.")
    elif truncated:
        hints.append(f"Lines {offset}-{last} of {part.total_lines}; go on with offset={last + 1}.")
    if file_size > WHOLE_FILE_BYTES and limit > MAX_LINES // 10:
        hints.append(f"The file is large ({file_size:,} bytes): search_files finds the lines worth reading.")
    result: JsonObject = {
        "content": "\n".join(f"{number}|{_cut(line)}" for number, line in enumerate(part.lines, offset)),
        "total_lines": part.total_lines,
        "file_size": file_size,
        "truncated": truncated,
    }
    return {**result, "hint": " ".join(hints)} if hints else result


def _cut(line: str) -> str:
    line = shown(line.removesuffix("\r"))
    return line if len(line) <= MAX_LINE_CHARS else line[:MAX_LINE_CHARS] + _CUT_MARK


def _refuse_long(result: JsonObject, limit: int, max_chars: int) -> None:
    chars = len(json.dumps(result, ensure_ascii=False))
    if chars > max_chars:
        raise _too_long(limit, chars, max_chars)


def _too_long(limit: int, chars: int, max_chars: int) -> ToolError:
    fitting = max(1, int(limit * max_chars / chars * 0.8))
    return ToolError(
        f"The lines asked for make {chars:,} characters, more than the {max_chars:,} a result may have; "
        f"read a smaller range with offset and limit (limit={fitting} may fit)."
    )


async def _similar_files(sandbox: Sandbox, place: Place) -> list[str]:
    """Return up to five paths beside a missing one whose names are near, written like the path that was given."""
    done = await sandbox.exec_plain(
        f"ls -a {shlex.quote(parent_of(place))} 2>/dev/null | head -n 3000",
        timeout_seconds=PROBE_TIMEOUT_SECONDS,
        max_output_chars=400_000,
    )
    names = [name for name in done.output.split("\n") if name not in ("", ".", "..")]
    folder, wanted = posixpath.split(place.given.rstrip("/"))
    by_lower = {name.lower(): name for name in names}
    stem = posixpath.splitext(wanted.lower())[0]
    near = [name for name in names if stem and posixpath.splitext(name.lower())[0] == stem]
    near += [by_lower[lower] for lower in difflib.get_close_matches(wanted.lower(), by_lower, n=5)]
    return [posixpath.join(folder, name) for name in dict.fromkeys(near)][:5]


@tool("file")
async def write_file(context: ToolContext, path: str, content: str) -> JsonObject:
    """Write a whole file, replacing what was there. Parent folders are made. To change parts use patch."""
    sandbox = await context.open_sandbox()
    place = await locate(sandbox, path)
    if place.kind != "missing":
        refuse_unless_file(place)
    refuse_protected(place)
    file = await _dressed_as_before(sandbox, place, clean(content))
    written = await store(context, place, file)
    context.state(FileState).failed_patches.pop(place.path, None)
    result: JsonObject = {"bytes_written": written, "dirs_created": place.parents_missing}
    problems = lint(place.path, file.text)
    return {**result, "lint": problems} if problems else result


async def _dressed_as_before(sandbox: Sandbox, place: Place, content: str) -> TextFile:
    """Give the new text the BOM and the CRLF line ends of the text file it replaces."""
    text = content.removeprefix("\ufeff")
    bom = text != content
    if place.kind == "missing":
        return TextFile(text, bom)
    head = await read_bytes(sandbox, place, JUDGED_BYTES)
    if is_image(head) or is_binary(head):
        return TextFile(text, bom)
    old = decode(head)
    ends = old.text.count("\n")
    if ends and old.text.count("\r\n") == ends:
        text = text.replace("\r\n", "\n").replace("\n", "\r\n")
    return TextFile(text, bom or old.bom)
