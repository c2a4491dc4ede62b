from __future__ import annotations

import asyncio
import gzip
import shutil
import ssl
import subprocess
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.web_server import PUBLIC, Handler, Site, endless, names, page, redirect, serve
from tools.addresses import AllowedHosts, BlockedAddressError
from tools.fetch import MAX_REDIRECTS, Fetched, FetchError, fetch, tls_context

OPEN = "site.example"  # allowed, at 127.0.0.1
KNOWN = {OPEN: ["127.0.0.1"], "inside.example": ["127.0.0.1"], "away.example": [PUBLIC]}
ALLOWED = AllowedHosts.parse(OPEN)
BOUND = 1_000_000


async def get(url: str, **options: Any) -> Fetched:
    given = {"max_bytes": BOUND, "seconds": 5, "allowed_hosts": ALLOWED, "lookup": names(KNOWN), **options}
    return await fetch(url, **given)


def visit(
    pages: dict[str, Handler], path: str = "/", site_to: Callable[[Site], None] = lambda _: None, **options: Any
) -> Fetched:
    """Fetch from a server of these pages."""

    async def work() -> Fetched:
        async with serve(pages) as site:
            try:
                return await get(site.url(path, OPEN), **options)
            finally:
                site_to(site)

    return asyncio.run(work())


def told(error: type[Exception], work: Callable[[], object]) -> str:
    with pytest.raises(error) as caught:
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_answer() -> None:
    got = visit({"/a": page("hällo", "Text/HTML; charset=ISO-8859-1")}, "/a#part")
    assert got.url.endswith("/a")
    assert (got.status, got.content_type, got.charset.lower(), got.body) == (
        200,
        "text/html",
        "iso-8859-1",
        "hällo".encode(),
    )
    assert got.ok
    missing = visit({}, "/a")
    assert (missing.status, missing.ok, missing.retryable, missing.body) == (404, False, False, b"no such page")


def test_what_is_sent() -> None:
    seen: list[Site] = []

    async def handler(_request: web.Request) -> web.StreamResponse:
        response = web.Response(status=302, headers={"Location": "/b"})
        response.set_cookie("session", "1")
        return response

    visit({"/": handler, "/b": page("x")}, site_to=seen.append)
    first, second = seen[0].requests
    assert "batch-runner" in first.headers["User-Agent"]
    assert first.host == f"{OPEN}:{seen[0].port}"
    assert "Cookie" not in first.headers
    assert second.headers["Cookie"] == "session=1"
    assert not {"Authorization", "Referer"} & set(first.headers)
    visit({"/": page("x")}, site_to=seen.append)
    assert "Cookie" not in seen[1].requests[0].headers


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed(status: int) -> None:
    got = visit({"/": redirect("b/c?q=1", status), "/b/c": page("there")})
    assert got.body == b"there"
    assert got.url.endswith("/b/c?q=1")


def test_a_redirect_without_a_place_is_an_answer() -> None:
    async def nowhere(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=302, text="nowhere")

    assert visit({"/": nowhere}).status == 302


@pytest.mark.parametrize(
    "place",
    [
        "http://127.0.0.1:{port}/secret",
        "http://inside.example:{port}/secret",
        "//[::1]:{port}/secret",
        "http://[::ffff:7f00:1]:{port}/secret",
        "http://169.254.169.254/latest/meta-data/",
        "http://10.0.0.1/",
    ],
)
def test_no_redirect_leads_inside(place: str) -> None:
    seen: list[Site] = []

    async def lead(request: web.Request) -> web.StreamResponse:
        return web.Response(status=302, headers={"Location": place.format(port=request.url.port)})

    pages = {"/": lead, "/secret": page("secret")}
    assert told(BlockedAddressError, lambda: visit(pages, site_to=seen.append)).startswith("Blocked: ")
    assert [request.path for request in seen[0].requests] == ["/"]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "inside.example", "[::1]", "127.1", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]"]
)
def test_nothing_inside_is_reached(host: str) -> None:
    async def work() -> int:
        async with serve({"/": page("secret")}) as site:
            with pytest.raises((BlockedAddressError, FetchError)):
                await get(site.url("/", host))
            return len(site.requests)

    assert asyncio.run(work()) == 0


