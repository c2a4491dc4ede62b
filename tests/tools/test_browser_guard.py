"""Where the browser may not go: private addresses, in whatever way a page tries."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.tools.browser_site import Pages, Site, serving
from tests.tools.browsing import Rollout, Worker, needs_chromium, working

pytestmark = needs_chromium

BLOCKED = "Blocked: URL targets a private or internal network address"
PAGES: Pages = {
    "/": "<title>Home</title>",
    "/worker.js": "fetch('http://PRIVATE/by-worker').catch(() => 0)",
    "/tries": """<title>Tries</title>
        <img src=http://PRIVATE/by-image><iframe src=http://PRIVATE/by-frame></iframe>
        <script src=http://PRIVATE/by-script></script><link rel=stylesheet href=http://PRIVATE/by-style>
        <link rel=prefetch href=http://PRIVATE/by-prefetch><video src=http://PRIVATE/by-video></video>
        <img src="/redirect?http://PRIVATE/by-redirect"><script>
        const quietly = promise => promise.catch(() => 0)
        quietly(fetch('http://PRIVATE/by-fetch', {mode: 'no-cors'}))
        quietly(fetch('http://localhost:PORT/by-name', {mode: 'no-cors'}))
        quietly(fetch('https://PRIVATE/by-tls', {mode: 'no-cors'}))
        navigator.sendBeacon('http://PRIVATE/by-beacon', 'x')
        new WebSocket('ws://PRIVATE/by-socket')
        new EventSource('http://PRIVATE/by-events')
        new Worker('/worker.js')
        quietly(navigator.serviceWorker.register('/worker.js'))
        const peer = new RTCPeerConnection({iceServers: [
            {urls: 'stun:127.0.0.1:UDP'}, {urls: 'turn:PRIVATE?transport=tcp', username: 'a', credential: 'b'}]})
        peer.createDataChannel('x')
        peer.createOffer().then(offer => peer.setLocalDescription(offer))
        try { quietly(new WebTransport('https://127.0.0.1:UDP/by-quic').ready) } catch {}
        </script>""",
    "/goes": "<title>Goes</title><script>setTimeout(() => { location = 'http://PRIVATE/by-location' }, 50)</script>",
    "/link": "<title>Link</title><a href=http://PRIVATE/by-link>Inside</a>",
    "/form": "<title>Form</title><form action=https://PRIVATE/by-form><button>Send</button></form>",
    "/popup": "<title>Popup</title><button onclick=\"window.open('http://PRIVATE/by-popup')\">Open</button>",
}


class Private:
    """Something of this machine that is nobody's business: it counts who comes, by TCP and UDP."""

    def __init__(self) -> None:
        self.came: list[bytes] = []
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.port, self.udp_port = self.tcp.getsockname()[1], self.udp.getsockname()[1]
        self.threads = [threading.Thread(target=wait) for wait in (self.accept, self.receive)]
        for thread in self.threads:
            thread.start()

    def accept(self) -> None:
        while True:
            connection, _ = self.tcp.accept()
            with connection:
                data = connection.recv(1000)
                if data == b"over":
                    return
                self.came.append(data)

    def receive(self) -> None:
        while (data := self.udp.recv(1000)) != b"over":
            self.came.append(data)

    def close(self) -> None:
        with socket.create_connection(("127.0.0.1", self.port)) as last:
            last.sendall(b"over")
        self.udp.sendto(b"over", self.udp.getsockname())
        for thread in self.threads:
            thread.join()
        self.tcp.close()
        self.udp.close()


@pytest.fixture(scope="module")
def private() -> Iterator[Private]:
    made = Private()
    yield made
    made.close()


@pytest.fixture(scope="module")
def worker(private: Private) -> Iterator[Worker]:
    names = {"PRIVATE": f"127.0.0.1:{private.port}", "UDP": str(private.udp_port), "PORT": str(private.port)}
    pages = dict(PAGES)
    for name, value in names.items():
        pages = {path: text.replace(name, value) for path, text in pages.items()}
    with serving(pages) as site, working(site) as made:
        yield made


