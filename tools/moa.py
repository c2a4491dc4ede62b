"""Asking several models and merging what they say: ``mixture_of_agents``.

The reference models are asked side by side, then the aggregator is shown their answers and writes one. Who fails is
left out, as long as one answers. All are asked at the run's own endpoint, or at ``MOA_BASE_URL``;
``MOA_REFERENCE_MODELS`` and ``MOA_AGGREGATOR_MODEL`` choose them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field

from tools.base import JsonObject, ToolContext, ToolError, tool
from tools.endpoint_settings import KEY_VARIABLES, NamedEndpoint, endpoint_variables, named_endpoint, wrong_endpoint
from tools.services import Question, Services, Settings

ANSWER_SECONDS = 240.0  # of one model
LIMIT_SECONDS = 1000.0  # of a whole call: references and aggregator, each asked twice at most
REFERENCE_TEMPERATURE = 0.6
AGGREGATOR_TEMPERATURE = 0.4
MAX_REFERENCES = 10
OWN_MODEL_TIMES = 3  # how often the run's model is asked where no others are known
MAX_ANSWER_CHARS = 60_000  # of one reference, as the aggregator is shown it

# The original's, but for the dearest of them.
OPENROUTER_REFERENCES = (
    "anthropic/claude-opus-4.6",
    "google/gemini-3-pro-preview",
    "openai/gpt-5.4",
    "deepseek/deepseek-v3.2",
)
OPENROUTER_AGGREGATOR = "anthropic/claude-opus-4.6"
_MERGE = """\
Several models have answered the user's request; their answers follow. Write the one best answer to it. Weigh each of \
them critically, since any may be wrong, one-sided or incomplete: keep what is right, mend what is not, settle where \
they disagree, and add what all have missed. Do not speak of the answers or of the models; answer the user.

Answers of the models:"""
_NOTHING = "No answer could be made. Try again, or go on without it."


@dataclass(frozen=True)
class _Cast:
    references: tuple[str, ...]
    aggregator: str
    endpoint: NamedEndpoint


def missing(settings: Settings) -> str:
    """Say what is wrong with the settings, if anything is."""
    if len(_named_references(settings)) > MAX_REFERENCES:
        return f"MOA_REFERENCE_MODELS names more than {MAX_REFERENCES} models"
    return wrong_endpoint("MOA", settings, needs="MOA_REFERENCE_MODELS")


@tool(
    "moa",
    limit_seconds=lambda limits: max(limits.max_call_seconds, LIMIT_SECONDS),
    settings=(*endpoint_variables("MOA"), "MOA_REFERENCE_MODELS", "MOA_AGGREGATOR_MODEL", *KEY_VARIABLES),
    missing=missing,
)
async def mixture_of_agents(
    context: ToolContext,
    user_prompt: Annotated[str, Field(description="The whole problem: the models see nothing else")],
) -> JsonObject:
    """Ask several strong models about a hard problem and merge their answers. Slow and dear: keep it for hard ones."""
    cast = _cast(context.services)
    answers, problems = await _references(context, cast, user_prompt)
    used = {"reference_models": [model for model, _ in answers], "aggregator_model": cast.aggregator}
    try:
        response = await _merged(context, cast, user_prompt, answers, problems)
    except ToolError as error:
        told = f"Error in MoA processing: {error}"
        raise ToolError(told, success=False, response=_NOTHING, models_used=used) from None
    return {"success": True, "response": response, "models_used": used}


def _cast(services: Services) -> _Cast:
    settings = services.settings
    endpoint = named_endpoint("MOA", settings)
    named = _named_references(settings)
    aggregator = settings.get("MOA_AGGREGATOR_MODEL", "")
    if named:
        return _Cast(named, aggregator or (named[0] if endpoint["base_url"] else services.model), endpoint)
    if _is_openrouter(services.base_url):
        return _Cast(OPENROUTER_REFERENCES, aggregator or OPENROUTER_AGGREGATOR, endpoint)
    return _Cast((services.model,) * OWN_MODEL_TIMES, aggregator or services.model, endpoint)


def _named_references(settings: Settings) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, settings.get("MOA_REFERENCE_MODELS", "").split(","))))


def _is_openrouter(base_url: str) -> bool:
    host = (urlsplit(base_url).hostname or "").rstrip(".")
    return host == "openrouter.ai" or host.endswith(".openrouter.ai")


async def _references(context: ToolContext, cast: _Cast, prompt: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Ask all at once; return who answered what, and why others did not."""
    problems: list[str] = []

    async def ask(model: str) -> tuple[str, str]:
        messages = [{"role": "user", "content": prompt}]
        question = Question(messages, model, temperature=REFERENCE_TEMPERATURE, timeout_seconds=ANSWER_SECONDS)
        try:
            return model, await _said(context, question, cast.endpoint)
        except ToolError as error:
            problems.append(str(error))
            return model, ""

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(model)) for model in cast.references]
    return [answer for task in tasks if (answer := task.result())[1]], problems


async def _merged(
    context: ToolContext, cast: _Cast, prompt: str, answers: list[tuple[str, str]], problems: list[str]
) -> str:
    if not answers:
        raise ToolError(f"no reference model answered ({'; '.join(problems)})")
    shown = "\n\n".join(f"{number}. {text[:MAX_ANSWER_CHARS]}" for number, (_, text) in enumerate(answers, start=1))
    messages = [{"role": "system", "content": f"{_MERGE}\n\n{shown}"}, {"role": "user", "content": prompt}]
    question = Question(messages, cast.aggregator, temperature=AGGREGATOR_TEMPERATURE, timeout_seconds=ANSWER_SECONDS)
    return await _said(context, question, cast.endpoint)


async def _said(context: ToolContext, question: Question, endpoint: NamedEndpoint) -> str:
    """Return what a model says, asking once more when that is nothing. Raises ToolError."""
    for _ in range(2):
        if text := (await context.ask(replace(question, **endpoint))).text.strip():
            return text
    raise ToolError(f"{question.model or 'the model'} said nothing, twice")
