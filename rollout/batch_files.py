"""The batch files: what they are called, which there are, and how rows are appended to new ones.

A row is one write of one line. A write that fails half-way (the disk is full) is taken back, so that a torn line is
never joined to the next; where even that fails, nothing more is written. Rows that could not be saved are kept, for
another try. Files of earlier processes are never opened for writing.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rollout.files import NO_ROOM, DiskFullError, RunDirError, explained, sync_folder
from rollout.jsonl import Problems

BATCH_NUMBERS = re.compile("0|[1-9][0-9]{0,17}")  # they fit 64 bits
_BATCH_NAME = re.compile(rf"batch_({BATCH_NUMBERS.pattern})\.jsonl")
_MAX_OPEN = 64


def batch_name(batch_num: int) -> str:
    """Return the name of a batch's file."""
    return f"batch_{batch_num}.jsonl"


def batch_numbers(folder: Path, problems: Problems) -> list[int]:
    """Return the numbers of the batch files there are, ascending; tell of names that look like one and are none.

    Raises RunDirError.
    """
    numbers = []
    with explained(f"read {folder}"), os.scandir(folder) as entries:
        for entry in entries:
            named = _BATCH_NAME.fullmatch(entry.name)
            if named and _is_file(entry):
                numbers.append(int(named[1]))
            elif entry.name.startswith("batch_"):
                problems.add(f"{folder / entry.name}: not a batch file (batch_N.jsonl); ignored")
    return sorted(numbers)


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link that leads round in a circle, or where nothing can be seen
        return False


def highest_number(folder: Path) -> int:
    """Return the highest batch number in use by whatever has such a name; -1 when none has. Raises RunDirError."""
    with explained(f"read {folder}"):
        names = [_BATCH_NAME.fullmatch(path.name) for path in folder.iterdir()]
        return max((int(named[1]) for named in names if named), default=-1)


@dataclass
class _OpenBatch:
    handle: int
    length: int  # bytes of whole rows
    durable: int  # the same, of those that a sync has saved
    unsynced: list[bytes] = field(default_factory=list)  # the rows between


class BatchWriter:
    """Appends rows to batches numbered ``first_batch`` and above; a bounded number of files is open."""

    def __init__(self, folder: Path, first_batch: int) -> None:
        self._folder = folder
        self._first_batch = first_batch
        self._waiting: dict[int, list[bytes]] = {}  # lines to be written, by batch
        self._open: OrderedDict[int, _OpenBatch] = OrderedDict()
        self._new_names = False
        self._broken: OSError | None = None

    def append(self, batch_num: int, line: bytes) -> None:
        """Take one row, given with or without its newline; ``sync`` writes it."""
        line = line.removesuffix(b"\n")
        if b"\n" in line or not line:
            raise ValueError("a row is one line")
        if batch_num < self._first_batch:
            raise ValueError(f"batch {batch_num} belongs to an earlier process")
        self._waiting.setdefault(batch_num, []).append(line + b"\n")

    def sync(self) -> None:
        """Make all rows durable. Raises RunDirError when that fails for some, after trying all.

        Those it failed for are tried again by the next ``sync``; that helps after a DiskFullError.
        """
        self._refuse_if_broken()
        failures: list[RunDirError] = []
        for batch_num in list(self._waiting):
            with _kept(failures), explained(f"write {self._folder / batch_name(batch_num)}"):
                self._write(batch_num)
        for batch_num, batch in self._open.items():
            with _kept(failures), explained(f"save rows in {self._folder}"):
                self._sync_one(batch_num, batch)
        if self._new_names:
            with _kept(failures), explained(f"save rows in {self._folder}"):
                sync_folder(self._folder)
                self._new_names = False
        if failures:
            raise min(failures, key=lambda failure: isinstance(failure, DiskFullError))  # what waiting does not mend

    def finish(self, batch_num: int) -> None:
        """Close a batch's file: no more rows of it are expected. Raises RunDirError."""
        if batch_num in self._waiting:
            self.sync()
        if batch := self._open.pop(batch_num, None):
            with explained(f"save rows in {self._folder}"):
                self._close_one(batch_num, batch)

    def close(self) -> None:
        """Make all rows durable, unless that has failed for good, and close all files. Raises RunDirError."""
        try:
            if not self._broken:
                self.sync()
        finally:
            while self._open:
                os.close(self._open.popitem()[1].handle)

    def _batch(self, batch_num: int) -> _OpenBatch:
        if batch_num in self._open:
            self._open.move_to_end(batch_num)
            return self._open[batch_num]
        if len(self._open) >= _MAX_OPEN:
            self._close_one(*self._open.popitem(last=False))
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        handle = os.open(self._folder / batch_name(batch_num), flags, 0o644)
        length = os.fstat(handle).st_size
        batch = self._open[batch_num] = _OpenBatch(handle, length, length)
        self._new_names |= length == 0
        return batch

    def _write(self, batch_num: int) -> None:
        """Write what waits for this batch; what cannot be written goes on waiting. Raises OSError."""
        batch = self._batch(batch_num)
        failure: OSError | None = None
        for line in self._waiting.pop(batch_num):
            try:
                self._write_row(batch, line)
            except OSError as error:
                failure = failure or error
                self._waiting.setdefault(batch_num, []).append(line)
        if failure:
            raise failure

    def _write_row(self, batch: _OpenBatch, line: bytes) -> None:
        if self._broken:
            raise self._broken
        try:
            written = os.write(batch.handle, line)
            while written < len(line):
                written += os.write(batch.handle, line[written:])
        except OSError:
            self._cut(batch, batch.length)
            raise
        batch.length += len(line)
        batch.unsynced.append(line)

    def _sync_one(self, batch_num: int, batch: _OpenBatch) -> None:
        """Save a batch's rows. Raises OSError: the kernel tells it once, then forgets what it could not save."""
        if not batch.unsynced:
            return
        try:
            os.fsync(batch.handle)
        except OSError as error:
            if error.errno in NO_ROOM:
                self._cut(batch, batch.durable)
                self._waiting[batch_num] = batch.unsynced + self._waiting.get(batch_num, [])
                batch.unsynced = []
            else:
                self._broken = error
            raise
        batch.durable = batch.length
        batch.unsynced = []

    def _cut(self, batch: _OpenBatch, length: int) -> None:
        """Take back what was written beyond this length."""
        try:
            os.ftruncate(batch.handle, length)
            batch.length = length
        except OSError as error:
            self._broken = error

    def _close_one(self, batch_num: int, batch: _OpenBatch) -> None:
        try:
            if not self._broken:
                self._sync_one(batch_num, batch)
        finally:
            os.close(batch.handle)

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise RunDirError(f"nothing more is written to {self._folder}: {self._broken.strerror}")


@contextmanager
def _kept(failures: list[RunDirError]) -> Iterator[None]:
    """Keep what goes wrong, and go on."""
    try:
        yield
    except RunDirError as failure:
        failures.append(failure)
