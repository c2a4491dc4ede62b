"""Text and JSON made safe: for UTF-8, for one line, for a log. Pure.

What comes from an endpoint or a dataset may hold lone surrogates, NULs, numbers JSON has not, or thousands of nested
brackets; behind these functions it does not.
"""

from __future__ import annotations

import json
import math
import unicodedata
from typing import Any, NoReturn

MAX_JSON_DEPTH = 64  # deeper values break encoders further down the road
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def clean_text(text: str) -> str:
    """Replace NULs and lone surrogates; paired surrogates become the character they stand for."""
    if "\0" in text:
        text = text.replace("\0", _REPLACEMENT)
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def clean_json(value: Any, depth: int = MAX_JSON_DEPTH) -> Any:
    """Return a JSON value with every text cleaned. Raises ValueError when it is nested deeper than ``depth``."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, (dict, list)) and depth == 0:
        raise ValueError("nested too deeply")
    if isinstance(value, dict):
        return {clean_text(key): clean_json(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [clean_json(item, depth - 1) for item in value]
    return value


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number in JSON")


def _finite_or_refuse(text: str) -> float:
    number = _finite(text)
    return _refuse(text) if number is None else number


# Raw control characters inside strings are let through, as many servers send them; NaN, Infinity and 1e999 become null.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(strict=False, parse_constant=lambda _: None, parse_float=_finite)
_STRICT_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse, parse_float=_finite_or_refuse)


def parse_json(text: str, *, strict_numbers: bool = False) -> Any:
    """Parse and clean JSON text. Raises ValueError (JSONDecodeError among them), whatever the text.

    With ``strict_numbers`` also for NaN, Infinity and numbers too large for a float.
    """
    try:
        value = (_STRICT_DECODER if strict_numbers else _DECODER).decode(text)
        return value if _is_plain(text) else clean_json(value)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise ValueError(number_problem(error)) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _is_plain(text: str) -> bool:
    """Tell, more quickly than by cleaning it, that there is nothing to clean in what a JSON text says."""
    return "\\u" not in text and text.count("[") + text.count("{") <= MAX_JSON_DEPTH and clean_text(text) == text


def number_problem(error: ValueError) -> str:
    """Return what is wrong with a number, in words for people; Python's own for long ones are for programmers."""
    text = str(error)
    return "a number with more digits than any reader takes" if "set_int_max_str_digits" in text else text


def dump_json(value: Any) -> str:
    """Return compact JSON text, in UTF-8 characters rather than escapes."""
    return _ENCODER.encode(value)


def is_blank(text: str) -> bool:
    """Tell whether a text shows nothing: white space, and characters without width (U+200B, U+FEFF and their like)."""
    return all(char.isspace() or unicodedata.category(char) == "Cf" for char in text)


def shown_name(name: str, max_chars: int) -> str:
    """Return a name that a model made up as people can read it, a missing one too."""
    return one_line(name, max_chars) or "(no name)"


def one_line(text: str, max_chars: int) -> str:
    """Return a text as one printable line of at most ``max_chars`` characters."""
    line = " ".join(text[: max_chars * 4].split())
    line = "".join(char if char.isprintable() else _REPLACEMENT for char in line)
    return line if len(line) <= max_chars else (line[: max(max_chars - 1, 0)].rstrip() + "…")[:max_chars]
