"""One call of the model against prepared answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.chat_model import CallLimits, ContextOverflowError, ModelError, OpenAIChatModel, Reply
from rollout.config import RunConfig
from rollout.messages import Message, ToolDefinition, UserMessage
from rollout.retry import RetryPolicy
from tests.rollout.http_server import (
    Answer,
    Asked,
    serve,
)

KEY = "sk-test-0123456789abcdef"
QUICK = RetryPolicy(max_tries=4, total_seconds=5, first_delay_seconds=0.01, max_delay_seconds=0.02)
LIMITS = CallLimits(request_seconds=5, max_body_bytes=200_000, retry=QUICK)
HELLO: tuple[Message, ...] = (UserMessage("hello"),)


def config(base_url: str, **flags: Any) -> RunConfig:
    return RunConfig(
        dataset_file=Path("prompts.jsonl"), batch_size=1, run_name="r", model="some/model", base_url=base_url, **flags
    )


def ask(
    *answers: Answer,
    messages: Sequence[Message] = HELLO,
    tools: Sequence[ToolDefinition] = (),
    limits: CallLimits = LIMITS,
    **flags: Any,
) -> tuple[Reply | ModelError | ContextOverflowError, list[Asked]]:
    """Complete once against an endpoint that gives these answers; return the outcome and what was asked."""

    async def run() -> tuple[Reply | ModelError | ContextOverflowError, list[Asked]]:
        async with serve(*answers) as endpoint:
            model = OpenAIChatModel(config(endpoint.base_url, **flags), KEY, limits)
            try:
                return await model.complete(messages, tools), endpoint.requests
            except (ModelError, ContextOverflowError) as failed:
                return failed, endpoint.requests
            finally:
                await model.close()

    return asyncio.run(run())


def reply(*answers: Answer, **how: Any) -> Reply:
    outcome, _ = ask(*answers, **how)
    assert isinstance(outcome, Reply), outcome
    return outcome


def failure(*answers: Answer, **how: Any) -> tuple[str, str, int]:
    """Return kind, message and number of requests of a call that fails."""
    outcome, requests = ask(*answers, **how)
    assert isinstance(outcome, ModelError), outcome
    assert "\n" not in str(outcome)
    assert KEY not in str(outcome)
    return outcome.kind, str(outcome), len(requests)
