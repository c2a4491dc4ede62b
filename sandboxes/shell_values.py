"""What words of a shell come to where that can be told from the text alone."""

from __future__ import annotations

import re

UNKNOWN = "\0"  # the part of a word that only running the command would tell
MAX_BRACE_WORDS = 64

_BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")
_ANSI_ESCAPE = re.compile(r"\\(?:x[0-9A-Fa-f]{1,2}|[0-7]{1,3}|u[0-9A-Fa-f]{1,4}|.)", re.DOTALL)


def written(words: list[str]) -> str:
    """Return what a command writes, "" when that cannot be told: echo, printf, and programs that look up a name."""
    name, arguments = words[0].rpartition("/")[2], words[1:]
    while arguments and name != "printf" and re.fullmatch(r"-[A-Za-z]+", arguments[0]):
        arguments = arguments[1:]
    if name == "printf" and len(arguments) > 1 and "%" in arguments[0]:
        arguments = arguments[1:]
    if name in ("echo", "printf"):
        return " ".join(arguments).replace("\\n", "\n")
    return arguments[-1] if name in ("which", "command", "type") and arguments else ""


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


def braces_expanded(word: str) -> list[str]:
    """Return the words that braces make of one; quotes are not regarded."""
    words = [word]
    while len(words) < MAX_BRACE_WORDS and (match := next((m for m in map(_BRACES.search, words) if m), None)):
        index = next(i for i, item in enumerate(words) if item == match.string)
        before, after = match.string[: match.start()], match.string[match.end() :]
        words[index : index + 1] = [before + choice + after for choice in match[1].split(",")]
    return words
