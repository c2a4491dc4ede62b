"""A program of this machine behind three pipes, as the streams of a process in a container.

What it writes is made into frames (see ``container_stream``). It is the parent of the process in the container, which
may live on when nobody listens any more, so it is let be until the container is gone: who is killed earlier leaves a
dead child that only the kernel knows, and whose container cannot end.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from typing import IO

from sandboxes.container_stream import STDERR, STDOUT, frame
from sandboxes.resident import launch, wait


class PipedStreams:
    """See the ProcessStreams protocol."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        """Start the program. Raises SandboxError."""
        self._process = launch(arguments, environment)

    async def attach(self, protocol: asyncio.Protocol) -> None:
        """See the protocol."""
        await _Door(self._process, protocol).open()

    def has_ended(self) -> bool:
        """Tell whether the program has ended; then it is out of the process table, too."""
        if self._process.poll() is None:
            return False
        wait(self._process)
        return True

    def put_down(self) -> None:
        """End the program. Blocks for a moment."""
        self._process.kill()
        wait(self._process)


class _Door(asyncio.Transport):
    """Two pipes to read as one stream of frames, and one to write."""

    def __init__(self, process: subprocess.Popen[bytes], protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._process = process
        self._protocol = protocol
        self._stdin: asyncio.WriteTransport | None = None
        self._outputs: list[asyncio.ReadTransport] = []
        self._ended_outputs = 0
        self._closed = False

    async def open(self) -> None:
        """Connect the pipes."""
        waiting = [pipe for pipe in (self._process.stdin, self._process.stdout, self._process.stderr) if pipe]
        self._protocol.connection_made(self)
        try:
            self._stdin, _ = await self._loop.connect_write_pipe(lambda: _Input(self._protocol), waiting[0])
            while len(waiting) > 1:
                await self._connect_output((STDOUT, STDERR)[len(self._outputs)], waiting.pop(1))
            waiting.clear()
        finally:
            if waiting:
                self.abort()

    async def _connect_output(self, number: int, pipe: IO[bytes]) -> None:
        def take(data: bytes) -> None:
            if not self._closed:
                self._protocol.data_received(frame(number, data))

        output, _ = await self._loop.connect_read_pipe(lambda: _Output(take, self._output_ended), pipe)
        self._outputs.append(output)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See asyncio.Transport. What nobody reads any more is lost."""
        if self._stdin and not self._stdin.is_closing():
            self._stdin.write(data)

    def write_eof(self) -> None:
        """See asyncio.Transport."""
        if self._stdin and not self._stdin.is_closing():
            self._stdin.write_eof()

    def get_write_buffer_size(self) -> int:
        """See asyncio.Transport."""
        return self._stdin.get_write_buffer_size() if self._stdin else 0

    def is_closing(self) -> bool:
        """See asyncio.Transport."""
        return self._closed

    def pause_reading(self) -> None:
        """See asyncio.Transport."""
        for output in self._outputs:
            if not output.is_closing():
                output.pause_reading()

    def resume_reading(self) -> None:
        """See asyncio.Transport."""
        for output in self._outputs:
            if not output.is_closing():
                output.resume_reading()

    def abort(self) -> None:
        """See asyncio.Transport."""
        if self._closed:
            return
        self._closed = True
        if self._stdin and (not self._stdin.is_closing() or self._stdin.get_write_buffer_size()):
            self._stdin.abort()
        for output in self._outputs:
            output.close()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe and len(self._outputs) < len((STDOUT, STDERR)):  # else their transports do it
                pipe.close()
        self._loop.call_soon(self._protocol.connection_lost, None)

    def _output_ended(self) -> None:
        self._ended_outputs += 1
        if self._ended_outputs == len((STDOUT, STDERR)):
            self.abort()


class _Input(asyncio.BaseProtocol):
    """Tells of the way to the process what ``asyncio.Protocol`` wants to know."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol

    def pause_writing(self) -> None:
        """See asyncio.BaseProtocol."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """See asyncio.BaseProtocol."""
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.BaseProtocol. Nobody need wait any more."""
        del exc
        self._protocol.resume_writing()


class _Output(asyncio.Protocol):
    """Hands on what one pipe brings, and its end."""

    def __init__(self, take: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._take = take
        self._on_end = on_end

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._take(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        del exc
        self._on_end()
