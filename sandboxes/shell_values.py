"""What words of a shell come to where that can be told from the text alone."""

from __future__ import annotations

import fnmatch
import re

from sandboxes.guard_rules import has_flag, operands

UNKNOWN = "\0"  # the part of a word that only running the command would tell
UNSET = UNKNOWN + "\1"  # the same, of a variable that nothing seen has set: most likely nothing
MAX_BRACE_WORDS = 64
MAX_CUT_CHARS = 300  # of a value; a longer one counts as whole, whatever an expansion leaves of it

_BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")
_ONE_OF = re.compile("\2([^\2\4]*)\4")  # values that a variable takes in turn
_ANSI_ESCAPE = re.compile(r"\\(?:x[0-9A-Fa-f]{1,2}|[0-7]{1,3}|u[0-9A-Fa-f]{1,4}|.)", re.DOTALL)


def written(words: list[str]) -> str:
    """Return what a command writes, "" when that cannot be told: echo, printf, ls, and programs that look up a name."""
    name, arguments = words[0].rpartition("/")[2], words[1:]
    if name == "ls":
        return " ".join(operands(arguments)) if has_flag(arguments, "d", "--directory") else "*"
    while arguments and name != "printf" and re.fullmatch(r"-[A-Za-z]+", arguments[0]):
        arguments = arguments[1:]
    if name == "printf" and len(arguments) > 1 and "%" in arguments[0]:
        arguments = arguments[1:]
    if name in ("echo", "printf"):
        return " ".join(arguments).replace("\\n", "\n")
    return arguments[-1] if name in ("which", "command", "type") and arguments else ""


def cut(value: str, operation: str) -> str:
    """Return what ``${name%pattern}``, ``#`` or ``:from:length`` leave of a value: all, where that is not clear."""
    if "\2" in value:
        return one_of([cut(item, operation) for item in alternatives(value)])
    if UNKNOWN in value or len(value) > MAX_CUT_CHARS:
        return value
    if part := re.fullmatch(r":\s*(\d{1,3})(?::\s*(\d{1,3}))?", operation):
        start = int(part[1])
        return value[start : start + int(part[2] or MAX_CUT_CHARS)]
    sign = next((sign for sign in ("%%", "##", "%", "#") if operation.startswith(sign)), "")
    pattern, most, places = operation.removeprefix(sign), len(sign) > 1, range(len(value) + 1)
    if "%" in sign:
        ends = [at for at in places if fnmatch.fnmatchcase(value[at:], pattern)]
        return value[: (min if most else max)(ends, default=len(value))]
    if "#" in sign:
        starts = [at for at in places if fnmatch.fnmatchcase(value[:at], pattern)]
        return value[(max if most else min)(starts, default=0) :]
    return value


def closing(text: str, position: int, pair: str) -> int:
    """Return where what opens at or after a position is closed, the text's length when it is not."""
    depth = 0
    for index in range(position, len(text)):
        depth += {pair[0]: 1, pair[1]: -1}.get(text[index], 0)
        if depth == 0 and index > position:
            return index
    return len(text)


def ansi_unquoted(text: str) -> str:
    """Return what stands between the quotes of ``$'…'``."""
    return _ANSI_ESCAPE.sub(_ansi, text)


def _ansi(match: re.Match[str]) -> str:
    code = match[0][1:]
    if code[0] in "xu" and len(code) > 1:
        return chr(int(code[1:], 16))
    if code[0] in "01234567":
        return chr(int(code, 8) & 0xFF)
    return {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\033", "f": "\f", "v": "\v"}.get(code, code)


def one_of(values: list[str]) -> str:
    """Return a value that stands for several: those of a loop's variable, or of an array."""
    if len(values) < len(("one", "other")):
        return "".join(values)
    return "\2" + "\3".join(value[1:-1] if _ONE_OF.fullmatch(value) else value for value in values) + "\4"


def alternatives(word: str) -> list[str]:
    """Return the words that a word stands for."""
    return _multiplied(word, _ONE_OF, "\3") if "\2" in word else [word]


def fields_of(value: str) -> list[str]:
    """Return the pieces that an unquoted expansion falls into; the first and last join what they touch."""
    if "\2" in value:
        return [re.sub(r"[ \t\n]+", "\3", value)]
    return re.split(r"[ \t\n]+", value)


def braces_expanded(word: str) -> list[str]:
    """Return the words that braces make of one; quotes are not regarded."""
    return _multiplied(word, _BRACES, ",")


def _multiplied(word: str, pattern: re.Pattern[str], separator: str) -> list[str]:
    words = [word]
    while len(words) < MAX_BRACE_WORDS and (match := next((m for m in map(pattern.search, words) if m), None)):
        index = next(i for i, item in enumerate(words) if item == match.string)
        before, after = match.string[: match.start()], match.string[match.end() :]
        words[index : index + 1] = [before + choice + after for choice in match[1].split(separator)]
    return words
