"""One command of a resident shell on this machine: its FIFOs, its frames, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Protocol

from sandboxes import command_shell
from sandboxes.base import SandboxFileError
from sandboxes.command_shell import STDIN_SECONDS
from sandboxes.fifo import FifoReader, open_fifo
from sandboxes.output import Collector


class JobOwner(Protocol):
    """Who is told of a job's life."""

    def job_started(self, job: Job) -> None:
        """Its pid is known."""

    def job_ended(self, job: Job) -> None:
        """Its shell has ended; its output is in."""

    def job_released(self, job: Job) -> None:
        """Its watcher has ended too: nothing of it will be heard any more."""


class Job(command_shell.Job):
    """See command_shell.Job.

    Its FIFOs are open when the constructor returns; it raises OSError when they cannot be had. The files of its slot
    are kept for the next command where they can be: making them would cost more than anything else done here.
    """

    def __init__(self, channel: Path, slot: int, collector: Collector, owner: JobOwner) -> None:
        super().__init__()
        self.slot = slot
        self._collector = collector
        self._owner = owner
        self._stdin_fd = -1
        self._writing = asyncio.Lock()
        self._writable = asyncio.Event()
        self._files = {kind: channel / f"{slot}.{kind}" for kind in ("cmd", "state", "out", "ctl", "in")}
        with contextlib.ExitStack() as opened:
            self.output = FifoReader(self._files["out"], collector.feed, lambda: None)
            opened.callback(self.output.close)
            self._control = FifoReader(self._files["ctl"], self._on_frame, self.release)
            opened.pop_all()

    @property
    def slot_is_free(self) -> bool:
        """Whether nobody can write to its FIFOs any more, so that another command may have them."""
        return not self.lost and not self.output.is_open and not self._control.is_open

    def finish(self) -> None:
        """See command_shell.Job."""
        if self.ended.is_set():
            return
        self.started.set()
        self.ended.set()
        self.close_stdin()
        self.output.drain()
        self.output.discard()
        self._collector.feed(b"")
        self._owner.job_ended(self)

    def release(self) -> None:
        """See command_shell.Job."""
        self.finish()
        self._control.close()
        for kind, path in self._files.items():
            if kind == "in" or not self.slot_is_free:
                path.unlink(missing_ok=True)
        self._owner.job_released(self)

    def open_stdin(self) -> None:
        """Make the FIFO that will be the command's stdin. Raises OSError."""
        self._stdin_fd = open_fifo(self._files["in"], os.O_RDWR)  # to read too: nobody else does yet

    def connect_stdin(self) -> None:
        """Stay as a writer only, now that the command reads, so that its end is noticed."""
        reading_too = self._stdin_fd
        if reading_too < 0:  # it has ended already
            return
        try:
            self._stdin_fd = os.open(self._files["in"], os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # it has ended, or closed its stdin, already
            self._stdin_fd = -1
        os.close(reading_too)

    async def write(self, data: bytes) -> None:
        """See command_shell.Job."""
        rest = memoryview(data)
        try:
            async with asyncio.timeout(STDIN_SECONDS), self._writing:
                while rest:
                    rest = rest[await self._write_some(rest) :]
        except TimeoutError:
            raise SandboxFileError("the process does not read its stdin") from None
        except OSError as error:
            self.close_stdin()
            raise SandboxFileError("the process has closed its stdin") from error

    def close_stdin(self) -> None:
        """See command_shell.Job."""
        if self._stdin_fd >= 0:
            asyncio.get_running_loop().remove_writer(self._stdin_fd)
            os.close(self._stdin_fd)
            self._stdin_fd = -1
            self._writable.set()

    async def _write_some(self, data: memoryview) -> int:
        if self._stdin_fd < 0:
            raise SandboxFileError("stdin is closed")
        try:
            return os.write(self._stdin_fd, data)
        except BlockingIOError:
            self._writable.clear()
            asyncio.get_running_loop().add_writer(self._stdin_fd, self._on_writable)
            await self._writable.wait()
            return 0

    def _on_writable(self) -> None:
        asyncio.get_running_loop().remove_writer(self._stdin_fd)
        self._writable.set()

    def _on_frame(self, data: bytes) -> None:
        self.frames.feed(data)
        if self.frames.exit_code is not None:
            self.finish()
        elif self.frames.pid and not self.started.is_set():
            self.started.set()
            self._owner.job_started(self)
