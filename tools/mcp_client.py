"""One session with an MCP server.

Imported only where MCP servers are used, because the ``mcp`` package is an extra. A session lives in a task of its own,
from its making to ``close``. What servers ask of us (models, files, the user) is refused by the package.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import anyio
import mcp.types as mcp_types
from mcp import ClientSession, MCPError
from pydantic import BaseModel, ValidationError

from tools.mcp_config import HttpServer, McpServer
from tools.mcp_transport import McpGoneError, Traffic, http_streams, stdio_streams

MAX_PAGES = 20  # of a list of tools
CLOSE_SECONDS = 8.0

__all__ = ["Connection", "McpGoneError", "McpRefusedError"]
ResultT = TypeVar("ResultT", bound=BaseModel)

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
            return http_streams(self._server, self._traffic)
        return stdio_streams(self._server, self._traffic, self.complaint if self._keeps_complaint else None)


def _reason(error: BaseException) -> str:
    """Return the first thing that went wrong, in a line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return _first_line(error) or type(error).__name__


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
