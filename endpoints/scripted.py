"""The scripted model: an OpenAI-compatible endpoint on loopback that answers from a file of prepared replies.

It owns HTTP itself, because half of its replies are broken on purpose: ``script.py`` has the format and says which
line answers which request, ``wire.py`` sends it. Tests use ``ScriptedEndpoint`` as a context manager, with a thread and
an event loop of its own; a run starts ``python -m endpoints.scripted FILE [--port N]`` as a child process
(``child.py``). No streaming, no request bodies in chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from endpoints.child import EndpointError, Parent, run_child
from endpoints.script import (
    JsonObject,
    Script,
    ScriptedReply,
    ScriptError,
    ServerLimits,
    fingerprint,
    kind_of,
    load_script,
)
from endpoints.wire import Connection, HangUpError, deliver, payload

DEFAULT_RECORDED_REQUESTS = 1000
MAX_HEAD_BYTES = 64 * 1024
BACKLOG = 1024


@dataclass(frozen=True)
class RecordedRequest:
    """One chat completion, or request for images, as it was asked for."""

    headers: dict[str, str]  # names in lower case
    body: JsonObject
    time: float  # seconds since the epoch
    path: str


class ScriptedEndpoint:
    """A scripted model in a thread of its own: ``with ScriptedEndpoint(load_script(path)) as endpoint: …``.

    ``base_url`` is where it listens, once started; ``requests`` holds the newest ``record`` of what it was asked.
    """

    def __init__(
        self, script: Script | Iterable[ScriptedReply], *, port: int = 0, record: int = DEFAULT_RECORDED_REQUESTS
    ) -> None:
        self._script = script if isinstance(script, Script) else Script("the script", tuple(script))
        self._port = port
        self.requests: deque[RecordedRequest] = deque(maxlen=record)
        self.base_url = ""

    def start(self) -> Self:
        """Begin to listen. Raises EndpointError when the port cannot be used."""
        listener = _listen(self._port)
        self.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(listener,), name="scripted endpoint", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End every connection and the thread."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def wait(self) -> None:
        """Block until it is stopped."""
        self._thread.join()

    def _run(self, listener: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(_Server(self._script, self.requests).run(listener, self._stopped))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@dataclass(frozen=True)
class _Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def is_chat(self) -> bool:
        return self.method == "POST" and self.path.endswith("/chat/completions")

    @property
    def is_images(self) -> bool:
        return self.method == "POST" and self.path.endswith("/images/generations")


class _Server:
    """The endpoint inside its event loop."""

    def __init__(self, script: Script, requests: deque[RecordedRequest]) -> None:
        self._script = script
        self._requests = requests
        self._throttle = _Throttle(script.limits)
        self._answers = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, listener: socket.socket, stopped: asyncio.Event) -> None:
        """Serve until the event is set; leaves no connection behind."""
        server = await asyncio.start_server(self._serve, sock=listener, limit=MAX_HEAD_BYTES, backlog=BACKLOG)
        await stopped.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await server.wait_closed()
        await asyncio.sleep(0)  # lets aborted transports close their sockets

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            while (request := await _read_request(reader)) is not None:
                await self._respond(request, Connection(reader, writer))
                if request.headers.get("connection", "").lower() == "close":
                    break
            writer.close()
        except (HangUpError, ConnectionError, asyncio.IncompleteReadError):
            writer.close()  # the reply wanted it so, or the client went away
        except asyncio.CancelledError:
            writer.transport.abort()  # the endpoint ends

    async def _respond(self, request: _Request, connection: Connection) -> None:
        if not (request.is_chat or request.is_images):
            reply = self._models() if request.method == "GET" and request.path.endswith("/models") else _not_found()
            return await _say(reply, connection)
        refusal = self._throttle.refusal()
        if refusal is not None:
            return await _say(refusal, connection)
        with self._throttle:
            return await self._complete(request, connection)

    async def _complete(self, request: _Request, connection: Connection) -> None:
        body = _chat_request(request.body) if request.is_chat else _images_request(request.body)
        if isinstance(body, str):
            return await _say(_refusal(400, body), connection)
        if self._requests.maxlen:
            self._requests.append(RecordedRequest(request.headers, body, time.time(), request.path))
        if request.is_chat:
            messages, kind = body["messages"], kind_of(body)
        else:
            messages, kind = [{"role": "user", "content": body["prompt"]}], "images"
        choice = self._script.reply_to(messages, kind)
        if choice is None:
            return await _say(_refusal(400, f"{self._script.name} has no line for this prompt"), connection)
        reply, turn = choice
        if reply.delay_seconds:
            await asyncio.sleep(_delay_seconds(reply, messages))
        self._answers += 1
        return await deliver(reply, payload(reply, turn, body, self._answers), connection)

    def _models(self) -> ScriptedReply:
        models = [{"id": name, "object": "model", "owned_by": "scripted"} for name in self._script.limits.models]
        return ScriptedReply(body={"object": "list", "data": models})


class _Throttle:
    """Counts what is in flight and what came lately; refuses what the script's limits do not allow."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._in_flight = 0
        self._tokens = self._burst = max(1.0, limits.requests_per_second or 0.0)
        self._counted_at = time.monotonic()

    def refusal(self) -> ScriptedReply | None:
        """Return what to say instead of an answer, or None."""
        most, rate = self._limits.max_concurrent, self._limits.requests_per_second
        if most is not None and self._in_flight >= most:
            return _refusal(429, f"more than {most} requests at once", retry_after_seconds=1)
        if rate is None:
            return None
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._counted_at) * rate)
        self._counted_at = now
        if self._tokens < 1:
            wait_seconds = math.ceil((1 - self._tokens) / rate)
            return _refusal(429, f"more than {rate:g} requests a second", retry_after_seconds=wait_seconds)
        self._tokens -= 1
        return None

    def __enter__(self) -> None:
        self._in_flight += 1

    def __exit__(self, *_: object) -> None:
        self._in_flight -= 1


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise EndpointError(f"port {port} cannot be used ({error.strerror}); choose another, or 0 for any") from None
    return listener


