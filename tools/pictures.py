"""What kind of picture some bytes are, and a form of it that models take. No network, no file.

The kind is told by the bytes alone, never by a name or a header. Decoding is left to Pillow in a process of its own
(``shrink.py``), with bounds on memory, time and pixels, so that a hostile picture harms nothing and nobody waits for a
large one. Without Pillow only what fits already is let through, as it is.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tools.own_time import turn
from tools.services import Settings

MAX_SENT_BYTES = 3_750_000  # 5 MB in base64, the least of what large providers take
MAX_SIDE_PIXELS = 2048  # models scale larger ones down, and charge for them
MAX_PIXELS = 100_000_000  # of a picture that is decoded
DECODE_SECONDS = 30.0
MAX_DECODES_AT_ONCE = 2  # in a worker; each takes a processor and up to a gigabyte
INSTALL_PILLOW = "install Pillow: pip install 'batch-runner[vision]'"

_NO_SIZE = "the image is broken or cut short: its header names no size"
_SENT_AS_IS = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
_BMP_HEADER_SIZES = frozenset({12, 40, 52, 56, 64, 108, 124})
_JPEG_SIZE_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_BITS_14 = 0x3FFF
_SIZE_AT = {"image/png": (">II", 16), "image/gif": ("<HH", 6)}
_PASSED_ON = ("PATH", "HOME", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL")


class PictureError(Exception):
    """The bytes are no picture that can be used; one line that says why."""


@dataclass(frozen=True)
class Picture:
    """A picture that can be sent to a model."""

    media_type: str  # such as image/png
    data: bytes


def media_type_of(data: bytes) -> str:
    """Return the media type of a PNG, JPEG, GIF, WebP or BMP picture, by its first bytes; "" for anything else."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    if data.startswith(b"BM") and int.from_bytes(data[14:18], "little") in _BMP_HEADER_SIZES:
        return "image/bmp"
    return ""


def size_of(data: bytes) -> tuple[int, int]:
    """Return width and height in pixels as the header says; (0, 0) when it does not, or is of no such picture."""
    kind = media_type_of(data)
    try:
        if kind == "image/webp":
            return _webp_size(data)
        if kind == "image/jpeg":
            return _jpeg_size(data)
        if kind in _SIZE_AT:
            width, height = _numbers(*_SIZE_AT[kind], data)
            return width, height
    except struct.error:  # it is cut
        pass
    return 0, 0


def checked_type(data: bytes) -> str:
    """Return the media type of a picture. Raises PictureError for what is none, or none that is understood."""
    if kind := media_type_of(data):
        return kind
    if not data:
        raise PictureError("the file is empty")
    head = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if b"<svg" in head:
        raise PictureError("SVG is a drawing, not pixels: convert it to PNG first")
    if head.startswith((b"<!doctype", b"<html", b"{")):
        raise PictureError("this is a web page or a text, not an image")
    raise PictureError("not an image: only PNG, JPEG, GIF, WebP and BMP are understood")


class Pictures:
    """Makes pictures fit for models; one in a worker, which bounds how many are decoded at once."""

    def __init__(self, _settings: Settings) -> None:
        self._places = asyncio.Semaphore(MAX_DECODES_AT_ONCE)

    async def close(self) -> None:
        """Hold nothing."""

    async def fit(self, data: bytes) -> Picture:
        """Return the picture as models take it: unchanged, or smaller, or in another format. Raises PictureError."""
        kind = checked_type(data)
        if importlib.util.find_spec("PIL") is None:
            return _as_it_is(data, kind)
        async with turn(self._places):
            return await _shrunk(data)

    async def check(self, data: bytes) -> str:
        """Return the media type of what can be shown, as far as that can be told here. Raises PictureError."""
        kind = checked_type(data)
        if importlib.util.find_spec("PIL") is not None:
            async with turn(self._places):
                await _shrunk(data)
        elif kind != "image/bmp" and 0 in size_of(data):
            raise PictureError(_NO_SIZE)
        return kind


def _as_it_is(data: bytes, kind: str) -> Picture:
    width, height = size_of(data)
    if kind not in _SENT_AS_IS:
        raise PictureError(f"{kind} must be converted first, for which Pillow is missing; {INSTALL_PILLOW}")
    if not width:
        raise PictureError(_NO_SIZE)
    if max(width, height) > MAX_SIDE_PIXELS or len(data) > MAX_SENT_BYTES:
        told = f"{width}x{height} pixels, {len(data):,} bytes"
        raise PictureError(f"too large to be sent ({told}), and Pillow, which would shrink it, is missing")
    return Picture(kind, data)


async def _shrunk(data: bytes) -> Picture:
    """Run shrink.py on it. Raises PictureError."""
    script = str(Path(__file__).with_name("shrink.py"))
    limits = [str(number) for number in (MAX_SENT_BYTES, MAX_SIDE_PIXELS, MAX_PIXELS, int(DECODE_SECONDS))]
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", script, *limits),  # -P: the folder of the script is no place to import from
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
    )
    try:
        async with asyncio.timeout(DECODE_SECONDS):
            said, _ = await child.communicate(data)
    except TimeoutError:
        raise PictureError(f"it took longer than {DECODE_SECONDS:g} seconds to decode") from None
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    head, _, made = said.partition(b"\n")
    if child.returncode != 0 or not head:
        raise PictureError("it cannot be decoded within the bounds of memory and time")
    answer = json.loads(head)
    if "error" in answer:
        raise PictureError(answer["error"])
    return Picture(answer["media_type"], made or data)


def _numbers(form: str, offset: int, data: bytes) -> tuple[int, ...]:
    """Read them. Raises struct.error where the data ends before."""
    return struct.unpack_from(form, data, offset)


def _webp_size(data: bytes) -> tuple[int, int]:
    chunk = data[12:16]
    if chunk == b"VP8X":
        width, height = _numbers("<I", 23, data)[0] >> 8, _numbers("<I", 26, data)[0] >> 8
        return width + 1, height + 1
    if chunk == b"VP8L":
        bits = _numbers("<I", 21, data)[0]
        return (bits & _BITS_14) + 1, (bits >> 14 & _BITS_14) + 1
    width, height = _numbers("<HH", 26, data)
    return (width & _BITS_14, height & _BITS_14) if chunk == b"VP8 " else (0, 0)


def _jpeg_size(data: bytes) -> tuple[int, int]:
    at = 2
    while data[at : at + 1] == b"\xff":
        marker, length = _numbers(">BH", at + 1, data)
        if marker in _JPEG_SIZE_MARKERS:
            height, width = _numbers(">HH", at + 5, data)
            return width, height
        at += 2 + length
    return 0, 0
