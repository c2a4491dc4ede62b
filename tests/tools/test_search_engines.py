"""Search services on loopback, in the wire formats they document; none of the real ones can be reached from a test."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from aiohttp import web

from tests.tools.web_server import Handler, Site, page, redirect, serve
from tools import search_engines
from tools.search_engines import BACKENDS, SETTINGS, Found, SearchClient, SearchError, chosen, missing

KEY = "a-key-nobody-may-see"
RESULT = {"title": "Tea &amp; <b>water</b>", "url": "https://tea.example/", "score": 0.9}
TEXT = "All\n about <strong>tea</strong>: 3 &lt; 4"
TEA = Found("Tea & water", "https://tea.example/", "All about tea: 3 < 4")


async def ask(settings: Mapping[str, str], query: str = "green tea", limit: int = 5) -> list[Found]:
    client = SearchClient(settings)
    try:
        return await client.search(query, limit)
    finally:
        await client.close()


def search(name: str, pages: Mapping[str, Handler], limit: int = 5) -> tuple[list[Found], Site]:
    """Ask a service that is served from these pages."""
    (backend,) = (backend for backend in BACKENDS if backend.name == name)

    async def work() -> tuple[list[Found], Site]:
        async with serve(pages) as site:
            return await ask({backend.variable: KEY, backend.base_variable: site.url()}, limit=limit), site

    return asyncio.run(work())


def told(name: str, pages: Mapping[str, Handler]) -> str:
    with pytest.raises(SearchError) as caught:
        search(name, pages)
    assert "\n" not in str(caught.value)
    assert KEY not in str(caught.value)
    return str(caught.value)


def answer(value: Any) -> Handler:
    return page(json.dumps(value), "application/json")


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("searxng", "/search", {"query": "q", "results": [{**RESULT, "content": TEXT, "engine": "x"}]}),
        ("tavily", "/search", {"query": "q", "results": [{**RESULT, "content": TEXT}], "response_time": 1.2}),
        ("exa", "/search", {"requestId": "1", "results": [{**RESULT, "id": "x", "text": TEXT}]}),
        ("brave", "/res/v1/web/search", {"type": "search", "web": {"results": [{**RESULT, "description": TEXT}]}}),
        ("firecrawl", "/v2/search", {"success": True, "data": {"web": [{**RESULT, "description": TEXT}]}}),
    ],
)
def test_every_service_is_understood(name: str, path: str, value: Any) -> None:
    found, site = search(name, {path: answer(value)})
    assert found == [TEA]
    assert len(site.requests) == 1


SENT = {
    "searxng": ("GET", {"q": "green tea", "format": "json"}, None, {}),
    "tavily": ("POST", {}, {"query": "green tea", "max_results": 3}, {"Authorization": f"Bearer {KEY}"}),
    "exa": (
        "POST",
        {},
        {"query": "green tea", "numResults": 3, "contents": {"text": {"maxCharacters": 500}}},
        {"x-api-key": KEY},
    ),
    "brave": (
        "GET",
        {"q": "green tea", "count": "3", "text_decorations": "false"},
        None,
        {"X-Subscription-Token": KEY},
    ),
    "firecrawl": ("POST", {}, {"query": "green tea", "limit": 3}, {"Authorization": f"Bearer {KEY}"}),
}


@pytest.mark.parametrize("name", SENT)
def test_every_service_is_asked_as_it_wants(name: str) -> None:
    async def reflect(request: web.Request) -> web.StreamResponse:
        text = await request.text()
        sent.append((request.method, dict(request.query), json.loads(text) if text else None))
        values = [{"url": f"https://tea.example/{number}"} for number in range(9)]
        return web.json_response({"results": values, "web": {"results": values}, "data": {"web": values}})

    sent: list[Any] = []
    paths = ("/search", "/res/v1/web/search", "/v2/search")
    found, site = search(name, dict.fromkeys(paths, reflect), limit=3)
    assert [item.url for item in found] == [f"https://tea.example/{number}" for number in range(3)]
    method, query, body, headers = SENT[name]
    assert sent == [(method, query, body)]
    assert headers.items() <= dict(site.requests[0].headers).items()
    assert "Cookie" not in site.requests[0].headers


def failing(statuses: list[int], **headers: str) -> Handler:
    """Fail with these statuses in turn, then answer."""

    async def handler(_request: web.Request) -> web.StreamResponse:
        if statuses:
            return web.Response(status=statuses.pop(0), text=f"<h1>No</h1>\n key {KEY}", headers=headers)
        return web.json_response({"results": [{**RESULT, "content": TEXT}]})

    return handler


def test_what_may_pass_is_tried_again_a_few_times() -> None:
    for status in (429, 500, 503):
        found, site = search("tavily", {"/search": failing([status] * 2, **{"Retry-After": "0"})})
        assert (found, len(site.requests)) == ([TEA], 3)
    assert told("tavily", {"/search": failing([429] * 9, **{"Retry-After": "0"})}) == "tavily: HTTP 429 No key ***"


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 432])
def test_refusals_are_told_at_once(status: int) -> None:
    assert told("tavily", {"/search": failing([status])}) == f"tavily: HTTP {status} No key ***"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("<html>", "the answer is no JSON"),
        ("[" * 100_000, "the answer is no JSON"),
        ('{"error": "x"}', "the answer has no data.web"),
        ('{"data": []}', "the answer has no data.web"),
        ("[]", "the answer has no data.web"),
        ('{"data": {"web": "x"}}', "the answer has no data.web"),
    ],
)
def test_what_is_no_answer(value: str, problem: str) -> None:
    assert told("firecrawl", {"/v2/search": page(value, "application/json")}) == f"firecrawl: {problem}"


def test_odd_results_are_left_out_or_cut() -> None:
    odd = [None, "x", {"title": "no url"}, {"url": 7}, {"url": "u", "title": None, "content": ["x"]}]
    long = {"url": "https://x/" + "u" * 9000, "title": "t" * 9000, "content": "c" * 9000}
    found, _ = search("tavily", {"/search": answer({"results": [*odd, long]})})
    assert found[0] == Found("", "u", "")
    assert [len(text) for text in (found[1].title, found[1].url, found[1].description)] == [300, 2000, 1000]


def test_an_answer_is_bounded() -> None:
    assert told("tavily", {"/search": page(b" " * 5_000_000, "application/json")}) == "tavily: the answer is too large"


def test_the_key_goes_nowhere_else() -> None:
    async def work() -> int:
        async with serve({"/search": answer({"results": []})}) as elsewhere:
            with pytest.raises(SearchError, match="tavily: HTTP 302"):
                async with serve({"/search": redirect(elsewhere.url("/search"), 302)}) as site:
                    await ask({"TAVILY_API_KEY": KEY, "TAVILY_BASE_URL": site.url()})
            return len(elsewhere.requests)

    assert asyncio.run(work()) == 0


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_engines, "_DELAYS_SECONDS", (0.01, 0.01))
    with pytest.raises(SearchError, match=r"^searxng: no connection: .*127\.0\.0\.1"):
        asyncio.run(ask({"SEARXNG_URL": "http://127.0.0.1:1"}))
    monkeypatch.setattr(search_engines, "_ALL_SECONDS", 0.3)

    async def hang(_request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        return web.Response()

    assert told("searxng", {"/search": hang}) == "searxng did not answer within 0.3 seconds"


# --- the choice ---


def test_the_first_that_is_configured_is_asked() -> None:
    everything = dict.fromkeys(SETTINGS, "http://x") | {"WEB_SEARCH_BACKEND": ""}
    for backend in BACKENDS:
        assert chosen(everything) == backend
        assert missing(everything) == ""
        del everything[backend.variable]
    assert chosen(everything) is None
    assert chosen({"WEB_SEARCH_BACKEND": "Brave", "BRAVE_API_KEY": "k", "SEARXNG_URL": "http://x"}) == BACKENDS[3]
    assert chosen({"WEB_SEARCH_BACKEND": "ddgs", "BRAVE_API_KEY": "k"}) is None


def test_what_is_missing_is_told() -> None:
    assert missing({}) == ""  # the keyless one is installed
    assert missing({"WEB_SEARCH_BACKEND": "ddgs"}) == ""
    assert missing({"WEB_SEARCH_BACKEND": "brave"}) == "WEB_SEARCH_BACKEND=brave needs BRAVE_API_KEY"
    choices = "searxng, tavily, exa, brave, firecrawl, ddgs"
    assert missing({"WEB_SEARCH_BACKEND": "bing"}) == f"WEB_SEARCH_BACKEND=bing is none of {choices}"
    told = "SEARXNG_URL=localhost:8080 must begin with http:// or https://"
    assert missing({"SEARXNG_URL": "localhost:8080"}) == told


def test_without_the_extra_a_service_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "ddgs", raising=False)
    assert missing({"EXA_API_KEY": KEY}) == ""
    assert missing({}) == (
        "set SEARXNG_URL, TAVILY_API_KEY, EXA_API_KEY, BRAVE_API_KEY or FIRECRAWL_API_KEY, "
        "or pip install ddgs (the extra web)"
    )


# --- the keyless one ---


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The ddgs package with one engine, whose pages are of our making."""
    from ddgs.base import BaseSearchEngine  # noqa: PLC0415 - imports a native client
    from ddgs.engines import ENGINES  # noqa: PLC0415
    from ddgs.results import TextResult  # noqa: PLC0415

    class Engine(BaseSearchEngine[TextResult]):
        name = "ours"
        category = "text"
        provider = "ours"
        search_url = ""
        search_method = "GET"
        items_xpath = "//li"
        elements_xpath: ClassVar[Mapping[str, str]] = {
            "title": ".//h2//text()",
            "href": ".//a/@href",
            "body": ".//p//text()",
        }

        def build_payload(self, query: str, *_: Any, **__: Any) -> dict[str, Any]:
            return {"q": query}

    monkeypatch.setitem(ENGINES, "text", {"ours": Engine})
    logging.getLogger("primp").setLevel(logging.ERROR)
    return Engine