async def _read_request(reader: asyncio.StreamReader) -> _Request | None:
    """Read a connection's next request; None when the client has closed it."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError:
        raise HangUpError from None
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    method, _, target = first.partition(" ")
    length = headers.get("content-length", "0")
    if not length.isdecimal():
        raise HangUpError
    body = await reader.readexactly(int(length))
    return _Request(method, target.partition(" ")[0].partition("?")[0], headers, body)


def _chat_request(raw: bytes) -> JsonObject | str:
    """Return the request's body, or what is wrong with it."""
    body = _json(raw)
    if isinstance(body, str):
        return body
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return 'the body must be an object with "messages", a list of objects'
    return "this endpoint does not stream" if body.get("stream") else body


def _images_request(raw: bytes) -> JsonObject | str:
    """Return the request's body, or what is wrong with it."""
    body = _json(raw)
    if isinstance(body, dict) and not isinstance(body.get("prompt"), str):
        return 'the body must be an object with "prompt", a text'
    return body


def _json(raw: bytes) -> JsonObject | str:
    try:
        body = json.loads(raw)
    except ValueError as error:
        return f"the body is not JSON: {error}"
    return body if isinstance(body, dict) else {}


async def _say(reply: ScriptedReply, connection: Connection) -> None:
    body = json.dumps(reply.body if reply.error is None else {"error": {"message": reply.error, "code": reply.status}})
    await deliver(reply, body.encode(), connection)


def _refusal(status: int, message: str, *, retry_after_seconds: int = 0) -> ScriptedReply:
    headers = {"Retry-After": str(retry_after_seconds)} if retry_after_seconds else {}
    return ScriptedReply(status=status, error=message, headers=headers)


def _not_found() -> ScriptedReply:
    return _refusal(404, "there is only POST /v1/chat/completions, POST /v1/images/generations and GET /v1/models")


def _delay_seconds(reply: ScriptedReply, messages: list[JsonObject]) -> float:
    if isinstance(reply.delay_seconds, tuple):
        return random.Random(fingerprint(messages)).uniform(*reply.delay_seconds)  # noqa: S311 - no secret is drawn
    return reply.delay_seconds


def main() -> int:
    """Serve a file until stdin ends; the exit code is 2 when that cannot be."""
    parser = argparse.ArgumentParser(prog="python -m endpoints.scripted", description="Answer from prepared replies.")
    parser.add_argument("file", help="JSONL file of replies")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1; default: any free one")
    arguments = parser.parse_args()

    def serve(parent: Parent) -> None:
        try:
            script = load_script(arguments.file)
        except ScriptError as error:
            raise EndpointError(str(error)) from None
        endpoint = ScriptedEndpoint(script, port=arguments.port, record=0).start()
        parent.ready(endpoint.base_url, "")
        endpoint.wait()

    return run_child(serve)


if __name__ == "__main__":
    sys.exit(main())
