"""The process in which hostile pages and PDF files are taken apart, so that a worker need not: a script.

It imports nothing of ours, has no key, may use little memory and CPU time, and may write no file. On stdin it gets
jobs, on stdout it gives answers: each a length (4 bytes, big-endian) and so much JSON; a job's JSON is followed by the
body, ``bytes`` long. What a page makes the parsers raise ends the process, and the caller starts another.
"""

from __future__ import annotations

import codecs
import json
import re
import resource
import sys
import time
import unicodedata
from collections.abc import Iterable
from html import unescape
from io import BytesIO
from typing import Any, BinaryIO

MAX_TEXT_CHARS = 2_000_000  # of an answer; what is beyond is counted, for text and HTML
MAX_HTML_CHARS = 1_000_000  # without scripts; the extractor needs seconds for so much
_MIN_MAIN_TEXT_CHARS = 100  # less is not taken for the page's main text; all of the page is, then
MAX_PDF_SECONDS = 10.0  # pages that are not reached by then are left out
_MEMORY_BYTES = 1 << 30
_CPU_SECONDS = 30  # for one job; the caller's clock is stricter, but may be gone
_SNIFFED_BYTES = 4096
_SNIFFED_CHARS = 20_000
_SPACES = "\t\n\r\f\x1b"  # and what colours begin with
_ODD = ("Cc", "Cn", "Co", "Cs")  # control characters, and those that mean nothing

_META_CHARSET = re.compile(
    rb"<(?:meta|\?xml)[^>]{0,200}?(?:charset|encoding)\s*=\s*[\"']?([\w.:-]{1,40})", re.IGNORECASE
)
_HTML_START = re.compile(rb"<(?:!doctype html|html|head|body)\b", re.IGNORECASE)
_BASE64_IMAGE = re.compile(
    r"\(?data:image/[\w.+-]{1,40}(?:;[\w=.-]{1,40}){0,4};base64,"
    r"(?:[\w+/=%-]++|\s++(?=[\w+/]{40}))*+\)?"  # over several lines, too
)
_SCRIPT_TAG = re.compile(r"<(/?)(script|style)\b", re.IGNORECASE)
# Each branch takes to the end what is not closed: looked for again and again, the end would be far.
_MARKUP = re.compile(
    r"<!--.*?(?:-->|\Z)"
    r"|<(?P<hidden>script|style|title|template|svg|noscript)\b[^<>]*+>.*?(?:</(?P=hidden)\s*>|\Z)"
    r"|(?P<inline></?(?:a|abbr|b|code|em|font|i|kbd|mark|q|s|small|span|strong|sub|sup|u|var)\b[^<>]*+>?)"
    r"|</?[a-z!?][^<>]*+>?",
    re.IGNORECASE | re.DOTALL,
)
_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_LATIN_1 = ("iso-8859-1", "latin-1", "latin1", "us-ascii", "ascii")  # browsers read all of them as cp1252
_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_TEXT_TYPES = re.compile(
    r"text/|application/(?:[\w.+-]+[+])?(?:json|xml|yaml|x-yaml|javascript|x-sh|toml)$|application/x-ndjson$"
)


def read_page(job: dict[str, str], body: bytes) -> dict[str, Any]:
    """Return {title, text, total_chars} of a body, or {problem}.

    ``job`` has url, content_type and charset, as the server named them; what the body looks like is believed first.
    """
    content_type = job["content_type"]
    if body[:1024].lstrip().startswith(b"%PDF-"):
        return _pdf(body)
    if content_type == "application/pdf":
        return {"problem": "The server says that this is a PDF file, but it is none"}
    is_nameless = content_type in ("", "application/octet-stream")
    is_html = content_type in ("text/html", "application/xhtml+xml")
    is_html = is_html or (is_nameless and _HTML_START.search(body[:1024]) is not None)
    text = _decoded(body, job["charset"]) if is_html or is_nameless or _TEXT_TYPES.match(content_type) else "\0"
    if is_html and not _is_binary(text):
        return _html(text, job["url"])
    if is_html or "\0" in text or _is_binary(text):
        return {"problem": f"Cannot read text from {content_type or 'binary data'}"}
    return _page("", text)


def _is_binary(text: str) -> bool:
    """Tell what is no text, whoever says so: one character in twenty has no look at all."""
    sample = text[:_SNIFFED_CHARS]
    odd = sum(char == "\ufffd" or (char not in _SPACES and unicodedata.category(char) in _ODD) for char in sample)
    return odd > len(sample) / 20


def _page(title: str, text: str) -> dict[str, Any]:
    text = _BASE64_IMAGE.sub("[BASE64_IMAGE_REMOVED]", text).strip()
    return {"title": title[:500], "text": text[:MAX_TEXT_CHARS], "total_chars": len(text)}


