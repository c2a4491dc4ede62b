"""When a request is worth another try, and how long to wait for it. Pure but for the clock and the dice.

The one retry layer of the program: the ``openai`` client's own is switched off. What went wrong is told by the status
first, then by the endpoint's words, because gateways use one status for many things.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from rollout.messages import FailureKind, Usage

# Not the module's own dice: forked workers would all inherit the same and come back in step.
_DICE = random.SystemRandom()


@dataclass(frozen=True)
class RetryPolicy:
    """Bounds of the tries of one request. The defaults outlast an outage of two minutes."""

    max_tries: int = 20  # the first one included
    total_seconds: float = 300.0  # no try is due later than this after the first failure, by the clock of OwnTime
    first_delay_seconds: float = 1.0  # doubled after each try; half to all of it is waited
    max_delay_seconds: float = 30.0
    max_retry_after_seconds: float = 120.0  # a server that asks for a longer wait gets this one


@dataclass(frozen=True)
class Verdict:
    """What a failed try means."""

    kind: FailureKind
    retry: bool = False
    overflow: bool = False  # the conversation is too long for the model


class TryError(Exception):
    """One try gave no answer. The text is one line for people: the status and the endpoint's own words."""

    def __init__(self, verdict: Verdict, message: str, *, status: int = 0, words: str = "") -> None:
        super().__init__(message)
        self.verdict = verdict
        self.status = status  # 0 when no answer came
        self.words = words  # all the endpoint said, in lower case
        self.retry_after_seconds: float | None = None
        self.usage = Usage()  # of an answer that could not be read, and is paid for all the same
        self.cost_usd = 0.0


_LEFT = re.compile(r"(?:x-)?ratelimit-remaining(-requests|-tokens)?", re.IGNORECASE)
_SPAN = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?", re.ASCII)
_SPAN_SECONDS = (86_400.0, 3_600.0, 60.0, 1.0, 0.001)
_EPOCH_SECONDS, _EPOCH_MS = 1e9, 1e12  # numbers above are moments, not spans


def exhausted_seconds(headers: Mapping[str, str], now: float) -> float:
    """Return how long nothing is left of what the endpoint grants, by its rate-limit headers; 0.0 while something is.

    Understood are ``x-ratelimit-remaining[-requests|-tokens]`` with the ``-reset`` of the same name, with or without
    the ``x-``: a number of seconds, a span such as ``6m0s``, or a moment in seconds or milliseconds since the epoch.
    """
    waits = [0.0]
    for name in headers:
        found = _LEFT.fullmatch(name)
        if found and headers[name].strip() == "0":
            waits.append(_reset_seconds(headers.get(name.lower().replace("remaining", "reset"), ""), now))
    return max(waits)


def _reset_seconds(text: str, now: float) -> float:
    text = text.strip()
    if re.fullmatch(r"\d{1,15}(\.\d{1,9})?", text, re.ASCII):
        value = float(text)
        if value > _EPOCH_SECONDS:
            return max(value / (1000.0 if value > _EPOCH_MS else 1.0) - now, 0.0)
        return value
    span = _SPAN.fullmatch(text)
    parts = zip(span.groups(), _SPAN_SECONDS, strict=True) if span else ()
    return sum(float(part) * unit for part, unit in parts if part)


class Attempts:
    """Counts the tries of one request."""

    def __init__(self, policy: RetryPolicy, now: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._now = now
        self._failures = 0
        self._deadline = 0.0

    def delay_after(self, error: TryError) -> float | None:
        """Count a failed try; return the seconds to wait before the next one, or None when there is to be none."""
        policy = self._policy
        if self._failures == 0:
            self._deadline = self._now() + policy.total_seconds
        self._failures += 1
        if not error.verdict.retry or self._failures >= policy.max_tries:
            return None
        # No power beyond 2**30: it is above any sensible maximum, and floats end.
        ceiling = min(policy.max_delay_seconds, policy.first_delay_seconds * 2 ** min(self._failures - 1, 30))
        delay = _DICE.uniform(ceiling / 2, ceiling)
        if error.retry_after_seconds is not None:
            asked = min(error.retry_after_seconds, policy.max_retry_after_seconds)
            delay = max(delay, asked * _DICE.uniform(1.0, 1.1))
        return delay if self._now() + delay <= self._deadline else None


def retry_after_seconds(headers: Mapping[str, str], now: float) -> float | None:
    """Return the wait a server asks for, from ``retry-after-ms`` or ``retry-after`` (seconds or an HTTP date), or None.

    ``headers`` have lower-case names; ``now`` is in seconds since the epoch. A date that has passed gives 0.
    """
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name, "").strip()
        if re.fullmatch(r"\d{1,12}(\.\d{0,12})?", value, re.ASCII):
            return float(value) * unit
    try:
        moment = parsedate_to_datetime(value)
        return max(0.0, (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - now)
    except (ValueError, OverflowError):
        return None


def classify(status: int, words: str) -> Verdict:
    """Tell what a refusal means; ``words`` is all the endpoint said, in lower case.

    A status of 0 or 200 stands for an error object that names no status: the words alone decide.
    """
    if status in _BY_WORDS_FIRST:
        for pattern, verdict in _BY_WORDS_FIRST[status]:
            if pattern.search(words):
                return verdict
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return _SERVER
    return _BAD_REQUEST if status >= HTTPStatus.MULTIPLE_CHOICES else _NO_ANSWER


def _any(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns))