def keyless(engine: Any, pages: Mapping[str, Handler]) -> tuple[list[Found], Site]:
    async def work() -> tuple[list[Found], Site]:
        async with serve(pages) as site:
            engine.search_url = site.url("/html")
            return await ask({}, limit=2), site

    return asyncio.run(work())


def test_the_keyless_one(engine: Any) -> None:
    item = "<li><h2>Tea {0}</h2><a href='https://tea.example/{0}'>x</a><p>About   green tea</p></li>"
    found, site = keyless(engine, {"/html": page("<ul>" + "".join(map(item.format, range(3))) + "</ul>")})
    assert len(found) == 2
    assert found[0] == Found("Tea 0", "https://tea.example/0", "About green tea")
    assert dict(site.requests[0].query) == {"q": "green tea"}


def test_the_keyless_one_finds_nothing(engine: Any) -> None:
    assert keyless(engine, {"/html": page("<ul></ul>")})[0] == []


def test_the_keyless_one_fails(engine: Any) -> None:
    engine.search_url = "http://127.0.0.1:1/"
    with pytest.raises(SearchError, match=r"^ddgs: ") as caught:
        asyncio.run(ask({}))
    assert "\n" not in str(caught.value)


def test_a_search_that_is_given_up_does_not_wait_for_its_thread(engine: Any) -> None:
    async def work() -> None:
        asked = asyncio.Event()
        go_on = asyncio.Event()

        async def hang(_request: web.Request) -> web.StreamResponse:
            asked.set()
            await go_on.wait()
            return web.Response(text="<ul></ul>")

        async with serve({"/html": hang}) as site:
            engine.search_url = site.url("/html")
            client = SearchClient({})
            task = asyncio.create_task(client.search("tea", 5))
            await asked.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(client.close(), 1)
            go_on.set()

    asyncio.run(work())
