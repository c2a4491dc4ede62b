"""The proxy of a sandbox whose network is limited, spoken to over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sandboxes.allow_list import AllowList
from sandboxes.proxy import MAX_CONNECTIONS, MAX_HEAD_BYTES, Proxy
from tests.sandboxes.support import descriptors, wait_until

Talk = Callable[[bytes], Awaitable[bytes]]


class Echo(BaseHTTPRequestHandler):
    """Tells what it was sent."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        told = f"{self.requestline}\n{self.headers}".encode() + body
        self.send_response(200)
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    do_GET = do_POST  # noqa: N815 (its names are the base class's)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[int]:
    """A web server on loopback; its port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.05,))
        thread.start()
        yield http.server_address[1]
        http.shutdown()
        thread.join()


def proxied(allowed: str, *requests: bytes) -> list[bytes]:
    """Send each request over a connection of its own; return what comes back until that is closed."""

    async def main() -> list[bytes]:
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        proxy = Proxy(AllowList.parse(allowed))
        await proxy.start(listener)

        async def ask(request: bytes) -> bytes:
            reader, writer = await asyncio.open_connection(*address)
            with contextlib.closing(writer):
                writer.write(request)
                return await asyncio.wait_for(reader.read(-1), 20)

        try:
            return [await ask(request) for request in requests]
        finally:
            proxy.close()
            await asyncio.sleep(0)

    return asyncio.run(main())


def status(answer: bytes) -> int:
    return int(answer.split()[1])


def test_a_plain_request(server: int) -> None:
    head = f"POST http://LOCALHOST:{server}/a?b=c HTTP/1.1\r\nHost: elsewhere.example\r\nX-Mine: 1\r\n".encode()
    secret = b"Proxy-Authorization: Basic x\r\nProxy-Connection: keep-alive\r\nContent-Length: 4\r\n\r\nbody"
    (answer,) = proxied(f"localhost:{server},127.0.0.1:{server}", head + secret)
    assert status(answer) == 200
    assert b"POST /a?b=c HTTP/1.1\n" in answer
    assert f"Host: LOCALHOST:{server}\n".encode() in answer
    assert b"X-Mine: 1\n" in answer
    assert b"elsewhere" not in answer
    assert b"Proxy-" not in answer
    assert answer.endswith(b"body")


def test_a_tunnel(server: int) -> None:
    target = f"127.0.0.1:{server}"
    inner = f"GET / HTTP/1.1\r\nHost: {target}\r\nConnection: close\r\n\r\n"
    (answer,) = proxied(target, f"CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n{inner}".encode())
    assert answer.startswith(b"HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    "request_line",
    [
        "GET http://other.example/ HTTP/1.1",
        "CONNECT other.example:443 HTTP/1.1",
        "CONNECT listed.example:22 HTTP/1.1",
        "GET http://169.254.169.254/latest/meta-data HTTP/1.1",
        "CONNECT 127.0.0.1:443 HTTP/1.1",
        "CONNECT [::1]:443 HTTP/1.1",
        "CONNECT [::ffff:7f00:1]:443 HTTP/1.1",
        "GET http://localhost/ HTTP/1.1",  # listed, but not where it leads to
        "CONNECT 2130706433:443 HTTP/1.1",
        "CONNECT 0x7f.1:443 HTTP/1.1",
    ],
)
def test_what_is_forbidden(request_line: str) -> None:
    (answer,) = proxied("listed.example,localhost", f"{request_line}\r\n\r\n".encode())
    assert status(answer) == 403
    assert b"this sandbox reaches only listed.example,localhost" in answer


def test_names_that_are_numbers_lead_to_private_addresses() -> None:
    answers = proxied("*", b"CONNECT 2130706433:443 HTTP/1.1\r\n\r\n", b"CONNECT localhost:443 HTTP/1.1\r\n\r\n")
    assert [status(answer) for answer in answers] == [403, 403]
    assert all(b"which is not public" in answer for answer in answers)


@pytest.mark.parametrize(
    "request_text",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET http://listed.example@evil.example/ HTTP/1.1\r\n\r\n",
        b"CONNECT listed.example HTTP/1.1\r\n\r\n",
        b"CONNECT listed.example:443@evil.example:443 HTTP/1.1\r\n\r\n",
        b"CONNECT listed.example\xff:443 HTTP/1.1\r\n\r\n",
        b"CONNECT a..listed.example:443 HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x00\x05hello\r\n\r\n",
    ],
)
def test_what_is_no_request(request_text: bytes) -> None:
    (answer,) = proxied("listed.example,*.listed.example", request_text)
    assert status(answer) == 400


def test_a_head_without_an_end() -> None:
    with contextlib.suppress(ConnectionResetError):  # the answer, or a reset for what was never read
        (answer,) = proxied("*", b"GET http://listed.example/ HTTP/1.1\r\nX: " + b"x" * 2 * MAX_HEAD_BYTES)
        assert status(answer) == 400


def test_a_host_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    (answer,) = proxied(f"127.0.0.1:{port}", f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode())
    assert status(answer) == 502


def test_its_end_cuts_all_connections(server: int) -> None:
    async def main() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        proxy = Proxy(AllowList.parse(f"127.0.0.1:{server}"))
        await proxy.start(listener)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(f"CONNECT 127.0.0.1:{server} HTTP/1.1\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        proxy.close()
        proxy.close()
        assert await asyncio.wait_for(reader.read(-1), 5) == b""
        writer.close()

    before = descriptors()
    asyncio.run(main())
    assert wait_until(lambda: descriptors() <= before)


def test_so_many_connections_and_no_more(server: int) -> None:
    async def main() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        proxy = Proxy(AllowList.parse(f"127.0.0.1:{server}"))
        await proxy.start(listener)
        held = [await asyncio.open_connection(*listener.getsockname()) for _ in range(MAX_CONNECTIONS)]
        await asyncio.sleep(0.1)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        assert status(await reader.read(-1)) == 503
        for _, each in [*held, (reader, writer)]:
            each.close()
        proxy.close()
        await asyncio.sleep(0.1)

    asyncio.run(main())
