"""The wires to MCP servers: their stdin and stdout, or streamable HTTP; both bounded.

Nothing a server sends is kept without bounds: the length of a message, and how much comes per request. A server of this
machine runs with a short list of variables and what its own ``env`` says, and under ``mcp_keeper.py``, which ends it
with us, however we end. Over HTTP nothing is listened to but answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process, SubprocessStreamProtocol
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx2
import mcp.types as mcp_types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from sandboxes import processes
from tools.base import JsonObject, valid_text
from tools.mcp_config import HttpServer, StdioServer

MAX_MESSAGE_BYTES = 8 << 20
MAX_BYTES_PER_CALL = 32 << 20  # progress notes, log lines and the like included
MAX_MESSAGES_PER_CALL = 2_000
MAX_REQUESTS = 1_000  # over HTTP, in one session: a server may make us come back again and again
END_SECONDS = 4.0  # what the keeper gets to end a server; it needs half a second
_KEEPER = Path(__file__).with_name("mcp_keeper.py")
_INHERITED = re.compile(r"HOME|LOGNAME|USER|PATH|SHELL|TERM|LANG|LC_[A-Z]+|TZ|TMPDIR")
_COMPLAINT_BYTES = 2000

Incoming = MemoryObjectReceiveStream[SessionMessage | Exception]
Outgoing = MemoryObjectSendStream[SessionMessage]


class McpGoneError(Exception):
    """The server did not start, or its session has ended; the message is a line that says why."""


class Traffic:
    """Counts what a server sends, and says when it is too much."""

    def __init__(self) -> None:
        self.problem = ""
        self.requests = 0
        self.begin()

    def begin(self) -> None:
        """Count anew: a request of ours begins."""
        self._bytes = self._messages = 0

    def take(self, size: int) -> None:
        """Count a piece. Raises McpGoneError when it is one too many."""
        self._bytes += size
        self._messages += 1
        if self._bytes > MAX_BYTES_PER_CALL or self._messages > MAX_MESSAGES_PER_CALL:
            self.fail("it sent more than is taken for one call")

    def fail(self, problem: str) -> None:
        """Raise McpGoneError, and remember why."""
        self.problem = self.problem or problem
        raise McpGoneError(problem)


def server_environment(server: StdioServer) -> dict[str, str]:
    """Return the variables a server of this machine sees."""
    inherited = {name: text for name, text in os.environ.items() if _INHERITED.fullmatch(name)}
    return {**inherited, **server.env}


@dataclass(frozen=True)
class _Server:
    """A keeper with the server below it."""

    process: Process
    transport: asyncio.SubprocessTransport

    @classmethod
    async def start(cls, server: StdioServer, *, stderr: int) -> _Server:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.subprocess_exec(
            lambda: SubprocessStreamProtocol(limit=MAX_MESSAGE_BYTES, loop=loop),
            *(sys.executable, "-I", "-S", str(_KEEPER), server.command, *server.args),
            stdin=PIPE,
            stdout=PIPE,
            stderr=stderr,
            env=server_environment(server),
            cwd=server.cwd or None,
            start_new_session=True,
        )
        process = Process(transport, protocol, loop)
        processes.residents.add(process.pid)  # it is waited for here, not by the sandboxes
        return cls(process, transport)

    async def end(self) -> None:
        """Close the server's stdin, by which the keeper ends it, and wait until both are gone."""
        if self.process.stdin:
            self.process.stdin.close()
        drained = asyncio.create_task(_drain(self.process.stdout))
        try:
            async with asyncio.timeout(END_SECONDS):
                await self.process.wait()
        except TimeoutError:
            self.transport.kill()
            await self.process.wait()
        processes.residents.discard(self.process.pid)
        self.transport.close()
        drained.cancel()
        await asyncio.gather(drained, return_exceptions=True)


@asynccontextmanager
async def stdio_streams(
    server: StdioServer, traffic: Traffic, complaint: bytearray | None
) -> AsyncIterator[tuple[Incoming, Outgoing]]:
    """Start a server and speak to it; end it. The end of what it says on stderr goes to ``complaint``."""
    starting = asyncio.ensure_future(_Server.start(server, stderr=DEVNULL if complaint is None else PIPE))
    try:
        running = await asyncio.shield(starting)
    except asyncio.CancelledError:
        with suppress(OSError):
            await _to_the_end((await starting).end())
        raise
    to_session, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    jobs = [
        asyncio.create_task(_read(running.process, to_session, traffic)),
        asyncio.create_task(_write(running.process, from_session)),
        asyncio.create_task(_overhear(running.process, complaint)),
    ]
    try:
        yield incoming, outgoing
    finally:
        for job in jobs:
            job.cancel()
        for stream in (to_session, incoming, outgoing, from_session):
            stream.close()
        await _to_the_end(running.end())


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await what must not be left half done; a cancellation that comes meanwhile is passed on afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled:
        raise cancelled


