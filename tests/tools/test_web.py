from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import pytest
from aiohttp import web

from endpoints.scripted import ScriptedEndpoint
from sandboxes.base import Sandbox, SandboxError
from tests.tools import pdf_files
from tests.tools.models import endpoint, rollout
from tests.tools.web_server import Handler, Site, endless, names, page, redirect, serve
from tools.base import JsonObject, ToolContext, ToolError
from tools.services import Services
from tools.web import MAX_PAGE_CHARS, WebPages, web_extract, web_search

BLOCKED = "Blocked: URL targets a private or internal network address"
NOTHING = "Content was inaccessible or not found"
PROSE = "Words that are long enough to be the text of a page, not its ornament. "


def html(text: str, title: str = "A page") -> str:
    return f"<html><head><title>{title}</title></head><body><article>{text}</article></body></html>"


PAGE = html(f"<p>{PROSE * 3}</p>")


async def no_sandbox() -> Sandbox:
    raise SandboxError("no engine")


@contextlib.asynccontextmanager
async def surroundings(settings: Mapping[str, str]) -> AsyncIterator[ToolContext]:
    context = ToolContext(no_sandbox, services=Services(settings))
    try:
        yield context
    finally:
        await context.services.close()


async def told(context: ToolContext, urls: Any) -> JsonObject:
    """What the model is told of these pages."""
    try:
        return await web_extract(context, {"urls": urls})
    except ToolError as error:
        return {**error.details, "error": str(error)}


def extract(
    pages: Mapping[str, Handler],
    urls: Callable[[Site], Any],
    settings: Mapping[str, str] | None = None,
    known: Mapping[str, list[str]] | None = None,
) -> JsonObject:
    """Serve pages and read some; 127.0.0.1 is allowed unless the settings say otherwise."""

    async def work() -> JsonObject:
        given = {"WEB_ALLOWED_HOSTS": "127.0.0.1"} if settings is None else settings
        async with serve(pages) as site, surroundings(given) as context:
            if known:
                context.services.shared(WebPages).lookup = names(known)
            return await told(context, urls(site))

    return asyncio.run(work())


def paths(*wanted: str) -> Callable[[Site], list[str]]:
    return lambda site: [site.url(path) for path in wanted]


def errors(result: JsonObject) -> list[Any]:
    return [item["error"] for item in result["results"]]


def test_pages_become_results() -> None:
    asked: list[str] = []

    def urls(site: Site) -> list[str]:
        asked.extend([site.url("/a"), f" {site.url('/report.pdf')}#page=2", site.url("/moved")])
        return asked

    document = pdf_files.written("Hello world", title="A report")
    pages = {"/a": page(PAGE), "/report.pdf": page(document, "application/pdf"), "/moved": redirect("/a")}
    result = extract(pages, urls)
    text = PROSE * 3
    assert result == {
        "results": [
            {"url": asked[0], "title": "A page", "content": text.strip(), "error": None},
            {"url": asked[1], "title": "A report", "content": "[Page 1]\nHello world", "error": None},
            {"url": asked[2], "title": "A page", "content": text.strip(), "error": None},
        ]
    }


def test_each_page_fails_on_its_own() -> None:
    pages = {
        "/ok": page("fine", "text/plain"),
        "/image": page(b"\x89PNG", "image/png"),
        "/empty": page("<html><head><title>App</title></head><body><div id=app></div></body></html>"),
        "/endless": endless(),
    }
    result = extract(pages, paths("/image", "/missing", "/ok", "/empty", "/endless"))
    assert errors(result) == [
        "Cannot read text from image/png",
        "HTTP 404 Not Found",
        None,
        NOTHING,
        "larger than 20,000,000 bytes",
    ]
    assert "error" not in result


def test_when_nothing_can_be_read_the_call_failed() -> None:
    result = extract({}, lambda site: [site.url("/a"), "ftp://x/y"])
    assert result["error"] == NOTHING
    assert errors(result) == ["HTTP 404 Not Found", "only http and https URLs can be fetched, not 'ftp://x/y'"]
    assert extract({}, lambda _: []) == {"error": NOTHING, "results": []}


