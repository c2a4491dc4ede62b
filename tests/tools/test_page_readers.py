from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.program import ROOT, descendants, wait_until
from tests.tools import pdf_files
from tools.page_reader import _stripped, read_page
from tools.page_readers import MAX_READERS, Page, PageError, PageReaders

ARTICLE = """<html><head><title>Of tea
 &amp; water</title><meta charset="{charset}"></head><body>
<nav><a href="/home">Home</a> <a href="/about">About</a></nav>
<article><h1>Thé</h1><p>Tea is a drink that is made of leaves, see <a href="/leaf">leaf</a> and <b>water</b>.</p>
<table><tr><th>kind</th><th>minutes</th></tr><tr><td>black</td><td>4</td></tr></table>
<pre><code>boil()
steep(4)</code></pre><script>evil()</script></article><footer>Imprint</footer></body></html>"""
PROSE = "Words that are long enough to be the text of a page, not its ornament. "
BUSY = ("<html><body>" + f"<p>{PROSE}<a href='x'>link</a></p>" * 2500).encode()  # a second's work, more or less


def with_readers(work: Callable[[PageReaders], Awaitable[Any]], **options: Any) -> Any:
    """Do some work; no process may be left after it."""

    async def run() -> Any:
        readers = PageReaders({}, **options)
        try:
            return await work(readers)
        finally:
            await readers.close()
            assert children() == []

    return asyncio.run(run())


def is_reader(pid: int) -> bool:
    try:
        return b"page_reader.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False  # it has just ended


def children() -> list[int]:
    """The readers of this process."""
    return [pid for pid in descendants(os.getpid()) if is_reader(pid)]


async def first_child() -> int:
    async with asyncio.timeout(30):
        found = children()
        while not found:
            await asyncio.sleep(0.02)
            found = children()
    return found[0]


async def told(readers: PageReaders, body: bytes, content_type: str = "text/html", charset: str = "") -> Page | str:
    """The page, or the error."""
    try:
        return await readers.read(body, url="http://a.example/b/", content_type=content_type, charset=charset)
    except PageError as error:
        return str(error)


def read(*jobs: tuple[Any, ...], **options: Any) -> list[Any]:
    async def work(readers: PageReaders) -> list[Any]:
        return [await told(readers, *job) for job in jobs]

    pages: list[Any] = with_readers(work, **options)
    return pages


def test_html_becomes_markdown() -> None:
    (page,) = read((ARTICLE.format(charset="utf-8").encode(),))
    assert page.title == "Of tea & water"
    assert page.total_chars == len(page.text)
    for piece in ("# Thé", "[leaf](http://a.example/leaf)", "| black | 4 |", "boil()\nsteep(4)"):
        assert piece in page.text
    for piece in ("Home", "evil", "Imprint", "<"):
        assert piece not in page.text


def test_links_lead_where_they_led() -> None:
    links = {
        "leaf": "http://a.example/b/leaf",
        "../leaf": "http://a.example/leaf",
        "/leaf": "http://a.example/leaf",
        "//b.example/leaf": "http://b.example/leaf",
        "?q=1": "http://a.example/b/?q=1",
        "https://c.example/": "https://c.example/",
        "http://[bad": "http://[bad",
    }
    text = f"<p>{PROSE * 3}" + "".join(f'<a href="{link}">to it</a> ' for link in links) + "</p>"
    bases = ("", "http://base.example/x/y", "/x/y", "http://[bad")
    plain, elsewhere, here, bad = read(
        *((f"<html><head><base href='{base}'></head><body>{text}".encode(),) for base in bases)
    )
    for place in links.values():
        assert f"[to it]({place})" in plain.text
    assert "[to it](http://base.example/x/leaf)" in elsewhere.text
    assert "[to it](http://a.example/x/leaf)" in here.text
    assert PROSE in bad.text