@pytest.fixture
def rollout(worker: Worker, private: Private) -> Iterator[Rollout]:
    private.came.clear()
    with worker.rollout() as opened:
        yield opened
    assert private.came == []


@pytest.fixture
def site(worker: Worker) -> Site:
    return worker.site


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:PORT/",
        "https://127.0.0.1:PORT/",
        "127.0.0.1:PORT",
        "http://localhost:PORT/",
        "http://[::1]:PORT/",
        "http://[::ffff:7f00:1]:PORT/",
        "http://2130706433:PORT/",
        "http://0x7f.1:PORT/",
        "http://0.0.0.0:PORT/",
        "http://169.254.169.254/latest/meta-data/",
        "http://user:pass@127.0.0.1:PORT/",
    ],
)
def test_private_addresses_are_not_gone_to(rollout: Rollout, private: Private, url: str) -> None:
    assert rollout.call("navigate", url=url.replace("PORT", str(private.port))) == {"success": False, "error": BLOCKED}


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("file:///etc/passwd", "file"),
        ("FILE:/etc/passwd", "file"),
        ("chrome://version", "chrome"),
        ("view-source:http://127.0.0.1/", "view-source"),
        ("data:text/html,hello", "data"),
        ("javascript:alert(1)", "javascript"),
        ("about:blank", "about"),
        ("ftp://example.org/", "ftp"),
    ],
)
def test_only_the_web_is_gone_to(rollout: Rollout, url: str, scheme: str) -> None:
    error = f"Blocked: only http and https pages can be opened, not {scheme}:"
    assert rollout.call("navigate", url=url) == {"success": False, "error": error}


@pytest.mark.parametrize("url", ["", "http://", "http://a b/", "https://[::1", "http://x:99999/"])
def test_what_is_no_url_is_told(rollout: Rollout, url: str) -> None:
    assert rollout.call("navigate", url=url)["success"] is False


def test_a_redirect_to_a_private_address_is_refused(rollout: Rollout, site: Site, private: Private) -> None:
    for target in (
        f"http://127.0.0.1:{private.port}/",
        f"https://127.0.0.1:{private.port}/",
        "http://169.254.169.254/x",
    ):
        result = rollout.call("navigate", url=site.url(f"/redirect?{target}"))
        assert result == {"success": False, "error": BLOCKED}
        assert rollout.call("snapshot")["url"] == "about:blank"
    assert rollout.call("navigate", url=site.url("/redirect?file:///etc/passwd"))["success"] is False
    assert rollout.open(site.url())["title"] == "Home"


def test_nothing_on_a_page_reaches_a_private_address(rollout: Rollout, site: Site) -> None:
    page = rollout.open(site.url("/tries"))
    assert page["title"] == "Tries"
    rollout.wait(asyncio.sleep(1.0))
    assert rollout.call("snapshot")["title"] == "Tries"
    assert site.asked("/worker.js")


@pytest.mark.parametrize(("path", "name"), [("/link", "Inside"), ("/form", "Send"), ("/popup", "Open")])
def test_clicks_lead_to_no_private_address(rollout: Rollout, site: Site, path: str, name: str) -> None:
    page = rollout.open(site.url(path))
    clicked = rollout.click(page, name)
    left = "its tab was closed" if name == "Open" else "the browser went back to the page before"
    assert (clicked["success"], clicked["error"]) == (False, f"{BLOCKED}; {left}")
    assert rollout.call("snapshot")["url"] == site.url(path)


def test_a_page_that_goes_to_a_private_address_itself(rollout: Rollout, site: Site) -> None:
    rollout.call("navigate", url=site.url("/goes"))
    rollout.wait(asyncio.sleep(0.5))
    seen = rollout.call("snapshot")
    assert "by-location" not in seen.get("snapshot", "")


def test_what_cannot_be_found_is_told(rollout: Rollout) -> None:
    for url in ("http://no-such-name.invalid/", "https://no-such-name.invalid/", "no-such-name.invalid"):
        result = rollout.call("navigate", url=url)
        assert result["success"] is False
        assert result["error"].startswith("no-such-name.invalid cannot be reached: ")
