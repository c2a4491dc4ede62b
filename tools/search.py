"""search_files: lines or files of the sandbox that match a pattern.

ripgrep where the sandbox has it, else grep over find's files: PCRE where grep knows it, else extended expressions.
Either way hidden files stay out, and so do names with a line break, which no file tool takes; the shape of the result
is the same, and the sandbox does the counting and paging, so that a search with a million matches brings back one page.
It ends with how the search went: a shell that dies on the way is told, and not taken for one that found nothing.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Annotated, Literal

from pydantic import Field

from sandboxes.base import Sandbox
from tools.base import JsonObject, ToolContext, ToolError, tool
from tools.text_files import checked_path, clean, shell_word

MAX_LIMIT = 200
MAX_OFFSET = 10**9
MAX_CONTEXT = 20
MAX_LINE_CHARS = 500
MAX_PAGE_CHARS = 50_000
MAX_CONTEXT_LINES = 1000
TIMEOUT_SECONDS = 60.0
DENSE_FROM = 5  # matches; from here on they are grouped by file in one text
REPEATS_WARNED, REPEATS_BLOCKED = 3, 4
_MAX_LINE_BYTES = 4 * MAX_LINE_CHARS + 600  # with the path in front
_BAD_PATTERN, _NO_FOLDER, _NO_PROGRAM = 3, 4, 5  # exit codes of the script
_BROKE_OFF = 124  # the least exit code of `found` that is none of its findings: xargs and shells say so of what died
_CUT_MARK = "... [truncated]"
# A path may hold what looks like a line's number: where grep can do it, a byte that paths hardly hold stands behind it.
_MATCH = re.compile(r"(?:([^\x01]*)\x01|(.*?):)(\d+):(.*)", re.DOTALL)
_IN_BRACKETS = {"d": "0-9", "w": "[:alnum:]_", "s": "[:space:]", "t": "\t"}
_HOW = {"content": "-n", "files_only": "-l", "count": "-c"}  # the same letters in rg and grep

# Goes to the folder $p, or to that of the file $p, and prints what is searched there: "." or the file.
_ENTER = r"""
r=.
if [ -d "$p" ]; then :
elif [ -f "$p" ]; then case $p in */*) r=./${p##*/} p=${p%/*}/ ;; *) r=./$p p=. ;; esac
else exit 4
fi
CDPATH= cd "$p" >/dev/null || exit 4
printf '%s\n' "$r"
"""
# Each defines `found`, which prints path:line:text, path:count or path, as $how says. $e is the pattern, $x the same
# for a grep that knows only extended expressions.
_FILES = r"""
files() {
  [ "$r" = . ] || { printf '%s\n' "$r"; return; }
  find . \( -name '.?*' -o -name "$broken" \) -prune -o -type f {names} -print | LC_ALL=C sort
}
needs() {
  for program; do command -v "$program" >/dev/null || { echo "$program"; exit 5; }; done
}
"""
_FIND_FILES = r"""
if command -v rg >/dev/null && [ "$r" = . ]; then
  found() { rg --no-config --no-messages --files --sort path {globs} .; }
else
  needs find sort
  found() { files; }
fi
"""
_FIND_LINES = r"""
if command -v rg >/dev/null; then
  printf x | rg --no-config -q -e "$e" - 2>&1 >/dev/null; [ $? -lt 2 ] || exit 3
  [ "$r" = . ] && set -- {globs}
  [ "$how" != -n ] || how="-n -0"
  found() { rg --no-config --no-messages --no-heading --color never --sort path $how -H "$@" -e "$e" -- "$r"; }
else
  needs find sort tr xargs grep
  [ "$how" != -n ] || ! printf x | grep -qZ x || how="-n -Z"
  if printf x | grep -qP x; then how="$how -P"; else how="$how -E" e=$x; fi
  if printf x | grep -qI x; then how="$how -I"; fi
  printf x | grep $how -e "$e" 2>&1 >/dev/null; [ $? -lt 2 ] || exit 3
  found() { files | tr '\n' '\0' | xargs -0 grep $how -H -e "$e"; }
fi
"""
# Both print the page and the end: how `found` ended, as a line of its own behind what it found, and the number of lines
# with that one; of counts, their sum as well.
_PAGE = """{ found "$@"; echo "=$?"; } | tr '\\000' '\\001' | LC_ALL=C cut -b 1-{bytes} |
LC_ALL=C sed -n -e '${p;=;d;}' -e '{first},{last}p'"""
_PAGE_OF_COUNTS = """{ found "$@"; echo "=$?"; } | {
  n=1 s=0
  while IFS= read -r line; do
    case $line in =*) end=$line; continue ;; esac
    case ${line##*:} in 0 | '' | *[!0-9]*) continue ;; esac
    [ $n -ge {first} ] && [ $n -le {last} ] && printf '%s\n' "$line"
    n=$((n + 1)) s=$((s + ${line##*:}))
  done
  printf '%s\n' "$end" $n $s
}"""


@dataclass(frozen=True)
class _Query:
    pattern: str
    target: Literal["content", "files"]
    path: str
    file_glob: str
    limit: int
    offset: int
    output_mode: Literal["content", "files_only", "count"]
    context: int

    @property
    def counting(self) -> bool:
        return self.target == "content" and self.output_mode == "count"


@dataclass(frozen=True)
class _Page:
    root: str  # "." or "./name": what was searched, as the lines' paths begin
    lines: list[str]
    total: int  # lines in all
    sum: int = 0  # of the counts


@dataclass(frozen=True)
class _Line:
    path: str  # as the model would write it
    number: int
    text: str
    is_match: bool = True


@dataclass
class SearchState:
    """The search that was made last, and how often in a row it brought the same."""

    last: tuple[_Query, str] | None = None
    times: int = 0


@tool("file")
async def search_files(  # noqa: PLR0913, PLR0917 - the arguments are the tool's schema
    tools: ToolContext,
    pattern: Annotated[str, Field(description="Regex; a glob for target=files")],
    target: Literal["content", "files"] = "content",
    path: str = ".",
    file_glob: str = "",
    limit: int = 50,
    offset: int = 0,
    output_mode: Literal["content", "files_only", "count"] = "content",
    context: Annotated[int, Field(description="Lines around each match")] = 0,
) -> JsonObject:
    """Search file contents, or find files by name. Hidden files are left out."""
    context, offset = min(max(0, context), MAX_CONTEXT), min(max(0, offset), MAX_OFFSET)
    limit = min(max(1, limit), MAX_LIMIT, MAX_CONTEXT_LINES // (2 * context + 1))
    pattern, file_glob = clean(pattern), clean(file_glob)
    if target == "files":
        pattern, file_glob = "", _name_glob(pattern or file_glob)
    elif not pattern or re.search(r"[\0\n]", pattern):
        raise ToolError("pattern must be one line of text")
    query = _Query(pattern, target, checked_path(path), file_glob, limit, offset, output_mode, context)
    sandbox = await tools.open_sandbox()
    page = await _page(sandbox, query)
    result = await _result(sandbox, query, page)
    return result if tools.by_script else _unless_repeated(tools.state(SearchState), query, result)


def _name_glob(pattern: str) -> str:
    return pattern if re.search(r"[*?\[{]", pattern) else f"*{pattern}*"


def _unless_repeated(state: SearchState, query: _Query, result: JsonObject) -> JsonObject:
    asked = (query, json.dumps(result))
    state.times = state.times + 1 if state.last == asked else 1
    state.last = asked
    if state.times >= REPEATS_BLOCKED:
        raise ToolError(
            f"BLOCKED: this search was made {state.times} times in a row with the same result. Go on with what it says."
        )
    if state.times >= REPEATS_WARNED:
        return {**result, "warning": f"The same search {state.times} times in a row brings the same result."}
    return result


def _script(query: _Query) -> str:
    globs = f"-g {shlex.quote(query.file_glob)} " if query.file_glob else ""
    values = {
        "globs": f"{globs}-g '!.*' -g \"!$broken\"",  # the last words: without them a glob would bring these in
        "names": _find_names(query.file_glob),
        "first": str(query.offset + 1),
        "last": str(query.offset + query.limit),
        "bytes": str(_MAX_LINE_BYTES),
    }
    search = _FIND_FILES if query.target == "files" else _FIND_LINES
    script = _ENTER + _FILES + search + (_PAGE_OF_COUNTS if query.counting else _PAGE)
    script = re.sub(r"\{(globs|names|first|last|bytes)\}", lambda match: values[match[1]], script)
    patterns = f"e={shlex.quote(query.pattern)} x={shlex.quote(_extended(query.pattern))}"
    head = f"p={shell_word(query.path)} {patterns} how={_HOW[query.output_mode]} broken='*\n*'"
    return f"({head}\nset --\n{script}\n) 2>/dev/null"


def _extended(pattern: str) -> str:
    """Return a regex as POSIX writes it, as far as the two differ in spelling alone."""
    pieces = []
    for piece in re.findall(r"\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]|\\.|\(\?:|.", pattern):
        if piece.startswith("[") and len(piece) > 1:
            pieces.append(re.sub(r"\\(.)", lambda match: _IN_BRACKETS.get(match[1], match[1]), piece))
        elif piece == "(?:":
            pieces.append("(")
        else:
            pieces.append({"\\d": "[0-9]", "\\D": "[^0-9]", "\\t": "\t"}.get(piece, piece))
    return "".join(pieces)


def _find_names(glob: str) -> str:
    """Return find's condition for a glob as ripgrep has them: with braces, and with folders in it."""
    if not glob:
        return ""
    tests = []
    for plain in _without_braces(glob):
        folders = "/" in plain.strip("/")
        wanted = "./" + plain.removeprefix("./").lstrip("/").replace("**/", "*") if folders else plain.strip("/")
        tests.append(f"-{'path' if folders else 'name'} {shlex.quote(wanted)}")
    return "\\( " + " -o ".join(tests) + " \\)"


def _without_braces(glob: str) -> list[str]:
    braces = re.search(r"\{([^{}]*)\}", glob)
    if not braces:
        return [glob]
    before, after = glob[: braces.start()], glob[braces.end() :]
    return [plain for choice in braces[1].split(",") for plain in _without_braces(before + choice + after)]


async def _page(sandbox: Sandbox, query: _Query) -> _Page:
    chars = (query.limit + 2) * (_MAX_LINE_BYTES + 1) + 10_000
    done = await sandbox.exec_plain(_script(query), timeout_seconds=TIMEOUT_SECONDS, max_output_chars=chars)
    if done.timed_out:
        raise ToolError(f"The search took longer than {TIMEOUT_SECONDS:g} seconds; search a smaller path")
    if done.exit_code == _NO_FOLDER:
        raise ToolError(f"Path not found: {query.path}")
    root, *lines = done.output.rstrip("\n").split("\n")
    if done.exit_code == _BAD_PATTERN:
        raise ToolError(f"Bad pattern {query.pattern!r}: {' '.join(lines)[:500]}")
    if done.exit_code == _NO_PROGRAM:
        raise ToolError(f"There is no {lines[-1]} in this sandbox, which a search needs; use the terminal")
    size = 3 if query.counting else 2
    end = re.fullmatch(r"=(\d+) (\d+)(?: (\d+))?", " ".join(lines[-size:]))
    if not end or int(end[1]) >= _BROKE_OFF:
        raise ToolError("The search broke off before its end; search a smaller path, or use the terminal")
    return _Page(root, lines[:-size], total=int(end[2]) - 1, sum=int(end[3] or 0))


async def _result(sandbox: Sandbox, query: _Query, page: _Page) -> JsonObject:
    end = query.offset + len(page.lines)
    result: JsonObject
    if query.target == "files" or query.output_mode == "files_only":
        result = {"total_count": page.total, "files": [_path(query, page, line) for line in page.lines]}
    elif query.counting:
        pairs = (line.rpartition(":") for line in page.lines)
        result = {"total_count": page.sum, "counts": {_path(query, page, name): int(n) for name, _, n in pairs}}
    else:
        parsed = (match.groups("") for match in map(_MATCH.fullmatch, page.lines) if match)
        found = [_Line(marked or plain, int(number), text) for marked, plain, number, text in parsed]
        lines = await _with_context(sandbox, query, found) if query.context else found
        kept = _fitting([replace(line, path=_path(query, page, line.path), text=_cut(line.text)) for line in lines])
        if len(kept) < len(lines):
            end = query.offset + sum(line.is_match for line in kept)
        result = {"total_count": page.total, **_shown(kept)}
    return {**result, "truncated": True, "hint": f"Go on with offset={end}."} if end < page.total else result


def _path(query: _Query, page: _Page, name: str) -> str:
    """Return a path of the output as the model would write it."""
    if page.root != ".":
        return query.path
    name = name.removeprefix("./")
    return name if query.path == "." else f"{query.path.rstrip('/')}/{name}"


def _cut(text: str) -> str:
    text = text.removesuffix("\r")
    return text if len(text) <= MAX_LINE_CHARS else text[:MAX_LINE_CHARS] + _CUT_MARK


def _fitting(lines: list[_Line]) -> list[_Line]:
    """Return as many lines as a result may hold, at least one."""
    sizes = accumulate(len(line.path) + len(line.text) + 40 for line in lines)
    return lines[: max(1, sum(size <= MAX_PAGE_CHARS for size in sizes))]


def _shown(lines: list[_Line]) -> JsonObject:
    # the lines of a private key are known for what they are, and masked, where they stand together
    if len(lines) < DENSE_FROM and not any("PRIVATE KEY" in line.text for line in lines):
        return {"matches": [_shown_alone(line) for line in lines]}
    text = []
    for path, group in groupby(lines, key=lambda line: line.path):
        text += [path, *(f"  {line.number}{':' if line.is_match else '-'} {line.text}" for line in group)]
    return {"matches_text": "\n".join(text)}


def _shown_alone(line: _Line) -> JsonObject:
    entry: JsonObject = {"path": line.path, "line": line.number, "content": line.text}
    return entry if line.is_match else {**entry, "context": True}


async def _with_context(sandbox: Sandbox, query: _Query, found: list[_Line]) -> list[_Line]:
    """Return the matches with the lines around them, which are fetched from their files."""
    mark = f"--{secrets.token_hex(8)}"
    commands = []
    files = []
    for path, group in groupby(found, key=lambda line: line.path):
        matches = {line.number for line in group}
        numbers = sorted({near for n in matches for near in range(max(1, n - query.context), n + query.context + 1)})
        prints = "".join(f"{number}p;" for number in numbers)
        commands.append(
            f"echo {mark}; LC_ALL=C sed -n '{prints}{numbers[-1]}q' {shlex.quote(path)} "
            f"| LC_ALL=C cut -b 1-{_MAX_LINE_BYTES}"
        )
        files.append((path, matches, numbers))
    done = await sandbox.exec_plain(
        "\n".join([f"(p={shell_word(query.path)}", _ENTER, *commands, ") 2>/dev/null"]),
        timeout_seconds=TIMEOUT_SECONDS,
        max_output_chars=2 * MAX_CONTEXT_LINES * _MAX_LINE_BYTES,
    )
    blocks = done.output.split(f"{mark}\n")[1:]
    return [
        _Line(path, number, text, number in matches)
        for (path, matches, numbers), block in zip(files, blocks, strict=False)  # fewer where time ran out
        for number, text in zip(numbers, block.split("\n")[:-1], strict=False)  # fewer at the end of a file
    ]