_SERVER = Verdict("server", retry=True)
_RATE_LIMIT = Verdict("rate_limit", retry=True)
_BILLING = Verdict("billing")
_AUTH = Verdict("auth")
_MODEL_NOT_FOUND = Verdict("model_not_found")
_BAD_REQUEST = Verdict("bad_request")
_BLOCKED = Verdict("content_blocked")
_OVERFLOW = Verdict("bad_request", overflow=True)
_NO_ANSWER = Verdict("bad_response", retry=True)

_OVERFLOW_WORDS = _any(
    r"context.?length",
    r"context.?(window|size|limit)",
    r"(prompt|input|request|conversation|messages?|payload|entity) (is |are )?too (long|large)",
    r"maximum (prompt|context|input) length",
    r"reduce the length",
    r"input token count",
    r"too many (input |prompt |total )?tokens",
    r"exceeded model token limit",
    r"longer than the maximum model length",
    r"`?inputs`? (tokens \+ `?max_new_tokens`? must be|must have less than)",
)
_CONTEXT_WORDS = _any(
    r"context", r"tokens?\b", r"(?<!content.)length", r"(prompt|input|conversation|messages?) .{0,8}long"
)
_BILLING_WORDS = _any(
    r"insufficient.{0,12}(credit|quota|balance|funds)",
    r"(credit balance|out of credit|more credits|payment required|billing|arrears)",
    r"(spending|key|hard) limit (exceeded|reached)",
    r"exceeded your current quota",
    r"specified api usage limits",
    r"budget has been exceeded",
    r"account.{0,80}suspended",
)
# What will pass by itself: a limit by the minute or the day, told with the words of a bill.
_PASSING_LIMIT_WORDS = _any(
    r"(usage|rate|request|token).{0,5}limit.{0,200}(try again|retry|resets?\b|\bwait\b|per (minute|hour|day))",
    r"quota.{0,200}(try again|retry (in|after)|resets?\b|\bwait\b|per (minute|hour|day))",
    r"too many tokens, please wait",
)
_RATE_WORDS = _any(r"rate.?limit", r"too many requests", r"overloaded", r"at capacity")
_BLOCKED_WORDS = _any(
    r"content.?(policy|filter|management)",
    r"safety (system|policy|filter)",
    r"(was|been|is|were) flagged",
    r"requires moderation",
    r"prohibited.?content",
    r"responsible.?ai",
    r"data_inspection_failed",
    r"inappropriate content",
    r"content exists risk",
)
_MODEL_WORDS = _any(
    r"model_not_found",
    r"(invalid|unknown|no such|not a valid|unsupported) model\b",
    r"\bmodel\b.{0,60}(not found|(does|do) not exist|not available|not a valid model)",
    r"no endpoints found",
)
_AUTH_WORDS = _any(r"(invalid|incorrect|missing|expired|no) .{0,10}api.?key", r"api.?key not valid", r"unauthori[sz]ed")

_Rule = tuple[re.Pattern[str], Verdict]
_Rules = tuple[_Rule, ...]
_HARD_QUOTA_RULE: _Rule = (_any(r"insufficient_quota"), _BILLING)
_BAD_REQUEST_RULES: _Rules = (
    (_BLOCKED_WORDS, _BLOCKED),
    (_OVERFLOW_WORDS, _OVERFLOW),
    (_MODEL_WORDS, _MODEL_NOT_FOUND),
    (_AUTH_WORDS, _AUTH),
    (_BILLING_WORDS, _BILLING),
    (_RATE_WORDS, _RATE_LIMIT),
)
_NO_STATUS_RULES: _Rules = (
    _HARD_QUOTA_RULE,
    (_PASSING_LIMIT_WORDS, _RATE_LIMIT),
    *_BAD_REQUEST_RULES,
    (_any(r"invalid_request_error"), _BAD_REQUEST),
    (_any(r"server_error", r"internal (server )?error", r"unavailable"), _SERVER),
)
_SERVER_RULES: _Rules = ((_OVERFLOW_WORDS, _OVERFLOW),)
_BY_WORDS_FIRST: Mapping[int, _Rules] = {
    0: _NO_STATUS_RULES,
    200: _NO_STATUS_RULES,
    400: ((_any(r"too many tokens, please wait"), _RATE_LIMIT), *_BAD_REQUEST_RULES),
    402: ((_PASSING_LIMIT_WORDS, _RATE_LIMIT),),
    403: ((_BLOCKED_WORDS, _BLOCKED), (_BILLING_WORDS, _BILLING)),
    404: ((_BILLING_WORDS, _BILLING),),
    412: ((_BILLING_WORDS, _BILLING),),
    413: ((_CONTEXT_WORDS, _OVERFLOW),),  # else it is a proxy that minds the bytes
    422: _BAD_REQUEST_RULES,
    429: (
        _HARD_QUOTA_RULE,
        (_any(r"request too large"), _OVERFLOW),  # larger than the minute's allowance: it will never fit
        (_PASSING_LIMIT_WORDS, _RATE_LIMIT),
        (_BILLING_WORDS, _BILLING),
    ),
    500: _SERVER_RULES,
    502: _SERVER_RULES,
}
_BY_STATUS: Mapping[int, Verdict] = {
    401: _AUTH,
    402: _BILLING,
    403: _AUTH,
    404: _MODEL_NOT_FOUND,  # or the path is wrong; either way nothing there will answer
    408: Verdict("timeout", retry=True),
    409: _SERVER,
    413: _BAD_REQUEST,
    425: _SERVER,
    429: _RATE_LIMIT,
}
