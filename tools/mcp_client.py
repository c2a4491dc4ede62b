"""One session with an MCP server, over its stdin and stdout or over streamable HTTP.

Imported only where MCP servers are used, because the ``mcp`` package is an extra. A session lives in a task of its own,
from ``open`` to ``close``. Nothing a server sends is believed or kept without bounds: the length of a message, how much
comes per request, and the time are limited. Servers of this machine run with a short list of variables and what their
own ``env`` says, and under ``mcp_keeper.py``, which ends them with us, however we end. What they ask of us (models,
files, the user) is refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import anyio
import httpx2
import mcp.types as mcp_types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp import ClientSession, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from pydantic import BaseModel, ValidationError

from sandboxes import processes
from tools.mcp_config import HttpServer, McpServer, StdioServer

MAX_MESSAGE_BYTES = 8 << 20
MAX_BYTES_PER_CALL = 32 << 20  # progress notes, log lines and the like included
MAX_MESSAGES_PER_CALL = 2_000
MAX_REQUESTS = 1_000  # over HTTP, in one session: a server that makes us come back again and again
MAX_PAGES = 20  # of a list of tools
CLOSE_SECONDS = 4.0
_KEEPER = Path(__file__).with_name("mcp_keeper.py")
_INHERITED = re.compile(r"HOME|LOGNAME|USER|PATH|SHELL|TERM|LANG|LC_[A-Z]+|TZ|TMPDIR")
_COMPLAINT_BYTES = 2000

ResultT = TypeVar("ResultT", bound=BaseModel)
Incoming = MemoryObjectReceiveStream[SessionMessage | Exception]
Outgoing = MemoryObjectSendStream[SessionMessage]

for _name in ("mcp", "client"):  # what these say may hold what servers say, or their keys
    logging.getLogger(_name).addHandler(logging.NullHandler())
    logging.getLogger(_name).propagate = False


class McpGoneError(Exception):
    """The server did not start, or its session has ended; the message is a line that says why."""


class McpRefusedError(Exception):
    """The server answered with an error; the message is its own."""


class Connection:
    """A session with one server."""

    def __init__(self, server: McpServer, *, listens_to_stderr: bool = False) -> None:
        self.complaint = bytearray()  # the end of what it wrote on stderr, where that is wanted
        self._server = server
        self._keeps_complaint = listens_to_stderr
        self._traffic = _Traffic()
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self._why = "it ended"
        self._task = asyncio.create_task(self._live())
        self._task.add_done_callback(self._on_end)

    @property
    def ended(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._stop.is_set() or self._task.done()

    async def call(self, name: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        """Call a tool. Raises McpGoneError, McpRefusedError."""
        params = mcp_types.CallToolRequestParams(name=name, arguments=arguments)
        return await self._ask(mcp_types.CallToolRequest(params=params), mcp_types.CallToolResult)

    async def tools(self) -> list[mcp_types.Tool]:
        """Return the server's tools. Raises McpGoneError, McpRefusedError."""
        found: list[mcp_types.Tool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            params = mcp_types.PaginatedRequestParams(cursor=cursor) if cursor else None
            page = await self._ask(mcp_types.ListToolsRequest(params=params), mcp_types.ListToolsResult)
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        return found

    def give_up(self) -> None:
        """Begin to close it, without waiting: it hangs."""
        self._stop.set()
        self._task.cancel()

    async def close(self) -> None:
        """End the session, and the server with it where it runs on this machine."""
        self._stop.set()
        if not self._ready.done():
            self._task.cancel()
        done, _ = await asyncio.wait({self._task}, timeout=CLOSE_SECONDS)
        if not done:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_SECONDS)

    async def _ask(self, request: Any, answer: type[ResultT]) -> ResultT:
        """Send one request and wait, no longer than the session lives."""
        session = await asyncio.shield(self._ready)
        self._traffic.begin()
        asking = asyncio.create_task(session.send_request(request, answer))
        try:
            await asyncio.wait({asking, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done() and not asking.cancelled():
                return asking.result()
        except MCPError as error:
            if error.code != mcp_types.CONNECTION_CLOSED:
                raise McpRefusedError(error.message) from None
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream):
            pass  # it has just gone
        except (ValidationError, RuntimeError) as error:
            raise McpRefusedError(f"its answer is not valid: {_first_line(error)}") from None
        finally:
            asking.cancel()
            await asyncio.wait({asking}, timeout=CLOSE_SECONDS)
        self._stop.set()
        await asyncio.wait({self._task}, timeout=CLOSE_SECONDS)
        raise McpGoneError(self._why)

    async def _live(self) -> None:
        async with self._streams() as (incoming, outgoing), ClientSession(incoming, outgoing) as session:
            await session.initialize()
            self._ready.set_result(session)
            await self._stop.wait()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Read off the task why the session is over; the package's tasks raise whatever went wrong, in groups."""
        error = None if task.cancelled() else task.exception()
        self._why = self._traffic.problem or (_reason(error) if error else "it ended")
        if not self._ready.done():
            self._ready.set_exception(McpGoneError(self._why))
            self._ready.exception()  # whether somebody waits or not

    def _streams(self) -> AbstractAsyncContextManager[Any]:
        if isinstance(self._server, HttpServer):
            return _http_streams(self._server, self._traffic)
        return _stdio_streams(self._server, self._traffic, self.complaint if self._keeps_complaint else None)


class _Traffic:
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


@asynccontextmanager
async def _stdio_streams(
    server: StdioServer, traffic: _Traffic, complaint: bytearray | None
) -> AsyncIterator[tuple[Incoming, Outgoing]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(_KEEPER), server.command, *server.args),
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL if complaint is None else PIPE,
        env=server_environment(server),
        cwd=server.cwd or None,
        limit=MAX_MESSAGE_BYTES,
        start_new_session=True,
    )
    processes.residents.add(process.pid)  # it is waited for here, not by the sandboxes
    to_session, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    jobs = [
        asyncio.create_task(_read(process, to_session, traffic)),
        asyncio.create_task(_write(process, from_session)),
        asyncio.create_task(_overhear(process, complaint)),
    ]
    try:
        yield incoming, outgoing
    finally:
        await asyncio.shield(_end(process, jobs))
        for stream in (to_session, incoming, outgoing, from_session):
            stream.close()


