"""The only way out of the browser: a forward proxy on loopback that connects to checked addresses and to no others.

Everything Chromium fetches goes through here: pages, their parts, redirects, web sockets, workers. A name is looked up
and checked here, once for each connection, and the connection goes to the address that was checked; so it makes no
difference what a page asks for, or what its DNS server answers the second time. What was refused or failed last for a
host is kept, because Chromium tells no reason.

Where the environment names a proxy (``HTTP_PROXY``, ``HTTPS_PROXY``, ``NO_PROXY``), connections go through that. A name
is checked here all the same, but then that proxy looks it up again, so it must guard its own network; a name that only
it knows must be listed as allowed.

A connection carries one request or one tunnel and is bounded in silence and in bytes. Other programs of this machine
can use the proxy too, to go where the browser may go.
"""

from __future__ import annotations

import asyncio
import base64
import socket
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from tools.addresses import AllowedHosts, BlockedAddressError, Lookup, resolve_public

CONNECT_SECONDS = 15.0  # for all addresses of a host together
SILENCE_SECONDS = 120.0  # of a server, after which its connection is closed
MAX_CONNECTION_BYTES = 200_000_000  # from a server, on one connection
RESOLVERS = 8  # names that are looked up at the same time
_HEAD_SECONDS = 30.0
_HEAD_BYTES = 256 * 1024
_CHUNK_BYTES = 64 * 1024
_KEPT_PROBLEMS = 1000
_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}
_DROPPED_HEADERS = (b"proxy-", b"connection:", b"keep-alive:")


_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _RefusedError(Exception):
    """The request gets this answer instead of a server's."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class _Request:
    """The head of a proxy request."""

    method: str
    host: str
    port: int
    head: bytes  # what the server is told; empty for a tunnel
    whole_url: str = ""  # of a request that is no tunnel


@dataclass(frozen=True)
class _Upstream:
    """A proxy of the environment."""

    host: str
    port: int
    credentials: str  # name:password, or ""

    @property
    def headers(self) -> bytes:
        """What it is told beside the request."""
        if not self.credentials:
            return b""
        return b"Proxy-Authorization: Basic " + base64.b64encode(self.credentials.encode()) + b"\r\n"


@dataclass
class Proxy:
    """One forward proxy; ``start`` gives it a port."""

    allowed: AllowedHosts
    lookup: Lookup | None = None  # None: the machine's resolver
    port: int = 0
    _server: asyncio.Server | None = None
    _connections: set[asyncio.Task[None]] = field(default_factory=set)
    _problems: OrderedDict[tuple[str, int], str] = field(default_factory=OrderedDict)
    _resolvers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(RESOLVERS, "browser-resolver"))

    async def start(self) -> None:
        """Listen on a free port of loopback. Raises OSError."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_HEAD_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Cut all connections and stop listening."""
        if self._server:
            self._server.close()
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        self._resolvers.shutdown(wait=False, cancel_futures=True)

    async def _looked_up(self, host: str, port: int) -> list[str]:
        """Ask the machine's resolver, in threads of our own: a page that names many slow names delays but pages."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(
                self._resolvers, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            )
        except UnicodeError:
            raise OSError(f"{host!r} is no host name") from None
        return list(dict.fromkeys(str(item[4][0]) for item in found))

    def problem(self, url: str) -> str:
        """Say why the URL's host could not be reached the last time it was tried; "" when it could."""
        target = target_of(url)
        return self._problems.get(target, "") if target else ""

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, asyncio.IncompleteReadError):  # whoever asked has gone, or says nothing
                await self._answer(reader, writer)
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request: _Request | None = None
        try:
            request = await _read_request(reader)
            server_reader, server_writer = await self._connect(request)
        except _RefusedError as refusal:
            if request is None or not request.head:  # of a page we say nothing: an answer would be taken for the page
                writer.write(_refusal(refusal))
                await writer.drain()
            return
        try:
            if not request.head:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await _relay((reader, writer), (server_reader, server_writer))
        finally:
            server_writer.close()

    async def _connect(self, request: _Request) -> _Stream:
        target = (request.host, request.port)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                connection = await self._way_to(request)
        except BlockedAddressError as error:
            raise self._noted(target, _RefusedError("403 Forbidden", str(error))) from None
        except TimeoutError:
            reason = f"{request.host} does not answer"
            raise self._noted(target, _RefusedError("504 Gateway Timeout", reason)) from None
        except OSError as error:
            reason = f"{request.host} cannot be reached: {error.strerror or error}"
            raise self._noted(target, _RefusedError("502 Bad Gateway", reason)) from None
        self._problems.pop(target, None)
        return connection

    async def _way_to(self, request: _Request) -> _Stream:
        """Connect to the server, or to the proxy that leads there. Raises BlockedAddressError, OSError."""
        lookup = self.lookup or self._looked_up
        upstream = _upstream_of(request)
        if upstream is None:
            addresses = await resolve_public(request.host, request.port, self.allowed, lookup)
            reader, writer = await _first_that_answers(addresses, request.port)
            writer.write(request.head)
            return reader, writer
        if not self.allowed.allows(request.host, request.port):
            await resolve_public(request.host, request.port, self.allowed, lookup)
        return await _through(upstream, request)

    def _noted(self, target: tuple[str, int], refusal: _RefusedError) -> _RefusedError:
        self._problems[target] = str(refusal)
        self._problems.move_to_end(target)
        if len(self._problems) > _KEPT_PROBLEMS:
            self._problems.popitem(last=False)
        return refusal


