"""Which row is whose: samples are matched to recorded rows by what they ask, and by count. Pure.

A sample is done when its last row is not a failure. Rows that answer the same question under the same prompt_index are
one sample's, and the last of them counts; under different ones they are different samples'. So three equal prompts of
which one is done leave two, wherever the lines of the dataset have moved to. Where several rows fit, the one with the
sample's own index wins. A row that does not say its image and cwd (the original's) fits any, after those that do. Of a
run that has but a shard of the dataset, only the shard's samples are looked at.

Memory: 9 bytes a sample; and for the time of the call about 80 for each row that is not found under its own index, and
for each sample it may then belong to.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress

from rollout.content import ANYWHERE, KEY_BYTES, PROMPT_BYTES, Keys, same_content
from rollout.row_index import RowIndex

NO_ROW = -1
_NUMBER_BYTES = 8
# Who chooses first: (failed, anywhere). The choosy before the easy to please, results before failures.
_CLAIM_ORDER = ((False, False), (False, True), (True, False), (True, True))


@dataclass(frozen=True)
class Match:
    """The dataset of today against the rows of all legs."""

    final_rows: array[int]  # per sample: the row that counts for it, or NO_ROW
    done: bytearray  # per sample: 1 when that row is not a failure
    orphans: array[int]  # rows that are done and answer no sample of the run, ascending
    samples: range  # those of the dataset that are the run's

    def done_indices(self) -> list[int]:
        """Return the samples that are done, ascending."""
        return list(compress(range(len(self.done)), self.done))

    def pending(self) -> array[int]:
        """Return the samples still to run, ascending."""
        return array("q", (index for index in self.samples if not self.done[index]))

    @property
    def not_run(self) -> int:
        """Samples that have no row yet."""
        return sum(self.final_rows[index] == NO_ROW for index in self.samples)

    def in_prompt_order(self) -> Iterator[tuple[int, int]]:
        """Yield (row, index) of every sample that has a row, one each."""
        return ((row, index) for index, row in enumerate(self.final_rows) if row != NO_ROW)


def match_rows(keys: Keys, rows: RowIndex, samples: range | None = None) -> Match:
    """Give every sample the row that counts for it. ``samples``: those of the dataset that are the run's, else all."""
    samples = range(len(keys)) if samples is None else samples
    matcher = _Matcher(keys, rows, samples)
    orphans = array("q")
    groups: dict[tuple[bool, bool], list[bytes]] = {(failed, anywhere): [] for failed, anywhere in _CLAIM_ORDER}
    for claim in matcher.match_at_own_index():
        groups[rows.failed(_row_of(claim)), claim[PROMPT_BYTES:KEY_BYTES] == ANYWHERE].append(claim)
    for failed, anywhere in _CLAIM_ORDER:
        moved = matcher.match_by_index(groups[failed, anywhere])
        homeless = matcher.match_anywhere(moved, PROMPT_BYTES if anywhere else KEY_BYTES)
        if not failed:
            orphans.extend(map(_row_of, homeless))
    done = bytearray(row != NO_ROW and not rows.failed(row) for row in matcher.final_rows)
    return Match(matcher.final_rows, done, array("q", sorted(orphans)), samples)


class _Matcher:
    """Fills ``final_rows``. A claim is a row that looks for a sample: the bytes key + index + row, which sort."""

    def __init__(self, keys: Keys, rows: RowIndex, samples: range) -> None:
        self.keys = keys
        self.rows = rows
        self.samples = samples
        self.final_rows = array("q", [NO_ROW]) * len(keys)

    def match_at_own_index(self) -> list[bytes]:
        """Match rows that say all they answer and stand where they stood; return other claims, sorted."""
        displaced = array("q")
        for row, index in enumerate(self.rows.indices):
            if index in self.samples and self.rows.keys[row] == self.keys[index]:
                self.final_rows[index] = row
            else:
                displaced.append(row)
        return list(self._last_of_each(sorted(map(self._claim, displaced))))

    def match_by_index(self, claims: list[bytes]) -> list[bytes]:
        """Match claims whose own index is a fitting sample that is free for them; return the rest."""
        rest = []
        for claim in claims:
            row = _row_of(claim)
            index = self.rows.indices[row]
            fits = index in self.samples and same_content(self.rows.keys[row], self.keys[index])
            if fits and self._free_for(row, index):
                self.final_rows[index] = row
            else:
                rest.append(claim)
        return rest

    def match_anywhere(self, claims: list[bytes], width: int) -> list[bytes]:
        """Match sorted claims to any free sample whose key begins with the same ``width`` bytes; return the rest."""
        if not claims:
            return []
        failed = self.rows.failed(_row_of(claims[0]))
        rest = []
        free = sorted(
            self.keys[index][:width] + index.to_bytes(_NUMBER_BYTES, "big")
            for index in self.samples
            if self._is_free(index, failed=failed)
        )
        place = 0
        for claim in claims:
            place = bisect_left(free, claim[:width], place)
            if place < len(free) and free[place][:width] == claim[:width]:
                self.final_rows[int.from_bytes(free[place][width:], "big")] = _row_of(claim)
                place += 1
            else:
                rest.append(claim)
        return rest

    def _free_for(self, row: int, index: int) -> bool:
        return self._is_free(index, failed=self.rows.failed(row))

    def _is_free(self, index: int, *, failed: bool) -> bool:
        """Tell whether the place is empty, or held by a failure and wanted by a row that is done."""
        held = self.final_rows[index]
        return held == NO_ROW or (not failed and self.rows.failed(held))

    def _claim(self, row: int) -> bytes:
        index = self.rows.indices[row] + 1  # NO_INDEX becomes 0
        return self.rows.keys[row] + index.to_bytes(_NUMBER_BYTES, "big") + row.to_bytes(_NUMBER_BYTES, "big")

    @staticmethod
    def _last_of_each(claims: list[bytes]) -> Iterator[bytes]:
        """Of sorted claims, yield the last one for each key and index, and every one that has no index."""
        for number, claim in enumerate(claims):
            one_sample = slice(0, KEY_BYTES + _NUMBER_BYTES)
            unindexed = not any(claim[KEY_BYTES : KEY_BYTES + _NUMBER_BYTES])
            if unindexed or number + 1 == len(claims) or claims[number + 1][one_sample] != claim[one_sample]:
                yield claim


def _row_of(claim: bytes) -> int:
    return int.from_bytes(claim[-_NUMBER_BYTES:], "big")
