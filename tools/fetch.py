"""A bounded GET of a page or file that a model, or another page, named.

Promises: only addresses that the guard lets through are connected to, at every redirect; nothing above the bound is
kept, decompressed bytes counted; it is over in time. No cookie and no header outlives a fetch, and no key is ever sent.

Proxies of the environment are used where they apply. A name is checked here first, but then it is the proxy that looks
it up and connects, so a proxy must guard its own network.

Imports HTTP libraries: import it where it is used.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_address
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx2
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from tools.addresses import NO_HOSTS, AllowedHosts, Lookup, resolve_public, system_lookup

USER_AGENT = "Mozilla/5.0 (compatible; batch-runner/0.1; automated)"  # says what it is, so that sites can tell it no
MAX_REDIRECTS = 10
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_RETRYABLE = frozenset({HTTPStatus.TOO_MANY_REQUESTS, *range(500, 600)})
_UNDONE = frozenset({"gzip", "deflate", "br", "zstd"})  # by the client, which fails where it has no library for one
_CODINGS = _UNDONE | {"x-gzip", "compress", "x-compress"}
_HEADERS = {"User-Agent": USER_AGENT, "Accept": "text/html,application/xhtml+xml,*/*;q=0.8", "Accept-Language": "en"}


class FetchError(Exception):
    """Nothing was fetched; one line that says why. ``retryable`` is told when another try may help."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


@dataclass(frozen=True)
class Fetched:
    """An answer, of whatever status."""

    url: str  # after redirects
    status: int
    content_type: str  # in lower case, without parameters; "" when the server names none
    charset: str  # as the server names it; "" when it does not
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether the status is one of success."""
        return HTTPStatus.OK <= self.status < HTTPStatus.MULTIPLE_CHOICES

    @property
    def retryable(self) -> bool:
        """Whether another try may give another status."""
        return self.status in _RETRYABLE


@functools.cache
def tls_context() -> ssl.SSLContext:
    """Return what certificates are checked with: the same as for the endpoint."""
    return httpx2.create_ssl_context()


async def fetch(
    url: str,
    *,
    max_bytes: int,
    seconds: float,
    allowed_hosts: AllowedHosts = NO_HOSTS,
    lookup: Lookup = system_lookup,
) -> Fetched:
    """GET an http or https URL, once. A larger body is an error, not cut. Raises FetchError, BlockedAddressError."""
    target = _web_url(url)
    way = _Way(allowed_hosts, lookup, max_bytes)
    try:
        async with asyncio.timeout(seconds):
            for _ in range(MAX_REDIRECTS + 1):
                got = await way.step(target)
                if isinstance(got, Fetched):
                    return got
                target = got
    except TimeoutError:
        raise FetchError(f"no answer within {seconds:g} seconds", retryable=True) from None
    except aiohttp.InvalidURL as error:
        raise FetchError(f"not a valid URL: {_line(error)}") from None
    except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientSSLError) as error:
        raise FetchError(f"no secure connection: {_line(error)}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise FetchError(f"could not be fetched: {_line(error)}", retryable=True) from None
    raise FetchError(f"more than {MAX_REDIRECTS} redirects")


class _Way:
    """From the first URL to the answer, one redirect after the other; cookies are kept for so long."""

    def __init__(self, allowed_hosts: AllowedHosts, lookup: Lookup, max_bytes: int) -> None:
        self._allowed_hosts = allowed_hosts
        self._lookup = lookup
        self._max_bytes = max_bytes
        self._cookies = aiohttp.CookieJar()

    async def step(self, url: URL) -> Fetched | URL:
        """Return the answer, or where it sends us."""
        proxy = await self._checked_proxy(url)
        # A proxy is the user's own and may be anywhere; every other connection is the guard's business.
        resolver = None if proxy else _CheckedResolver(self._allowed_hosts, self._lookup)
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    resolver=resolver,
                    ssl=tls_context() if url.scheme == "https" else True,
                    use_dns_cache=False,
                    force_close=True,
                ),
                cookie_jar=self._cookies,
                timeout=aiohttp.ClientTimeout(total=None),
                headers=_HEADERS,
            ) as session,
            session.get(url, allow_redirects=False, proxy=proxy) as answer,
        ):
            if answer.status in _REDIRECTS and (location := answer.headers.get("Location")):
                return _web_url(location, url)
            _check_coding(answer.headers.getall("Content-Encoding", []))
            body = await self._read(answer)
            content_type = answer.content_type.lower() if "Content-Type" in answer.headers else ""
            return Fetched(str(url), answer.status, content_type, answer.charset or "", body)

    async def _checked_proxy(self, url: URL) -> str | None:
        """Return the proxy to go through to this URL, if any. Raises BlockedAddressError, OSError.

        What the resolver of a direct connection checks is left to it; addresses never come to a resolver.
        """
        host, port = url.host or "", url.port or 0
        proxy = None if proxy_bypass(host) else getproxies().get(url.scheme)
        if _is_literal(host) or (proxy and not self._allowed_hosts.allows(host, port)):
            await resolve_public(host, port, self._allowed_hosts, self._lookup)
        return proxy

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        chunks, size = [], 0
        async for chunk in answer.content.iter_any():
            size += len(chunk)
            if size > self._max_bytes:
                answer.close()
                raise FetchError(f"larger than {self._max_bytes:,} bytes")
            chunks.append(chunk)
        return b"".join(chunks)


class _CheckedResolver(AbstractResolver):
    """Gives the connector checked addresses only."""

    def __init__(self, allowed_hosts: AllowedHosts, lookup: Lookup) -> None:
        self._allowed_hosts = allowed_hosts
        self._lookup = lookup

    async def resolve(
        self,
        host: str,
        port: int = 0,
        family: socket.AddressFamily = socket.AF_UNSPEC,  # noqa: ARG002 - the base's; both families will do
    ) -> list[ResolveResult]:
        """Look the host up. Raises BlockedAddressError, OSError."""
        addresses = await resolve_public(host, port, self._allowed_hosts, self._lookup)
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        """Hold nothing."""


def _web_url(text: str, base: URL | None = None) -> URL:
    """Return an absolute http(s) URL without user, password and fragment. Raises FetchError."""
    try:
        url = base.join(URL(text)) if base else URL(text)
        port, host = url.port, url.host  # of which the name is decoded only now
    except ValueError as error:
        raise FetchError(f"not a valid URL: {_line(error)}") from None
    if url.scheme not in ("http", "https") or not host or not port:
        raise FetchError(f"only http and https URLs can be fetched, not {text[:200]!r}")
    return url.with_user(None).with_fragment(None)


def _check_coding(headers: list[str]) -> None:
    """Raise FetchError where more is to be undone than the one coding that the client undoes by itself."""
    named = [name.strip().lower() for header in headers for name in header.split(",")]
    codings = [name for name in named if name in _CODINGS]  # others, such as "utf-8", are said by mistake
    if codings and (len(named) > 1 or codings[0] not in _UNDONE):
        raise FetchError(f"its body is encoded in a way that is not undone here: {', '.join(codings)[:200]}")


def _is_literal(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
