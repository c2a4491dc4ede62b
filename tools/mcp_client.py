"""One session with an MCP server.

Imported only where MCP servers are used, because the ``mcp`` package is an extra. A session lives in a task of its own,
from its making to ``close``. What servers ask of us (models, files, the user) is refused by the package. Results are
handed on as they came: one odd part of them must not cost the rest, so it is not the package that checks them.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import anyio
import mcp.types as mcp_types
from mcp import ClientSession, MCPError
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from pydantic import ValidationError

from tools.base import JsonObject
from tools.mcp_config import HttpServer, McpServer
from tools.mcp_transport import McpGoneError, Traffic, http_streams, stdio_streams

MAX_PAGES = 20  # of a list of tools
CLOSE_SECONDS = 8.0

__all__ = ["Connection", "McpGoneError", "McpRefusedError"]
_VERSION_HEADER = "mcp-protocol-version"
_NO_MESSAGE = "Failed to parse"  # how the package begins, where what came over HTTP is none

for _name in ("mcp", "client"):  # what these say may hold what servers say, or their keys
    logging.getLogger(_name).addHandler(logging.NullHandler())
    logging.getLogger(_name).propagate = False


class McpRefusedError(Exception):
    """The server answered with an error; the message is its own."""


class Connection:
    """A session with one server."""

    def __init__(self, server: McpServer, *, listens_to_stderr: bool = False) -> None:
        self.complaint = bytearray()  # the end of what it wrote on stderr, where that is wanted
        self._server = server
        self._keeps_complaint = listens_to_stderr
        self._traffic = Traffic()
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[_Session] = asyncio.get_running_loop().create_future()
        self._why = "it ended"
        self._task = asyncio.create_task(self._live())
        self._task.add_done_callback(self._on_end)

    @property
    def ended(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._stop.is_set() or self._task.done()

    async def call(self, name: str, arguments: JsonObject) -> JsonObject:
        """Call a tool; return the result as the server gives it. Raises McpGoneError, McpRefusedError."""
        return await self._ask("tools/call", {"name": name, "arguments": arguments})

    async def tools(self) -> list[Any]:
        """Return the server's tools as it tells of them. Raises McpGoneError, McpRefusedError."""
        found: list[Any] = []
        cursor: Any = None
        for _ in range(MAX_PAGES):
            page = await self._ask("tools/list", {"cursor": cursor} if cursor else {})
            tools, cursor = page.get("tools"), page.get("nextCursor")
            if not isinstance(tools, list):
                raise McpRefusedError("its answer is not valid: it holds no list of tools")
            found += tools
            if not cursor:
                break
        return found

    def give_up(self) -> None:
        """Begin to close it, without waiting."""
        if not (self._stop.is_set() or self._ready.done()):
            self._task.cancel()
        self._stop.set()

    async def close(self) -> None:
        """End the session, and the server with it where it runs on this machine."""
        self.give_up()
        done, _ = await asyncio.wait({self._task}, timeout=CLOSE_SECONDS)
        if not done:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_SECONDS)

    async def _ask(self, method: str, params: JsonObject) -> JsonObject:
        """Send one request and wait, no longer than the session lives."""
        session = await asyncio.shield(self._ready)
        self._traffic.begin()
        asking = asyncio.create_task(session.ask(method, params))
        try:
            await asyncio.wait({asking, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done() and not asking.cancelled():
                return asking.result()
        except MCPError as error:
            if error.code != mcp_types.CONNECTION_CLOSED:
                is_none = error.message.startswith(_NO_MESSAGE)
                raise McpRefusedError("its answer is not valid JSON-RPC" if is_none else error.message) from None
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream):
            pass  # it has just gone
        except RuntimeError as error:
            raise McpRefusedError(f"its answer is not valid: {_first_line(error)}") from None
        finally:
            asking.cancel()
            await asyncio.wait({asking}, timeout=CLOSE_SECONDS)
        self._stop.set()
        await asyncio.wait({self._task}, timeout=CLOSE_SECONDS)
        raise McpGoneError(self._why)

    async def _live(self) -> None:
        async with self._streams() as (incoming, outgoing):
            dispatcher: JSONRPCDispatcher[Any] = JSONRPCDispatcher(incoming, outgoing)
            async with ClientSession(dispatcher=dispatcher) as session:
                told = await session.initialize()
                self._ready.set_result(_Session(dispatcher, str(told.protocol_version)))
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
            return http_streams(self._server, self._traffic)
        return stdio_streams(self._server, self._traffic, self.complaint if self._keeps_complaint else None)


@dataclass(frozen=True)
class _Session:
    """A session that is open: its requests, and the version of the protocol that was agreed on."""

    dispatcher: JSONRPCDispatcher[Any]
    version: str

    async def ask(self, method: str, params: JsonObject) -> JsonObject:
        return await self.dispatcher.send_raw_request(method, params, {"headers": {_VERSION_HEADER: self.version}})


def _reason(error: BaseException) -> str:
    """Return the first thing that went wrong, in a line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ValidationError):
        return f"its first answer is not valid: {error.title}"
    if isinstance(error, MCPError) and error.message.startswith(_NO_MESSAGE):
        return "its first answer is not valid JSON-RPC"
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return _first_line(error) or type(error).__name__


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