def _html(html: str, url: str) -> dict[str, Any]:
    import trafilatura  # noqa: PLC0415 - a fifth of a second, and not for PDF files

    html, note = _bounded(html)
    config = trafilatura.settings.use_config()
    config.set("DEFAULT", "MIN_EXTRACTED_SIZE", str(_MIN_MAIN_TEXT_CHARS))
    tree, title = trafilatura.load_html(html), _title(html)
    if tree is not None:
        # The extractor knows the page's host only, and would resolve "x" on /a/b to /x.
        tree.resolve_base_href(handle_failures="ignore")
        tree.make_links_absolute(url, resolve_base_href=False, handle_failures="ignore")
        document = trafilatura.extract_with_metadata(
            tree,
            url=url,
            favor_recall=True,
            output_format="markdown",
            include_links=True,
            include_comments=False,
            config=config,
        )
        if document is not None and document.text:
            return _page(title or document.title or "", _FRONT_MATTER.sub("", document.text) + note)
    # No main text: all that is no mark-up. Wrapped, because a fragment is not taken for HTML.
    text = trafilatura.html2txt(f"<html><body><div>{html}</div></body></html>")
    if text.strip() in ("", title):  # also where the mark-up is nested deeper than the extractor goes
        text = _stripped(html)
    return _page(title, text + note if text else "")


def _stripped(html: str) -> str:
    """Return what stands between the tags, in lines; nothing is parsed, so that neither depth nor nonsense matters."""
    text = _MARKUP.sub(lambda found: "" if found["inline"] else "\n", html)
    return "\n".join(filter(None, (" ".join(line.split()) for line in unescape(text).split("\n"))))


def _bounded(html: str) -> tuple[str, str]:
    """Return the page with no more mark-up than can be read in time, and a note when something was left out."""
    if len(html) <= MAX_HTML_CHARS:
        return html, ""
    kept, start, script = [], 0, ""
    for tag in _SCRIPT_TAG.finditer(html):  # scripts are most of a page that is so large
        closing, name = tag[1], tag[2].lower()
        if not script and not closing:
            kept.append(html[start : tag.start()])
            script = name
        elif script == name and closing:
            start, script = tag.start(), ""
    html = "".join(kept) + ("" if script else html[start:])
    if len(html) <= MAX_HTML_CHARS:
        return html, ""
    note = f"\n\n[Only the first {MAX_HTML_CHARS} of {len(html)} characters of HTML were read]"
    return html[:MAX_HTML_CHARS], note


def _title(html: str) -> str:
    found = re.search(r"<title[^>]{0,200}>([^<]{0,500})", html, re.IGNORECASE)
    return " ".join(unescape(found[1]).split()) if found else ""


def _decoded(body: bytes, charset: str) -> str:
    """Return the text: by its mark, else as UTF-8, else as the server says, else as the page says, else by its look."""
    named = _META_CHARSET.search(body[:_SNIFFED_BYTES])
    candidates = [encoding for mark, encoding in _BOMS if body.startswith(mark)]
    if b"\0" not in body and b"\x1b" not in body:
        candidates.append("utf-8")  # what is valid UTF-8 is hardly ever anything else, whoever says so
    for encoding in (*candidates, charset, named[1].decode("ascii") if named else ""):
        try:
            return body.decode("cp1252" if encoding.lower() in _LATIN_1 else encoding)
        except (LookupError, ValueError):
            continue  # it is another, or there is none of that name
    from charset_normalizer import from_bytes  # noqa: PLC0415 - seldom needed

    best = from_bytes(body[:50_000]).best()
    return body.decode(best.encoding if best else "cp1252", "replace")


def _pdf(body: bytes) -> dict[str, Any]:
    try:
        import pypdf  # noqa: PLC0415 - not for HTML, and it may not be there
    except ImportError:
        return {"problem": "PDF files cannot be read here: pypdf is not installed"}
    try:
        reader = pypdf.PdfReader(BytesIO(body))
        title = str((reader.metadata and reader.metadata.title) or "")
        return _pdf_text(title, (page.extract_text() for page in reader.pages), len(reader.pages))
    except pypdf.errors.FileNotDecryptedError:
        return {"problem": "The PDF file is protected by a password"}
    except (pypdf.errors.PyPdfError, pypdf.errors.DependencyError) as error:
        return {"problem": f"The PDF file cannot be read: {' '.join(str(error).split())[:200]}"}


def _pdf_text(title: str, pages: Iterable[str], count: int) -> dict[str, Any]:
    deadline = time.monotonic() + MAX_PDF_SECONDS
    parts, size, number = [], 0, 0
    for number, text in enumerate(pages, 1):
        parts.append(f"[Page {number}]\n{text.strip()}")
        size += len(parts[-1])
        if size > MAX_TEXT_CHARS or time.monotonic() > deadline:
            break
    if not any(text.partition("\n")[2] for text in parts):
        return {"problem": "The PDF file holds no text; its pages may be images"}
    if number < count:
        parts.insert(0, f"[Only the first {number} of {count} pages were read]")
    return _page(title, "\n\n".join(parts))


def _limit() -> None:
    """Bound what the process may take; CPU time is bounded job by job."""
    for kind, wanted in (
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        _, hard = resource.getrlimit(kind)
        bound = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (bound, bound))


def _limit_cpu() -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    bound = int(usage.ru_utime + usage.ru_stime) + _CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))


def main(jobs: BinaryIO, answers: BinaryIO) -> None:
    """Do jobs until there are no more."""
    _limit()
    while len(length := jobs.read(4)) == 4:  # noqa: PLR2004 - bytes of a length
        job = json.loads(jobs.read(int.from_bytes(length)))
        _limit_cpu()
        answer = json.dumps(read_page(job, jobs.read(job["bytes"]))).encode()
        answers.write(len(answer).to_bytes(4) + answer)
        answers.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
