"""A web site on loopback for the browser to visit: pages by their path, and paths that misbehave."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Pages = dict[str, str]  # path → HTML


@dataclass
class Site:
    """What it was asked for, and the end of its patience."""

    pages: Pages
    port: int = 0
    requests: list[str] = field(default_factory=list)  # paths with their queries
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, path: str = "/") -> str:
        return f"http://{self.host}{path}"

    def asked(self, path: str) -> bool:
        return any(request.partition("?")[0] == path for request in self.requests)


@contextmanager
def serving(pages: Pages) -> Iterator[Site]:
    """Serve until the block ends. ``SITE`` in a page is the site's host and port."""
    site = Site(pages)

    class Handler(_Handler):
        the_site = site

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    site.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        site.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    the_site: Site

    def do_GET(self) -> None:
        site = self.the_site
        site.requests.append(self.path)
        parts = urlsplit(self.path)
        if parts.path.startswith("/late/"):
            site.over.wait(1.0)
        path = parts.path.removeprefix("/late")
        if path in site.pages:
            self._answer(site.pages[path].replace("SITE", site.host).encode())
        elif parts.path == "/endless":
            self._endless()
        elif parts.path == "/slow":
            site.over.wait(1.0)
            self._answer(b"<title>Slow</title><p>at last")
        elif parts.path == "/silent":
            site.over.wait(60)
        elif parts.path == "/redirect":
            self._answer(b"", 302, Location=unquote(parts.query))
        elif parts.path == "/file.csv":
            self._answer(b"a,b\n1,2\n", 200, **{"Content-Disposition": "attachment; filename=file.csv"})
        elif parts.path == "/pixel.png":
            self._answer(_PIXEL, 200, **{"Content-Type": "image/png"})
        else:
            self._answer(b"<title>Not found</title>nothing here", 404)

    def _answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Type": "text/html; charset=utf-8"} | headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        with suppress(OSError):  # who asked has gone
            self.end_headers()
            self.wfile.write(body)

    def _endless(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<title>Endless</title><h1>It goes on</h1>")
        with suppress(OSError):  # who asked has had enough
            while not self.the_site.over.wait(0.05):
                self.wfile.write(b"<p>and on</p>")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


_PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8cfc000000301010018dd8db0"
    "0000000049454e44ae426082"
)
