from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from math import inf
from typing import Any

import pytest

from rollout.auxiliary import AuxiliaryModels
from rollout.config import PrefillMessage
from rollout.dialects import Dialect
from rollout.endpoint import CallLimits
from rollout.gate import Gate
from tests.rollout.asking import KEY, LIMITS, config
from tests.rollout.http_server import Answer as HttpAnswer
from tests.rollout.http_server import Asked, body_of, error, raw, says, serve, stalled
from tools.services import Answer, AuxiliaryError, Post, Posted, Question, Spent

HELLO = [{"role": "user", "content": "hello"}]
OTHER_KEY = "sk-other-0123456789"
RUN_FLAGS: dict[str, Any] = {
    "max_tokens": 77,
    "ephemeral_system_prompt": "secret",
    "prefill_messages": (PrefillMessage(role="user", content="before"),),
    "reasoning_effort": "high",
    "providers_allowed": ("a",),
}
Asking = Question | Post


def ask(
    *answers: HttpAnswer,
    asking: Asking | None = None,
    times: int = 1,
    elsewhere: Mapping[str, Any] | None = None,
    settings: Mapping[str, str] | None = None,
    limits: CallLimits = LIMITS,
    **flags: Any,
) -> tuple[list[Any], list[Asked]]:
    """Ask so often; return answers or errors, and what was asked.

    ``elsewhere`` asks another endpoint than the run's: it holds the question's fields but for its address.
    """

    async def run() -> tuple[list[Any], list[Asked]]:
        async with serve(*answers) as endpoint:
            own = endpoint.base_url if elsewhere is None else "http://127.0.0.1:9/v1"
            models = AuxiliaryModels(config(own, **flags), KEY, settings or {}, limits)
            asked = asking or Question(HELLO)
            if elsewhere is not None:
                asked = Question(HELLO, base_url=endpoint.base_url, **elsewhere)
            outcomes: list[Any] = []
            for _ in range(times):
                try:
                    outcomes.append(await (models.post(asked) if isinstance(asked, Post) else models.ask(asked)))
                except AuxiliaryError as failed:
                    outcomes.append(failed)
            await models.close()
            return outcomes, endpoint.requests

    return asyncio.run(run())


def failure(*answers: HttpAnswer, **how: Any) -> tuple[str, str]:
    (outcome, *_), _ = ask(*answers, **how)
    assert isinstance(outcome, AuxiliaryError), outcome
    assert "\n" not in str(outcome)
    assert KEY not in str(outcome)
    return outcome.kind, str(outcome)


def test_the_runs_model_is_asked_and_nothing_of_the_run_goes_along() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "cost": 0.5, "prompt_tokens_details": {"cached_tokens": 4}}
    (outcome,), (asked,) = ask(raw(json.dumps({**body_of("four"), "usage": usage})), **RUN_FLAGS)
    assert outcome == Answer("four", Spent(1, 9, 3, 0, 4, 0.5))
    assert asked.body == {"model": "some/model", "messages": HELLO}
    assert asked.path == "/v1/chat/completions"
    assert asked.headers["authorization"] == f"Bearer {KEY}"


def test_what_the_question_says_is_sent() -> None:
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "what\ud800 is it"},
        {"type": "image_url", "image_url": {"url": "data:x"}},
    ]
    question = Question([{"role": "user", "content": parts}], "eyes", temperature=0.1, max_tokens=5)
    _, (asked,) = ask(says(), asking=question)
    parts[0]["text"] = "what\ufffd is it"
    messages = [{"role": "user", "content": parts}]
    assert asked.body == {"model": "eyes", "temperature": 0.1, "max_tokens": 5, "messages": messages}


def test_a_large_body_arrives_whole() -> None:
    question = Question([{"role": "user", "content": "x" * 6_000_000}])
    _, (asked,) = ask(says(), asking=question)
    assert asked.body["messages"] == question.messages


@pytest.mark.parametrize(
    ("content", "more", "text"),
    [
        ("<think>hm</think> four ", {}, "four"),
        ("hm</think>four", {}, "four"),
        ("<REASONING_SCRATCHPAD>hm</REASONING_SCRATCHPAD>four", {}, "four"),
        ("<think>never ends", {}, ""),
        ("four", {"reasoning": "hm"}, "four"),
        (None, {"reasoning_content": "hm"}, ""),
        ([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "four"}], {}, "four"),
        (" ", {}, ""),
    ],
)
def test_thoughts_are_no_part_of_the_answer(content: Any, more: dict[str, Any], text: str) -> None:
    (outcome,), _ = ask(says(content, **more))
    assert outcome.text == text


