"""One endpoint: the tries of a request, their bounds in time, size and number, and what is told when they are used up.

What is sent and how an answer is read is the caller's; what is worth another try is retry's, the HTTP transport's.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeVar

from rollout.dialects import Request
from rollout.gate import Gate, Passage
from rollout.keys import PLACEHOLDER_KEY
from rollout.messages import FailureKind
from rollout.replies import refusal
from rollout.retry import Attempts, RetryPolicy, TryError, Verdict, exhausted_seconds, retry_after_seconds
from rollout.texts import one_line
from rollout.wall import met_with
from rollout.waste import wasted
from tools.own_time import own_time
from tools.redact import redact

if TYPE_CHECKING:
    from rollout.transport import Connection

MAX_MESSAGE_CHARS = 500
# A server that is overloaded may answer with these, and one that stumbles over a request now and then does.
_MAY_BE_CHANCE = (HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT)
AnswerT = TypeVar("AnswerT")


class ModelError(Exception):
    """The endpoint gave no answer, for good: retries are used up or would not help."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind


class ContextOverflowError(Exception):
    """The conversation no longer fits the model's context window: the rollout ends as partial."""


@dataclass(frozen=True)
class Access:
    """Where an endpoint is, and what opens it."""

    base_url: str
    api_key: str = field(repr=False)
    key_scheme: str = "Bearer"  # what stands before the key in the Authorization header


@dataclass(frozen=True)
class CallLimits:
    """Bounds of one call of a model."""

    request_seconds: float = 600.0  # wall time of one try, to the last byte of its answer
    max_body_bytes: int = 16 * 1024 * 1024  # of an answer, decompressed
    retry: RetryPolicy = field(default_factory=RetryPolicy)


DEFAULT_LIMITS = CallLimits()


def _learns_nothing(_error: TryError, _request: Request) -> bool:
    return False


class Endpoint:
    """An endpoint that answers JSON with JSON; one instance serves all rollouts of a process and event loop."""

    def __init__(
        self,
        access: Access,
        limits: CallLimits = DEFAULT_LIMITS,
        gate: Gate | None = None,  # where requests wait for their turn; None: none does
        log: Callable[[str], None] = lambda _: None,  # told of every try that is repeated
    ) -> None:
        self._access = access
        self._limits = limits
        self._gate = gate or Gate()
        self._log = log
        self._connection: Connection | None = None

    async def ask(
        self,
        compose: Callable[[], Request],
        read: Callable[[bytes], AnswerT],
        learn: Callable[[TryError, Request], bool] = _learns_nothing,
        within_seconds: float = math.inf,
    ) -> AnswerT:
        """Return what ``read`` makes of the answer, however many tries it takes.

        The request is composed anew for every try. ``read`` raises TryError for what is no answer; ``learn`` tells
        whether a request that was refused will be composed otherwise, and is worth asking again at once. No wait for
        another try is longer than ``within_seconds``: who will not wait so long is told now what went wrong. Turns at
        the gate are waited for beyond that. Raises ModelError, ContextOverflowError and GateClosedError.
        """
        policy = self._limits.retry
        if within_seconds < policy.total_seconds:
            policy = replace(policy, total_seconds=within_seconds)
        with own_time() as clock:
            attempts = Attempts(policy, clock)
            while True:
                request = compose()
                try:
                    answer = await self._try(request, read)
                except TryError as error:
                    wasted(error.usage, error.cost_usd)
                    if learn(error, request):
                        continue
                    told = self._told(error)
                    if error.verdict.overflow:
                        raise ContextOverflowError(told) from None
                    delay = attempts.delay_after(error)
                    if delay is None:
                        raise ModelError(error.verdict.kind, told) from None
                    self._log(f"{told}; trying again in {delay:.1f} s")
                    met_with(told)
                else:
                    met_with("")
                    return answer
                await self._gate.pause(delay)

    async def close(self) -> None:
        """Close the connections. The next call opens new ones."""
        if self._connection:
            connection, self._connection = self._connection, None
            await connection.close()

    async def _try(self, request: Request, read: Callable[[bytes], AnswerT]) -> AnswerT:
        with await self._gate.enter() as passage:
            try:
                answer = read(await self._post(request, passage))
            except TryError as error:
                passage.refused = error.verdict.retry and _is_too_much(error.status)
                passage.too_many = passage.refused and error.status == HTTPStatus.TOO_MANY_REQUESTS
                passage.failed = error.status in _MAY_BE_CHANCE
                raise
            passage.answered = True
            return answer

    async def _post(self, request: Request, passage: Passage) -> bytes:
        """Return the body of an HTTP 200. Raises TryError."""
        from rollout.transport import Connection, TransportError  # noqa: PLC0415 - takes most of a second

        if self._connection is None:
            access = self._access
            key = access.api_key or PLACEHOLDER_KEY
            self._connection = Connection(access.base_url, key, self._limits.max_body_bytes, access.key_scheme)
        try:
            async with asyncio.timeout(self._limits.request_seconds):
                answer = await self._connection.post(request.path, request.body)
        except TransportError as error:
            raise TryError(Verdict(error.kind, retry=not error.permanent), str(error)) from None
        except TimeoutError:
            told = f"no whole answer within {self._limits.request_seconds:g} s"
            raise TryError(Verdict("timeout", retry=True), told) from None
        passage.wait_seconds = exhausted_seconds(answer.headers, time.time())
        if not HTTPStatus.OK <= answer.status < HTTPStatus.MULTIPLE_CHOICES:
            refused = refusal(answer.status, answer.body, answer.headers.get("location", ""))
            refused.retry_after_seconds = retry_after_seconds(answer.headers, time.time())
            if _is_too_much(answer.status) or answer.status in _MAY_BE_CHANCE:
                passage.wait_seconds = max(passage.wait_seconds, refused.retry_after_seconds or 0.0)
            raise refused
        return answer.body

    def _told(self, error: TryError) -> str:
        """Return what went wrong as one line without secrets."""
        key = self._access.api_key
        text = str(error) if key in ("", PLACEHOLDER_KEY) else str(error).replace(key, "***")
        return one_line(redact(text)[0], MAX_MESSAGE_CHARS)


def _is_too_much(status: int) -> bool:
    """Tell whether an answer means that too much is asked."""
    is_server_error = status >= HTTPStatus.INTERNAL_SERVER_ERROR and status not in _MAY_BE_CHANCE
    return status == HTTPStatus.TOO_MANY_REQUESTS or is_server_error
