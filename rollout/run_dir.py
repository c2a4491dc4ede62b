"""The folder of a run, ``data/<run_name>/``: every file of it is written here, by one process.

* ``batch_N.jsonl``: every outcome, one row each, durable after ``sync``; the only source of truth (batch_files.py).
* ``checkpoint.json``: progress, replaced as it grows; can be made again from the batch files (checkpoint.py).
* ``trajectories.jsonl``, ``statistics.json``: made anew from the batch files at the end (merge.py).
* ``run.log``: for bug reports; whoever logs opens it.

Batches of an earlier process are never written to: new ones are numbered above them. What rows mean is left to rows.py,
which sample they belong to to resume.py.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rollout.batch_files import BatchWriter, batch_name, batch_numbers, highest_number
from rollout.checkpoint import Checkpoint, DatasetFacts, Past, load_past
from rollout.files import (
    RunDirError,
    explained,
    refuse_irregular,
    refuse_irreplaceable,
    replaced,
    sweep,
    sync_folder,
)
from rollout.jsonl import JsonObject, Problems
from rollout.merge import TRAJECTORIES, MergeReport, MergeRules, merge_rows
from rollout.resume import Match
from rollout.row_index import RowIndex
from rollout.row_scan import scan_later_rows, scan_rows
from rollout.run_lock import LOCK_FILES, RunLock

__all__ = ["DATA", "RunDir", "RunDirError", "check_run"]

DATA = Path("data")
CHECKPOINT = "checkpoint.json"
STATISTICS = "statistics.json"
LOG = "run.log"
_MAX_NAME_BYTES = 255


def check_run(run_name: str, *, resume: bool, data: Path = DATA) -> Path:
    """Return the run's folder, after checking that it may be used; nothing is touched.

    Raises RunDirError: on a name that is not one path component, on a folder that is a link to another or that another
    process has, on a folder, pipe or the like in the place of one of its files, which the run could only stumble over
    later, and, without ``resume``, on a folder that holds rows.
    """
    folder = data / _checked_name(run_name)
    with explained(f"use {folder}"):
        if folder.is_symlink():
            raise RunDirError(f"{folder} is a link that may lead out of {data}/: choose another run_name")
        for path in (data, folder):
            if os.path.lexists(path) and not path.is_dir():
                raise RunDirError(f"{path} is not a folder: move it away, or choose another run_name")
        if folder.exists():
            for name in (*LOCK_FILES, LOG):
                refuse_irregular(folder / name)
            for name in (CHECKPOINT, TRAJECTORIES, STATISTICS):
                refuse_irreplaceable(folder / name)
            if RunLock.held(folder):
                RunLock.acquire(folder).release()  # tells who holds it
            if not resume:
                _refuse_rows(folder)
    return folder


@dataclass
class RunDir:
    """A run's folder while this process owns it. Use as a context manager, or close it."""

    path: Path
    run_name: str
    past: Past  # what an earlier checkpoint tells; empty when there is none
    first_batch: int  # the lowest number for a batch of this process: above all that were ever used
    warnings: list[str]
    _lock: RunLock
    _writer: BatchWriter

    @classmethod
    def open(cls, run_name: str, *, resume: bool, data: Path = DATA) -> RunDir:
        """Make the folder where it is missing, and take it over.

        Raises RunDirError as ``check_run`` does, and when another process has it or it cannot be written to.
        """
        folder = check_run(run_name, resume=resume, data=data)
        with ExitStack() as on_error:
            _make_folder(folder)
            lock = RunLock.acquire(folder)
            on_error.callback(lock.release)
            if not resume:
                _refuse_rows(folder)  # again: a process may have ended since they were looked for
            with explained(f"write to {folder}"):
                sweep(folder)
            past = load_past(folder / CHECKPOINT, run_name) if resume else Past()
            first_batch = max([highest_number(folder), *past.batch_stats]) + 1
            warnings = [warning for warning in (lock.warning, past.warning) if warning]
            on_error.pop_all()
        return cls(folder, run_name, past, first_batch, warnings, lock, BatchWriter(folder, first_batch))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the batch files and give the folder free. Raises RunDirError when rows could not be saved."""
        try:
            self._writer.close()
        finally:
            self._lock.release()

    @property
    def log_path(self) -> Path:
        """Where tracebacks and versions go."""
        return self.path / LOG

    def append(self, batch_num: int, line: bytes) -> None:
        """Take one row, with or without its newline; it is written and durable after ``sync``."""
        self._writer.append(batch_num, line)

    def sync(self) -> None:
        """Make all appended rows durable: once for all that arrived together.

        Raises RunDirError when that fails for some, after trying all; after a DiskFullError it may be called again.
        """
        self._writer.sync()

    def finish_batch(self, batch_num: int) -> None:
        """Close the batch's file; all its rows are there. Raises RunDirError."""
        self._writer.finish(batch_num)

    def scan(self) -> RowIndex:
        """Read all batch files once. Raises RunDirError."""
        return scan_rows(self.path)

    def scan_own(self, rows: RowIndex) -> None:
        """Add what this process has written to what ``scan`` found before; once, at the end. Raises RunDirError."""
        scan_later_rows(self.path, self.first_batch, rows)

    def start_checkpoint(self, config: JsonObject, dataset: DatasetFacts, rows: RowIndex, match: Match) -> Checkpoint:
        """Return the checkpoint of this leg: all that is recorded already, nothing new. ``config`` has no secrets."""
        checkpoint = Checkpoint(self.run_name, config, dataset, self.past)
        checkpoint.take_over(rows, match)
        return checkpoint

    def save_checkpoint(self, checkpoint: Checkpoint, *, at_any_cost: bool = False) -> bool:
        """Save rows and then the checkpoint; False when it was put off because saving has cost too much so far.

        Raises RunDirError.
        """
        if not at_any_cost and not checkpoint.affordable():
            return False
        started = time.monotonic()
        self.sync()
        try:
            self.write_json(CHECKPOINT, checkpoint.to_json())
        finally:
            checkpoint.spent(time.monotonic() - started)
        return True

    def merge(self, rows: RowIndex, match: Match, rules: MergeRules) -> MergeReport:
        """Write trajectories.jsonl anew of all legs' rows. Raises RunDirError; the old file then stays."""
        return merge_rows(self.path, rows, match, rules)

    def write_json(self, name: str, value: Any, *, indent: int | None = None) -> None:
        """Replace a JSON file of the run at once. Raises RunDirError; the old file then stays."""
        with replaced(self.path / name) as file:
            text = json.dumps(value, ensure_ascii=False, indent=indent, allow_nan=False)
            file.write(text.encode(errors="replace") + b"\n")  # names of files need be no text


def _checked_name(run_name: str) -> str:
    """Raise RunDirError unless the name is one path component that a person can read and type."""
    if run_name in ("", ".", "..") or "/" in run_name or not run_name.isprintable() or run_name != run_name.strip():
        raise RunDirError(
            f"run_name {run_name!r} must be one folder name: no '/', no '..', no control characters, no space around it"
        )
    if len(run_name.encode()) > _MAX_NAME_BYTES:
        raise RunDirError(f"run_name {run_name[:20]!r}... is longer than {_MAX_NAME_BYTES} bytes")
    return run_name


def _refuse_rows(folder: Path) -> None:
    """Raise RunDirError when there is any row, be it in trajectories.jsonl alone: a fresh start would replace it."""
    files = [folder / batch_name(number) for number in batch_numbers(folder, Problems())]
    with explained(f"read {folder}"):
        if any(path.exists() and path.stat().st_size for path in [*files, folder / TRAJECTORIES]):
            raise RunDirError(f"{folder} holds rows of an earlier run: pass --resume, or choose another run_name")


def _make_folder(folder: Path) -> None:
    with explained(f"make {folder}"):
        for path in (folder.parent, folder):
            if not path.is_dir():
                path.mkdir(exist_ok=True)
                sync_folder(path.parent)
