"""One streaming pass over all batch files, which makes the index of their rows.

Everything a batch file may have suffered is tolerated and told: a line that was cut by a crash or a full disk, junk,
bytes that are no text, files that are empty or have odd names. No file is ever changed.

Parsing takes nearly all the time, so that many rows are shared out among the processor's cores: this process reads the
first batches, helpers of its own read the others. A helper that fails or dies costs time and nothing else: what it had
to read is read here. Helpers end with this process, and never see a key.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Self

from rollout.batch_files import batch_name, batch_numbers
from rollout.files import explained, open_to_read
from rollout.jsonl import Problems, parse_object, read_lines
from rollout.row_index import RowIndex
from rollout.secrecy import without_secrets

WORTH_SHARING_BYTES = 64 << 20  # a helper needs a third of a second to start
_MAX_READERS = 8
_PATIENCE = 3.0  # times what this process took for a share as large; a helper that takes longer is stuck
_LEAST_PATIENCE_SECONDS = 30.0
_BUFFER_BYTES = 1 << 20
_ROOT = Path(__file__).resolve().parent.parent
_PR_SET_PDEATHSIG = 1


def scan_rows(folder: Path, worth_sharing_bytes: int = WORTH_SHARING_BYTES) -> RowIndex:
    """Index the rows of all batch files. Raises RunDirError when one cannot be read."""
    rows = RowIndex()
    _scan(folder, batch_numbers(folder, rows.problems), rows, worth_sharing_bytes)
    return rows


def scan_later_rows(folder: Path, first_batch: int, rows: RowIndex) -> None:
    """Add the rows of batches from ``first_batch`` on, of which ``rows`` must have none. Raises RunDirError."""
    if len(rows) and rows.batches[-1] >= first_batch:
        raise ValueError("rows of these batches are indexed already")
    later = [batch_num for batch_num in batch_numbers(folder, Problems()) if batch_num >= first_batch]
    _scan(folder, later, rows, WORTH_SHARING_BYTES)


def _scan(folder: Path, batches: Sequence[int], rows: RowIndex, worth_sharing_bytes: int) -> None:
    own, *others = _shares(folder, batches, worth_sharing_bytes) or [[]]
    with ExitStack() as helpers:
        shared = [(share, _started(folder, share, helpers)) for share in others]
        began = time.monotonic()
        _scan_batches(folder, own, rows)
        patience = max(_PATIENCE * (time.monotonic() - began), _LEAST_PATIENCE_SECONDS)
        for share, helper in shared:
            found = helper.rows(patience) if helper else None
            if found is None:
                _scan_batches(folder, share, rows)
            else:
                rows.extend(found)


def _shares(folder: Path, batches: Sequence[int], worth_sharing_bytes: int) -> list[list[int]]:
    """Cut the batches, in order, into parts of about as many bytes, one for each core that is worth its helper."""
    with explained(f"read {folder}"):
        ends = list(accumulate((folder / batch_name(batch_num)).stat().st_size for batch_num in batches))
    total = ends[-1] if ends else 0
    readers = min(len(os.sched_getaffinity(0)), _MAX_READERS, 1 + total // worth_sharing_bytes)
    numbered = zip(batches, ends, strict=True)
    return [
        [batch_num for batch_num, _ in part]
        for _, part in groupby(numbered, key=lambda batch: max(batch[1] - 1, 0) * readers // max(total, 1))
    ]


def _scan_batches(folder: Path, batches: Sequence[int], rows: RowIndex) -> None:
    for batch_num in batches:
        _scan_batch(folder, batch_num, rows)


def _scan_batch(folder: Path, batch_num: int, rows: RowIndex) -> None:
    path = folder / batch_name(batch_num)
    with explained(f"read {path}"), open_to_read(path, _BUFFER_BYTES) as file:
        for number, offset, line in read_lines(file):
            if line.isspace():
                continue
            try:
                rows.add((batch_num, offset, len(line.rstrip())), parse_object(line))
            except ValueError as error:
                cut = "cut in the middle; its sample runs again, unless it has another row"
                what = f"{error}; ignored" if line.endswith(b"\n") else cut
                rows.problems.add(f"{path}:{number}: {what}")


def _started(folder: Path, batches: Sequence[int], helpers: ExitStack) -> _Helper | None:
    """Return a helper that ends with the stack; None where no process can be had."""
    try:
        return helpers.enter_context(_Helper.start(folder, batches))
    except OSError:
        return None


@dataclass
class _Helper:
    """A process that indexes some of the batches; leaving the context ends it."""

    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, folder: Path, batches: Sequence[int]) -> Self:
        code = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from rollout.row_scan import help_out; help_out()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, folder, str(os.getpid()), *map(str, (batches[0], batches[-1]))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what goes wrong there is found again here, and told
            env=without_secrets(os.environ),
            start_new_session=True,  # Ctrl-C at a terminal reaches this process alone
        )
        return cls(process)

    def rows(self, patience_seconds: float) -> RowIndex | None:
        """Wait for what it found; None when it failed, or took too long."""
        try:
            told, _ = self.process.communicate(timeout=patience_seconds)
        except subprocess.TimeoutExpired:
            return None
        return pickle.loads(told) if self.process.returncode == 0 else None  # noqa: S301 - our own process wrote it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.stdout:
            self.process.stdout.close()
        self.process.kill()
        self.process.wait()


def help_out() -> None:
    """Be a helper: index batches and write the index to stdout. Arguments: folder, parent, first batch, last batch."""
    folder, parent, first, last = Path(sys.argv[1]), *map(int, sys.argv[2:])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)  # it died before it could take this process along
    rows = RowIndex()
    batches = [batch_num for batch_num in batch_numbers(folder, Problems()) if first <= batch_num <= last]
    _scan_batches(folder, batches, rows)
    pickle.dump(rows, sys.stdout.buffer)
