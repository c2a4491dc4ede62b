"""An endpoint that costs next to nothing: one terminal call, then a final answer, plain or streamed as asked.

    python -m tests.bench.endpoint [none | constant | spread | heavy] [LIMIT] [TURNS]

Prints its base_url; when its stdin ends, prints what it saw (``Served``) as JSON and ends. What a limit is stands in
limits.py; what is above it is answered with HTTP 429 at once. With TURNS, every rollout is so many calls of the todo
tool instead of one of the terminal. Answers come at once, after
a second, after half to one and a half, or after a log-normal time with a mean of one second that is cut at twenty;
drawn by prompt and turn, so that whoever asks the same waits as long.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from math import exp
from random import Random
from typing import Any

from aiohttp import web

from tests.bench.limits import REQUEST_TOKENS, Limit

USAGE = {"prompt_tokens": REQUEST_TOKENS - 20, "completion_tokens": 20, "total_tokens": REQUEST_TOKENS}
CALL = {"id": "call_1", "type": "function", "function": {"name": "terminal", "arguments": '{"command": "echo hello"}'}}
PLAN_CALL = {"id": "call_1", "type": "function", "function": {"name": "todo", "arguments": "{}"}}
HEAVY_MOST_SECONDS = 20.0


@dataclass
class Served:
    """What the endpoint saw, times in monotonic seconds of this machine."""

    first: float = 0.0  # request
    last: float = 0.0  # answer
    waits: dict[str, float] = field(
        default_factory=dict
    )  # seconds in all, by prompt, in the order they were first seen
    reached: float = 0.0  # of what its limit allowed, 0 to 1
    refused: float = 0.0  # of all requests, 0 to 1


def drawn(kind: str, key: str) -> float:
    """Return the seconds that an answer takes."""
    chance = Random(key)
    match kind:
        case "constant":
            return 1.0
        case "spread":
            return chance.uniform(0.5, 1.5)
        case "heavy":
            return min(exp(chance.gauss(-0.5, 1.0)), HEAVY_MOST_SECONDS)
    return 0.0


class Delays:
    """Lets requests wait, or turns them away, and keeps count."""

    def __init__(self, kind: str, limit: Limit | None = None, turns: int = 0) -> None:
        self.kind = kind
        self.turns = turns
        self.limit = limit
        self.served = Served()

    async def wait(self, asked: dict[str, Any]) -> None:
        """Raise HTTPTooManyRequests for what is above the limit."""
        served = self.served
        served.first = served.first or time.monotonic()
        prompt = str(next((each["content"] for each in asked["messages"] if each["role"] == "user"), ""))
        answers = sum(each["role"] == "assistant" for each in asked["messages"])
        seconds = drawn(self.kind, f"{prompt}\0{answers}")
        if self.limit and not self.limit.take(time.monotonic(), seconds):
            raise web.HTTPTooManyRequests(text='{"error": {"message": "too many requests"}}')
        try:
            if seconds:
                served.waits[prompt] = served.waits.get(prompt, 0.0) + seconds
                await asyncio.sleep(seconds)
        finally:
            if self.limit:
                self.limit.ended()
        served.last = time.monotonic()

    def told(self) -> Served:
        if self.limit:
            self.served.reached, self.served.refused = self.limit.reached, self.limit.refused_share
        return self.served


DELAYS = web.AppKey("delays", Delays)


def _message(asked: dict[str, Any], turns: int) -> tuple[dict[str, Any], str]:
    if sum(message["role"] == "tool" for message in asked["messages"]) >= max(turns, 1):
        return {"role": "assistant", "content": "It said hello.", "reasoning_content": "I see."}, "stop"
    thought = {"role": "assistant", "content": None, "reasoning_content": "Let me see."}
    return {**thought, "tool_calls": [PLAN_CALL if turns else CALL]}, "tool_calls"


def _chunks(message: dict[str, Any], finish_reason: str) -> bytes:
    head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "bench"}
    delta = dict(message)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": 0, **message["tool_calls"][0]}]
    parts = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}]},
        {**head, "choices": [], "usage": USAGE},
    ]
    return b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts) + b"data: [DONE]\n\n"


async def complete(request: web.Request) -> web.Response:
    asked = await request.json()
    delays = request.app[DELAYS]
    await delays.wait(asked)
    message, finish_reason = _message(asked, delays.turns)
    if asked.get("stream"):
        return web.Response(body=_chunks(message, finish_reason), content_type="text/event-stream")
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return web.json_response({"id": "x", "object": "chat.completion", "choices": [choice], "usage": USAGE})


async def models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "bench", "object": "model", "context_length": 131072}]})


async def serve(kind: str = "none", limit: str = "", turns: str = "0") -> None:
    app = web.Application(client_max_size=1 << 28)
    delays = app[DELAYS] = Delays(kind, Limit.read(limit) if limit else None, int(turns))
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    print(json.dumps(asdict(delays.told())), flush=True)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
