"""How a prepared reply travels: its bytes, and everything that may go wrong with them on the way.

``payload`` makes the body; ``deliver`` sends it over a connection of a ``scripted.py`` endpoint: gzipped, in chunks,
with a false length, half and then silent, half and then reset, or without end, as the reply says.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import socket
import struct
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NoReturn

from endpoints.picture import picture
from endpoints.script import JsonObject, ScriptedReply, Turn

CHUNK_BYTES = 16 * 1024
ENDLESS_PAUSE_SECONDS = 0.01  # between two chunks of a body without end
RESET_PAUSE_SECONDS = 0.05  # gives the client time to read what comes before a reset
BYTES_PER_TOKEN = 4
_NO_WAIT_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST


class HangUpError(Exception):
    """The connection cannot be used for another request."""


@dataclass(frozen=True)
class Connection:
    """One client's connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def silence(self) -> NoReturn:
        """Say nothing more; returns (by HangUpError) when the client has gone."""
        while await self.reader.read(CHUNK_BYTES):
            pass
        raise HangUpError

    async def reset(self) -> NoReturn:
        """Send RST instead of a proper end."""
        await asyncio.sleep(RESET_PAUSE_SECONDS)
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_WAIT_ON_CLOSE)
        self.writer.transport.abort()
        raise HangUpError

    async def send(self, data: bytes, *, chunked: bool = False) -> None:
        """Send a piece of a response."""
        if not chunked:
            self.writer.write(data)
        else:
            for start in range(0, len(data), CHUNK_BYTES):
                chunk = data[start : start + CHUNK_BYTES]
                self.writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        await self.writer.drain()


async def deliver(reply: ScriptedReply, body: bytes, connection: Connection) -> None:
    """Send a response. Raises HangUpError when the connection has to end after it."""
    if reply.gzip:
        body = gzip.compress(body)
    head = _head(reply, len(body))
    if not (reply.stall or reply.reset or reply.endless or reply.chunked):
        await connection.send(head + body)
        if reply.content_length is not None:
            raise HangUpError
        return
    if reply.stall == "headers":
        await connection.silence()
    if reply.reset == "before":
        await connection.reset()
    await connection.send(head)
    if reply.reset == "headers":
        await connection.reset()
    half_way = len(body) // 2 if reply.stall or reply.reset else len(body)
    await connection.send(body[:half_way], chunked=reply.chunked)
    if reply.stall:
        await connection.silence()
    if reply.reset:
        await connection.reset()
    while reply.endless:
        await connection.send(b" " * CHUNK_BYTES, chunked=reply.chunked)
        await asyncio.sleep(ENDLESS_PAUSE_SECONDS)
    await connection.send(b"0\r\n\r\n")


def payload(reply: ScriptedReply, turn: Turn, request: JsonObject, number: int) -> bytes:
    """Make the body of the reply to a request; ``number`` counts answers and names this one."""
    given = reply.model_fields_set
    if "body" in given:
        return reply.body.encode() if isinstance(reply.body, str) else _json_bytes(reply.body)
    if reply.is_error:
        return _json_bytes({"error": _error(reply)})
    if reply.to == "images":
        return _json_bytes(_images(reply, request))
    message = reply.message if reply.message is not None else _message(reply, turn)
    finish_reason = "tool_calls" if message.get("tool_calls") else "stop"
    answer: JsonObject = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": reply.model or request.get("model"),
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": reply.finish_reason if "finish_reason" in given else finish_reason,
            }
        ],
    }
    usage = reply.usage if "usage" in given else _usage(request["messages"], message)
    return _json_bytes(answer if usage is None else {**answer, "usage": usage})


def _head(reply: ScriptedReply, body_bytes: int) -> bytes:
    headers = {"Content-Type": reply.content_type}
    if reply.gzip:
        headers["Content-Encoding"] = "gzip"
    if reply.chunked:
        headers["Transfer-Encoding"] = "chunked"
    elif reply.endless:
        headers["Connection"] = "close"
    else:
        headers["Content-Length"] = str(body_bytes if reply.content_length is None else reply.content_length)
    lines = [f"{name}: {value}\r\n" for name, value in {**headers, **reply.headers}.items()]
    return f"HTTP/1.1 {reply.status} {_reason(reply.status)}\r\n{''.join(lines)}\r\n".encode("latin-1", "replace")


def _message(reply: ScriptedReply, turn: Turn) -> JsonObject:
    content = reply.content
    if reply.content_chars is not None:
        text = content if isinstance(content, str) and content else "x"
        content = (text * (reply.content_chars // len(text) + 1))[: reply.content_chars]
    message: JsonObject = {"role": "assistant", "content": content}
    for name in ("reasoning", "reasoning_content", "reasoning_details"):
        if name in reply.model_fields_set:
            message[name] = getattr(reply, name)
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"call_{turn.number + 1}_{number}" if call.id is None else call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False)
                    if isinstance(call.arguments, dict)
                    else call.arguments,
                },
            }
            for number, call in enumerate(reply.tool_calls, start=1)
        ]
    return message


def _images(reply: ScriptedReply, request: JsonObject) -> JsonObject:
    image = reply.image or base64.b64encode(picture(str(request.get("prompt")))).decode()
    form = "url" if image.startswith(("http://", "https://", "data:")) else "b64_json"
    usage = {} if reply.usage is None else {"usage": reply.usage}
    return {"created": int(time.time()), "data": [{form: image}], **usage}


def _error(reply: ScriptedReply) -> JsonObject:
    if isinstance(reply.error, dict):
        return reply.error
    return {"message": reply.error or _reason(reply.status), "type": "scripted", "code": reply.status}


def _usage(messages: list[JsonObject], message: JsonObject) -> JsonObject:
    asked = sum(len(part) for part in map(str, messages)) // BYTES_PER_TOKEN
    said = len(str(message)) // BYTES_PER_TOKEN
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}


def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