def target_of(url: str) -> tuple[str, int] | None:
    """Return the host, without brackets, and the port that a URL leads to; None when it leads to none."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError:
        return None
    return (parts.hostname, port) if parts.hostname and port else None


async def _read_request(reader: asyncio.StreamReader) -> _Request:
    try:
        async with asyncio.timeout(_HEAD_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise _RefusedError("431 Request Header Fields Too Large", "the request's head is too large") from None
    first, *headers = head[:-4].split(b"\r\n")
    words = first.decode("latin-1").split(" ")
    if len(words) != 3:  # noqa: PLR2004 - method, target, version
        raise _RefusedError("400 Bad Request", "no request line")
    method, where, version = words
    target = target_of(f"https://{where}" if method == "CONNECT" else where)
    if target is None or (method != "CONNECT" and not where.lower().startswith("http://")):
        raise _RefusedError("400 Bad Request", "this is a proxy")
    if method == "CONNECT":
        return _Request(method, *target, b"")
    kept = [header for header in headers if not header.lower().startswith(_DROPPED_HEADERS)]
    line = f"{method} {_origin_form(where)} {version}".encode("latin-1")
    return _Request(method, *target, b"\r\n".join([line, *kept, b"Connection: close", b"", b""]), where)


def _origin_form(url: str) -> str:
    """Return what follows the host, as it is written."""
    rest = url.partition("://")[2]
    start = min((at for at in map(rest.find, "/?#") if at >= 0), default=len(rest))
    path = rest[start:]
    return path if path.startswith("/") else f"/{path}"


async def _first_that_answers(addresses: list[str], port: int) -> _Stream:
    *others, last = addresses
    for address in others:
        with suppress(OSError):
            return await asyncio.open_connection(address, port)
    return await asyncio.open_connection(last, port)


def _upstream_of(request: _Request) -> _Upstream | None:
    """Return the proxy that the environment names for this request; one that does not speak HTTP is passed over."""
    url = getproxies().get("http" if request.head else "https", "")
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or _PORTS["http"]
    except ValueError:
        return None
    if parts.scheme != "http" or not parts.hostname or proxy_bypass(request.host):
        return None
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else ""
    return _Upstream(parts.hostname, port, user)


async def _through(upstream: _Upstream, request: _Request) -> _Stream:
    reader, writer = await asyncio.open_connection(upstream.host, upstream.port)
    if request.head:
        line, _, rest = request.head.partition(b"\r\n")
        method, _, version = line.split(b" ")
        writer.write(
            b" ".join([method, request.whole_url.encode("latin-1"), version]) + b"\r\n" + upstream.headers + rest
        )
        return reader, writer
    host = f"[{request.host}]" if ":" in request.host else request.host
    target = f"{host}:{request.port}".encode("latin-1")
    writer.write(b"CONNECT %b HTTP/1.1\r\nHost: %b\r\n%b\r\n" % (target, target, upstream.headers))
    try:
        status = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0].decode("latin-1")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        status = "no answer"
    if " 200" not in status:
        writer.close()
        raise OSError(f"the proxy {upstream.host} says {status[:100]!r}")
    return reader, writer


def _refusal(refusal: _RefusedError) -> bytes:
    body = f"{refusal}\n".encode()
    head = f"HTTP/1.1 {refusal.status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


async def _relay(browser: _Stream, server: _Stream) -> None:
    """Pass bytes both ways until one side is done."""
    ways = [
        asyncio.ensure_future(_copy(browser[0], server[1])),
        asyncio.ensure_future(_copy_bounded(server[0], browser[1])),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while chunk := await source.read(_CHUNK_BYTES):
        sink.write(chunk)
        await sink.drain()


async def _copy_bounded(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    left = MAX_CONNECTION_BYTES
    while left > 0:
        async with asyncio.timeout(SILENCE_SECONDS):
            chunk = await source.read(_CHUNK_BYTES)
        if not chunk:
            return
        left -= len(chunk)
        sink.write(chunk)
        await sink.drain()
