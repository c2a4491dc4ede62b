"""Search services: which one is asked, in what form, and what its answer means.

Owns the table of services, which of them is chosen by the settings, their wire formats, retries and bounds. A service
is one entry of BACKENDS. The addresses are the user's own settings or those below, so the address guard has no say
here; a key goes to its service alone, never along a redirect, and into no error.

Imports aiohttp only when a service is asked.
"""

from __future__ import annotations

import asyncio
import html
import json
import random
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tools.services import Settings

if TYPE_CHECKING:
    import aiohttp

CHOICE_VARIABLE = "WEB_SEARCH_BACKEND"
KEYLESS = "ddgs"
_DELAYS_SECONDS = (1.0, 3.0)  # before the second and the third try, which is the last
_MAX_DELAY_SECONDS = 10.0  # a service that asks for a longer wait gets this one
_AT_ONCE = 16  # requests of a worker
_TRY_SECONDS = 20.0
_ALL_SECONDS = 60.0
_DDGS_SECONDS = 10
_MAX_ANSWER_BYTES = 4 << 20
_TOO_LARGE = "the answer is too large"
_DICE = random.SystemRandom()  # not the module's own: forked workers would all inherit the same
_MAX_TITLE_CHARS, _MAX_DESCRIPTION_CHARS, _MAX_URL_CHARS = 300, 1000, 2000


class SearchError(Exception):
    """A search failed; one line that says why, without the key."""


@dataclass(frozen=True)
class Found:
    """One result."""

    title: str
    url: str
    description: str


@dataclass(frozen=True)
class _Request:
    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Backend:
    """A search service."""

    name: str
    variable: str  # that turns it on: its key, or its address where it needs none
    base_variable: str  # overrides the address
    base_url: str
    request: Callable[[str, int, str], _Request]  # query, limit, key
    results: tuple[str, ...] = ("results",)  # where they are in the answer
    description: str = "content"  # the key of a result's


BACKENDS = (  # the first one that is configured is asked
    Backend(
        "searxng",
        "SEARXNG_URL",
        "SEARXNG_URL",
        "",
        lambda query, _limit, _key: _Request("GET", "/search", params={"q": query, "format": "json"}),
    ),
    Backend(
        "tavily",
        "TAVILY_API_KEY",
        "TAVILY_BASE_URL",
        "https://api.tavily.com",
        lambda query, limit, key: _Request(
            "POST", "/search", body={"query": query, "max_results": limit}, headers={"Authorization": f"Bearer {key}"}
        ),
    ),
    Backend(
        "exa",
        "EXA_API_KEY",
        "EXA_BASE_URL",
        "https://api.exa.ai",
        lambda query, limit, key: _Request(
            "POST",
            "/search",
            body={"query": query, "numResults": limit, "contents": {"text": {"maxCharacters": 500}}},
            headers={"x-api-key": key},
        ),
        description="text",
    ),
    Backend(
        "brave",
        "BRAVE_API_KEY",
        "BRAVE_BASE_URL",
        "https://api.search.brave.com",
        lambda query, limit, key: _Request(
            "GET",
            "/res/v1/web/search",
            params={"q": query, "count": str(limit), "text_decorations": "false"},
            headers={"X-Subscription-Token": key},
        ),
        ("web", "results"),
        "description",
    ),
    Backend(
        "firecrawl",
        "FIRECRAWL_API_KEY",
        "FIRECRAWL_API_URL",
        "https://api.firecrawl.dev",
        lambda query, limit, key: _Request(
            "POST", "/v2/search", body={"query": query, "limit": limit}, headers={"Authorization": f"Bearer {key}"}
        ),
        ("data", "web"),
        "description",
    ),
)
SETTINGS = tuple(
    dict.fromkeys([CHOICE_VARIABLE, *(name for item in BACKENDS for name in (item.variable, item.base_variable))])
)


def chosen(settings: Settings) -> Backend | None:
    """Return the service to ask, or None for the keyless one."""
    choice = settings.get(CHOICE_VARIABLE, "").lower()
    fitting = [item for item in BACKENDS if (item.name == choice if choice else item.variable in settings)]
    return fitting[0] if fitting else None


def missing(settings: Settings) -> str:
    """Say why there is no searching with these settings and what to do about it, or ""."""
    choice = settings.get(CHOICE_VARIABLE, "").lower()
    backend = chosen(settings)
    if backend and backend.variable not in settings:
        return f"{CHOICE_VARIABLE}={choice} needs {backend.variable}"
    if backend:
        base_url = settings.get(backend.base_variable) or backend.base_url
        is_address = re.match(r"https?://[^/\s]", base_url)
        return "" if is_address else f"{backend.base_variable}={base_url} must begin with http:// or https://"
    if choice not in ("", KEYLESS):
        return f"{CHOICE_VARIABLE}={choice} is none of {', '.join(item.name for item in BACKENDS)}, {KEYLESS}"
    if find_spec(KEYLESS):
        return ""
    *variables, last = (item.variable for item in BACKENDS)
    return f"set {', '.join(variables)} or {last}, or pip install ddgs (the extra web)"