async def _read(process: Process, to_session: MemoryObjectSendStream[Any], traffic: Traffic) -> None:
    """Hand each line on as a message; end the session with the server, or when that says too much."""
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, McpGoneError):
        async with to_session:
            while line := await _line(process.stdout, traffic):
                traffic.take(len(line))
                for message in _messages(line, traffic):
                    await to_session.send(message)
                await asyncio.sleep(0)  # lines that are there already come without waiting


async def _line(stdout: asyncio.StreamReader, traffic: Traffic) -> bytes:
    try:
        return await stdout.readline()
    except ValueError:
        traffic.fail(f"it sent a message of more than {MAX_MESSAGE_BYTES >> 20} MB")
        raise


def _messages(line: bytes, traffic: Traffic) -> list[SessionMessage]:
    """Return the messages of a line: one, or a batch. A line that is none is passed over: many print a greeting."""
    try:
        return [SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False))]
    except ValidationError:
        if b'"jsonrpc"' not in line:
            return []
    try:
        # By way of text, in which half a surrogate pair can be replaced; that parser also bears deeper nesting.
        text = json.dumps(json.loads(line.decode("utf-8", "replace")), ensure_ascii=False)
        data = json.loads(valid_text(text))
    except (ValueError, RecursionError):
        traffic.fail("it sent a message that is not valid")
        raise
    return [message for item in (data if isinstance(data, list) else [data]) if (message := _taken(item))]


def _taken(item: Any) -> SessionMessage | None:
    """Return the message, or an error in the place of an answer that is none: it must cost its own call alone."""
    try:
        return SessionMessage(mcp_types.jsonrpc_message_adapter.validate_python(item, by_name=False))
    except ValidationError:
        if not isinstance(item, dict) or "method" in item or type(item.get("id")) not in (int, str):
            return None
    error = mcp_types.ErrorData(code=mcp_types.INTERNAL_ERROR, message=_said(item))
    return SessionMessage(mcp_types.JSONRPCError(jsonrpc="2.0", id=item["id"], error=error))


def _said(answer: JsonObject) -> str:
    """Return what an answer that is not valid says all the same."""
    error = answer.get("error")
    said = error.get("message") if isinstance(error, dict) else error
    if not said:
        return "its answer is not valid: it holds neither a result that is an object nor an error"
    return said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)


async def _write(process: Process, from_session: MemoryObjectReceiveStream[SessionMessage]) -> None:
    assert process.stdin is not None  # noqa: S101 - it is a pipe
    with suppress(ConnectionError, anyio.ClosedResourceError):
        async with from_session:
            async for message in from_session:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode() + b"\n")
                await process.stdin.drain()


async def _overhear(process: Process, complaint: bytearray | None) -> None:
    while complaint is not None and process.stderr and (data := await process.stderr.read(4096)):
        complaint += data
        del complaint[:-_COMPLAINT_BYTES]


async def _drain(stdout: asyncio.StreamReader | None) -> None:
    """Throw away what still comes: who cannot write does not end."""
    while stdout and await stdout.read(1 << 16):
        pass


@asynccontextmanager
async def http_streams(server: HttpServer, traffic: Traffic) -> AsyncIterator[tuple[Any, Any]]:
    """Speak to a server over HTTP, with a client of our own and no connection of anybody else's."""

    async def check_request(request: httpx2.Request) -> None:
        traffic.requests += 1
        if traffic.requests > MAX_REQUESTS:
            traffic.fail("it made us send too many requests")
        if request.method == "GET" and "last-event-id" not in request.headers:
            raise httpx2.UnsupportedProtocol("what the server says unasked is not listened to")

    async def check_response(response: httpx2.Response) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":
            traffic.fail("its answer is compressed, which was not asked for")
        response.stream = _Counted(response.stream, traffic)

    client = httpx2.AsyncClient(
        headers={"Accept-Encoding": "identity", **server.headers},
        timeout=httpx2.Timeout(30, read=600),
        event_hooks={"request": [check_request], "response": [check_response]},
    )
    async with (
        client,
        streamable_http_client(server.url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES) as streams,
    ):
        yield streams


class _Counted(httpx2.AsyncByteStream):
    """A body that ends when it is too long."""

    def __init__(self, stream: Any, traffic: Traffic) -> None:
        self._stream = stream
        self._traffic = traffic

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            self._traffic.take(len(piece))
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()
