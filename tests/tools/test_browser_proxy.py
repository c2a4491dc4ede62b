from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tools import browser_proxy
from tools.addresses import NO_HOSTS, AllowedHosts
from tools.browser_proxy import Proxy, target_of


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


LOOPBACK = AllowedHosts.parse("127.0.0.0/8")
BLOCKED = "Blocked: URL targets a private or internal network address"
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(talk: Talk) -> AsyncIterator[int]:
    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        finally:
            writer.close()

    listening = await asyncio.start_server(served, "127.0.0.1", 0)
    async with listening:
        yield int(listening.sockets[0].getsockname()[1])


async def echo_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer with what was asked."""
    head = await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + head)
    await writer.drain()


async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Give back in capitals what comes, until nothing more comes."""
    while data := await reader.read(100):
        writer.write(data.upper())
        await writer.drain()


@asynccontextmanager
async def running(proxy: Proxy) -> AsyncIterator[Proxy]:
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()


async def say(proxy: Proxy, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        writer.write(data)
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


def get(url: str) -> bytes:
    head = (
        f"GET {url} HTTP/1.1\r\nHost: h\r\nProxy-Connection: keep-alive\r\nConnection: keep-alive\r\nX-Mine: 1\r\n\r\n"
    )
    return head.encode()


def connect(where: str) -> bytes:
    return f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("path", "asked"), [("", "/"), ("/a/b?c=d", "/a/b?c=d"), ("?q=1/2", "/?q=1/2"), ("/x%20y", "/x%20y")]
)
def test_a_request_reaches_the_server_as_it_expects_it(path: str, asked: str) -> None:
    async def scene() -> None:
        async with server(echo_head) as port, running(Proxy(LOOPBACK)) as proxy:
            answer = await say(proxy, get(f"http://127.0.0.1:{port}{path}"))
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            head = answer.partition(b"\r\n\r\n")[2].split(b"\r\n")
            assert head == [f"GET {asked} HTTP/1.1".encode(), b"Host: h", b"X-Mine: 1", b"Connection: close", b"", b""]

    asyncio.run(scene())


def test_a_tunnel_passes_bytes_both_ways() -> None:
    async def scene() -> None:
        async with server(shout) as port, running(Proxy(LOOPBACK)) as proxy:
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(connect(f"127.0.0.1:{port}"))
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 200 Connection established\r\n\r\n"
            for word in (b"one", b"two"):
                writer.write(word)
                assert await reader.readexactly(3) == word.upper()
            writer.close()
            await writer.wait_closed()

    asyncio.run(scene())


@pytest.mark.parametrize(
    "where",
    [
        "127.0.0.1",
        "localhost",
        "169.254.169.254",
        "10.1.2.3",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "0.0.0.0",
        "2130706433",
        "100.64.0.1",
        "[fd00::1]",
    ],
)
def test_private_addresses_are_refused_and_the_reason_kept(where: str) -> None:
    async def scene() -> None:
        async with server(shout) as port, running(Proxy(NO_HOSTS)) as proxy:
            tunnel = await say(proxy, connect(f"{where}:{port}"))
            plain = await say(proxy, get(f"http://{where}:{port}/"))
            assert tunnel.startswith(b"HTTP/1.1 403 Forbidden\r\n")
            assert tunnel.endswith(f"\r\n\r\n{BLOCKED}\n".encode())
            assert plain == b""
            assert proxy.problem(f"https://{where}:{port}/any") == BLOCKED
            assert proxy.problem("https://example.org/") == ""

    asyncio.run(scene())


def test_each_connection_is_checked_and_goes_where_the_check_looked() -> None:
    """A name that resolves to another address the second time gains nothing."""
    answers = [["127.0.0.1"], ["10.0.0.1"], ["127.0.0.1", "169.254.169.254"]]
    asked: list[tuple[str, int]] = []

    async def lookup(host: str, port: int) -> list[str]:
        asked.append((host, port))
        return answers.pop(0)

    async def scene() -> None:
        async with server(echo_head) as port, running(Proxy(LOOPBACK, lookup)) as proxy:
            url = f"http://rebinding.test:{port}/"
            assert b"200 OK" in await say(proxy, get(url))
            assert proxy.problem(url) == ""
            for _ in range(2):
                assert await say(proxy, get(url)) == b""
                assert proxy.problem(url) == BLOCKED
            assert asked == [("rebinding.test", port)] * 3

    asyncio.run(scene())


def test_what_cannot_be_reached_is_told() -> None:
    async def nothing(_host: str, _port: int) -> list[str]:
        raise OSError(-2, "Name or service not known")

    async def scene() -> None:
        async with running(Proxy(LOOPBACK, nothing)) as proxy:
            assert b"502 Bad Gateway" in await say(proxy, connect("no.such.name:80"))
            assert proxy.problem("http://no.such.name/") == "no.such.name cannot be reached: Name or service not known"
        async with server(shout) as port:
            pass
        async with running(Proxy(LOOPBACK)) as proxy:
            assert b"502 Bad Gateway" in await say(proxy, connect(f"127.0.0.1:{port}"))

    asyncio.run(scene())


def test_the_second_address_is_tried() -> None:
    async def lookup(_host: str, _port: int) -> list[str]:
        return ["127.0.0.9", "127.0.0.1"]

    async def scene() -> None:
        async with server(echo_head) as port, running(Proxy(LOOPBACK, lookup)) as proxy:
            assert b"200 OK" in await say(proxy, get(f"http://two.test:{port}/"))

    asyncio.run(scene())


