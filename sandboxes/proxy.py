"""The only way out of a sandbox whose network is limited: an HTTP proxy that looks at where each request is bound for.

It serves one sandbox, on a socket that only that sandbox can reach, in the event loop of the worker that owns it, and
ends with either. CONNECT and plain requests with a whole address are understood; the rest is refused. Names are
resolved here, and the connection goes to the address that was checked. What a listed host itself passes on to others
(a content network, another proxy) is out of its sight.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sandboxes.allow_list import AllowList

HEAD_SECONDS = 30.0
CONNECT_SECONDS = 30.0
MAX_CONNECTIONS = 128  # at the same time, of one sandbox
MAX_HEAD_BYTES = 1 << 16
CHUNK_BYTES = 1 << 16
RESOLVERS = 4  # names that are looked up at the same time, of one sandbox
HTTP_PORT = 80

_HOST = rb"(?P<host>[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])"
_TUNNEL = re.compile(rb"CONNECT " + _HOST + rb":(?P<port>\d{1,5}) HTTP/1\.[01]")
_PLAIN = re.compile(
    rb"(?P<method>[A-Z]{1,20}) http://" + _HOST + rb"(:(?P<port>\d{1,5}))?(?P<path>[/?][^ ]*)? HTTP/1\.[01]",
    re.IGNORECASE,
)
_OF_THIS_HOP = re.compile(rb"(host|connection|keep-alive|proxy-[a-z-]+|upgrade)\s*:", re.IGNORECASE)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _RefusedError(Exception):
    """A request that goes no further; the message is for whoever sent it."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class _Request:
    host: str
    port: int
    head: bytes  # what the host is sent first; b"" for a tunnel


class Proxy:
    """One sandbox's proxy."""

    def __init__(self, allowed: AllowList) -> None:
        self._allowed = allowed
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._resolvers = ThreadPoolExecutor(RESOLVERS, thread_name_prefix="names")

    async def start(self, listener: socket.socket) -> None:
        """Serve a listening socket, which is closed with the proxy."""
        self._server = await asyncio.start_server(
            self._accept, sock=listener, limit=MAX_HEAD_BYTES, start_serving=False
        )
        await self._server.start_serving()

    def close(self) -> None:
        """Cut all connections and take no more; may be called twice."""
        if self._server:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        self._resolvers.shutdown(wait=False, cancel_futures=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            try:
                request = await self._request(reader)
                async with self._connected(request) as (answers, requests):
                    if request.head:
                        requests.write(request.head)
                    else:
                        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    await _relay((reader, requests), (answers, writer))
            except _RefusedError as refusal:
                writer.write(_answer(refusal))
                await writer.drain()

    async def _request(self, reader: asyncio.StreamReader) -> _Request:
        if len(self._tasks) > MAX_CONNECTIONS:
            raise _RefusedError("503 Service Unavailable", f"more than {MAX_CONNECTIONS} connections at once")
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            raise _RefusedError("400 Bad Request", "no whole request came") from None
        request = _parsed(head)
        if not self._allowed.permits(request.host, request.port):
            raise self._forbidden(f"{request.host}:{request.port} is not among them")
        return request

    @contextlib.asynccontextmanager
    async def _connected(self, request: _Request) -> AsyncIterator[Streams]:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await self._connect(request.host, request.port)
        except OSError as error:
            raise _RefusedError("502 Bad Gateway", f"{request.host}:{request.port}: {error}") from error
        with contextlib.closing(writer):
            yield reader, writer

    async def _connect(self, host: str, port: int) -> Streams:
        """Connect to the first address that answers, of those that may be. Raises OSError, _RefusedError."""
        lookup = self._resolvers.submit(socket.getaddrinfo, host.strip("[]"), port, type=socket.SOCK_STREAM)
        try:
            found = dict.fromkeys(str(item[4][0]) for item in await asyncio.wrap_future(lookup))
        except UnicodeError:
            raise _RefusedError("400 Bad Request", f"{host} is no host name") from None
        addresses = [address for address in found if self._allowed.permits_address(address, port)]
        if not addresses:
            raise self._forbidden(f"{host} leads to {', '.join(found)}, which is not public")
        for address in addresses[:-1]:
            with contextlib.suppress(OSError):
                return await asyncio.open_connection(address, port)
        return await asyncio.open_connection(addresses[-1], port)

    def _forbidden(self, why: str) -> _RefusedError:
        return _RefusedError("403 Forbidden", f"this sandbox reaches only {self._allowed.text}; {why}")


def _parsed(head: bytes) -> _Request:
    """Read the head of a request. Raises _RefusedError."""
    first, *lines = head[:-4].split(b"\r\n")
    match = _TUNNEL.fullmatch(first) or _PLAIN.fullmatch(first)
    if not match:
        raise _RefusedError("400 Bad Request", "neither CONNECT host:port nor METHOD http://host/path")
    host, port = match["host"].decode("ascii"), int(match["port"] or HTTP_PORT)
    if match.re is _TUNNEL:
        return _Request(host, port, b"")
    path = match["path"] or b"/"
    authority = match["host"] + (b":%d" % port if match["port"] else b"")
    kept = [line for line in lines if not _OF_THIS_HOP.match(line)]
    path = path if path.startswith(b"/") else b"/" + path
    request_line = b"%s %s HTTP/1.1" % (match["method"], path)
    # One request a connection: the next one may be bound for another host.
    head = b"\r\n".join([request_line, b"Host: " + authority, b"Connection: close", *kept, b"", b""])
    return _Request(host, port, head)


async def _relay(*ways: Streams) -> None:
    """Copy each way to its end; when one breaks off so does the other."""
    copies = [asyncio.create_task(_copy(source, sink)) for source, sink in ways]
    try:
        await asyncio.gather(*copies)
    finally:
        for copy in copies:
            copy.cancel()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(CHUNK_BYTES):
        sink.write(data)
        await sink.drain()
    sink.write_eof()


def _answer(refusal: _RefusedError) -> bytes:
    body = f"{refusal}\n".encode("utf-8", "replace")
    head = f"HTTP/1.1 {refusal.status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    return head.encode("ascii") + b"Connection: close\r\n\r\n" + body
