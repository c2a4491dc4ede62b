"""What is said in a rollout, as values: the live form of a conversation, between the endpoint and the trajectory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tools.calls import ToolCall, ToolDefinition, ToolMessage

__all__ = [
    "AssistantMessage",
    "Failure",
    "FailureKind",
    "Message",
    "ToolCall",
    "ToolDefinition",
    "ToolMessage",
    "Usage",
    "UserMessage",
]

FailureKind = Literal[
    "auth",
    "billing",
    "rate_limit",
    "model_not_found",
    "bad_request",
    "content_blocked",
    "server",
    "timeout",
    "connection",
    "bad_response",
    "image_unavailable",
    "sandbox",
    "worker_died",
    "interrupted",
    "internal",
]


@dataclass(frozen=True)
class Failure:
    """Why a rollout gave no result: the program's or the world's fault, never the model's."""

    kind: FailureKind
    message: str


@dataclass(frozen=True)
class UserMessage:
    """The prompt, or the request for a summary at the turn limit."""

    content: str
    sent: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # dialects' own notes


@dataclass(frozen=True)
class AssistantMessage:
    """One answer of the model."""

    content: str  # text, as the model wrote it (inline <think> or <REASONING_SCRATCHPAD> blocks included)
    reasoning: str = ""  # native reasoning, each piece once
    tool_calls: tuple[ToolCall, ...] = ()
    echo: dict[str, Any] = field(default_factory=dict)  # reasoning fields to send back, in the form they came


Message = UserMessage | AssistantMessage | ToolMessage


@dataclass(frozen=True)
class Usage:
    """Tokens, summed over requests."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.cached_tokens + other.cached_tokens,
        )
