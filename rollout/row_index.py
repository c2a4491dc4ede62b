"""Where each row is and what it answers, in some sixty bytes a row; row_scan.py fills it.

Rows of the original runner are understood: a failed sample's, a tombstone ({prompt_index, discarded, prompt}), rows
that do not say where they ran. A row of ours whose fields have other types than ours have is junk like any other.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import get_args

from rollout.budget import row_spending
from rollout.content import Keys, row_key
from rollout.jsonl import JsonObject, Problems
from rollout.row_types import wrong_field
from rollout.rows import Outcome, outcome

NO_INDEX = -1  # of a row that does not say its prompt_index
_OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
_CODES = {name: code for code, name in enumerate(_OUTCOMES)}


@dataclass
class RowIndex:
    """All well-formed rows, in the order of batch numbers and of lines. Rows are named by their place here, from 0."""

    batches: array[int] = field(default_factory=lambda: array("q"))
    offsets: array[int] = field(default_factory=lambda: array("q"))  # of the row's first byte in its file
    lengths: array[int] = field(default_factory=lambda: array("q"))  # bytes, without white space at the end
    indices: array[int] = field(default_factory=lambda: array("q"))  # prompt_index as recorded, or NO_INDEX
    keys: Keys = field(default_factory=Keys)  # what the row answers
    codes: bytearray = field(default_factory=bytearray)
    problems: Problems = field(default_factory=Problems)
    cost_usd: float = 0.0  # of all rows
    tokens: int = 0

    def __len__(self) -> int:
        return len(self.batches)

    def outcome(self, row: int) -> Outcome:
        """Return how the row's rollout ended."""
        return _OUTCOMES[self.codes[row]]

    def failed(self, row: int) -> bool:
        """Tell whether the row records a failure, so that its sample is not done by it."""
        return self.codes[row] == _CODES["failed"]

    def outcomes(self) -> Iterator[tuple[int, Outcome]]:
        """Yield (batch number, outcome) of every row."""
        for batch, code in zip(self.batches, self.codes, strict=True):
            yield batch, _OUTCOMES[code]

    def add(self, place: tuple[int, int, int], row: JsonObject) -> None:
        """Add a row at (batch, offset, length). Raises ValueError with the reason when it is no row."""
        if wrong := wrong_field(row):
            raise ValueError(f'"{wrong}" is not what it is in a row of this program')
        key = row_key(row)
        index = row.get("prompt_index")
        batch, offset, length = place
        self.batches.append(batch)
        self.offsets.append(offset)
        self.lengths.append(length)
        self.indices.append(index if type(index) is int and 0 <= index < 1 << 63 else NO_INDEX)
        self.keys.append(key)
        self.codes.append(_CODES[outcome(row)])
        cost_usd, tokens = row_spending(row)
        self.cost_usd += cost_usd
        self.tokens += tokens

    def extend(self, later: RowIndex) -> None:
        """Add all rows of an index of later batches, and what was wrong in them."""
        for own, more in (
            (self.batches, later.batches),
            (self.offsets, later.offsets),
            (self.lengths, later.lengths),
            (self.indices, later.indices),
        ):
            own.extend(more)
        self.keys.extend(later.keys)
        self.codes.extend(later.codes)
        self.problems.extend(later.problems)
        self.cost_usd += later.cost_usd
        self.tokens += later.tokens
