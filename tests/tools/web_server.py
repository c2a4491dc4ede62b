"""A web server on loopback, and a resolver that knows other names than the machine's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from tools.addresses import Lookup

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PUBLIC = "93.184.215.14"


@dataclass
class Site:
    port: int = 0
    requests: list[web.Request] = field(default_factory=list)

    def url(self, path: str = "/", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


@asynccontextmanager
async def serve(pages: Mapping[str, Handler]) -> AsyncIterator[Site]:
    """Answer the paths, and 404 for others."""
    site = Site()

    async def answer(request: web.Request) -> web.StreamResponse:
        site.requests.append(request)
        await request.read()
        handler = pages.get(request.path)
        return await handler(request) if handler else web.Response(status=404, text="no such page")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    tcp = web.TCPSite(runner, "127.0.0.1", 0)
    await tcp.start()
    site.port = int(runner.addresses[0][1])
    try:
        yield site
    finally:
        await runner.cleanup()


def page(body: bytes | str, content_type: str = "text/html; charset=utf-8", **headers: str) -> Handler:
    data = body.encode() if isinstance(body, str) else body

    async def handler(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=data, headers={"Content-Type": content_type, **headers})

    return handler


def redirect(location: str, status: int = 302) -> Handler:
    async def handler(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, headers={"Location": location})

    return handler


def endless(piece: bytes = b"x" * 65536, **headers: str) -> Handler:
    """A body that never ends."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/html", **headers})
        await response.prepare(request)
        while True:
            await response.write(piece)

    return handler


def names(known: Mapping[str, list[str]]) -> Lookup:
    """A resolver that knows these names and no others; of several look-ups of a name, each takes a step in its list.

    ``{"host": ["1.2.3.4 5.6.7.8", "10.0.0.1"]}`` is public at first and private from then on.
    """
    asked: dict[str, int] = {}

    async def lookup(host: str, _port: int) -> list[str]:
        if host not in known:
            raise OSError(f"no such host: {host}")
        asked[host] = asked.get(host, 0) + 1
        steps = known[host]
        return steps[min(asked[host], len(steps)) - 1].split()

    return lookup
