"""trajectories.jsonl: the rows that count, in prompt order, one a sample, in one pass over the batch files.

Every row is read and parsed once, also those that do not count any more, and shown to whoever counts; lines that are
kept are copied as they are. Memory does not grow with the run's text. What a row must be like is left to the caller.
"""

from __future__ import annotations

import os
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, Self

from rollout.batch_files import batch_name
from rollout.files import RunDirError, explained, open_to_read, replaced
from rollout.jsonl import JsonObject, Problems, parse_object, parse_strictly
from rollout.resume import Match
from rollout.row_index import RowIndex
from rollout.rows import encode_row

TRAJECTORIES = "trajectories.jsonl"
# "superseded": a later row of the sample counts, or it is a failure of a sample that the dataset no longer has.
Fate = Literal["kept", "filtered", "discarded", "failed", "superseded"]
_INDEX_IN_FRONT = re.compile(rb'\{\s*"prompt_index"\s*:\s*(-?\d+)(?=\s*[,}])')
_MAX_OPEN = 64


@dataclass(frozen=True)
class MergeRules:
    """What the merge asks of each row, which it shows with the prompt_index that its sample has today."""

    drop_reason: Callable[[JsonObject], str]  # why a finished row is filtered, "kind" or "kind: details"; "" = kept
    count: Callable[[JsonObject, Fate], None]  # called once for every row of the batch files
    complete: Callable[[JsonObject], bool] = lambda _row: False  # mends a row of another writer in place; True = it did


@dataclass
class MergeReport:
    """What became of the rows."""

    fates: Counter[Fate] = field(default_factory=Counter)
    filtered: Counter[str] = field(default_factory=Counter)  # by kind
    filtered_rows: Problems = field(default_factory=Problems)  # which, and why
    orphans: int = 0  # done, but the dataset no longer has their samples: they stay in the batch files


def merge_rows(folder: Path, rows: RowIndex, match: Match, rules: MergeRules) -> MergeReport:
    """Write ``folder``/trajectories.jsonl anew. Raises RunDirError; the old file then stays."""
    report = MergeReport(orphans=len(match.orphans))
    superseded = bytearray(b"\1") * len(rows)
    with replaced(folder / TRAJECTORIES) as target, RowReader(folder, rows) as reader:
        for row, index in match.in_prompt_order():
            superseded[row] = 0
            line, values = _with_index(*reader.read(row), index)
            if rules.complete(values):
                line = encode_row(values)
            fate, reason = _fate(rows, row, rules.drop_reason(values))
            if fate == "kept":
                target.write(line)
            elif fate == "filtered":
                report.filtered[reason.partition(":")[0]] += 1
                report.filtered_rows.add(f"sample {index} in {batch_name(rows.batches[row])}: {reason}")
            report.fates[fate] += 1
            rules.count(values, fate)
        for row, left_over in enumerate(superseded):
            if left_over:
                report.fates["superseded"] += 1
                rules.count(reader.read(row)[1], "superseded")
    return report


def _fate(rows: RowIndex, row: int, drop_reason: str) -> tuple[Fate, str]:
    outcome = rows.outcome(row)
    if outcome in ("failed", "discarded"):
        return outcome, ""
    return ("filtered", drop_reason) if drop_reason else ("kept", "")


def _with_index(line: bytes, values: JsonObject, index: int) -> tuple[bytes, JsonObject]:
    """Return the row with this prompt_index in it: what it answers may stand elsewhere in today's dataset."""
    if type(recorded := values.get("prompt_index")) is int and recorded == index:  # true and 1.0 equal 1
        return line, values
    values = {**values, "prompt_index": index}
    if found := _INDEX_IN_FRONT.match(line):
        return b"%b%d%b" % (line[: found.start(1)], index, line[found.end(1) :]), values
    return encode_row(values), values


class RowReader:
    """Reads rows of batch files at random, with a bounded number of files open."""

    def __init__(self, folder: Path, rows: RowIndex) -> None:
        self._folder = folder
        self._rows = rows
        self._doing = f"read the rows in {folder}"
        self._files: OrderedDict[int, BinaryIO] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def read(self, row: int) -> tuple[bytes, JsonObject]:
        """Return the row's line, with a newline and valid as strict JSON, and its values. Raises RunDirError."""
        line = self.line(row)
        try:
            return line + b"\n", parse_strictly(line)
        except ValueError:
            values = self._parse_patiently(line, self._rows.batches[row])
        return encode_row(values), values

    def line(self, row: int) -> bytes:
        """Return the row as it stands in its file, without a newline. Raises RunDirError."""
        batch_num, length = self._rows.batches[row], self._rows.lengths[row]
        with explained(self._doing):
            line = os.pread(self._file(batch_num).fileno(), length, self._rows.offsets[row])
        if len(line) < length:
            raise _changed(self._folder / batch_name(batch_num))
        return line

    def _parse_patiently(self, line: bytes, batch_num: int) -> JsonObject:
        try:
            return parse_object(line)
        except ValueError:
            raise _changed(self._folder / batch_name(batch_num)) from None

    def _file(self, batch_num: int) -> BinaryIO:
        if batch_num in self._files:
            self._files.move_to_end(batch_num)
            return self._files[batch_num]
        if len(self._files) >= _MAX_OPEN:
            self._files.popitem(last=False)[1].close()
        file = self._files[batch_num] = open_to_read(self._folder / batch_name(batch_num), buffer_bytes=0)
        return file


def _changed(path: Path) -> RunDirError:
    return RunDirError(f"{path} was changed while the run was reading it; run again with --resume")