def test_openrouter_gets_the_routing_of_the_runs_own_model_alone() -> None:
    url = "https://openrouter.ai/api/v1"
    models = AuxiliaryModels(config(url, **RUN_FLAGS), KEY, {})
    own = json.loads(models._dialect(url, "some/model").compose_question(HELLO, {}).body)
    assert own == {"model": "some/model", "provider": {"only": ["a"]}, "usage": {"include": True}, "messages": HELLO}
    other = json.loads(models._dialect(url, "other/model").compose_question(HELLO, {}).body)
    assert other == {"model": "other/model", "usage": {"include": True}, "messages": HELLO}
    # The run's own requests are as ever.
    assert json.loads(Dialect(config(url, **RUN_FLAGS)).compose((), ()).body)["max_tokens"] == 77


@pytest.mark.parametrize(
    "words",
    [
        "Unsupported value: 'temperature' does not support 0.1 with this model. Only the default (1) is supported.",
        "Unsupported parameter: 'temperature' is not supported with this model.",
    ],
)
def test_a_model_without_temperature_is_asked_without_it_from_then_on(words: str) -> None:
    question = Question(HELLO, temperature=0.1)
    outcomes, asked = ask(error(400, words), says(), asking=question, times=2)
    assert [outcome.text for outcome in outcomes] == ["fine", "fine"]
    assert ["temperature" in request.body for request in asked] == [True, False, False]


# Keys


def key_sent(**how: Any) -> str:
    (outcome,), (asked,) = ask(says(), **how)
    assert isinstance(outcome, Answer)
    return asked.headers["authorization"].removeprefix("Bearer ")


def test_the_runs_key_stays_with_the_runs_endpoint() -> None:
    assert key_sent() == KEY
    assert key_sent(elsewhere={}) == "no-key"
    assert key_sent(elsewhere={}, settings={"OPENROUTER_API_KEY": "sk-or-1"}) == "no-key"
    assert key_sent(elsewhere={}, settings={"OPENAI_API_KEY": OTHER_KEY}) == OTHER_KEY
    assert key_sent(elsewhere={"api_key": OTHER_KEY}, settings={"OPENAI_API_KEY": "sk-env"}) == OTHER_KEY


def access_key(own: str, asked: str, settings: Mapping[str, str]) -> str:
    models = AuxiliaryModels(config(own), KEY, settings)
    return models._access(Question(HELLO, base_url=asked)).api_key


@pytest.mark.parametrize(
    ("own", "asked", "key"),
    [
        ("https://a.example/v1", "https://a.example/v2", KEY),
        ("https://a.example/v1", "https://A.example:443/v1", KEY),
        ("https://a.example/v1", "http://a.example/v1", "sk-env"),  # in the clear
        ("https://a.example/v1", "https://a.example:8443/v1", "sk-env"),
        ("https://a.example/v1", "https://b.a.example/v1", "sk-env"),
        ("https://a.example/v1", "https://a.example.evil/v1", "sk-env"),
        ("https://a.example/v1", "https://openrouter.ai/api/v1", "sk-or"),
        ("https://openrouter.ai/api/v1", "https://a.example/v1", "sk-env"),
        ("https://openrouter.ai/api/v1", "https://openrouter.ai.evil/api/v1", "sk-env"),
    ],
)
def test_the_host_decides_about_the_key(own: str, asked: str, key: str) -> None:
    assert access_key(own, asked, {"OPENAI_API_KEY": "sk-env", "OPENROUTER_API_KEY": "sk-or"}) == key


@pytest.mark.parametrize("base_url", ["ftp://a/v1", "http://", "http://user:pw@a/v1", "a b", "http://a:b/v1"])
def test_an_address_that_is_none_is_told(base_url: str) -> None:
    kind, words = failure(says(), asking=Question(HELLO, base_url=base_url))
    assert kind == "bad_request"
    assert words.startswith("base_url")
    assert "pw" not in words


def test_a_key_that_is_none_is_told_without_it() -> None:
    asking = Question(HELLO, base_url="http://127.0.0.1:9/v1", api_key="sk bad")
    assert "sk bad" not in failure(says(), asking=asking)[1]


# Trouble


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (error(401, f"key {KEY} is no good"), "auth", "some/model: HTTP 401: key *** is no good"),
        (error(402, "no credit"), "billing", "some/model: HTTP 402: no credit"),
        (error(404, "no such model"), "model_not_found", "some/model: HTTP 404: no such model"),
        (error(400, "maximum context length is 10"), "bad_request", "maximum context length"),
        (error(503, "busy\nvery"), "server", "some/model: HTTP 503: busy very"),
        (raw("<html>"), "bad_response", "no JSON"),
        (raw('{"error": {"message": "provider is down", "code": 502}}'), "server", "provider is down"),
    ],
)
def test_failures_are_one_line_and_a_kind(answer: HttpAnswer, kind: str, words: str) -> None:
    told_kind, told = failure(answer)
    assert told_kind == kind
    assert words in told


