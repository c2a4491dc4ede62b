"""What tools have beyond their own rollout: settings, other models, and things that are dear to start.

One Services serves all rollouts of a worker process. Settings are environment variables that a tool named in its
``@tool``; they are read at the door, reach the worker over its socket and are written nowhere, so a key may be one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

Settings = Mapping[str, str]  # environment variable → its text, stripped; unset and blank ones are left out
SharedT = TypeVar("SharedT")


@dataclass(frozen=True)
class Spent:
    """What auxiliary requests cost; it counts in the row like the rollout's own."""

    requests: int = 0  # that returned an answer
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.cached_tokens + other.cached_tokens,
            self.cost_usd + other.cost_usd,
        )


@dataclass(frozen=True)
class Question:
    """One request to an auxiliary model. What is left blank is the run's own model, endpoint and key."""

    messages: Sequence[Mapping[str, Any]]  # OpenAI form; content is text or a list of parts
    model: str = ""
    base_url: str = ""
    api_key: str = ""  # blank with another base_url: what the environment holds for that host
    temperature: float | None = None
    max_tokens: int | None = None
    timeout_seconds: float = 120.0  # of all tries together, without waits for their turn


@dataclass(frozen=True)
class Answer:
    """What an auxiliary model said."""

    text: str  # without thoughts; may be blank
    spent: Spent = Spent()


@dataclass(frozen=True)
class Post:
    """One JSON request to an endpoint that answers in JSON and is no chat. What is left blank is the run's own."""

    path: str  # under the base URL, no slash in front
    body: Mapping[str, Any]
    base_url: str = ""
    api_key: str = ""  # blank with another base_url: what the environment holds for that host
    key_scheme: str = "Bearer"  # what stands before the key in the Authorization header
    timeout_seconds: float = 120.0  # of all tries together, without waits for their turn


@dataclass(frozen=True)
class Posted:
    """What an endpoint answered to a Post."""

    body: dict[str, Any]
    spent: Spent = Spent()


class AuxiliaryError(Exception):
    """An endpoint gave a tool no answer; one line that says why."""

    def __init__(self, message: str, kind: str = "error") -> None:
        super().__init__(message)
        self.kind = kind  # auth, billing, rate_limit, ...: the kinds of failed rollouts, but it fails none


class Models(Protocol):
    """Whoever can ask auxiliary models."""

    async def ask(self, question: Question) -> Answer:
        """Return the answer. Raises AuxiliaryError."""


class Endpoints(Protocol):
    """Whoever can send other JSON requests."""

    async def post(self, post: Post) -> Posted:
        """Return what was answered. Raises AuxiliaryError."""


class NoModels:
    """Stands where no endpoint is at hand."""

    async def ask(self, question: Question) -> Answer:
        """Raise AuxiliaryError."""
        raise AuxiliaryError(f"no endpoint to ask {question.model or 'a model'}")

    async def post(self, post: Post) -> Posted:
        """Raise AuxiliaryError."""
        raise AuxiliaryError(f"no endpoint for {post.path}")


class Shared(Protocol):
    """A thing of which a worker has one: made from the settings when first asked for, closed at the worker's end."""

    def __init__(self, settings: Settings) -> None: ...

    async def close(self) -> None:
        """Give back what it holds."""


@dataclass
class Services:
    """What all rollouts of a worker share."""

    settings: Settings = field(default_factory=dict)
    models: Models = field(default_factory=NoModels)
    endpoints: Endpoints = field(default_factory=NoModels)
    base_url: str = ""  # the run's own endpoint and model: what is asked when a question names none
    model: str = ""
    _shared: dict[type, Shared] = field(default_factory=dict)

    def shared(self, cls: type[SharedT]) -> SharedT:
        """Return the worker's own instance of ``cls``, a ``Shared``; it serves rollouts side by side."""
        if cls not in self._shared:
            self._shared[cls] = cast("type[Shared]", cls)(self.settings)
        return cast("SharedT", self._shared[cls])

    async def close(self) -> None:
        """Close what was shared, the latest first."""
        while self._shared:
            _, thing = self._shared.popitem()
            await thing.close()