def test_charsets_right_and_wrong() -> None:
    coded = [
        ("utf-8", "utf-8", "utf-8"),
        ("utf-8", "", ""),
        ("utf-8", "iso-8859-1", "latin-1"),  # both liars
        ("latin-1", "utf-8", "iso-8859-1"),
        ("latin-1", "iso-8859-1", ""),
        ("latin-1", "klingon", "zlib"),
        ("cp1252", "", "windows-1252"),
        ("utf-16", "", ""),
        ("utf-16-le", "utf-16le", ""),
        ("utf-8-sig", "ascii", "ascii"),
    ]
    pages = read(*((ARTICLE.format(charset=meta).encode(real), "text/html", header) for real, header, meta in coded))
    assert ["# Thé" in page.text for page in pages] == [True] * len(coded)
    (page,) = read(("日本語のテキスト".encode("iso2022_jp"), "text/plain", "iso-2022-jp"))
    assert page.text == "日本語のテキスト"


def test_other_text_is_shown_as_it_is() -> None:
    feed = "<?xml version='1.0'?><rss><channel><title>T</title></channel></rss>"
    texts = [
        ('{"a": 1}', "application/json"),
        ('{"a": 1}', "application/vnd.api+json"),
        ("# A\n\n* b", "text/markdown"),
        ("<html><body>source</body></html>", "text/plain"),
        (feed, "application/rss+xml"),
        ("a: 1", "application/octet-stream"),
        ("a: 1", ""),
    ]
    pages = read(*((text.encode(), content_type) for text, content_type in texts))
    assert pages == [Page("", text, len(text)) for text, _ in texts]


def test_what_is_no_text_is_refused() -> None:
    assert read(
        (b"\x89PNG\r\n", "image/png"),
        (b"a\0b", "text/plain"),
        (b"a\0b", ""),
        (b"<html>", "application/pdf"),
        (b"PK", "application/zip"),
    ) == [
        "Cannot read text from image/png",
        "Cannot read text from text/plain",
        "Cannot read text from binary data",
        "The server says that this is a PDF file, but it is none",
        "Cannot read text from application/zip",
    ]


def test_a_binary_body_is_no_page_whoever_says_so() -> None:
    noise = bytes(range(256)) * 20
    for content_type in ("text/html", "text/plain", "application/xhtml+xml"):
        for body in (gzip.compress(noise), noise, b"\0" * 100):
            assert read((body, content_type)) == [f"Cannot read text from {content_type}"]
    told_in_colour, nul = read((b"\x1b[31mred\x1b[0m " * 50, "text/plain"), (b"<p>one NUL \0 is borne in many words",))
    assert "red" in told_in_colour.text
    assert "one NUL" in nul.text


def test_html_that_is_nested_too_deeply_is_read_without_its_tags() -> None:
    deep = "<div>" * 100_000 + "deep &amp; far" + "</div>" * 50_000
    rest = "<p>an <b>other</b> line<br>and<script>no()</script> more<!-- nor <b>this --><style>p {}"
    (page,) = read((f"<title>The title</title><body>{deep}{rest}".encode(),))
    assert (page.title, page.text) == ("The title", "deep & far\nan other line\nand\nmore")


