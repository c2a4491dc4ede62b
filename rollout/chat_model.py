"""Asking a model: the ChatModel protocol, and the OpenAI-compatible one (retries, dialects)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollout.messages import AssistantMessage, FailureKind, Message, ToolDefinition, Usage


class ModelError(Exception):
    """The endpoint gave no answer, for good: retries are used up or would not help.

    ``api_calls`` and ``usage`` are what was spent all the same, on answers that were thrown away.
    """

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind


class ContextOverflowError(Exception):
    """The conversation no longer fits the model's context window: the rollout ends as partial."""


@dataclass(frozen=True)
class Reply:
    """One answer of the endpoint."""

    message: AssistantMessage
    finish_reason: str  # the endpoint's: stop, tool_calls, length, content_filter, ...
    usage: Usage
    cost_usd: float  # 0.0 where the endpoint names none


class ChatModel(Protocol):
    """Whatever answers a conversation."""

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> Reply:
        """Return the next assistant message.

        ``tools`` may be empty: then none is offered. Raises ModelError and ContextOverflowError.
        """