@pytest.mark.parametrize(
    "head",
    [
        b"\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET ftp://a.b/ HTTP/1.1\r\n\r\n",
        b"GET https://a.b/ HTTP/1.1\r\n\r\n",
        b"CONNECT nowhere HTTP/1.1\r\n\r\n"[:-4] + b":x HTTP\r\n\r\n",
        b"CONNECT [::1 HTTP/1.1\r\n\r\n",
        b"GET http://a.b:99999999/ HTTP/1.1\r\n\r\n",
        b"\xff\xfe\x00 \x01 \x02\r\n\r\n",
    ],
)
def test_what_is_no_proxy_request_is_refused(head: bytes) -> None:
    async def scene() -> None:
        async with running(Proxy(LOOPBACK)) as proxy:
            assert (await say(proxy, head)).startswith(b"HTTP/1.1 400 Bad Request\r\n")

    asyncio.run(scene())


def test_a_head_without_end_is_refused() -> None:
    async def scene() -> None:
        async with running(Proxy(LOOPBACK)) as proxy:
            endless = b"GET http://127.0.0.1/ HTTP/1.1\r\nX: " + b"x" * 300_000
            assert b"431" in await say(proxy, endless)

    asyncio.run(scene())


def test_a_connection_is_bounded_in_bytes_and_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser_proxy, "MAX_CONNECTION_BYTES", 1_000_000)
    monkeypatch.setattr(browser_proxy, "SILENCE_SECONDS", 0.2)

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x" * 100_000)
            await writer.drain()

    async def silence(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        while await reader.read(100):
            pass

    async def scene() -> None:
        async with server(ending(flood)) as port, running(Proxy(LOOPBACK)) as proxy:
            got = len(await say(proxy, get(f"http://127.0.0.1:{port}/")))
            assert 1_000_000 <= got < 1_200_000
        async with server(ending(silence)) as port, running(Proxy(LOOPBACK)) as proxy:
            assert await say(proxy, get(f"http://127.0.0.1:{port}/")) == b""

    asyncio.run(scene())


def ending(talk: Talk) -> Talk:
    """Talk until the other side has gone."""

    async def talked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        except ConnectionError:
            writer.transport.abort()

    return talked


def test_closing_cuts_what_is_open() -> None:
    async def scene() -> None:
        async with server(ending(shout)) as port:
            proxy = Proxy(LOOPBACK)
            await proxy.start()
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(connect(f"127.0.0.1:{port}"))
            await reader.readuntil(b"\r\n\r\n")
            await proxy.close()
            async with asyncio.timeout(5):
                assert await reader.read() == b""
            writer.close()
            with pytest.raises(OSError):  # noqa: PT011 - whichever way it refuses
                await asyncio.open_connection("127.0.0.1", proxy.port)

    asyncio.run(scene())


def test_a_proxy_of_the_environment_is_used_and_names_are_checked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[bytes] = []

    async def upstream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 403 No\r\n\r\n" if b"no.test" in heads[-1] else b"HTTP/1.1 200 OK\r\n\r\nhello")
        await writer.drain()

    async def lookup(host: str, _port: int) -> list[str]:
        if host == "inside.test":
            return ["10.0.0.1"]
        return ["8.8.8.8"]

    async def scene() -> None:
        async with server(upstream) as port, running(Proxy(NO_HOSTS, lookup)) as proxy:
            for name in ("http_proxy", "https_proxy"):
                monkeypatch.setenv(name, f"http://ann:p%40ss@127.0.0.1:{port}")
            assert (await say(proxy, get("http://out.test/x?y"))).endswith(b"\r\n\r\nhello")
            assert (await say(proxy, connect("out.test:443"))).endswith(b"established\r\n\r\nhello")
            assert await say(proxy, get("http://inside.test/")) == b""
            assert b"403 Forbidden" in await say(proxy, connect("169.254.169.254:80"))
            assert b"502 Bad Gateway" in await say(proxy, connect("no.test:443"))
            assert "says 'HTTP/1.1 403 No'" in proxy.problem("https://no.test/")

    asyncio.run(scene())
    plain, tunnel, refused = heads
    assert plain.startswith(
        b"GET http://out.test/x?y HTTP/1.1\r\nProxy-Authorization: Basic YW5uOnBAc3M=\r\nHost: h\r\n"
    )
    assert tunnel == (
        b"CONNECT out.test:443 HTTP/1.1\r\nHost: out.test:443\r\nProxy-Authorization: Basic YW5uOnBAc3M=\r\n\r\n"
    )
    assert refused.startswith(b"CONNECT no.test:443 ")


def test_no_proxy_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    async def scene() -> None:
        async with server(echo_head) as port, running(Proxy(LOOPBACK)) as proxy:
            assert b"200 OK" in await say(proxy, get(f"http://127.0.0.1:{port}/"))

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://example.org", ("example.org", 80)),
        ("https://example.org/x", ("example.org", 443)),
        ("wss://example.org:8080/", ("example.org", 8080)),
        ("http://[::1]:8/", ("::1", 8)),
        ("file:///etc/passwd", None),
        ("about:blank", None),
        ("http://", None),
        ("http://a:99999", None),
        ("nonsense", None),
    ],
)
def test_where_a_url_leads(url: str, target: tuple[str, int] | None) -> None:
    assert target_of(url) == target