@pytest.mark.parametrize("piece", ["<", "<!--", "<div ", "</", "<!", "<![CDATA[", "<script>", "<a><b", "&"])
def test_taking_tags_away_is_quick_whatever_they_are(piece: str) -> None:
    started = time.monotonic()
    _stripped(piece * (1_000_000 // len(piece)))
    assert time.monotonic() - started < 5


def test_pages_of_little_text() -> None:
    pages = read(
        (b"<p>hi</p>",),
        (b"<html><body><p>ok</body></html>", ""),
        (b"",),
        (b"<html><head><title>App</title></head><body><div id=root></div><script>x()</script></body></html>",),
    )
    assert [page.text for page in pages] == ["hi", "ok", "", ""]
    assert pages[3].title == "App"


def test_images_in_the_text_are_removed() -> None:
    data = base64.b64encode(os.urandom(3000)).decode()
    wrapped = base64.encodebytes(os.urandom(3000)).decode().strip()
    jobs: list[tuple[bytes, str]] = []
    for image in (data, wrapped):
        text = f"before ![x](data:image/png;base64,{image}) after\nand "
        text += f"more data:image/svg+xml;charset=utf-8;base64,{data} end"
        html = f"<html><body><p>{PROSE}<img src='data:image/png;base64,{image}'></p><p>{PROSE}</p></body></html>"
        jobs += [(text.encode(), "text/markdown"), (html.encode(), "text/html")]
    plain, page, *others = read(*jobs)
    assert plain.text == "before ![x][BASE64_IMAGE_REMOVED] after\nand more [BASE64_IMAGE_REMOVED] end"
    assert page.text == f"{PROSE}\n\n{PROSE}".replace(" \n", "\n").strip()
    assert others == [plain, page]


def test_long_texts_are_cut_and_counted() -> None:
    text, html = read((b"a" * 3_000_000, "text/plain"), (b"<html><body><p>" + b"x" * 1_000_000 + b"<p>end",))
    assert (len(text.text), text.total_chars) == (2_000_000, 3_000_000)
    assert html.text.startswith("xxx")
    assert "Only the first 1000000 of 1000021 characters of HTML were read" in html.text


def test_scripts_do_not_count() -> None:
    script = b"<SCRIPT type=x>" + b"var x = '<style>'; " * 60_000 + b"</script >"
    body = (
        b"<html><head>" + script + b"</head><body><p>" + PROSE.encode() * 3 + b"</p>" + script + b"<p>End.</p></body>"
    )
    closed, unclosed = read((body,), (b"<p>" + PROSE.encode() * 3 + script[:-10] + b"<p>lost",))
    assert closed.text == (PROSE * 3).strip() + "\n\nEnd."
    assert unclosed.text == (PROSE * 3).strip()


class TestPdf:
    def test_text_by_pages(self) -> None:
        document = pdf_files.written("Hello world", "The second page", title="A report")
        types = ("application/pdf", "application/octet-stream", "text/html")
        page = Page("A report", "[Page 1]\nHello world\n\n[Page 2]\nThe second page", 46)
        assert read(*((document, content_type) for content_type in types)) == [page] * 3

    def test_files_that_cannot_be_read(self) -> None:
        hello = pdf_files.written("Hello")
        locked, open_lock, scan, torn, nothing = read(
            (pdf_files.locked(hello, "secret"),),
            (pdf_files.locked(hello, ""),),
            (pdf_files.pages([pdf_files.stream(b"")]),),
            (hello[:200],),
            (b"%PDF-1.7\n",),
        )
        assert locked == "The PDF file is protected by a password"
        assert open_lock.text == "[Page 1]\nHello"
        assert scan == "The PDF file holds no text; its pages may be images"
        assert torn.startswith("The PDF file ")
        assert nothing.startswith("The PDF file cannot be read: ")

    @pytest.mark.parametrize("hostile", [pdf_files.BOMB, pdf_files.ENDLESS], ids=["bomb", "endless"])
    def test_hostile_files(self, hostile: bytes) -> None:
        error, after = read((hostile,), (pdf_files.written("Hello"),), seconds=5)
        assert isinstance(error, str)
        assert after.text == "[Page 1]\nHello"


def test_hostile_html_is_read_or_refused() -> None:
    bodies = [
        b"<html><body>" + b"<div>" * 200_000 + b"deep",
        b"<p " + b"a=b " * 400_000 + b">text",
        b"<!DOCTYPE html ["
        + b"".join(b'<!ENTITY l%d "%s">' % (n, b"&l%d;" % (n - 1) * 10) for n in range(20))
        + b"]>&l19;",
        b"<!DOCTYPE a [<!ENTITY x SYSTEM 'file:///etc/passwd'>]><html><body><p>"
        + PROSE.encode()
        + b"&x;</p></body></html>",
        bytes(range(256)) * 1000,
        b"<" * 500_000,
        b"<title>" * 100_000,
    ]
    *_, after = pages = read(*((body,) for body in bodies), (ARTICLE.encode(),))
    assert "root:" not in str(pages)
    assert "Tea" in after.text


def test_a_page_that_takes_too_long_is_given_up() -> None:
    assert read((BUSY * 20,), seconds=0.5) == ["The page could not be read within 0.5 seconds"]


def test_a_reader_that_dies_costs_one_page() -> None:
    async def work(readers: PageReaders) -> tuple[Any, Any]:
        task = asyncio.create_task(told(readers, BUSY * 20))
        os.kill(await first_child(), signal.SIGKILL)
        return await task, await told(readers, b"<p>hi</p>")

    error, page = with_readers(work)
    assert error == "The page could not be read: it is damaged, or takes too much memory"
    assert page.text == "hi"


def test_a_cancelled_call_takes_its_reader_along() -> None:
    async def work(readers: PageReaders) -> None:
        task = asyncio.create_task(told(readers, BUSY * 20))
        await first_child()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert children() == []

    with_readers(work)


def test_few_processes_read_many_pages_and_the_worker_is_idle() -> None:
    async def work(readers: PageReaders) -> tuple[set[int], float]:
        seen: set[int] = set()
        before = time.thread_time()
        bodies = [BUSY, *[b"<p>hi"] * 30]
        tasks = [asyncio.create_task(told(readers, body)) for body in bodies]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.05)
            seen.update(children())
        return seen, time.thread_time() - before

    seen, cpu_seconds = with_readers(work)
    assert 1 <= len(seen) <= MAX_READERS
    assert cpu_seconds < 0.4


def test_readers_are_bounded_and_know_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAVILY_API_KEY", "tvly-1234567890")

    def look() -> tuple[str, str]:
        (pid,) = children()
        return Path(f"/proc/{pid}/environ").read_text(), Path(f"/proc/{pid}/limits").read_text(encoding="ascii")

    async def work(readers: PageReaders) -> tuple[str, str]:
        await told(readers, b"<p>hi")
        return look()

    environ, limits = with_readers(work)
    assert "tvly" not in environ
    bounds = {line[:26].strip(): line[26:47].strip() for line in limits.splitlines()}
    assert bounds["Max address space"] == str(1 << 30)
    assert bounds["Max file size"] == "0"
    assert bounds["Max cpu time"] != "unlimited"


OWNER = """
import asyncio
from tools.page_readers import PageReaders
body = b"<html><body>" + b"<p>words <a href='x'>link</a></p>" * 9000
asyncio.run(PageReaders({}).read(body, url="http://a.example/", content_type="text/html", charset=""))
"""


def test_readers_end_with_a_worker_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT) as owner:
        try:
            wait_until(children, "a reader is there", 30)
            readers = children()
        finally:
            owner.kill()
    wait_until(lambda: not any(map(is_reader, readers)), "readers are gone", 30)


