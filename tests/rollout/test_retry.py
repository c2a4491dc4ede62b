from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import format_datetime
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.retry import Attempts, RetryPolicy, TryError, Verdict, classify, retry_after_seconds
from tools.own_time import OwnTime

RETRIED = Verdict("server", retry=True)
NOW = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)


@dataclass
class Clock:
    seconds: float = 1000.0

    def __call__(self) -> float:
        return self.seconds


def failed(verdict: Verdict = RETRIED, retry_after_seconds: float | None = None) -> TryError:
    error = TryError(verdict, "HTTP 503", status=503)
    error.retry_after_seconds = retry_after_seconds
    return error


def delays(policy: RetryPolicy, try_seconds: float = 0.0, error: TryError | None = None) -> list[float]:
    """Fail until the policy gives up, each try taking so long; return the waits."""
    clock = Clock()
    attempts = Attempts(policy, clock)
    waits: list[float] = []
    while True:
        clock.seconds += try_seconds
        delay = attempts.delay_after(error or failed())
        if delay is None:
            return waits
        waits.append(delay)
        clock.seconds += delay


@pytest.mark.parametrize("_", range(20))
def test_the_default_policy_outlasts_an_outage_of_two_minutes(_: int) -> None:
    waits = delays(RetryPolicy())
    assert 120 < sum(waits) <= 300
    assert len(waits) < RetryPolicy().max_tries


def test_waits_grow_and_are_jittered() -> None:
    policy = RetryPolicy(max_tries=8, total_seconds=1000, first_delay_seconds=1, max_delay_seconds=8)
    for wait, ceiling in zip(delays(policy), [1, 2, 4, 8, 8, 8, 8], strict=True):
        assert ceiling / 2 <= wait <= ceiling
    assert delays(policy) != delays(policy)


def test_bounded_in_number() -> None:
    assert len(delays(RetryPolicy(max_tries=3))) == 2
    assert delays(RetryPolicy(max_tries=1)) == []


def test_bounded_in_time_from_the_first_failure_on() -> None:
    policy = RetryPolicy(max_tries=100, total_seconds=50, first_delay_seconds=0.1, max_delay_seconds=0.1)
    assert len(delays(policy, try_seconds=30.0)) == 2


def test_what_would_not_help_is_not_tried_again() -> None:
    assert delays(RetryPolicy(), error=failed(Verdict("auth"))) == []


def test_many_tries_do_not_overflow() -> None:
    policy = RetryPolicy(max_tries=3000, total_seconds=1e12, first_delay_seconds=1, max_delay_seconds=2)
    assert len(delays(policy)) == 2999


def test_retry_after_is_never_undercut_but_bounded() -> None:
    policy = RetryPolicy(total_seconds=1e6, max_retry_after_seconds=20)
    assert all(5 <= wait <= 30 for wait in delays(policy, error=failed(retry_after_seconds=5)))
    assert 20 <= delays(policy, error=failed(retry_after_seconds=86_400))[0] <= 22


def test_a_wait_beyond_the_budget_is_not_begun() -> None:
    assert delays(RetryPolicy(total_seconds=10), error=failed(retry_after_seconds=60)) == []


def test_one_refusal_before_and_one_after_a_long_queue_do_not_end_a_request() -> None:
    clock = Clock()
    own_time = OwnTime(clock)
    attempts = Attempts(RetryPolicy(total_seconds=300), own_time)
    assert attempts.delay_after(failed()) is not None
    clock.seconds += 330
    own_time.left_out += 330
    assert attempts.delay_after(failed()) is not None
    clock.seconds += 300  # the endpoint's own slowness counts
    assert attempts.delay_after(failed()) is None


def delays_behind(queues: list[float], try_seconds: float, seed: int) -> list[float]:
    """The waits of a request that waits for each of its turns as long as the queue is then; the same dice each time."""
    clock = Clock()
    own_time = OwnTime(clock)
    attempts = Attempts(RetryPolicy(), own_time)
    waits: list[float] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("rollout.retry._DICE", Random(seed))
        for queue in queues:
            clock.seconds += queue + try_seconds
            own_time.left_out += queue
            delay = attempts.delay_after(failed())
            if delay is None:
                break
            waits.append(delay)
            clock.seconds += delay
    return waits


@given(st.lists(st.integers(0, 10_000), max_size=25), st.integers(0, 100), st.integers(0, 9))
def test_how_long_our_own_queue_is_changes_nothing_of_the_tries(queues: list[int], try_seconds: int, seed: int) -> None:
    behind = delays_behind([float(queue) for queue in queues], try_seconds, seed)
    assert behind == delays_behind([0.0] * len(queues), try_seconds, seed)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7),
        ({"retry-after": " 0.5 "}, 0.5),
        ({"retry-after": "0"}, 0),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9),
        ({"retry-after": format_datetime(NOW.replace(minute=1), usegmt=True)}, 60),
        ({"retry-after": "Fri, 01 May 2026 12:01:00"}, 60),
        ({"retry-after": "Fri, 01 May 2020 12:00:00 GMT"}, 0),
        ({"retry-after": "Fri, 99 May 2026 12:01:00 GMT"}, None),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "1e9"}, None),
        ({"retry-after": "9" * 400}, None),
        ({"retry-after": "٣"}, None),
        ({"retry-after": "tomorrow"}, None),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_seconds(headers, NOW.timestamp()) == seconds