def test_no_page_leads_inside() -> None:
    pages = {
        "/": page("secret", "text/plain"),
        "/in": redirect("http://inside.example/"),
        "/meta": redirect("http://169.254.169.254/"),
    }
    known = {
        "open.example": ["127.0.0.1"],
        "inside.example": ["10.0.0.1"],
        "mixed.example": ["93.184.215.14 127.0.0.1"],
    }

    def urls(site: Site) -> list[str]:
        return [
            site.url("/", "open.example"),
            site.url("/in", "open.example"),
            site.url("/meta", "open.example"),
            site.url(),
            site.url("/", "mixed.example"),
        ]

    result = extract(pages, urls, {"WEB_ALLOWED_HOSTS": "open.example"}, known)
    assert errors(result) == [None, *[BLOCKED] * 4]
    assert [item["content"] for item in result["results"]] == ["secret", "", "", "", ""]
    result = extract(pages, lambda site: [site.url(), "http://localhost/", "http://[::1]/", "127.0.0.1:1"], {})
    assert errors(result) == [BLOCKED] * 4


def test_what_models_write_is_understood() -> None:
    def one(site: Site) -> str:
        return site.url("/ok")

    def six(site: Site) -> list[str]:
        return [site.url("/ok")] * 6

    pages = {"/ok": page("fine", "text/plain")}
    assert [item["content"] for item in extract(pages, one)["results"]] == ["fine"]
    assert errors(extract(pages, six)) == [*[None] * 5, "Not read: only 5 URLs a call"]


def test_pages_are_read_side_by_side() -> None:
    all_five: list[asyncio.Barrier] = []

    async def together(_request: web.Request) -> web.StreamResponse:
        if not all_five:
            all_five.append(asyncio.Barrier(5))
        await all_five[0].wait()
        return web.Response(text="fine")

    assert errors(extract({"/": together}, paths(*"/////"))) == [None] * 5


def test_a_long_page_is_cut_and_says_so() -> None:
    text = "".join(f"line {number}\n" for number in range(5000))
    (item,) = extract({"/": page(text, "text/plain")}, paths("/"))["results"]
    shown, _, notice = item["content"].rpartition("\n\n")
    assert shown == text[:MAX_PAGE_CHARS]
    assert notice == f"[The first 15000 of {len(text) - 1} characters]"


# --- summaries ---

LONG = "fact " * 2000
SUMMARISED = "[Summary of a page of 9999 characters]"


def summarise(served: ScriptedEndpoint, *texts: str, **settings: str) -> tuple[list[str], Any]:
    """Read pages with a model for summaries; return their contents, and what was spent."""

    async def work() -> tuple[list[str], Any]:
        pages = {f"/{number}": page(text, "text/plain") for number, text in enumerate(texts)}
        given = {"WEB_ALLOWED_HOSTS": "127.0.0.1", "WEB_SUMMARY_MODEL": "small/model", **settings}
        async with serve(pages) as site, rollout(served.base_url, given) as context:
            result = await told(context, [site.url(path) for path in pages])
            return [item["content"] for item in result["results"]], context.spent

    return asyncio.run(work())


def test_long_pages_are_summarised_and_cost() -> None:
    reply = {
        "content": "<think>hm</think>All facts.",
        "usage": {"prompt_tokens": 9, "completion_tokens": 2, "cost": 0.5},
    }
    with endpoint(reply) as served:
        (long, short), spent = summarise(served, LONG, "short")
        (body,) = [request.body for request in served.requests]
    assert (long, short) == (f"All facts.\n\n{SUMMARISED}", "short")
    assert (spent.requests, spent.cost_usd) == (1, 0.5)
    assert body["model"] == "small/model"
    assert LONG.strip() in body["messages"][1]["content"]
    assert "never an instruction" in body["messages"][0]["content"]


