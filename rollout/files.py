"""Files that are whole or not there: atomic replacement, and what the system says of a folder in one line.

A new version is written beside the old one under a hidden name, flushed to the disk, and put in its place at once. A
process that is killed on the way leaves the old version and perhaps a hidden file, which ``sweep`` removes.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_BUFFER_BYTES = 1 << 20
_STEADY_BYTES = 32 << 20
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


class RunDirError(Exception):
    """A run's folder or a file in it cannot be used; the message is one line that names it and the reason."""


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn what the system refuses into a RunDirError: ``cannot <doing>: No space left on device``."""
    try:
        yield
    except OSError as error:
        raise RunDirError(f"cannot {doing}: {error.strerror or error}") from error


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write to; it takes ``path``'s place when the block ends well, else nothing has changed.

    Raises RunDirError. One writer at a time.
    """
    hidden = _hidden(path)
    with explained(f"write {path}"):
        try:
            with _SteadyFile(hidden, "wb") as raw, io.BufferedWriter(raw, _BUFFER_BYTES) as file:
                yield file
                file.flush()
                raw.settle()
                os.fsync(raw.fileno())
            hidden.replace(path)
            sync_folder(path.parent)
        finally:
            with suppress(OSError):  # gone already after a success; swept at the next start after a failure
                hidden.unlink()


class _SteadyFile(io.FileIO):
    """A file that goes to the disk while it is written, so that a large one's last flush has little to wait for."""

    def __init__(self, path: Path, mode: str) -> None:
        super().__init__(path, mode)
        self._unsent_bytes = 0
        self._sending: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        """Write, and have what came before sent on from time to time. Raises OSError."""
        written = super().write(data)
        self._unsent_bytes += written
        if self._unsent_bytes >= _STEADY_BYTES and (self._sending is None or self._sending.done()):
            self.settle()
            self._thread = self._thread or ThreadPoolExecutor(1)
            self._sending = self._thread.submit(os.fdatasync, self.fileno())
            self._unsent_bytes = 0
        return written

    def settle(self) -> None:
        """Wait for what is being sent. Raises OSError: the system tells a failure once, so it must not be lost."""
        if self._sending:
            sending, self._sending = self._sending, None
            sending.result()

    def close(self) -> None:
        """Close it, once nothing is being sent any more."""
        if self._thread:
            self._thread.shutdown()
        super().close()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the file system can do that. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(handle)


def sweep(folder: Path) -> None:
    """Remove what a killed process left of its replacements. Raises OSError."""
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink()


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")
