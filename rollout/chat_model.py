"""Asking a model: the ChatModel protocol, and the OpenAI-compatible one.

What is sent is dialects' business, what comes back replies'; the tries of a request are endpoint's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from rollout.config import RunConfig
from rollout.dialects import Dialect
from rollout.endpoint import DEFAULT_LIMITS, Access, CallLimits, ContextOverflowError, Endpoint, ModelError
from rollout.gate import Gate, GateClosedError
from rollout.messages import AssistantMessage, Message, ToolDefinition
from rollout.replies import Reply, read_reply

__all__ = [
    "CallLimits",
    "ChatModel",
    "ContextOverflowError",
    "GateClosedError",
    "ModelError",
    "OpenAIChatModel",
    "Reply",
]


_RATE_WORDS = re.compile(r"per.min(ute)?\b|\btpm\b")
_ROOM_WORDS = re.compile(r"max_(completion_|new_|output_)?tokens|completion")


class ChatModel(Protocol):
    """Whatever answers a conversation."""

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> Reply:
        """Return the next assistant message.

        ``tools`` may be empty: then none is offered. Raises ModelError, ContextOverflowError, and GateClosedError when
        nothing is asked any more.
        """


class OpenAIChatModel:
    """A model behind an OpenAI-compatible endpoint; one instance serves all rollouts of a process and event loop."""

    def __init__(
        self,
        config: RunConfig,
        api_key: str,
        limits: CallLimits = DEFAULT_LIMITS,
        gate: Gate | None = None,
        log: Callable[[str], None] = lambda _: None,  # told of every try that is repeated
    ) -> None:
        self._max_tokens = config.max_tokens
        self._dialect = Dialect(config)
        self._endpoint = Endpoint(Access(config.base_url, api_key), limits, gate, log)

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> Reply:
        """Return the next assistant message, however many tries it takes. Raises what the protocol says."""
        compose = partial(self._dialect.compose, messages, tools)
        try:
            return await self._endpoint.ask(compose, read_reply, self._dialect.learn)
        except ContextOverflowError as error:
            if any(isinstance(message, AssistantMessage) for message in messages) or not (why := self._no_room(error)):
                raise
            raise ModelError("bad_request", f"{error}; {why}") from None

    def _no_room(self, error: ContextOverflowError) -> str:
        """Say why a first request is too large though no conversation grew; "" when the prompt is too long."""
        if _RATE_WORDS.search(str(error).lower()):
            return "one request is more than this account may ask in a minute"
        if self._max_tokens is not None and _ROOM_WORDS.search(str(error).lower()):
            return f"the prompt and --max_tokens={self._max_tokens} do not fit the model's context together"
        return ""

    async def close(self) -> None:
        """Close the connections. The next call opens new ones."""
        await self._endpoint.close()
