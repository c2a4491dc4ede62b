from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from math import inf
from typing import Any

import pytest

from rollout.chat_model import CallLimits, ContextOverflowError, ModelError, OpenAIChatModel, Reply
from rollout.controller import Seen
from rollout.gate import Gate
from rollout.messages import AssistantMessage, ToolMessage, UserMessage
from rollout.retry import RetryPolicy
from tests.rollout.asking import HELLO, KEY, LIMITS, QUICK, ask, config, failure, reply
from tests.rollout.http_server import (
    body_of,
    error,
    hangs_up,
    raw,
    says,
    serve,
    stalled,
)


def test_asks_and_reads() -> None:
    body = {**body_of("four", reasoning="2 and 2"), "usage": {"prompt_tokens": 9, "completion_tokens": 3, "cost": 0.5}}
    outcome, (asked,) = ask(raw(json.dumps(body)))
    assert isinstance(outcome, Reply)
    assert (outcome.message.content, outcome.message.reasoning) == ("four", "2 and 2")
    assert (outcome.finish_reason, outcome.usage.prompt_tokens, outcome.cost_usd) == ("stop", 9, 0.5)
    assert asked.path == "/v1/chat/completions"
    assert asked.headers["authorization"] == f"Bearer {KEY}"
    assert asked.headers["content-type"] == "application/json"
    assert asked.body == {"model": "some/model", "messages": [{"role": "user", "content": "hello"}]}


def test_surrogates_and_nuls_go_through_the_wire() -> None:
    messages = (
        UserMessage("a\ud800b\0c\ud83d\ude00"),
        AssistantMessage("x", echo={"reasoning": "é"}),
        ToolMessage("1", "t", "\udfff"),
    )
    outcome, (asked,) = ask(raw(r'{"choices":[{"message":{"content":"a\ud800b\u0000c"}}]}'), messages=messages)
    assert [message["content"] for message in asked.body["messages"]] == ["a\ufffdb\ufffdc😀", "x", "\ufffd"]
    assert isinstance(outcome, Reply)
    assert outcome.message.content == "a\ufffdb\ufffdc"


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 520, 529])
def test_passing_troubles_are_retried(status: int) -> None:
    outcome, requests = ask(error(status, "busy"), error(status, "busy"), says())
    assert isinstance(outcome, Reply)
    assert len(requests) == 3


@pytest.mark.parametrize(
    ("status", "words", "kind"),
    [
        (400, "Unsupported parameter: 'max_tokens'", "bad_request"),
        (401, "No auth credentials found", "auth"),
        (402, "Insufficient credits", "billing"),
        (403, "Forbidden", "auth"),
        (404, "The model `x` does not exist", "model_not_found"),
        (422, "bad field", "bad_request"),
        (429, "You exceeded your current quota, please check your plan and billing details.", "billing"),
    ],
)
def test_lasting_troubles_are_told_at_once(status: int, words: str, kind: str) -> None:
    assert failure(error(status, words)) == (kind, f"HTTP {status}: {words}", 1)


def test_a_storm_that_never_ends_is_bounded() -> None:
    assert failure(error(503, "overloaded")) == ("server", "HTTP 503: overloaded", QUICK.max_tries)


def test_retry_after_seconds_are_waited() -> None:
    async def run() -> float:
        async with serve(error(429, "slow down", {"Retry-After": "0.3"}), says()) as endpoint:
            model = OpenAIChatModel(config(endpoint.base_url), KEY, LIMITS)
            started = asyncio.get_running_loop().time()
            await model.complete(HELLO, ())
            await model.close()
            return asyncio.get_running_loop().time() - started

    assert 0.3 <= asyncio.run(run()) < 2


def test_retry_after_date_beyond_the_budget_ends_it() -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    assert failure(error(429, "later", {"Retry-After": date}))[::2] == ("rate_limit", 1)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"choices": null}',
        '{"choices": []}',
        '{"choices": [null]}',
        '{"choices": [{"finish_reason": "stop"}]}',
        '{"choices": [{"message": {"role": "assistant"}}]}',
        '{"choices": [{"finish_reason": "error", "message": {"content": "part"}}]}',
        '{"choices": [{"message": {"content": "no end',
        "[" * 100_000,
        b"\xff\xfe\x00",
        "data: {}\n\n",
    ],
)
def test_a_200_that_is_no_answer_is_retried(body: bytes | str) -> None:
    outcome, requests = ask(raw(body), says())
    assert isinstance(outcome, Reply)
    assert len(requests) == 2
    kind, message, count = failure(raw(body))
    assert (kind, count) == ("bad_response", QUICK.max_tries)
    assert message.startswith("HTTP 200")


def test_an_error_inside_a_200_counts_as_its_status() -> None:
    assert failure(raw('{"error": {"code": 502, "message": "upstream"}}')) == (
        "server",
        "HTTP 200 with error 502: upstream",
        QUICK.max_tries,
    )
    assert failure(raw('{"error": {"code": "401", "message": "who?"}}'))[::2] == ("auth", 1)
    assert failure(raw('{"error": {"message": "Rate limit exceeded"}}'))[::2] == ("rate_limit", QUICK.max_tries)


def test_an_empty_message_is_an_answer() -> None:
    assert reply(says("")).message.content == ""
    assert reply(says(None)).message.content == ""


