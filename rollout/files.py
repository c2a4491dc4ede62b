"""Files that are whole or not there: atomic replacement, and what the system says of a folder in one line.

A new version is written beside the old one under a hidden name, flushed to the disk, and put in its place at once. A
process that is killed on the way leaves the old version and perhaps a hidden file, which ``sweep`` removes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_BUFFER_BYTES = 1 << 20
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
            with hidden.open("wb", buffering=_BUFFER_BYTES) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            hidden.replace(path)
            sync_folder(path.parent)
        finally:
            with suppress(OSError):  # gone already after a success; swept at the next start after a failure
                hidden.unlink()


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
