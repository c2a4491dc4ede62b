"""The HTTP to an endpoint: the ``openai`` client says where to and with which headers, aiohttp carries the bytes.

The client's own way from a request to its answer takes three times the processor time of the bare connection, and what
it does on that way (retries, parsing, typed answers) is done elsewhere here, or not wanted. Sent is no more than an
endpoint needs: neither cookies nor headers that the environment slipped in. Redirects are not followed, so that a key
stays with the host it was meant for. Bodies are decompressed and counted while they stream. The wall time of a request
is the caller's to bound.

Imports aiohttp and openai, which takes most of a second: import it where it is used.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx2
import openai

CONNECT_TIMEOUT_SECONDS = 30.0
_KEEPALIVE_SECONDS = 30.0
_DNS_CACHE_SECONDS = 300
_SENT_HEADERS = (
    "authorization",
    "content-type",
    "accept",
    "user-agent",
    "openai-organization",
    "openai-project",
)
_LARGE_BODY_BYTES = 1 << 20  # aiohttp warns of a larger one that comes in one piece


class TransportError(Exception):
    """No whole answer came over the wire. ``permanent`` is told when trying again cannot help."""

    def __init__(
        self, kind: Literal["connection", "timeout", "bad_response"], message: str, *, permanent: bool = False
    ) -> None:
        super().__init__(message)
        self.kind: Literal["connection", "timeout", "bad_response"] = kind
        self.permanent = permanent


@dataclass(frozen=True)
class HttpAnswer:
    """A whole answer, decompressed."""

    status: int
    headers: Mapping[str, str]  # names in any case
    body: bytes


class Connection:
    """The way to one endpoint; belongs to the event loop that first uses it."""

    def __init__(self, base_url: str, api_key: str, max_body_bytes: int, key_scheme: str = "Bearer") -> None:
        client = openai.AsyncOpenAI(
            base_url=base_url,
            api_key=api_key,
            default_headers={"Authorization": f"{key_scheme} {api_key}"},  # wins over $OPENAI_CUSTOM_HEADERS
            # Nothing is sent by it: it needs no certificates, which take a while to load.
            http_client=httpx2.AsyncClient(transport=httpx2.AsyncBaseTransport()),
        )
        said = {name.lower(): value for name, value in client.default_headers.items() if isinstance(value, str)}
        self._base_url = f"{str(client.base_url).rstrip('/')}/"  # of a bare host, too
        self._headers = {name: said[name] for name in _SENT_HEADERS if name in said}
        self._max_body_bytes = max_body_bytes
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: bytes) -> HttpAnswer:
        """Send a JSON body to a path under the base URL and read the whole answer. Raises TransportError."""
        session = self._session = self._session or self._open()
        headers = {**self._headers, "content-length": str(len(body))}  # else slices would go out as chunks
        try:
            async with session.post(
                self._base_url + path, data=_sliced(body), headers=headers, allow_redirects=False
            ) as answer:
                return HttpAnswer(answer.status, answer.headers, await self._read(answer))
        except (aiohttp.ClientError, OSError) as error:
            raise _told(error) from error

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        chunks, size = [], 0
        async for chunk in answer.content.iter_any():
            size += len(chunk)
            if size > self._max_body_bytes:
                answer.close()
                told = f"HTTP {answer.status} with a body of more than {self._max_body_bytes} bytes"
                raise TransportError("bad_response", told)
            chunks.append(chunk)
        return b"".join(chunks)

    def _open(self) -> aiohttp.ClientSession:
        parts = urlsplit(self._base_url)
        secure = parts.scheme == "https"
        connector = aiohttp.TCPConnector(
            limit=0,  # how many requests run at once is decided where rollouts are started
            ssl=httpx2.create_ssl_context() if secure else True,
            keepalive_timeout=_KEEPALIVE_SECONDS,
            ttl_dns_cache=_DNS_CACHE_SECONDS,
        )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_SECONDS),
            proxy=None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme),
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._session:
            await self._session.close()


def _sliced(body: bytes) -> bytes | AsyncIterator[bytes]:
    return body if len(body) <= _LARGE_BODY_BYTES else _slices(body)


async def _slices(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _LARGE_BODY_BYTES):
        yield body[start : start + _LARGE_BODY_BYTES]


def _told(error: aiohttp.ClientError | OSError) -> TransportError:
    what = str(error) or type(error).__name__
    if isinstance(error, TimeoutError):
        return TransportError("timeout", f"no connection within {CONNECT_TIMEOUT_SECONDS:g} s: {what}")
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.InvalidURL):
        return TransportError("connection", what, permanent=True)
    if isinstance(error, aiohttp.ClientResponseError) and not isinstance(error, aiohttp.ClientHttpProxyError):
        return TransportError("bad_response", f"no HTTP answer: {what}")
    return TransportError("connection", f"connection failed: {what}")