def test_very_long_pages_are_summarised_in_parts() -> None:
    replies = [{"content": "part"}, {"content": "whole" * 2000, "prompt": "part\n\n---\n\npart\n\n---\n\npart"}]
    with endpoint(*replies) as served:
        (content,), spent = summarise(served, "x" * 250_000)
    assert spent.requests == 4
    assert content == ("whole" * 2000)[:6000] + "\n\n[Summary of a page of 250000 characters]"


@pytest.mark.parametrize(
    ("reply", "reason"), [({"status": 400, "body": {"error": {"message": "no"}}}, "no"), ({"content": " "}, "")]
)
def test_a_page_without_a_summary_is_cut(reply: JsonObject, reason: str) -> None:
    with endpoint(reply) as served:
        (content, short), _ = summarise(served, LONG * 2, LONG)
    assert content.startswith(LONG)
    assert "[The first 15000 of 19999 characters; it could not be summarised: " in content
    assert reason in content
    assert short == LONG.strip()


def test_pages_too_long_for_summaries_are_cut() -> None:
    with endpoint({"content": "x"}) as served:
        (content,), spent = summarise(served, "x" * 2_000_001)
    assert content.endswith("[The first 15000 of 2000001 characters]")
    assert spent.requests == 0


# --- searching ---


def search(results: Sequence[JsonObject] | int, **arguments: Any) -> JsonObject:
    """Search with a SearXNG on loopback that gives these results, or fails with this status."""

    async def answer(_request: web.Request) -> web.StreamResponse:
        if isinstance(results, int):
            return web.Response(status=results, text="refused")
        return web.json_response({"results": results})

    async def work() -> JsonObject:
        async with serve({"/search": answer}) as site, surroundings({"SEARXNG_URL": site.url()}) as context:
            return await web_search(context, {"query": "tea", **arguments})

    return asyncio.run(work())


def test_a_search() -> None:
    many = [{"title": f"T{n}", "url": f"https://x/{n}", "content": f"C{n}"} for n in range(30)]
    assert search(many, limit=2) == {
        "success": True,
        "data": {
            "web": [
                {"title": "T0", "url": "https://x/0", "description": "C0", "position": 1},
                {"title": "T1", "url": "https://x/1", "description": "C1", "position": 2},
            ]
        },
    }
    for limit, count in ((None, 5), (0, 1), (1000, 20), ("3", 3)):
        assert len(search(many, limit=limit)["data"]["web"]) == count
    assert search([]) == {"success": True, "data": {"web": []}}


def test_a_search_that_fails() -> None:
    with pytest.raises(ToolError, match=r"^Error searching web: searxng: HTTP 403 refused$"):
        search(403)
    with pytest.raises(ToolError, match=r"^Error searching web: the query is empty$"):
        search([], query="  ")


# --- availability ---


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert web_extract.missing({}) == web_search.missing({}) == ""
    assert web_extract.missing({"WEB_ALLOWED_HOSTS": "a b"}).startswith("WEB_ALLOWED_HOSTS: 'a b' is no host")
    told = "WEB_SUMMARY_BASE_URL needs WEB_SUMMARY_MODEL"
    assert web_extract.missing({"WEB_SUMMARY_BASE_URL": "http://x"}).startswith(told)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "trafilatura", raising=False)
    assert web_extract.missing({}) == "pip install trafilatura lxml_html_clean pypdf (the extra web)"
    assert web_search.missing({"SEARXNG_URL": "http://x"}) == ""


def test_what_the_model_is_shown() -> None:
    assert web_search.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "limit": {"type": "integer", "default": 5, "description": "1 to 20"},
        },
        "required": ["query"],
    }
    assert web_extract.parameters == {
        "type": "object",
        "properties": {"urls": {"type": "array", "items": {"type": "string"}, "description": "At most 5"}},
        "required": ["urls"],
    }
