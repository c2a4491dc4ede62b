"""A container engine on loopback that has no containers: what it says of images, and how slowly, the test decides."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

IMAGE = {"Config": {"Env": ["A=b"], "WorkingDir": "/w"}, "Os": "linux", "Architecture": "amd64"}
PAUSE_SECONDS = 0.05  # between two things that a pull says
STILL: dict[str, Any] = {"stands": "still"}  # in what a pull says: nothing more comes


@dataclass
class FakeEngine:
    """What it has, and what it was asked for."""

    host: str = ""
    images: set[str] = field(default_factory=set)
    # By image, what a pull says; it has the image then. One that is not here is waited for until the test ends.
    pulls: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    pulling: list[str] = field(default_factory=list)
    let_go: list[str] = field(default_factory=list)  # images whose pull nobody listened to any more
    asked: list[str] = field(default_factory=list)  # method and path of whatever is about containers
    create_seconds: float = 0.0
    made_after: int = 0  # attempts to remove the container that is being created
    closing: threading.Event = field(default_factory=threading.Event)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 200

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.engine = engine

    def handle_error(self, *_: object) -> None:
        """Say nothing of who hangs up."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.endswith("/version"):
            self.answer(200, {"Os": "linux", "Arch": "amd64", "ApiVersion": "1.43", "MinAPIVersion": "1.24"})
        elif "/images/" not in path:
            self.answer(200, {})
        elif path.split("/images/")[1].removesuffix("/json") in self.server.engine.images:
            self.answer(200, IMAGE)
        else:
            self.answer(404, {"message": "No such image"})

    def do_POST(self) -> None:
        url, engine = urlsplit(self.path), self.server.engine
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if url.path.endswith("/images/create"):
            query = parse_qs(url.query)
            self.pull(f"{query['fromImage'][0]}:{query['tag'][0]}")
            return
        engine.asked.append(f"POST {url.path.partition('/containers')[2]}")
        engine.closing.wait(engine.create_seconds)
        self.answer(201, {"Id": "c1"})

    def do_DELETE(self) -> None:
        engine = self.server.engine
        engine.asked.append(f"DELETE {urlsplit(self.path).path.partition('/containers')[2]}")
        engine.made_after -= 1
        self.answer(404, {"message": "No such container"}) if engine.made_after else self.answer(204, {})

    def pull(self, name: str) -> None:
        engine = self.server.engine
        engine.pulling.append(name)
        if name not in engine.pulls:
            engine.closing.wait()
            return
        self.head(200, {"Transfer-Encoding": "chunked"})
        for message in engine.pulls[name]:
            if message is STILL:
                self.wait_while_listened_to(name)
                return
            self.chunk(json.dumps(message).encode() + b"\r\n")
            engine.closing.wait(PAUSE_SECONDS)
        engine.images.add(name)
        self.chunk(b"")

    def wait_while_listened_to(self, name: str) -> None:
        self.connection.settimeout(PAUSE_SECONDS)
        while not self.server.engine.closing.is_set():
            with suppress(TimeoutError):
                if not self.connection.recv(1):
                    self.server.engine.let_go.append(name)
                    return

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.head(status, {"Content-Type": "application/json", "Content-Length": str(len(data))})
        self.wfile.write(data)

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def fake_engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    with Server(engine) as server:
        engine.host = f"tcp://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield engine
        finally:
            engine.closing.set()
            server.shutdown()
