"""What becomes of the bytes a command writes: three collectors, each bounded in memory however much comes.

Text is decoded as UTF-8 as it arrives, bytes that are no text become U+FFFD, and no character is torn where a chunk or
a cut ends.
"""

from __future__ import annotations

import codecs
from collections import deque
from typing import Protocol


class Collector(Protocol):
    """Takes the bytes of one command in the order they came."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes; empty bytes mean that no more will come."""


class _Newest:
    """The newest ``limit`` characters of a text."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pieces: deque[str] = deque()
        self._length = 0

    def add(self, text: str) -> None:
        """Append, and forget what is too old."""
        self._pieces.append(text[-self._limit :] if self._limit else "")
        self._length += len(self._pieces[-1])
        while self._length - len(self._pieces[0]) >= self._limit and len(self._pieces) > 1:
            self._length -= len(self._pieces.popleft())

    def text(self) -> str:
        """Return what is kept."""
        whole = "".join(self._pieces)
        self._pieces = deque([whole])
        return whole[-self._limit :] if self._limit else ""


class HeadAndTail:
    """A command's output: whole while it fits, else its first 40 % and last 60 % with a notice between."""

    def __init__(self, max_chars: int) -> None:
        self._head_limit = max_chars * 2 // 5
        self._max_chars = max_chars
        self._head: list[str] = []
        self._head_length = 0
        self._tail = _Newest(max_chars - self._head_limit)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.total_chars = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes; empty bytes end the text."""
        text = self._decoder.decode(data, final=not data)
        self.total_chars += len(text)
        if room := self._head_limit - self._head_length:
            head, text = text[:room], text[room:]
            self._head.append(head)
            self._head_length += len(head)
        if text:
            self._tail.add(text)

    @property
    def omitted_chars(self) -> int:
        """How many characters of the middle are left out."""
        return max(0, self.total_chars - self._max_chars)

    def text(self) -> str:
        """Return the output as it is to be shown."""
        head, tail = "".join(self._head), self._tail.text()
        if not self.omitted_chars:
            return head + tail
        notice = f"[OUTPUT TRUNCATED - {self.omitted_chars} chars omitted out of {self.total_chars} total]"
        return f"{head}\n\n{notice}\n\n{tail}"


class Newest:
    """A background process's output: the newest ``max_chars`` characters."""

    def __init__(self, max_chars: int) -> None:
        self._newest = _Newest(max_chars)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> None:
        """Take the next bytes; empty bytes end the text."""
        if text := self._decoder.decode(data, final=not data):
            self._newest.add(text)

    def text(self) -> str:
        """Return what is kept."""
        return self._newest.text()


class Raw:
    """A file's content: the first ``max_bytes`` bytes as they are."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.data = bytearray()

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self.data += data[: self._max_bytes - len(self.data)]
