"""Asking a model: the ChatModel protocol, and the OpenAI-compatible one.

The latter owns the tries of a request: their bounds in time, size and number, and what is told when they are used up.
What is sent is dialects' business, what comes back replies', what is worth another try retry's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

from rollout.config import RunConfig
from rollout.dialects import Dialect, Request
from rollout.keys import PLACEHOLDER_KEY
from rollout.messages import FailureKind, Message, ToolDefinition
from rollout.replies import Reply, read_reply, refusal
from rollout.retry import Attempts, RetryPolicy, TryError, Verdict, retry_after_seconds
from rollout.texts import one_line
from tools.redact import redact

if TYPE_CHECKING:
    from rollout.transport import Connection

__all__ = ["CallLimits", "ChatModel", "ContextOverflowError", "ModelError", "Observer", "OpenAIChatModel", "Reply"]

MAX_MESSAGE_CHARS = 500
# Told of every try: its status (0 when no answer came; an error inside an HTTP 200 counts as the status it names),
# seconds it took, and seconds the server asks to wait, or None.
Observer = Callable[[int, float, float | None], None]


class ModelError(Exception):
    """The endpoint gave no answer, for good: retries are used up or would not help."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind


class ContextOverflowError(Exception):
    """The conversation no longer fits the model's context window: the rollout ends as partial."""


class ChatModel(Protocol):
    """Whatever answers a conversation."""

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> Reply:
        """Return the next assistant message.

        ``tools`` may be empty: then none is offered. Raises ModelError and ContextOverflowError.
        """


@dataclass(frozen=True)
class CallLimits:
    """Bounds of one call of a model."""

    request_seconds: float = 600.0  # wall time of one try, to the last byte of its answer
    max_body_bytes: int = 16 * 1024 * 1024  # of an answer, decompressed
    retry: RetryPolicy = field(default_factory=RetryPolicy)


class OpenAIChatModel:
    """A model behind an OpenAI-compatible endpoint; one instance serves all rollouts of a process and event loop."""

    def __init__(
        self,
        config: RunConfig,
        api_key: str,
        limits: CallLimits = CallLimits(),
        observe: Observer = lambda *_: None,
        log: Callable[[str], None] = lambda _: None,  # told of every try that is repeated
    ) -> None:
        self._base_url = config.base_url
        self._api_key = api_key or PLACEHOLDER_KEY
        self._dialect = Dialect(config)
        self._limits = limits
        self._observe = observe
        self._log = log
        self._connection: Connection | None = None

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> Reply:
        """Return the next assistant message, however many tries it takes. Raises ModelError, ContextOverflowError."""
        attempts = Attempts(self._limits.retry)
        while True:
            request = self._dialect.compose(messages, tools)
            try:
                return await self._try(request)
            except TryError as error:
                if self._dialect.learn(error, request):
                    continue
                told = self._told(error)
                if error.verdict.overflow:
                    raise ContextOverflowError(told) from None
                delay = attempts.delay_after(error)
                if delay is None:
                    raise ModelError(error.verdict.kind, told) from None
                self._log(f"{told}; trying again in {delay:.1f} s")
            await asyncio.sleep(delay)

    async def close(self) -> None:
        """Close the connections. The next call opens new ones."""
        if self._connection:
            connection, self._connection = self._connection, None
            await connection.close()

    async def _try(self, request: Request) -> Reply:
        started = time.monotonic()
        try:
            reply = read_reply(await self._post(request.body))
        except TryError as error:
            self._observe(error.status, time.monotonic() - started, error.retry_after_seconds)
            raise
        self._observe(HTTPStatus.OK, time.monotonic() - started, None)
        return reply

    async def _post(self, body: bytes) -> bytes:
        """Return the body of an HTTP 200. Raises TryError."""
        from rollout.transport import Connection, TransportError  # noqa: PLC0415 - takes most of a second

        if self._connection is None:
            self._connection = Connection(self._base_url, self._api_key, self._limits.max_body_bytes)
        try:
            async with asyncio.timeout(self._limits.request_seconds):
                answer = await self._connection.post("chat/completions", body)
        except TransportError as error:
            raise TryError(Verdict(error.kind, retry=not error.permanent), str(error)) from None
        except TimeoutError:
            told = f"no whole answer within {self._limits.request_seconds:g} s"
            raise TryError(Verdict("timeout", retry=True), told) from None
        if not HTTPStatus.OK <= answer.status < HTTPStatus.MULTIPLE_CHOICES:
            refused = refusal(answer.status, answer.body)
            refused.retry_after_seconds = retry_after_seconds(answer.headers, time.time())
            raise refused
        return answer.body

    def _told(self, error: TryError) -> str:
        """Return what went wrong as one line without secrets."""
        text = str(error) if self._api_key == PLACEHOLDER_KEY else str(error).replace(self._api_key, "***")
        return one_line(redact(text)[0], MAX_MESSAGE_CHARS)
