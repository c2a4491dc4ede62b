"""Lines of JSON as people leave them on disk: read one at a time, told by number when they are bad.

Reading is bounded: a line longer than ``MAX_LINE_BYTES`` is given out cut, so that it parses as nothing, and the rest
of it is passed over. What a parsed object means is left to the reader.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from pydantic_core import from_json

from rollout.texts import clean_json, number_problem

JsonObject = dict[str, Any]
MAX_LINE_BYTES = 1 << 29
_MAX_DEPTH = 200  # the fast parser's own limit


@dataclass
class Problems:
    """What was wrong, a line of text each: all are counted, the first hundred are remembered."""

    count: int = 0
    first: list[str] = field(default_factory=list)
    remembered: int = 100

    def add(self, text: str) -> None:
        """Count one more."""
        self.count += 1
        if len(self.first) < self.remembered:
            self.first.append(text)

    def extend(self, more: Problems) -> None:
        """Add those that were found elsewhere."""
        self.count += more.count
        self.first += more.first[: self.remembered - len(self.first)]

    def lines(self) -> list[str]:
        """Return what to show: the remembered ones, and how many more there were."""
        more = self.count - len(self.first)
        return [*self.first, f"... and {more:,} more"] if more else list(self.first)


def read_lines(file: BinaryIO, max_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, int, bytes]]:
    """Yield (line number from 1, byte offset, the line with its newline) from the file's start on."""
    number = offset = 0
    while line := file.readline(max_bytes):
        number += 1
        yield number, offset, line
        offset += len(line)
        while len(line) == max_bytes and not line.endswith(b"\n"):
            line = file.readline(max_bytes)
            offset += len(line)


def parse_strictly(line: bytes) -> Any:
    """Return the value of a line that every JSON parser takes. Raises ValueError."""
    return from_json(line, allow_inf_nan=False, cache_strings="keys")


def parse_object(line: bytes) -> JsonObject:
    """Return the JSON object on a line. Raises ValueError with a few words that say what is wrong with it."""
    try:
        value = parse_strictly(line)
    except ValueError:
        value = _parse_patiently(line)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - one error for all that can be wrong with a line
    return value


def _parse_patiently(line: bytes) -> Any:
    """Take what Python's parser takes besides: lone surrogates (replaced), NaN, a byte order mark."""
    try:
        return clean_json(json.loads(line.decode("utf-8-sig")), _MAX_DEPTH)
    except UnicodeDecodeError:
        raise ValueError("not valid UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg}, column {error.colno})") from None
    except ValueError as error:
        raise ValueError(number_problem(error)) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
