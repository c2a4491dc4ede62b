"""What the parent and its workers say to each other: frames on a stream socket.

A frame is a small JSON header and a payload of raw bytes (a row's line goes through the parent without being parsed):
two big-endian uint32 lengths, header, payload. Both ends are this program; nothing here is trusted to a stranger.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_LENGTHS = struct.Struct(">II")
READ_BYTES = 1 << 18  # one read from a socket


@dataclass(frozen=True)
class Frame:
    """One message; ``header["type"]`` names its kind."""

    header: dict[str, Any]
    payload: bytes = b""

    def encode(self) -> bytes:
        """Return the bytes that go over the socket."""
        header = json.dumps(self.header, separators=(",", ":")).encode()
        return _LENGTHS.pack(len(header), len(self.payload)) + header + self.payload


@dataclass
class FrameBuffer:
    """Puts a byte stream back into frames. A frame that is cut by the stream's end never comes out."""

    _data: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take what a read brought; yield the frames that are whole now."""
        self._data += data
        start = 0
        while len(self._data) - start >= _LENGTHS.size:
            header_length, payload_length = _LENGTHS.unpack_from(self._data, start)
            header_start = start + _LENGTHS.size
            payload_start = header_start + header_length
            end = payload_start + payload_length
            if len(self._data) < end:
                break
            yield Frame(json.loads(self._data[header_start:payload_start]), bytes(self._data[payload_start:end]))
            start = end
        del self._data[:start]
