"""What passes between a model and its tools, as values: a call, its result, a tool as the model is shown it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
    echo: dict[str, Any] = field(default_factory=dict)  # what else the server said of it, to be sent back as it came


@dataclass(frozen=True)
class ToolMessage:
    """The result of one tool call, as the JSON text the model is shown."""

    tool_call_id: str
    name: str
    content: str


@dataclass(frozen=True)
class ToolDefinition:
    """A tool as the model is shown it."""

    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema of the arguments object