def test_the_checked_address_is_the_one_connected_to() -> None:
    """A name that is public when it is checked and private at the next look-up."""

    async def work() -> int:
        async with serve({"/": page("secret")}) as site:
            with pytest.raises(FetchError):
                await get(
                    site.url("/", "turncoat"),
                    lookup=names({"turncoat": ["192.0.2.1", "127.0.0.1"]}),
                    seconds=0.3,
                    allowed_hosts=AllowedHosts.parse("192.0.2.0/24"),
                )
            return len(site.requests)

    assert asyncio.run(work()) == 0


def test_redirects_end() -> None:
    seen: list[Site] = []
    loop = {"/": redirect("/")}
    assert told(FetchError, lambda: visit(loop, site_to=seen.append)) == f"more than {MAX_REDIRECTS} redirects"
    assert len(seen[0].requests) == MAX_REDIRECTS + 1


@pytest.mark.parametrize(
    "place", ["file:///etc/passwd", "ftp://away.example/", "javascript:alert(1)", "gopher://x", "data:text/html,x"]
)
def test_only_the_web(place: str) -> None:
    assert "only http and https URLs" in told(FetchError, lambda: visit({"/": redirect(place)}))
    assert "only http and https URLs" in told(FetchError, lambda: asyncio.run(get(place)))


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://a:99999/", "http://a:b/", "http://exa mple/", "http://\x00/", "", "x"]
)
def test_what_is_no_url(url: str) -> None:
    assert told(FetchError, lambda: asyncio.run(get(url)))


def test_a_body_ends_at_the_bound() -> None:
    assert len(visit({"/": page(b"x" * BOUND)}).body) == BOUND
    assert told(FetchError, lambda: visit({"/": page(b"x" * (BOUND + 1))})) == "larger than 1,000,000 bytes"
    assert told(FetchError, lambda: visit({"/": endless()})) == "larger than 1,000,000 bytes"