async def _read(process: Process, to_session: MemoryObjectSendStream[Any], traffic: _Traffic) -> None:
    """Hand each line on as a message; end the session with the server, or when that says too much."""
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, McpGoneError):
        async with to_session:
            while line := await _line(process.stdout, traffic):
                traffic.take(len(line))
                if message := _message(line, traffic):
                    await to_session.send(message)
                await asyncio.sleep(0)  # lines that are there already come without waiting


async def _line(stdout: asyncio.StreamReader, traffic: _Traffic) -> bytes:
    try:
        return await stdout.readline()
    except ValueError:
        traffic.fail(f"it sent a message of more than {MAX_MESSAGE_BYTES >> 20} MB")
        raise


def _message(line: bytes, traffic: _Traffic) -> SessionMessage | None:
    try:
        return SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValidationError:
        if b'"jsonrpc"' in line:  # else it is no message: many print a greeting
            traffic.fail("it sent a message that is not valid")
        return None


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


async def _end(process: Process, jobs: list[asyncio.Task[None]]) -> None:
    """Close the server's stdin, by which the keeper ends it, and wait until both are gone."""
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
    if process.stdin:
        process.stdin.close()
    drained = asyncio.create_task(_drain(process.stdout))
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
    finally:
        processes.residents.discard(process.pid)
        drained.cancel()
        await asyncio.gather(drained, return_exceptions=True)


async def _drain(stdout: asyncio.StreamReader | None) -> None:
    """Throw away what still comes: who cannot write does not end."""
    while stdout and await stdout.read(1 << 16):
        pass


@asynccontextmanager
async def _http_streams(server: HttpServer, traffic: _Traffic) -> AsyncIterator[tuple[Any, Any]]:
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

    def __init__(self, stream: Any, traffic: _Traffic) -> None:
        self._stream = stream
        self._traffic = traffic

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            self._traffic.take(len(piece))
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


def _reason(error: BaseException) -> str:
    """Return the first thing that went wrong, in a line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return _first_line(error) or type(error).__name__


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
