"""Files that are whole or not there: atomic replacement, and what the system says of a folder in one line.

Others may have been in the folder of a run: what should be a file is opened here, and so never waited for.

A new version is written beside the old one under a hidden name, flushed to the disk, and put in its place at once. A
process that is killed on the way leaves the old version and perhaps a hidden file, which ``sweep`` removes.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_BUFFER_BYTES = 1 << 20
_STEADY_BYTES = 32 << 20
# What opening says of folders, of pipes and sockets that nobody reads, and of links that lead nowhere or must not be.
_NO_FILE = (errno.EISDIR, errno.ENXIO, errno.ELOOP)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


class RunDirError(Exception):
    """A run's folder or a file in it cannot be used; the message is one line that names it and the reason."""


class DiskFullError(RunDirError):
    """There is no room for it, or none that this user may have: that may change."""


class IrregularFileError(RunDirError):
    """A folder, a pipe or the like stands where a file of the run should be."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is not a regular file: move it away")


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn what the system refuses into a RunDirError: ``cannot <doing>: No space left on device``."""
    try:
        yield
    except OSError as error:
        kind = DiskFullError if error.errno in NO_ROOM else RunDirError
        raise kind(f"cannot {doing}: {error.strerror or error}") from error


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file of a run and return its descriptor; never wait for a pipe's other end, as plain opening does.

    Raises OSError, and IrregularFileError when what is there is no file, nor a link to one.
    """
    try:
        handle = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise IrregularFileError(path) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise IrregularFileError(path)
    return handle


def open_to_read(path: Path, buffer_bytes: int = -1) -> BinaryIO:
    """Open a file of a run for reading, as ``open_regular`` does; ``buffer_bytes``: as ``open`` has it."""
    return os.fdopen(open_regular(path), "rb", buffering=buffer_bytes)


def refuse_irregular(path: Path) -> None:
    """Raise IrregularFileError when something else than a file, a link to one, or nothing is there."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno in _NO_FILE:
            raise IrregularFileError(path) from None
        raise
    if not stat.S_ISREG(mode):
        raise IrregularFileError(path)


def refuse_irreplaceable(path: Path) -> None:
    """Raise IrregularFileError when ``replaced`` could not put a file in this place: only a folder withstands it."""
    for place in (path, _hidden(path)):
        if place.is_dir() and not place.is_symlink():
            raise IrregularFileError(place)


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
        if leftover.is_symlink() or not leftover.is_dir():  # a folder is not ours
            leftover.unlink()


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")
