"""An endpoint that costs next to nothing: one terminal call, then a final answer, plain or streamed as asked.

python -m tests.bench.endpoint        prints its base_url, ends when its stdin does
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from aiohttp import web

USAGE = {"prompt_tokens": 1000, "completion_tokens": 20, "total_tokens": 1020}
CALL = {"id": "call_1", "type": "function", "function": {"name": "terminal", "arguments": '{"command": "echo hello"}'}}


def _message(asked: dict[str, Any]) -> tuple[dict[str, Any], str]:
    if any(message["role"] == "tool" for message in asked["messages"]):
        return {"role": "assistant", "content": "It said hello.", "reasoning_content": "I see."}, "stop"
    thought = {"role": "assistant", "content": None, "reasoning_content": "Let me see."}
    return {**thought, "tool_calls": [CALL]}, "tool_calls"


def _chunks(message: dict[str, Any], finish_reason: str) -> bytes:
    head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "bench"}
    delta = dict(message)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": 0, **CALL}]
    parts = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}]},
        {**head, "choices": [], "usage": USAGE},
    ]
    return b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts) + b"data: [DONE]\n\n"


async def complete(request: web.Request) -> web.Response:
    asked = await request.json()
    message, finish_reason = _message(asked)
    if asked.get("stream"):
        return web.Response(body=_chunks(message, finish_reason), content_type="text/event-stream")
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return web.json_response({"id": "x", "object": "chat.completion", "choices": [choice], "usage": USAGE})


async def models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "bench", "object": "model", "context_length": 131072}]})


async def serve() -> None:
    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve())
