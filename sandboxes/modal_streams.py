"""The streams of a process in a sandbox of Modal, as those of a process in a container."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from sandboxes.container_stream import STDERR, STDOUT, frame

CHUNK_BYTES = 1 << 20  # of what is sent at once
FULL_BYTES, LOW_BYTES = 1 << 18, 1 << 16  # what waits to be sent: from where on, and down to where, writers wait


class _Writer(Protocol):
    """What the package has for a stdin."""

    drain: Any  # its attribute ``aio`` sends what was written

    def write(self, data: bytes) -> None:
        """Keep it to be sent."""

    def write_eof(self) -> None:
        """Keep in mind that nothing follows."""


class RemoteProcess(Protocol):
    """What the package has for a process whose output is bytes."""

    @property
    def stdout(self) -> AsyncIterator[bytes]:
        """Its output."""

    @property
    def stderr(self) -> AsyncIterator[bytes]:
        """Its complaints."""

    @property
    def stdin(self) -> _Writer:
        """Its input."""


class RemoteStreams:
    """See the ProcessStreams protocol."""

    def __init__(self, process: RemoteProcess, errors: tuple[type[Exception], ...]) -> None:
        """``errors``: what the package raises when the process, or the way to it, is gone."""
        self._process = process
        self._errors = errors

    async def attach(self, protocol: asyncio.Protocol) -> None:
        """See the protocol."""
        protocol.connection_made(_Line(self._process, protocol, self._errors))


class _Line(asyncio.Transport):
    """Two streams to read as one of frames, and one to write; each has a task of its own."""

    def __init__(self, process: RemoteProcess, protocol: asyncio.Protocol, errors: tuple[type[Exception], ...]) -> None:
        super().__init__()
        self._protocol = protocol
        self._errors = errors
        self._stdin = process.stdin
        self._waiting = bytearray()
        self._eof = self._closed = self._full = False
        self._wake = asyncio.Event()
        self._reading = asyncio.Event()
        self._reading.set()
        outputs = ((STDOUT, process.stdout), (STDERR, process.stderr))
        self._readers = [self._task(self._read(number, output), self._read_ended) for number, output in outputs]
        self._writer = self._task(self._write(), self._write_ended)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See asyncio.Transport. What nobody reads any more is lost."""
        if self._eof or self._closed or self._writer.done():
            return
        self._waiting += data
        self._wake.set()
        if len(self._waiting) > FULL_BYTES and not self._full:
            self._full = True
            self._protocol.pause_writing()

    def write_eof(self) -> None:
        """See asyncio.Transport."""
        self._eof = True
        self._wake.set()

    def get_write_buffer_size(self) -> int:
        """See asyncio.Transport."""
        return len(self._waiting)

    def is_closing(self) -> bool:
        """See asyncio.Transport."""
        return self._closed

    def pause_reading(self) -> None:
        """See asyncio.Transport."""
        self._reading.clear()

    def resume_reading(self) -> None:
        """See asyncio.Transport."""
        self._reading.set()

    def abort(self) -> None:
        """See asyncio.Transport. The process goes on or ends as the sandbox has it."""
        if self._closed:
            return
        self._closed = True
        for task in (*self._readers, self._writer):
            task.cancel()
        asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def _task(self, work: Awaitable[None], on_end: Callable[[], None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: on_end())
        return task

    async def _read(self, number: int, output: AsyncIterator[bytes]) -> None:
        try:
            async for data in output:
                await self._reading.wait()
                if not self._closed:
                    self._protocol.data_received(frame(number, data))
        except self._errors:
            return  # it is over

    def _read_ended(self) -> None:
        if all(reader.done() for reader in self._readers):
            self.abort()

    async def _write(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    chunk = bytes(self._waiting[:CHUNK_BYTES])
                    self._stdin.write(chunk)
                    await self._stdin.drain.aio()
                    self._sent(len(chunk))
                if self._eof:
                    self._stdin.write_eof()
                    await self._stdin.drain.aio()
                    return
        except self._errors:
            return  # nobody reads it

    def _sent(self, size: int) -> None:
        del self._waiting[:size]
        if self._full and len(self._waiting) <= LOW_BYTES:
            self._full = False
            self._protocol.resume_writing()

    def _write_ended(self) -> None:
        self._waiting.clear()
        self._protocol.resume_writing()
