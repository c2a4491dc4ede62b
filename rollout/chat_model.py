"""Asking a model: the ChatModel protocol, and the OpenAI-compatible one.

What is sent is dialects' business, what comes back replies'; the tries of a request are endpoint's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from rollout.config import RunConfig
from rollout.dialects import Dialect
from rollout.endpoint import DEFAULT_LIMITS, Access, CallLimits, ContextOverflowError, Endpoint, ModelError
from rollout.gate import Gate, GateClosedError
from rollout.messages import Message, ToolDefinition
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
        self._dialect = Dialect(config)
        self._endpoint = Endpoint(Access(config.base_url, api_key), limits, gate, log)

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> Reply:
        """Return the next assistant message, however many tries it takes. Raises what the protocol says."""
        compose = partial(self._dialect.compose, messages, tools)
        return await self._endpoint.ask(compose, read_reply, self._dialect.learn)

    async def close(self) -> None:
        """Close the connections. The next call opens new ones."""
        await self._endpoint.close()
