"""Reading named pipes through the event loop.

A FIFO is opened before anybody writes to it, so no writer ever waits for a reader, and none gets SIGPIPE while the
reader is open. Reading is fair: who floods is read at a pace that leaves most of the loop's time to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

CHUNK_BYTES = 65_536
UNPACED_BYTES = 16 << 20  # so much of one FIFO is read as fast as it comes
PACE = 3  # afterwards: seconds of pause for each second spent reading
DISCARD_PAUSE_SECONDS = 0.02  # between reads of output that nobody wants
_F_GETPIPE_SZ = 1032


def open_fifo(path: Path, flags: int) -> int:
    """Open a FIFO without waiting and following no link; make it when it is not there."""
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is no FIFO")
    return fd


def overwrite(path: Path, data: bytes) -> None:
    """Make ``data`` the content of a small file. Some file systems make a cut to nothing expensive: none is made."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb", buffering=0) as file:  # noqa: PTH123 (a descriptor, no path)
        file.write(data)
        file.truncate(len(data))


class FifoReader:
    """Hands over what is written to one FIFO until its last writer has gone."""

    def __init__(self, path: Path, on_data: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_data: Callable[[bytes], None] | None = on_data
        self._on_end = on_end
        self._total_bytes = 0
        self._resume: asyncio.TimerHandle | None = None
        self._fd = open_fifo(path, os.O_RDONLY)
        self._loop.add_reader(self._fd, self._read)

    @property
    def is_open(self) -> bool:
        """Whether somebody may still write."""
        return self._fd >= 0

    def drain(self) -> None:
        """Take what is in the pipe now: a full pipe at most, however fast somebody writes."""
        left = fcntl.fcntl(self._fd, _F_GETPIPE_SZ) if self.is_open else 0
        while self.is_open and left > 0:
            size = self._read_chunk()
            if not size:
                break
            left -= size

    def discard(self) -> None:
        """From now on throw away what comes, without haste, so that who writes is neither stopped nor killed."""
        self._on_data = None

    def close(self) -> None:
        """Stop reading. Who writes after this gets SIGPIPE."""
        if self._resume:
            self._resume.cancel()
        if self.is_open:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> None:
        started = time.perf_counter()
        self._total_bytes += self._read_chunk()
        if not self.is_open:
            return
        if self._on_data is None:
            self._pause(DISCARD_PAUSE_SECONDS)
        elif self._total_bytes > UNPACED_BYTES:
            self._pause(PACE * (time.perf_counter() - started))

    def _read_chunk(self) -> int:
        """Read once; 0 when the pipe is empty or has ended."""
        try:
            data = os.read(self._fd, CHUNK_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self.close()
            self._on_end()
        elif self._on_data:
            self._on_data(data)
        return len(data)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._fd)
        self._resume = self._loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._loop.add_reader(self._fd, self._read)
