"""The embedded model: a small real one on this machine's processor, behind an OpenAI-compatible endpoint on loopback.

    python -m endpoints.embedded [MODEL.gguf]

A demonstration, not a model to make data with. The engine is llama.cpp (xllamacpp), which opens a port of its own on
loopback; this layer in front of it adds what the model lacks: tools (tool_text.py) and a grammar that holds it to them
(tool_grammar.py). One process per run, which ends with the run (child.py). Not served: streaming, several choices.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from typing import Any

import aiohttp
from aiohttp import web

from endpoints.child import EndpointError, Parent, run_child
from endpoints.tool_grammar import call_grammar
from endpoints.tool_text import BadRequestError, fold, offer, unfold
from endpoints.weights import QWEN, find_weights, model_name

JsonObject = dict[str, Any]

CONTEXT_TOKENS = 16_384  # of each of the conversations that are worked on at once
PARALLEL = 2
DEFAULT_MAX_TOKENS = 1024  # a small model that has lost the thread writes until it is stopped
MAX_BODY_BYTES = 1 << 26
REQUEST_SECONDS = 900.0


class Layer:
    """The HTTP side: OpenAI's form in, the engine's form out, and back."""

    def __init__(self, engine_url: str, model: str) -> None:
        self._engine_url = engine_url
        self._model = model
        self._numbers = itertools.count(1)
        self._client: aiohttp.ClientSession | None = None

    async def serve(self, parent: Parent) -> None:
        """Listen, say so, and go on for ever."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(REQUEST_SECONDS)) as self._client:
            parent.ready(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", self._model)
            await asyncio.Event().wait()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._model, "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        try:
            asked = _checked(await request.json())
            offered = offer(asked)
            body = {
                "messages": fold(asked["messages"], asked.get("tools") or []),
                "temperature": asked.get("temperature") or 0,
                "max_tokens": asked.get("max_completion_tokens") or asked.get("max_tokens") or DEFAULT_MAX_TOKENS,
                "cache_prompt": True,
            }
            if asked.get("tools"):
                body["grammar"] = call_grammar(offered.tools, think=offered.think, text=offered.text)
        except (BadRequestError, ValueError, KeyError, TypeError, AttributeError) as error:
            return _error(400, "invalid_request_error", f"{type(error).__name__}: {error}")
        return await self._ask_engine(body)

    async def _ask_engine(self, body: JsonObject) -> web.Response:
        assert self._client is not None  # noqa: S101 - it is made before anybody can ask
        async with self._client.post(f"{self._engine_url}/v1/chat/completions", json=body) as response:
            said: JsonObject = await response.json(content_type=None)
        if response.status != 200:  # noqa: PLR2004
            problem = said.get("error") or {}
            overflow = "context" in str(problem.get("type")) or "context" in str(problem.get("message"))
            kind = "context_length_exceeded" if overflow else "engine_error"
            return _error(400 if overflow else response.status, kind, str(problem.get("message") or problem))
        choice = said["choices"][0]
        cut = choice["finish_reason"] == "length"
        message, finish_reason = unfold(choice["message"]["content"], call_id=f"call_{next(self._numbers)}", cut=cut)
        answer = {"index": 0, "message": message, "finish_reason": finish_reason}
        return web.json_response(
            {
                "id": said.get("id", ""),
                "object": "chat.completion",
                "created": said.get("created", 0),
                "model": self._model,
                "choices": [answer],
                "usage": said.get("usage"),
            }
        )


def _checked(asked: Any) -> JsonObject:
    messages = asked.get("messages") if isinstance(asked, dict) else None
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise BadRequestError("messages must be a list of objects, and not empty")
    if asked.get("stream"):
        raise BadRequestError("streaming is not served; ask without stream")
    return dict(asked)


def _error(status: int, code: str, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": code, "code": code}}, status=status)


def start_engine(path: str) -> Any:
    """Load the model and return the running engine, which has ``listening_address``. Raises EndpointError."""
    try:
        import xllamacpp  # noqa: PLC0415 - the extra; takes a moment to load
    except ImportError as error:
        raise EndpointError(f"the engine xllamacpp cannot be loaded: {error}") from None
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.port = 0
    params.n_ctx = CONTEXT_TOKENS * PARALLEL
    params.n_parallel = PARALLEL
    params.kv_unified = True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 2
    params.no_extra_bufts = True  # a third less memory
    params.ui = False
    params.verbosity = 1
    params.cache_ram_mib = 0
    try:
        return xllamacpp.Server(params)
    except RuntimeError as error:
        raise EndpointError(f"the engine cannot load {path}: {error}") from None


def main() -> int:
    """Serve until stdin ends; the exit code is 2 when that cannot be."""
    model = sys.argv[1] if len(sys.argv) > 1 else QWEN.model

    def serve(parent: Parent) -> None:
        path = find_weights(model, parent.progress)
        parent.progress(f"loading {path.name}: a small model on this machine's processor, for demonstration")
        engine = start_engine(str(path))
        asyncio.run(Layer(engine.listening_address, model_name(model)).serve(parent))

    return run_child(serve)


if __name__ == "__main__":
    sys.exit(main())
