from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from endpoints.child import EndpointError
from endpoints.embedded import DEFAULT_MAX_TOKENS, PARALLEL, Layer, check_processor
from endpoints.launch import start_endpoint
from endpoints.script import ScriptedReply
from endpoints.scripted import ScriptedEndpoint
from tests.endpoints.embedded_model import PATIENCE_SECONDS, politely, why_not

Json = dict[str, Any]
PROMPT: Json = {"role": "user", "content": "Which Linux kernel version is this machine running? Use uname."}
COMMAND: Json = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TERMINAL: Json = {
    "type": "function",
    "function": {"name": "terminal", "description": "Run a shell command.", "parameters": COMMAND},
}
CALL_TEXT = '<think>\nI will ask uname.\n</think>\n{"name": "terminal", "arguments": {"command": "uname -r"}}'


# The layer, with prepared replies in the engine's place


def through_layer(
    lines: list[Json], ask: Callable[[aiohttp.ClientSession, str], Awaitable[Any]]
) -> tuple[Any, list[Json]]:
    """Run a client against the layer; return what it returns, and what the engine was asked."""
    replies = [ScriptedReply.model_validate(line) for line in lines]

    async def run(engine_url: str) -> Any:
        async with aiohttp.ClientSession() as client:
            runner = web.AppRunner(Layer(engine_url, "small", client).application(), handler_cancellation=True)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            try:
                return await ask(client, f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
            finally:
                await runner.cleanup()

    with ScriptedEndpoint(replies) as engine:
        result = asyncio.run(run(engine.base_url.removesuffix("/v1")))
        return result, [request.body for request in engine.requests]


def posted(body: Any, *lines: Json) -> tuple[int, Json, list[Json]]:
    """Return status and body of the layer's answer, and what the engine was asked."""

    async def ask(client: aiohttp.ClientSession, base_url: str) -> tuple[int, Json]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with client.post(f"{base_url}/chat/completions", data=data) as response:
            return response.status, await response.json()

    (status, said), asked = through_layer(list(lines), ask)
    return status, said, asked


def test_a_call_goes_through_the_layer() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
    body = {"model": "any", "messages": [PROMPT], "tools": [TERMINAL]}
    status, said, (asked,) = posted(body, {"content": CALL_TEXT, "usage": usage})
    function = {"name": "terminal", "arguments": '{"command": "uname -r"}'}
    message = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I will ask uname.",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }
    assert status == 200
    assert said["choices"] == [{"index": 0, "message": message, "finish_reason": "tool_calls"}]
    assert (said["model"], said["usage"]) == ("small", usage)
    assert [turn["role"] for turn in asked["messages"]] == ["system", "user"]
    assert (asked["temperature"], asked["max_tokens"]) == (0, DEFAULT_MAX_TOKENS)
    assert asked["grammar"].startswith("%llguidance")
    assert "tools" not in asked


def test_settings_are_handed_on_and_ids_go_on() -> None:
    history = [{"role": "assistant", "tool_calls": [{"function": {"name": "a"}}]}, {"role": "tool", "content": "{}"}]
    body = {"messages": [PROMPT, *history], "tools": [TERMINAL], "temperature": 0.5, "max_tokens": 7}
    _, said, (asked,) = posted(body, {"content": CALL_TEXT, "finish_reason": "length"})
    assert said["choices"][0]["finish_reason"] == "length"
    assert said["choices"][0]["message"]["tool_calls"][0]["id"] == "call_2"
    assert (asked["temperature"], asked["max_tokens"]) == (0.5, 7)


def test_without_tools_there_is_no_grammar() -> None:
    status, said, (asked,) = posted({"messages": [PROMPT]}, {"content": "6.1"})
    assert (status, said["choices"][0]["message"]["content"]) == (200, "6.1")
    assert "grammar" not in asked


def test_when_no_tools_are_offered_any_more_there_is_text_alone() -> None:
    history = [{"role": "assistant", "tool_calls": [{"function": {"name": "a"}}]}, {"role": "tool", "content": "{}"}]
    _, _, (asked,) = posted({"messages": [PROMPT, *history, PROMPT]}, {"content": "6.1"})
    assert asked["grammar"].rstrip().endswith("start: text")


@pytest.mark.parametrize("body", [b"{", b"[]", {"messages": []}, {"messages": [PROMPT], "stream": True}])
def test_requests_that_make_no_sense(body: Any) -> None:
    status, said, asked = posted(body, {"content": "never"})
    assert (status, said["error"]["type"], asked) == (400, "invalid_request_error", [])


def test_a_conversation_that_is_too_long() -> None:
    problem = {"type": "exceed_context_size_error", "n_ctx": 100, "n_prompt_tokens": 230, "message": "m"}
    status, said, _ = posted({"messages": [PROMPT]}, {"status": 400, "error": problem})
    assert (status, said["error"]["code"]) == (400, "context_length_exceeded")
    assert said["error"]["message"] == "This model's maximum context length is 100 tokens; your messages have 230."


def test_what_the_engine_says_is_told() -> None:
    status, said, _ = posted({"messages": [PROMPT]}, {"status": 503, "error": "Loading model"})
    assert (status, said["error"]) == (
        503,
        {"message": "Loading model", "type": "server_error", "code": "engine_error"},
    )


def test_so_many_at_once_and_those_who_leave_make_room() -> None:
    async def ask(client: aiohttp.ClientSession, base_url: str) -> int:
        url, body = f"{base_url}/chat/completions", {"messages": [PROMPT]}
        tasks = [asyncio.ensure_future(client.post(url, json=body)) for _ in range(PARALLEL)]
        await asyncio.wait(tasks, timeout=0.5)
        for task in tasks:  # they are stuck in the engine: the clients give up
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with client.post(url, json=body) as response:
            return response.status

    stuck = {"content": "x", "stall": "headers", "times": PARALLEL}
    status, asked = through_layer([stuck, {"content": "x"}], ask)
    assert (status, len(asked)) == (200, PARALLEL + 1)


def test_models() -> None:
    async def ask(client: aiohttp.ClientSession, base_url: str) -> Any:
        async with client.get(f"{base_url}/models") as response:
            return await response.json()

    said, _ = through_layer([{"content": "x"}], ask)
    assert [model["id"] for model in said["data"]] == ["small"]


def test_an_old_processor_is_refused(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("flags : fpu sse4_2 avx avx2\n", encoding="utf-8")
    check_processor("x86_64", info)
    info.write_text("flags : fpu sse4_2 avx\n", encoding="utf-8")
    check_processor("aarch64", info)
    with pytest.raises(EndpointError, match="needs a processor with AVX2"):
        check_processor("x86_64", info)


# The real model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """The embedded model, started once; skips when it is not installed."""
    if reason := why_not():
        pytest.skip(reason)
    with politely():
        endpoint = start_endpoint("embedded", "", tmp_path_factory.mktemp("embedded") / "log", print)
    assert endpoint is not None
    with openai.OpenAI(base_url=endpoint.base_url, api_key="none", timeout=PATIENCE_SECONDS, max_retries=0) as client:
        yield client
    endpoint.close()
    assert endpoint.process.returncode == 0


def complete(client: openai.OpenAI, messages: list[Json], **more: Any) -> Json:
    arguments: Json = {"model": "m", "messages": messages, "tools": [TERMINAL], "max_tokens": 200, **more}
    answer: Json = client.chat.completions.create(**arguments).model_dump()
    return answer


@pytest.mark.model
@pytest.mark.timeout(PATIENCE_SECONDS)
def test_a_task_from_the_prompt_to_the_answer(model: openai.OpenAI) -> None:
    answer = complete(model, [PROMPT])
    choice = answer["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"].startswith("I will ")
    assert "uname" in json.loads(call["function"]["arguments"])["command"]
    assert answer["usage"]["prompt_tokens"] > 100
    assert answer["usage"]["completion_tokens"] > 10
    result = {"role": "tool", "tool_call_id": call["id"], "content": '{"output": "6.1.0-39-amd64", "exit_code": 0}'}
    again = complete(model, [PROMPT, choice["message"], result])
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100  # what stands in front is not read again
    message = again["choices"][0]["message"]
    assert message["tool_calls"] or "6.1.0-39-amd64" in message["content"]


@pytest.mark.model
@pytest.mark.timeout(PATIENCE_SECONDS)
def test_the_same_question_has_the_same_answer(model: openai.OpenAI) -> None:
    answers = [complete(model, [PROMPT], max_tokens=10)["choices"] for _ in range(2)]
    assert answers[0] == answers[1]


@pytest.mark.model
@pytest.mark.timeout(PATIENCE_SECONDS)
def test_text_without_tools_and_a_cut(model: openai.OpenAI) -> None:
    choice = complete(model, [{"role": "user", "content": "Count from 1 to 100."}], tools=[], max_tokens=12)["choices"][
        0
    ]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"]


@pytest.mark.model
@pytest.mark.timeout(PATIENCE_SECONDS)
def test_a_schema_with_words_the_engine_does_not_know(model: openai.OpenAI) -> None:
    odd = {"type": "string", "pattern": "(?<=x)y", "format": "odd", "not": {"const": "z"}, "contentMediaType": "x"}
    parameters = {**COMMAND, "properties": {"command": odd, "ring": {"$ref": "#/$defs/ring"}}, "if": {}, "$defs": 3}
    tool = {"type": "function", "function": {"name": 'odd"name', "parameters": parameters}}
    message = complete(model, [PROMPT], tools=[tool], tool_choice="required")["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == 'odd"name'
    assert "command" in json.loads(message["tool_calls"][0]["function"]["arguments"])


@pytest.mark.model
@pytest.mark.timeout(PATIENCE_SECONDS)
def test_the_real_context_has_an_end(model: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        complete(model, [{"role": "user", "content": "word " * 40_000}])
    assert raised.value.code == "context_length_exceeded"
    assert complete(model, [PROMPT], max_tokens=5)["choices"]  # and life goes on
