"""A small picture made of its description: different texts give different pictures, equal texts the same. Pure."""

from __future__ import annotations

import hashlib
import struct
import zlib

SIDE_PIXELS = 64
STRIPES = 8


def picture(text: str) -> bytes:
    """Return a PNG of coloured stripes."""
    colours = hashlib.sha256(text.encode(errors="replace")).digest()
    height = SIDE_PIXELS // STRIPES
    rows = [b"\0" + colours[stripe * 3 : stripe * 3 + 3] * SIDE_PIXELS for stripe in range(STRIPES)]
    header = struct.pack(">IIBBBBB", SIDE_PIXELS, SIDE_PIXELS, 8, 2, 0, 0, 0)  # 8 bits each of red, green and blue
    pixels = zlib.compress(b"".join(row * height for row in rows))
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", pixels) + _chunk(b"IEND", b"")


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