@given(st.text(max_size=60))
def test_any_retry_after_is_understood_or_ignored(value: str) -> None:
    seconds = retry_after_seconds({"retry-after": value}, NOW.timestamp())
    assert seconds is None or seconds >= 0


@pytest.mark.parametrize(
    ("status", "words", "kind", "retry"),
    [
        (401, "no auth credentials found", "auth", False),
        (402, "insufficient credits. add more using the credits page", "billing", False),
        (402, "usage limit reached. try again in 5 minutes", "rate_limit", True),
        (402, "quota exhausted, resets at midnight", "rate_limit", True),
        (403, "forbidden", "auth", False),
        (403, "key limit exceeded (total limit)", "billing", False),
        (403, "x requires moderation on y. your input was flagged for z", "content_blocked", False),
        (404, "the model `m` does not exist", "model_not_found", False),
        (404, "no endpoints found matching your data policy", "model_not_found", False),
        (404, "insufficient credits for this model", "billing", False),
        (404, "not found", "model_not_found", False),
        (400, "m is not a valid model id", "model_not_found", False),
        (400, "unsupported parameter: 'max_tokens'", "bad_request", False),
        (400, "api key not valid. please pass a valid api key.", "auth", False),
        (
            400,
            "the response was filtered due to the prompt triggering content management policy",
            "content_blocked",
            False,
        ),
        (400, "rate limit reached", "rate_limit", True),
        (400, "your credit balance is too low", "billing", False),
        (400, "you have reached your specified api usage limits", "billing", False),
        (400, "budget has been exceeded! current cost: 1.0, max budget: 1.0", "billing", False),
        (412, "account x is suspended, possibly due to reaching the monthly spending limit", "billing", False),
        (412, "precondition failed", "bad_request", False),
        (400, "content exists risk", "content_blocked", False),
        (400, "too many tokens, please wait before trying again.", "rate_limit", True),
        (200, "too many tokens, please wait before trying again.", "rate_limit", True),
        (400, "", "bad_request", False),
        (405, "", "bad_request", False),
        (408, "", "timeout", True),
        (409, "", "server", True),
        (418, "", "bad_request", False),
        (422, "extra inputs are not permitted", "bad_request", False),
        (429, "", "rate_limit", True),
        (429, "rate limit reached for requests per minute, see billing to raise it", "rate_limit", True),
        (429, "you exceeded your current quota, please check your plan and billing details", "billing", False),
        (429, "you exceeded your current quota, check your plan. please retry in 23.4s", "rate_limit", True),
        (429, "insufficient_quota. try again later", "billing", False),
        (429, "the engine is currently overloaded", "rate_limit", True),
        (500, "", "server", True),
        (502, "provider returned error", "server", True),
        (503, "", "server", True),
        (529, "overloaded_error", "server", True),
        (599, "", "server", True),
        (301, "", "bad_request", False),
        (200, "something went wrong", "bad_response", True),
        (200, "rate_limit_exceeded", "rate_limit", True),
        (200, "insufficient_quota", "billing", False),
        (200, "invalid_api_key: incorrect api key provided", "auth", False),
        (200, "model_not_found", "model_not_found", False),
        (0, "", "bad_response", True),
    ],
)
def test_what_a_refusal_means(status: int, words: str, kind: str, retry: bool) -> None:
    assert classify(status, words) == Verdict(kind, retry=retry)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (400, "this model's maximum context length is 8192 tokens. however, your messages resulted in 9000 tokens."),
        (400, "context_length_exceeded"),
        (400, "prompt is too long: 210000 tokens > 200000 maximum"),
        (400, "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000"),
        (400, "the input token count (1200000) exceeds the maximum number of tokens allowed (1048576)."),
        (400, "the request exceeds the available context size. try increasing the context size"),
        (400, "input is too long for requested model."),
        (400, "this model's maximum prompt length is 131072 but the request contains 200000 tokens."),
        (400, "invalid request: your request exceeded model token limit: 8192"),
        (422, "input validation error: `inputs` tokens + `max_new_tokens` must be <= 8193. given: 9000 and 100"),
        (422, "input validation error: `inputs` must have less than 8192 tokens. given: 9000"),
        (400, "the decoder prompt (length 5000) is longer than the maximum model length of 4096."),
        (413, "prompt is too long: 210000 tokens > 200000 maximum"),
        (413, "the conversation exceeds the context window"),
        (413, "maximum length exceeded"),
        (429, "request too large for gpt-x on tokens per min (tpm): limit 30000, requested 31000."),
        (500, "the request exceeds the available context size"),
        (200, "context_length_exceeded"),
    ],
)
def test_a_conversation_that_is_too_long(status: int, words: str) -> None:
    verdict = classify(status, words)
    assert verdict.overflow
    assert not verdict.retry


@given(st.integers(0, 999), st.text(max_size=300))
def test_every_refusal_has_a_meaning(status: int, words: str) -> None:
    assert classify(status, words.lower()).kind


@pytest.mark.parametrize(
    "words", ["", "<title>413 request entity too large</title>", "payload too large", "content-length is above 1 mb"]
)
def test_a_body_that_a_proxy_finds_too_large_is_no_overflow(words: str) -> None:
    verdict = classify(413, words)
    assert (verdict.kind, verdict.retry, verdict.overflow) == ("bad_request", False, False)
