"""The batch files: what they are called, which there are, and how rows are appended to new ones.

A row is one write of one line. A write that fails half-way (the disk is full) is taken back, so that a torn line is
never joined to the next; where even that fails, nothing more is written. Files of earlier processes are never opened
for writing.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from rollout.files import RunDirError, explained, sync_folder
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
    unsynced: bool = False


class BatchWriter:
    """Appends rows to batches numbered ``first_batch`` and above; a bounded number of files is open."""

    def __init__(self, folder: Path, first_batch: int) -> None:
        self._folder = folder
        self._first_batch = first_batch
        self._open: OrderedDict[int, _OpenBatch] = OrderedDict()
        self._new_names = False
        self._broken = ""

    def append(self, batch_num: int, line: bytes) -> None:
        """Write one row, given with or without its newline; it is durable after ``sync``. Raises RunDirError."""
        line = line.removesuffix(b"\n")
        if b"\n" in line or not line:
            raise ValueError("a row is one line")
        with explained(f"write {self._folder / batch_name(batch_num)}"):
            self._refuse_if_broken()
            batch = self._batch(batch_num)
            self._write(batch, line + b"\n")

    def sync(self) -> None:
        """Make all rows durable. Raises RunDirError; then what was written since the last ``sync`` may be lost."""
        self._refuse_if_broken()
        with explained(f"save rows in {self._folder}"):
            for batch in self._open.values():
                self._sync_one(batch)
            if self._new_names:
                sync_folder(self._folder)
                self._new_names = False

    def finish(self, batch_num: int) -> None:
        """Close a batch's file: no more rows of it are expected. Raises RunDirError."""
        if batch := self._open.pop(batch_num, None):
            self._close_one(batch)

    def close(self) -> None:
        """Make all rows durable, unless that has failed already, and close all files. Raises RunDirError."""
        try:
            if not self._broken:
                self.sync()
        finally:
            while self._open:
                os.close(self._open.popitem()[1].handle)

    def _batch(self, batch_num: int) -> _OpenBatch:
        if batch_num < self._first_batch:
            raise ValueError(f"batch {batch_num} belongs to an earlier process")
        if batch_num in self._open:
            self._open.move_to_end(batch_num)
            return self._open[batch_num]
        if len(self._open) >= _MAX_OPEN:
            self._close_one(self._open.popitem(last=False)[1])
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        handle = os.open(self._folder / batch_name(batch_num), flags, 0o644)
        batch = self._open[batch_num] = _OpenBatch(handle, os.fstat(handle).st_size)
        self._new_names |= batch.length == 0
        return batch

    def _write(self, batch: _OpenBatch, data: bytes) -> None:
        try:
            written = os.write(batch.handle, data)
            while written < len(data):
                written += os.write(batch.handle, data[written:])
        except OSError as error:
            try:
                os.ftruncate(batch.handle, batch.length)
            except OSError:
                self._broken = str(error.strerror)
            raise
        batch.length += len(data)
        batch.unsynced = True

    def _sync_one(self, batch: _OpenBatch) -> None:
        if batch.unsynced:
            try:
                os.fsync(batch.handle)
            except OSError as error:
                self._broken = str(error.strerror)  # the kernel tells it once, then forgets what it could not save
                raise
            batch.unsynced = False

    def _close_one(self, batch: _OpenBatch) -> None:
        with explained(f"save rows in {self._folder}"):
            try:
                if not self._broken:
                    self._sync_one(batch)
            finally:
                os.close(batch.handle)

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise RunDirError(f"nothing more is written to {self._folder}: {self._broken}")
