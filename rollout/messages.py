"""What is said in a rollout, as values: the live form of a conversation, between the endpoint and the trajectory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

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
class ToolCall:
    """One call the model made.

    ``arguments`` is always an object. Where the model's text was no JSON object, ``problem`` says so, ``arguments`` is
    ``{"_raw": text}``, and the call must not be run.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    problem: str = ""


@dataclass(frozen=True)
class UserMessage:
    """The prompt, or the request for a summary at the turn limit."""

    content: str


@dataclass(frozen=True)
class AssistantMessage:
    """One answer of the model."""

    content: str  # text, as the model wrote it (inline <think> or <REASONING_SCRATCHPAD> blocks included)
    reasoning: str = ""  # native reasoning, each piece once
    tool_calls: tuple[ToolCall, ...] = ()
    echo: dict[str, Any] = field(default_factory=dict)  # reasoning fields to send back, in the form they came


@dataclass(frozen=True)
class ToolMessage:
    """The result of one tool call, as the JSON text the model is shown."""

    tool_call_id: str
    name: str
    content: str


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


@dataclass(frozen=True)
class ToolDefinition:
    """A tool as the model is shown it."""

    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema of the arguments object
