"""A chat endpoint on loopback that gives prepared answers, hostile ones too."""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Asked:
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Endpoint:
    base_url: str = ""
    requests: list[Asked] = field(default_factory=list)


@asynccontextmanager
async def serve(*answers: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[Endpoint]:
    """Give the answers in turn, the last one for ever."""
    endpoint = Endpoint()
    tasks: set[asyncio.Task[None]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not writer.is_closing():
                endpoint.requests.append(await _read(reader))
                await answers[min(len(endpoint.requests), len(answers)) - 1](writer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            writer.transport.abort()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(talk(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=1 << 24, ssl=tls)
    endpoint.base_url = f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield endpoint
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks)
        await asyncio.sleep(0)


async def _read(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers["content-length"]))
    return Asked(first.split()[1], headers, json.loads(body))


def raw(body: bytes | str, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    data = body if isinstance(body, bytes) else body.encode()
    fields = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
    head = f"HTTP/1.1 {status} Words\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items()) + "\r\n"
    return as_is(head.encode() + data)


def as_is(data: bytes, *, close: bool = False) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        if close:
            writer.close()

    return answer


def error(status: int, words: str = "", headers: Mapping[str, str] | None = None) -> Answer:
    return raw(json.dumps({"error": {"message": words}}), status, headers)


def body_of(content: Any = "fine", finish_reason: str | None = "stop", **message: Any) -> dict[str, Any]:
    choice = {
        "index": 0,
        "finish_reason": finish_reason,
        "message": {"role": "assistant", "content": content, **message},
    }
    return {"choices": [choice]}


def says(content: Any = "fine", finish_reason: str | None = "stop", **message: Any) -> Answer:
    return raw(json.dumps(body_of(content, finish_reason, **message)))


def zipped(body: bytes) -> Answer:
    return raw(gzip.compress(body), headers={"Content-Encoding": "gzip"})


def chunked(body: bytes, size: int = 7) -> Answer:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    stream = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    return as_is(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + stream)


def endless(piece: bytes = b" " * 65536) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()

    return answer


def stalled(head: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{") -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        await asyncio.sleep(60)

    return answer


def cut_off() -> Answer:
    return as_is(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"choices"', close=True)


def hangs_up() -> Answer:
    return as_is(b"", close=True)
