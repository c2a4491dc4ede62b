"""The embedded model: a small real one on this machine's processor, behind an OpenAI-compatible endpoint on loopback.

    python -m endpoints.embedded [MODEL.gguf]

A demonstration, not a model to make data with. The engine is llama.cpp (xllamacpp), which opens a port of its own on
loopback; this layer in front of it adds what the model lacks: tools (tool_text.py) and a grammar that holds it to them
(tool_grammar.py). One process per run, which ends with the run (child.py). Temperature is 0 unless the request says
otherwise; a reply ends after ``DEFAULT_MAX_TOKENS`` likewise. Not served: streaming, several choices.
"""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from endpoints.chat_request import BadRequestError, ChatRequest, JsonObject, parse_request
from endpoints.child import EndpointError, Parent, run_child
from endpoints.tool_grammar import call_grammar
from endpoints.tool_text import fold, offer, unfold
from endpoints.weights import QWEN, find_weights, model_name

PARALLEL = 2  # conversations worked on at once; each keeps its place in the engine's cache
CONTEXT_TOKENS = 16_384  # of each of them
DEFAULT_MAX_TOKENS = 1024  # a small model that has lost the thread writes until it is stopped
MAX_BODY_BYTES = 1 << 26
REQUEST_SECONDS = 900.0
OK_STATUS = 200


class Layer:
    """The HTTP side: OpenAI's form in, the engine's form out, and back."""

    def __init__(self, engine_url: str, model: str, client: aiohttp.ClientSession) -> None:
        self._engine_url = engine_url
        self._model = model
        self._client = client
        self._places = asyncio.Semaphore(PARALLEL)

    def application(self) -> web.Application:
        """Return the routes."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        return app

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._model, "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        try:
            asked = parse_request(await request.read())
        except BadRequestError as error:
            return _error(400, "invalid_request_error", str(error))
        async with self._places:
            try:
                status, said = await self._ask_engine(asked)
            except TimeoutError:
                return _error(504, "timeout", f"the model took longer than {REQUEST_SECONDS:g} seconds")
        if status != OK_STATUS:
            return _refused(status, said)
        return web.json_response(self._answer(asked, said))

    async def _ask_engine(self, asked: ChatRequest) -> tuple[int, JsonObject]:
        body: JsonObject = {
            "messages": fold(asked),
            "temperature": asked.temperature or 0,
            "max_tokens": asked.max_completion_tokens or asked.max_tokens or DEFAULT_MAX_TOKENS,
        }
        if asked.tools or asked.has_calls:
            offered = offer(asked)
            body["grammar"] = call_grammar(offered.tools, step=offered.step, text=offered.text)
        async with self._client.post(f"{self._engine_url}/v1/chat/completions", json=body) as response:
            return response.status, await response.json(content_type=None)

    def _answer(self, asked: ChatRequest, said: JsonObject) -> JsonObject:
        choice = said["choices"][0]
        calls_before = sum(len(message.tool_calls or []) for message in asked.messages)
        message, finish_reason = unfold(
            choice["message"]["content"] or "",
            call_id=f"call_{calls_before + 1}",
            cut=choice["finish_reason"] == "length",
        )
        return {
            "id": said["id"],
            "object": "chat.completion",
            "created": said["created"],
            "model": self._model,
            "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
            "usage": said["usage"],
        }


def _refused(status: int, said: JsonObject) -> web.Response:
    """Tell the client, in OpenAI's words where there are any, what the engine did not like."""
    problem = said.get("error") or {}
    message = str(problem.get("message") or problem)
    if problem.get("type") == "exceed_context_size_error":
        limit, asked = problem.get("n_ctx"), problem.get("n_prompt_tokens")
        return _error(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {limit} tokens; your messages have {asked}.",
        )
    return _error(status, "engine_error", message)


def _error(status: int, code: str, message: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"  # noqa: PLR2004 - HTTP's own border
    return web.json_response({"error": {"message": message, "type": kind, "code": code}}, status=status)


def start_engine(path: Path) -> Any:
    """Load the model and return the running engine, which has ``listening_address``. Raises EndpointError."""
    try:
        import xllamacpp  # noqa: PLC0415 - the extra; takes a moment to load
    except ImportError as error:
        raise EndpointError(f"the engine xllamacpp cannot be loaded: {error}") from None
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.port = 0
    params.n_ctx = CONTEXT_TOKENS * PARALLEL
    params.n_parallel = PARALLEL
    params.kv_unified = False  # a long conversation must not take the other one's place
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    params.cpuparams.poll = params.cpuparams_batch.poll = 0  # waiting threads sleep: twice as fast on a busy machine
    params.no_extra_bufts = True  # a third less memory
    params.ui = False
    params.verbosity = 1
    params.cache_ram_mib = 0
    try:
        return xllamacpp.Server(params)
    except RuntimeError as error:
        raise EndpointError(f"the engine cannot load {path}: {error}") from None


def check_processor(machine: str = platform.machine(), cpu_info: Path = Path("/proc/cpuinfo")) -> None:
    """Refuse a processor on which the engine would crash. Raises EndpointError."""
    if machine == "x86_64" and cpu_info.exists():
        words = cpu_info.read_text(encoding="utf-8", errors="replace").split()
        if "avx2" not in words:
            raise EndpointError("the embedded model needs a processor with AVX2; use another --base_url")


async def _serve(engine_url: str, model: str, parent: Parent) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(REQUEST_SECONDS)) as client:
        layer = Layer(engine_url, model, client)
        # A client that goes away takes its request with it, or the engine would work on for nobody.
        runner = web.AppRunner(layer.application(), access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        parent.ready(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", model)
        await asyncio.Event().wait()


def main() -> int:
    """Serve until stdin ends; the exit code is 2 when that cannot be."""
    model = sys.argv[1] if len(sys.argv) > 1 else QWEN.model

    def serve(parent: Parent) -> None:
        check_processor()
        path = find_weights(model, parent.progress)
        parent.progress(f"loading {path.name}: a small model on this machine's processor, for demonstration")
        engine = start_engine(path)
        asyncio.run(_serve(engine.listening_address, model_name(model), parent))

    return run_child(serve)


if __name__ == "__main__":
    sys.exit(main())
