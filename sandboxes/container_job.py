"""One command in a lane of a container: its output, its frames, its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from sandboxes.base import SandboxFileError
from sandboxes.command_shell import START_SECONDS, STDIN_SECONDS, Job
from sandboxes.container_stream import ContainerStream
from sandboxes.output import Collector

SETTLE_SECONDS = 0.5  # for output that is under way when the watcher is lost
MARK_SECONDS = 5.0  # the same when the command has ended well, and only the way here is long
NEWS_SECONDS = 0.1  # how long a write waits for the news that nobody reads it
CHUNK_BYTES = 1 << 18


class LaneJob(Job):
    """See Job.

    Output and frames come in streams of their own, in no order: it has ended when both have said so, or when one has
    and the other had its time.
    """

    def __init__(
        self, stream: ContainerStream, collector: Collector, on_change: Callable[[LaneJob], None], *, stdin: bool
    ) -> None:
        """``on_change`` is called when it has started and when it has ended."""
        super().__init__()
        self._stream = stream
        self._collector = collector
        self._on_change = on_change
        self._stdin_open = stdin
        self._stdin_gone = asyncio.Event()
        self._unread = False  # something was written that nobody will read
        self._output_complete = False
        self._frames_ended = False
        self._deadline: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._begin = self._loop.call_later(START_SECONDS, self.finish)

    def take_output(self, data: bytes) -> None:
        """Take what was written."""
        if not self.ended.is_set():
            self._collector.feed(data)

    def take_frame(self, frame: bytes) -> None:
        """Take one whole frame."""
        self.frames.feed(frame)
        if self.frames.pid and not self.started.is_set():
            self.started.set()
            self._begin.cancel()
            self._on_change(self)
        if self.frames.exit_code is not None:
            self._settle()

    def output_complete(self) -> None:
        """Take note that all output of the command itself is in."""
        self._output_complete = True
        self._settle()

    def frames_ended(self) -> None:
        """Take note that the watcher is gone."""
        self._frames_ended = True
        self._settle()

    def stdin_ended(self) -> None:
        """Take note that nobody reads stdin any more."""
        self._unread = self._unread or self._stdin_open
        self._stdin_open = False
        self._stdin_gone.set()
        self._stream.drop_input()

    def finish(self) -> None:
        """See Job."""
        self._begin.cancel()
        if self._deadline:
            self._deadline.cancel()
        if self.ended.is_set():
            return
        self.started.set()
        self.ended.set()
        if self._stream.holds_input:
            self.stdin_ended()
        self.close_stdin()
        self._stdin_gone.set()
        self._collector.feed(b"")
        self._on_change(self)

    def release(self) -> None:
        """See Job; nothing more will be heard of it."""
        self.finish()

    def connect_stdin(self) -> None:
        """Do nothing: the lane finds out by itself."""

    async def write(self, data: bytes) -> None:
        """See Job."""
        await self.pour(data)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NEWS_SECONDS):
                await self._stdin_gone.wait()
        if self._unread:
            raise SandboxFileError("the process has closed its stdin")

    async def pour(self, data: bytes) -> None:
        """Write to the command's stdin, and do not wait for news. Raises SandboxFileError when there are some."""
        for start in range(0, len(data), CHUNK_BYTES):
            await self._room_for_input()
            self._stream.send(data[start : start + CHUNK_BYTES])

    async def _room_for_input(self) -> None:
        try:
            async with asyncio.timeout(STDIN_SECONDS):
                await self._stream.drain()
        except TimeoutError:
            raise SandboxFileError("the process does not read its stdin") from None
        if not self._stdin_open:
            raise SandboxFileError("the process has closed its stdin" if self._unread else "stdin is closed")

    def close_stdin(self) -> None:
        """See Job."""
        if self._stdin_open:
            self._stdin_open = False
            self._stream.end_input()

    def _settle(self) -> None:
        told = self.frames.exit_code is not None
        if self._output_complete and (told or self._frames_ended):
            self.finish()
        elif (told or self._frames_ended) and not self._deadline:
            seconds = MARK_SECONDS if told else SETTLE_SECONDS
            self._deadline = self._loop.call_later(seconds, self.finish)
