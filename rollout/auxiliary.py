"""Asking other models on a tool's behalf: the run's own endpoint, or one that a tool's settings name.

Requests are the tool's alone: of the run they take its endpoint and model, where the tool names none, and OpenRouter's
provider routing with these; never its token limit, prompts, reasoning or tools. The run's key goes to the run's own
endpoint only; every other gets the key the tool names for it, or what the environment holds for its host. A failure
here is the tool's: it never counts as the run's endpoint refusing a key or a bill.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from rollout.config import RunConfig
from rollout.dialects import Dialect, Request
from rollout.endpoint import Access, CallLimits, ContextOverflowError, Endpoint, ModelError
from rollout.gate import Gate, GateClosedError
from rollout.keys import api_key_for, host_of
from rollout.messages import Usage
from rollout.replies import Reply, read_object, read_reply, spent_on
from rollout.retry import RetryPolicy
from rollout.texts import clean_json, dump_json
from rollout.trajectory import split_thinking
from tools.own_time import own_timeout
from tools.services import Answer, AuxiliaryError, Post, Posted, Question, Settings, Spent

AnswerT = TypeVar("AnswerT")
_PORTS = {"http": 80, "https": 443}
# A tool call is being waited for: fewer tries than for a rollout's own request, but larger answers, for pictures.
LIMITS = CallLimits(max_body_bytes=64 * 1024 * 1024, retry=RetryPolicy(max_tries=6))


class AuxiliaryModels:
    """The endpoints that the tools of one worker may ask; belongs to the event loop that first asks."""

    def __init__(
        self,
        config: RunConfig,
        api_key: str,
        settings: Settings,
        limits: CallLimits = LIMITS,
        log: Callable[[str], None] = lambda _: None,  # told of every try that is repeated
    ) -> None:
        self._config = config
        self._own = Access(config.base_url, api_key)
        self._settings = settings
        self._limits = limits
        self.gate: Gate | None = None  # that requests to the run's own endpoint pass; to be set before the first
        self._log = log
        self._endpoints: dict[Access, Endpoint] = {}
        self._dialects: dict[tuple[str, str], Dialect] = {}

    async def ask(self, question: Question) -> Answer:
        """Return the answer. Raises AuxiliaryError."""
        access = self._access(question)
        model = question.model or self._config.model
        dialect = self._dialect(access.base_url, model)
        sampling = {"temperature": question.temperature, "max_tokens": question.max_tokens}
        given = {name: value for name, value in sampling.items() if value is not None}
        compose = partial(dialect.compose_question, question.messages, given)
        asking = self._endpoint(access).ask(compose, read_reply, dialect.learn, question.timeout_seconds)
        return _answer(await _within(question.timeout_seconds, asking, model))

    async def post(self, post: Post) -> Posted:
        """Return what was answered. Raises AuxiliaryError."""
        access = self._access(post)
        body = dump_json(clean_json(dict(post.body))).encode(errors="replace")
        request = Request(body, path=post.path)
        asking = self._endpoint(access).ask(lambda: request, read_object, within_seconds=post.timeout_seconds)
        answer = await _within(post.timeout_seconds, asking, post.path)
        return Posted(answer, _spent(*spent_on(answer)))

    async def close(self) -> None:
        """Close the connections."""
        while self._endpoints:
            _, endpoint = self._endpoints.popitem()
            await endpoint.close()

    def _access(self, asked: Question | Post) -> Access:
        """Return where a request goes, and with which key. Raises AuxiliaryError."""
        scheme = asked.key_scheme if isinstance(asked, Post) else "Bearer"
        base_url = asked.base_url or self._own.base_url
        try:
            host = host_of(base_url)
            if _origin(base_url) == _origin(self._own.base_url) and not asked.api_key:
                return Access(base_url, self._own.api_key, scheme)
            return Access(base_url, api_key_for(host, asked.api_key, self._settings), scheme)
        except ValueError as error:
            raise AuxiliaryError(str(error), "bad_request") from None

    def _endpoint(self, access: Access) -> Endpoint:
        if access not in self._endpoints:
            gate = self.gate if _origin(access.base_url) == _origin(self._own.base_url) else None
            self._endpoints[access] = Endpoint(access, self._limits, gate, self._log)
        return self._endpoints[access]

    def _dialect(self, base_url: str, model: str) -> Dialect:
        if (base_url, model) not in self._dialects:
            changed: dict[str, Any] = {"base_url": base_url, "model": model}
            if (base_url, model) != (self._config.base_url, self._config.model):
                # Providers chosen for the run's model need not have another one.
                changed |= {f"providers_{what}": () for what in ("allowed", "ignored", "order")}
                changed["provider_sort"] = None
            self._dialects[base_url, model] = Dialect(self._config.model_copy(update=changed))
        return self._dialects[base_url, model]


async def _within(seconds: float, asking: Awaitable[AnswerT], whom: str) -> AnswerT:
    """Return the answer in time, turns at the gate not counted. Raises AuxiliaryError, which names who was asked."""
    try:
        async with own_timeout(seconds) as timer:
            return await asking
    except ModelError as error:
        raise AuxiliaryError(f"{whom}: {error}", error.kind) from None
    except ContextOverflowError as error:
        raise AuxiliaryError(f"{whom}: {error}", "bad_request") from None
    except GateClosedError:
        raise AuxiliaryError(f"{whom}: the run's budget is used up", "billing") from None
    except TimeoutError:
        if not timer.expired():
            raise
        raise AuxiliaryError(f"{whom}: no answer within {seconds:g} s", "timeout") from None


def _answer(reply: Reply) -> Answer:
    text, _ = split_thinking(reply.message.content, native=reply.message.reasoning)
    return Answer(text, _spent(reply.usage, reply.cost_usd))


def _spent(usage: Usage, cost_usd: float) -> Spent:
    return Spent(
        requests=1,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        cached_tokens=usage.cached_tokens,
        cost_usd=cost_usd,
    )


def _origin(base_url: str) -> tuple[str, str, int]:
    """Return what a key was meant for: scheme, host and port."""
    parts = urlsplit(base_url)
    return parts.scheme, host_of(base_url), parts.port or _PORTS[parts.scheme]