@pytest.mark.parametrize(("encoding", "squeeze"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_bomb_does_not_go_off(encoding: str, squeeze: Callable[[bytes], bytes]) -> None:
    bomb = page(squeeze(b"\0" * 50_000_000), "text/html", **{"Content-Encoding": encoding})
    started = time.process_time()
    assert told(FetchError, lambda: visit({"/": bomb})) == "larger than 1,000,000 bytes"
    assert visit({"/": page(squeeze(b"hello"), "text/html", **{"Content-Encoding": encoding})}).body == b"hello"
    assert time.process_time() - started < 3


@pytest.mark.parametrize("encoding", ["gzip, gzip", "identity, gzip", "x-gzip", "compress", "GZIP,br"])
def test_a_coding_that_is_not_undone_is_told(encoding: str) -> None:
    twice = page(gzip.compress(gzip.compress(b"hello")), "text/html", **{"Content-Encoding": encoding})
    message = told(FetchError, lambda: visit({"/": twice}))
    assert message.startswith("its body is encoded in a way that is not undone here: ")


@pytest.mark.parametrize("encoding", ["identity", "", "utf-8", "utf-8, none"])
def test_a_coding_that_is_none_does_no_harm(encoding: str) -> None:
    assert visit({"/": page(b"hello", "text/html", **{"Content-Encoding": encoding})}).body == b"hello"


def test_broken_compression_is_told() -> None:
    assert told(FetchError, lambda: visit({"/": page(b"no gzip", "text/html", **{"Content-Encoding": "gzip"})}))


async def never(_request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    return web.Response()


def test_a_slow_server_is_given_up() -> None:
    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b".")
            await asyncio.sleep(0.02)

    for handler in (never, drip):
        with pytest.raises(FetchError, match=r"no answer within 0\.3 seconds") as caught:
            visit({"/": handler}, seconds=0.3)
        assert caught.value.retryable


def test_a_cancelled_fetch_ends_at_once() -> None:
    async def work() -> None:
        asked = asyncio.Event()

        async def hang(request: web.Request) -> web.StreamResponse:
            asked.set()
            return await never(request)

        async with serve({"/": hang}) as site:
            task = asyncio.create_task(get(site.url("/", OPEN)))
            await asked.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(work())


def test_nobody_there() -> None:
    with pytest.raises(FetchError, match=r"could not be fetched: .*127\.0\.0\.1") as caught:
        asyncio.run(get("http://site.example:1/"))
    assert caught.value.retryable
    assert "could not be fetched" in told(FetchError, lambda: asyncio.run(get("http://unknown.example/")))


@pytest.mark.parametrize(
    "answer",
    [
        b"garbage\r\n\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10_000,
    ],
)
def test_what_is_no_http(answer: bytes) -> None:
    async def talk(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async def work() -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        async with server:
            await get(f"http://{OPEN}:{server.sockets[0].getsockname()[1]}/")

    assert told(FetchError, lambda: asyncio.run(work()))


def test_no_tls_where_tls_was_wanted() -> None:
    async def work() -> None:
        async with serve({"/": page("x")}) as site:
            await get(site.url("/", OPEN).replace("http:", "https:"))

    assert told(FetchError, lambda: asyncio.run(work()))


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A server's own certificate, which nobody vouches for, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    command = [openssl, "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-days", "2", "-subj", f"/CN={OPEN}", "-addext", f"subjectAltName=DNS:{OPEN}"]
    command += ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)
    return tmp_path / "cert.pem"


def test_certificates_are_checked(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        writer.close()

    async def work() -> bytes:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate, certificate.with_name("key.pem"))
        server = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=tls)
        async with server:
            return (await get(f"https://{OPEN}:{server.sockets[0].getsockname()[1]}/")).body

    assert told(FetchError, lambda: asyncio.run(work())).startswith("no secure connection: ")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    tls_context.cache_clear()
    assert asyncio.run(work()) == b"hi"
    tls_context.cache_clear()


@given(st.text() | st.builds("http://{}/".format, st.text()) | st.builds("http://{}:{}@h".format, st.text(), st.text()))
def test_any_text_is_fetched_or_refused(url: str) -> None:
    with pytest.raises((FetchError, BlockedAddressError)):
        asyncio.run(get(url, lookup=names({}), allowed_hosts=AllowedHosts()))


class TestProxy:
    """The environment names a proxy."""

    @staticmethod
    def through_proxy(
        monkeypatch: pytest.MonkeyPatch, url: str, known: dict[str, list[str]], allowed: str = ""
    ) -> list[str]:
        async def work() -> list[str]:
            async with serve({"/": page("by proxy")}) as proxy:
                monkeypatch.setenv("http_proxy", proxy.url())
                monkeypatch.setenv("no_proxy", "direct.example")
                got = await get(url, lookup=names(known), allowed_hosts=AllowedHosts.parse(allowed))
                assert got.body == b"by proxy"
                return [str(request.url) for request in proxy.requests]

        return asyncio.run(work())

    def test_it_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = self.through_proxy(monkeypatch, "http://away.example/", {"away.example": [PUBLIC]})
        assert asked == ["http://away.example/"]

    def test_it_does_not_open_what_is_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for url in ("http://10.0.0.1/", "http://inside.example/", "http://direct.example/"):
            known = {"inside.example": ["10.0.0.1"], "direct.example": ["10.0.0.1"]}
            with pytest.raises(BlockedAddressError):
                self.through_proxy(monkeypatch, url, known)
        with pytest.raises(FetchError):
            self.through_proxy(monkeypatch, "http://unknown.example/", {})

    def test_names_that_only_it_knows_can_be_allowed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.through_proxy(monkeypatch, "http://unknown.example/", {}, "unknown.example")


@pytest.mark.parametrize("url", ["http://xn--.com/", "http://xn--a.xn--.com/x.png"])
def test_names_that_cannot_be_decoded(url: str) -> None:
    with pytest.raises(FetchError, match="not a valid URL"):
        asyncio.run(fetch(url, max_bytes=100, seconds=5))