class SearchClient:
    """A worker's connections to search services; a ``Shared`` thing."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="search")

    async def search(self, query: str, limit: int) -> list[Found]:
        """Return at most ``limit`` results, best first. Raises SearchError."""
        backend = chosen(self._settings)
        name = backend.name if backend else KEYLESS
        try:
            async with asyncio.timeout(_ALL_SECONDS) as clock:
                found = await (self._ask(backend, query, limit) if backend else self._keyless(query, limit))
        except TimeoutError:
            if not clock.expired():
                raise
            raise SearchError(f"{name} did not answer within {_ALL_SECONDS:g} seconds") from None
        return found[:limit]

    async def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._session:
            await self._session.close()

    async def _keyless(self, query: str, limit: int) -> list[Found]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, _ask_ddgs, query, limit)

    async def _ask(self, backend: Backend, query: str, limit: int) -> list[Found]:
        key = self._settings.get(backend.variable, "")
        request = backend.request(query, limit, key)
        base_url = self._settings.get(backend.base_variable) or backend.base_url
        for delay in (*_DELAYS_SECONDS, None):
            tried = await self._try(f"{base_url.rstrip('/')}{request.path}", request)
            if tried.status == HTTPStatus.OK:
                return _read_answer(backend, tried.text)
            if delay is None or not tried.retryable:
                break
            wait = delay * _DICE.uniform(0.5, 1) if tried.wait_seconds is None else tried.wait_seconds
            await asyncio.sleep(min(wait, _MAX_DELAY_SECONDS))
        raise SearchError(_hidden(f"{backend.name}: {tried.told}", key))

    async def _try(self, url: str, request: _Request) -> _Tried:
        from urllib.request import getproxies, proxy_bypass  # noqa: PLC0415 - with all of http

        import aiohttp  # noqa: PLC0415 - a sixth of a second

        from tools.fetch import tls_context  # noqa: PLC0415

        parts = urlsplit(url)
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=_AT_ONCE, ssl=tls_context() if parts.scheme == "https" else True),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=_TRY_SECONDS),
            )
        try:
            async with self._session.request(
                request.method,
                url,
                params=request.params,
                json=request.body,
                headers={"Accept": "application/json", **request.headers},
                allow_redirects=False,
                proxy=None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme),
            ) as answer:
                wait = answer.headers.get("Retry-After", "")
                seconds = float(wait) if re.fullmatch(r"\d{1,6}", wait) else None
                body = await _bounded(answer)
                return (
                    _Tried(0, _TOO_LARGE)
                    if body is None
                    else _Tried(answer.status, body.decode("utf-8", "replace"), seconds)
                )
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            told = f"no connection: {error or type(error).__name__}"
            return _Tried(0, told, retry_failure=not isinstance(error, ValueError))


@dataclass(frozen=True)
class _Tried:
    """What one try brought."""

    status: int  # 0: no answer; the text says why
    text: str
    wait_seconds: float | None = None  # that the service asks for
    retry_failure: bool = False

    @property
    def retryable(self) -> bool:
        passing = self.status == HTTPStatus.TOO_MANY_REQUESTS or self.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        return passing or self.retry_failure

    @property
    def told(self) -> str:
        words = " ".join(re.sub(r"<[^>]*>", " ", self.text).split())[:300]
        return f"HTTP {self.status} {words}".strip() if self.status else words


async def _bounded(answer: aiohttp.ClientResponse) -> bytes | None:
    chunks, size = [], 0
    async for chunk in answer.content.iter_any():
        size += len(chunk)
        if size > _MAX_ANSWER_BYTES:
            answer.close()
            return None
        chunks.append(chunk)
    return b"".join(chunks)


def _read_answer(backend: Backend, text: str) -> list[Found]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise SearchError(f"{backend.name}: the answer is no JSON") from None
    for key in backend.results:
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, list):
        raise SearchError(f"{backend.name}: the answer has no {'.'.join(backend.results)}")
    return _found(value, "url", backend.description)


def _ask_ddgs(query: str, limit: int) -> list[Found]:
    """Ask in a thread. Raises SearchError."""
    from ddgs import DDGS  # noqa: PLC0415 - optional
    from ddgs.exceptions import DDGSException  # noqa: PLC0415

    try:
        return _found(DDGS(timeout=_DDGS_SECONDS).text(query, max_results=limit), "href", "body")
    except DDGSException as error:
        if str(error) == "No results found.":
            return []
        raise SearchError(f"{KEYLESS}: {' '.join(str(error).split())[:300]}") from None


def _found(results: list[Any], url: str, description: str) -> list[Found]:
    return [
        Found(
            _plain(item.get("title"), _MAX_TITLE_CHARS),
            item[url][:_MAX_URL_CHARS],
            _plain(item.get(description), _MAX_DESCRIPTION_CHARS),
        )
        for item in results
        if isinstance(item, dict) and isinstance(item.get(url), str)
    ]


def _plain(text: Any, max_chars: int) -> str:
    """Return one line without mark-up."""
    if not isinstance(text, str):
        return ""
    return " ".join(html.unescape(re.sub(r"</?\w[^<>]{0,200}>", "", text)).split())[:max_chars]


def _hidden(text: str, key: str) -> str:
    return text.replace(key, "***") if key else text
