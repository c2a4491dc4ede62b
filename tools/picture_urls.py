"""The bytes behind a picture's URL: a data URL, or an http(s) one, fetched under the address guard."""

from __future__ import annotations

import asyncio
import base64
import binascii
from urllib.parse import unquote_to_bytes

from tools.addresses import ALLOWED_HOSTS_VARIABLE, AllowedHosts, BlockedAddressError
from tools.pictures import PictureError
from tools.services import Settings

MAX_IMAGE_BYTES = 50_000_000
DOWNLOAD_SECONDS = 30.0
PAUSES_SECONDS = (2.0, 4.0)  # between tries, where another one may help


def wrong_hosts(settings: Settings) -> str:
    """Say what is wrong with the hosts the user allows; "" when they can be read."""
    try:
        AllowedHosts.parse(settings.get(ALLOWED_HOSTS_VARIABLE, ""))
    except ValueError as error:
        return str(error)
    return ""


def is_picture_url(text: str) -> bool:
    """Tell whether it is a URL that ``picture_at`` takes, and not a path."""
    return text[:8].lower().startswith(("data:", "http://", "https://"))


async def picture_at(url: str, settings: Settings) -> bytes:
    """Return what is there, at most ``MAX_IMAGE_BYTES``, picture or not. Raises PictureError.

    The settings must have passed ``wrong_hosts``.
    """
    if url[:5].lower() == "data:":
        return _decoded(url)
    allowed = AllowedHosts.parse(settings.get(ALLOWED_HOSTS_VARIABLE, ""))
    for pause in (*PAUSES_SECONDS, None):
        data, problem, retryable = await _download(url, allowed)
        if not problem:
            return data
        if pause is None or not retryable:
            break
        await asyncio.sleep(pause)
    raise PictureError(problem)


async def _download(url: str, allowed: AllowedHosts) -> tuple[bytes, str, bool]:
    """Return the bytes, or what went wrong and whether another try may help."""
    from tools.fetch import FetchError, fetch  # noqa: PLC0415 - imports an HTTP client

    try:
        got = await fetch(url, max_bytes=MAX_IMAGE_BYTES, seconds=DOWNLOAD_SECONDS, allowed_hosts=allowed)
    except BlockedAddressError as error:
        return b"", str(error), False
    except FetchError as error:
        return b"", str(error), error.retryable
    return got.body, "" if got.ok else f"HTTP {got.status} from {url[:200]}", got.retryable


def _decoded(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        raise PictureError("the data URL has no comma, and so no data")
    if not head.lower().rstrip().endswith(";base64"):
        return _bounded(unquote_to_bytes(body))
    return _bounded(decoded_base64(body))


def decoded_base64(text: str) -> bytes:
    """Return the bytes of base64 text, line breaks and missing padding forgiven. Raises PictureError."""
    try:
        return base64.b64decode("".join(text.split()) + "==")
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"no valid base64: {error}") from None


def _bounded(data: bytes) -> bytes:
    if len(data) > MAX_IMAGE_BYTES:
        raise PictureError(f"larger than {MAX_IMAGE_BYTES:,} bytes")
    return data
