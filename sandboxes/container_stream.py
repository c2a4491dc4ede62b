"""The connection to one process of a container: its stdin, and its stdout and stderr as the engine multiplexes them.

Frames are a stream's number, three NULs and a length of four bytes, big-endian, before as many bytes: so docker has it,
and what starts processes by other means makes the same (``frame``).
Reading is fair: who floods is read at a pace that leaves most of the loop's time to others, and holds the flood back.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

HEADER_BYTES = 8
STDOUT, STDERR = 1, 2
UNPACED_BYTES = 16 << 20  # so much is read as fast as it comes
PACE = 3  # afterwards: seconds of pause for each second spent reading


class ProcessStreams(Protocol):
    """The streams of a process that was just started, before anybody reads them."""

    async def attach(self, protocol: asyncio.Protocol) -> None:
        """Hand them over: the protocol gets frames, and a transport that writes to the process's stdin."""


@dataclass(frozen=True)
class Connection:
    """Streams that an engine sends through one socket."""

    socket: socket.socket
    early: bytes = b""  # what was already read from it

    async def attach(self, protocol: asyncio.Protocol) -> None:
        """See ProcessStreams."""
        protocol.data_received(self.early)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, self.socket)


class ContainerStream(asyncio.Protocol):
    """Hands over what the process writes until its connection ends."""

    def __init__(
        self, on_stdout: Callable[[bytes], None], on_stderr: Callable[[bytes], None], on_end: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_stdout = on_stdout
        self._on_stderr = on_stderr
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._header = b""
        self._sink = on_stdout
        self._left = 0  # bytes of the current frame that are still to come
        self._unpaced_bytes = UNPACED_BYTES
        self._resume: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    async def connect(self, streams: ProcessStreams) -> None:
        """Take over a process that was just started."""
        await streams.attach(self)

    @property
    def is_open(self) -> bool:
        """Whether the process can be written to."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def holds_input(self) -> bool:
        """Whether something that was sent still waits here."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def send(self, data: bytes) -> None:
        """Write to the process's stdin, without waiting; to a connection that has ended nothing is written."""
        if self._transport and self.is_open:
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait until little of what was sent still waits here."""
        await self._writable.wait()

    def drop_input(self) -> None:
        """Take note that nobody reads the process's stdin any more: what is sent is lost, and not waited for."""
        self._writable.set()

    def end_input(self) -> None:
        """End the process's stdin."""
        if self._transport and self.is_open:
            self._transport.write_eof()

    def close(self) -> None:
        """Let go; nothing is handed over after this."""
        self._on_stdout = self._on_stderr = self._sink = _nowhere
        if self._resume:
            self._resume.cancel()
        if self._transport:
            self._transport.abort()

    def pace_anew(self) -> None:
        """Read as fast as at first again: what comes now is another command's."""
        self._unpaced_bytes = UNPACED_BYTES

    def pause(self, seconds: float) -> None:
        """Read nothing for a while."""
        if self._transport and self.is_open and self._resume is None:
            self._transport.pause_reading()
            self._resume = self._loop.call_later(seconds, self._go_on)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - sockets have no other kind
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        started = time.perf_counter()
        self._unpaced_bytes -= len(data)
        self._take(data)
        if self._unpaced_bytes < 0:
            self.pause(PACE * (time.perf_counter() - started))

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        del exc
        self._writable.set()
        if self._resume:
            self._resume.cancel()
        self._on_end()

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._writable.set()

    def _take(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                self._sink(piece)
                continue
            missing = HEADER_BYTES - len(self._header)
            self._header += data[at : at + missing]
            at += missing
            if len(self._header) == HEADER_BYTES:
                self._sink = self._on_stderr if self._header[0] == STDERR else self._on_stdout
                self._left = int.from_bytes(self._header[4:], "big")
                self._header = b""

    def _go_on(self) -> None:
        self._resume = None
        if self._transport and self.is_open:
            self._transport.resume_reading()


def frame(number: int, data: bytes) -> bytes:
    """Return what came from one of the process's streams as a frame."""
    return bytes((number, 0, 0, 0)) + len(data).to_bytes(4, "big") + data


def _nowhere(_data: bytes) -> None:
    """Take what nobody wants any more."""