def test_passing_troubles_are_tried_again() -> None:
    (outcome,), asked = ask(error(503), error(429), says("four"))
    assert (outcome.text, len(asked)) == ("four", 3)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (stalled(), ("timeout", "some/model: no answer within 0.3 s")),
        (error(503, "busy"), ("server", "some/model: HTTP 503: busy")),
        (error(429, "slow down", {"Retry-After": "100"}), ("rate_limit", "some/model: HTTP 429: slow down")),
    ],
)
def test_it_is_over_in_time_and_says_why(answer: HttpAnswer, told: tuple[str, str]) -> None:
    patient = CallLimits(request_seconds=60)
    started = time.monotonic()
    assert failure(answer, asking=Question(HELLO, timeout_seconds=0.3), limits=patient) == told
    assert time.monotonic() - started < 3


async def asked_at_a_closed_gate(asked: Asking, *answers: HttpAnswer) -> str:
    """Ask while the gate lets nobody through for longer than the question may take."""
    async with serve(*answers) as endpoint:
        models = AuxiliaryModels(config(endpoint.base_url), KEY, {}, CallLimits(request_seconds=60))
        models.gate = Gate()
        models.gate.pace(8, inf, time.monotonic() + 0.6)
        try:
            await (models.post(asked) if isinstance(asked, Post) else models.ask(asked))
        except AuxiliaryError as failed:
            return str(failed)
        finally:
            await models.close()
        return "answered"


def test_a_wait_at_our_own_gate_is_no_time_out() -> None:
    question, post = Question(HELLO, timeout_seconds=0.3), Post("x/y", {}, timeout_seconds=0.3)
    assert asyncio.run(asked_at_a_closed_gate(question, says("four"))) == "answered"
    assert asyncio.run(asked_at_a_closed_gate(post, raw("{}"))) == "answered"
    told = "some/model: no answer within 0.3 s"
    assert asyncio.run(asked_at_a_closed_gate(question, stalled())) == told


def test_who_stops_waiting_leaves_nothing_behind() -> None:
    async def run() -> None:
        async with serve(stalled(), says("four")) as endpoint:
            models = AuxiliaryModels(config(endpoint.base_url), KEY, {}, LIMITS)
            task = asyncio.create_task(models.ask(Question(HELLO)))
            while not endpoint.requests:  # noqa: ASYNC110 - the server sets no event
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await models.ask(Question(HELLO))).text == "four"
            await models.close()
            await models.close()

    asyncio.run(run())


def test_repeated_tries_are_logged_without_keys() -> None:
    lines: list[str] = []

    async def run() -> None:
        async with serve(error(503, f"busy {KEY}"), says()) as endpoint:
            models = AuxiliaryModels(config(endpoint.base_url), KEY, {}, LIMITS, log=lines.append)
            await models.ask(Question(HELLO))
            await models.close()

    asyncio.run(run())
    (line,) = lines
    assert line.startswith("HTTP 503: busy ***; trying again in ")


# Requests that are no chats


def test_a_post_goes_to_its_path_with_its_key() -> None:
    post = Post("images/generations", {"prompt": "a cat\ud800"}, key_scheme="Key", api_key=OTHER_KEY)
    (outcome,), (asked,) = ask(raw('{"data": [1]}'), asking=post)
    assert outcome == Posted({"data": [1]}, Spent(1))
    assert (asked.path, asked.body) == ("/v1/images/generations", {"prompt": "a cat\ufffd"})
    assert asked.headers["authorization"] == f"Key {OTHER_KEY}"
    _, (asked,) = ask(raw("{}"), asking=Post("x", {}))
    assert asked.headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (raw("[1]"), "bad_response", "x/y: HTTP 200, but no JSON object: [1]"),
        (raw('{"error": "no such model"}'), "model_not_found", "no such model"),
        (raw('{"detail": "Cannot access application"}', 403), "auth", "HTTP 403: Cannot access application"),
        (raw('{"detail": [{"loc": ["body", "image_size"], "msg": "bad"}]}', 422), "bad_request", "image_size"),
    ],
)
def test_a_post_that_fails(answer: HttpAnswer, kind: str, words: str) -> None:
    told_kind, told = failure(answer, asking=Post("x/y", {}))
    assert told_kind == kind
    assert words in told