PIECES = st.sampled_from(
    [
        b"<p>",
        b"</p>",
        b"<a href='x'>",
        b"<table><tr><td>",
        b"<!--",
        b"-->",
        b"<script>",
        b"<meta charset='",
        b"'>",
        b"<base href=",
        b"&#0;",
        b"&nbsp;",
        b"%PDF-1.4",
        b"<?xml encoding='utf-7'?>",
        b"data:image/png;base64,",
        PROSE.encode(),
        "\N{SNOWMAN}".encode("utf-16"),
    ]
)
CHARSETS = st.sampled_from(["", "utf-8", "utf-16", "utf-7", "idna", "zlib", "iso-2022-kr", "\0", "\ud800", "x" * 50])
TYPES = st.sampled_from(["text/html", "text/plain", "application/pdf", "application/json", "", "image/png"])


@given(st.lists(PIECES | st.binary(max_size=20), max_size=30), TYPES, CHARSETS)
def test_any_body_is_read_or_refused(pieces: list[bytes], content_type: str, charset: str) -> None:
    job = {"url": "http://a.example/", "content_type": content_type, "charset": charset}
    answer = read_page(job, b"".join(pieces))
    assert answer.keys() in ({"title", "text", "total_chars"}, {"problem"})
    json.loads(json.dumps(answer))