def test_cancellation_passes_at_once() -> None:
    async def run() -> None:
        async with serve(stalled()) as endpoint:
            model = OpenAIChatModel(config(endpoint.base_url), KEY, LIMITS)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(model.complete(HELLO, ()), 0.1)
            await model.close()

    asyncio.run(run())


def test_context_overflow_is_told_apart() -> None:
    words = "This model's maximum context length is 8192 tokens. Please reduce the length of the messages."
    outcome, requests = ask(error(400, words))
    assert isinstance(outcome, ContextOverflowError)
    assert len(requests) == 1
    assert isinstance(ask(error(413, words))[0], ContextOverflowError)


def test_an_answer_for_which_there_is_no_room_from_the_start_is_a_bad_request() -> None:
    """The flag is wrong, not the conversation too long: nothing of it would be worth keeping."""
    words = "'max_tokens' is too large: 200000. This model's maximum context length is 32768 tokens."

    async def run() -> tuple[str, str, type[Exception]]:
        async with serve(error(400, words)) as endpoint:
            model = OpenAIChatModel(config(endpoint.base_url, max_tokens=200_000), KEY, LIMITS)
            with pytest.raises(ModelError) as refused:
                await model.complete(HELLO, ())
            with pytest.raises(ContextOverflowError) as grown:
                await model.complete([*HELLO, AssistantMessage("hi"), *HELLO], ())
            await model.close()
            return refused.value.kind, str(refused.value), grown.type

    kind, told, grown = asyncio.run(run())
    assert (kind, grown) == ("bad_request", ContextOverflowError)
    assert told.endswith("tokens.; the prompt and --max_tokens=200000 do not fit the model's context together")


def test_a_prompt_that_is_too_long_by_itself_is_not_blamed_on_the_flag() -> None:
    outcome, _ = ask(error(400, "prompt is too long: 250000 tokens > 200000 maximum"), max_tokens=1024)
    assert isinstance(outcome, ContextOverflowError)


@pytest.mark.parametrize("status", [413, 429])
def test_a_request_that_is_more_than_a_minute_grants_is_a_bad_request(status: int) -> None:
    words = "Request too large for model x on tokens per minute (TPM): Limit 6000, Requested 9000"
    kind, told, requests = failure(error(status, words))
    assert (kind, requests) == ("bad_request", 1)
    assert told.endswith("one request is more than this account may ask in a minute")


def test_secrets_never_show() -> None:
    _, message, _ = failure(error(401, f"Incorrect API key provided:\n {KEY} or ghp_{'x1y2z3' * 6}."))
    assert message.startswith("HTTP 401: Incorrect API key provided: ***")
    assert "x1y2z3" not in message


def test_a_refused_parameter_is_left_out_and_remembered() -> None:
    async def run() -> list[Any]:
        refusal = error(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
        async with serve(refusal, says()) as endpoint:
            model = OpenAIChatModel(config(endpoint.base_url, max_tokens=7), KEY, LIMITS)
            await model.complete(HELLO, ())
            await model.complete(HELLO, ())
            await model.close()
            return [asked.body for asked in endpoint.requests]

    first, second, third = asyncio.run(run())
    assert first["max_tokens"] == 7
    assert second == third
    assert second["max_completion_tokens"] == 7
    assert "max_tokens" not in second


def test_the_gate_notes_every_try() -> None:
    async def run() -> Seen:
        gate = Gate()
        slow = error(429, "slow", {"Retry-After": "0.01"})
        answers = (hangs_up(), slow, error(500, "oh"), says())
        async with serve(*answers) as endpoint:
            model = OpenAIChatModel(config(endpoint.base_url), KEY, LIMITS, gate)
            await model.complete(HELLO, ())
            await model.close()
        return gate.report()

    seen = asyncio.run(run())
    assert (seen.sent, seen.answered, seen.refused, seen.failed, seen.wait_seconds) == (4, 1, 1, 1, 0.01)
    assert (seen.open_requests, seen.waiting_requests, len(seen.seconds)) == (0, 0, 1)


def test_waits_for_a_turn_at_our_own_gate_use_up_nothing_of_what_tries_may_take() -> None:
    async def run() -> int:
        gate = Gate()

        def others_are_first(_told: str) -> None:
            gate.pace(8, inf, time.monotonic() + 0.9)

        policy = RetryPolicy(total_seconds=0.8, first_delay_seconds=0.01, max_delay_seconds=0.02)
        busy = error(429, "slow down")
        async with serve(busy, busy, says()) as endpoint:
            limits = CallLimits(retry=policy)
            model = OpenAIChatModel(config(endpoint.base_url), KEY, limits, gate, log=others_are_first)
            await model.complete(HELLO, ())
            await model.close()
            return len(endpoint.requests)

    assert asyncio.run(run()) == 3


def test_hundreds_at_once_share_one_model() -> None:
    async def run() -> int:
        async with serve(error(500, "warming up"), says()) as endpoint:
            model = OpenAIChatModel(config(endpoint.base_url), KEY, LIMITS)
            await asyncio.gather(*(model.complete(HELLO, ()) for _ in range(200)))
            await model.close()
            return len(endpoint.requests)

    assert asyncio.run(run()) == 201


def test_a_closed_model_opens_again() -> None:
    async def run() -> None:
        async with serve(says()) as endpoint:
            model = OpenAIChatModel(config(endpoint.base_url), KEY, LIMITS)
            for _ in range(2):
                await model.complete(HELLO, ())
                await model.close()

    asyncio.run(run())
