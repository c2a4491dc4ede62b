from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import pytest

from endpoints.scripted import ScriptedEndpoint
from tests.tools.models import endpoint, rollout
from tools import moa
from tools.base import ToolError
from tools.moa import OPENROUTER_AGGREGATOR, OPENROUTER_REFERENCES, missing, mixture_of_agents
from tools.services import Services

Json = dict[str, Any]
MERGING = "Several models have answered"  # how the aggregator is told
THREE = {"MOA_REFERENCE_MODELS": "a/one, b/two,c/three", "MOA_AGGREGATOR_MODEL": "d/judge"}
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "cost": 0.5}


def to_models(**more: Any) -> Json:
    return {"to": "auxiliary", "usage": USAGE, **more}


REFERENCE = to_models(content="<think>hm</think>about 4")
AGGREGATE = to_models(prompt=MERGING, content="it is 4")


def mix(served: ScriptedEndpoint, settings: Mapping[str, str] | None = None, prompt: str = "2 and 2?") -> Json:
    async def run() -> Json:
        async with rollout(served.base_url, settings) as context:
            try:
                result = await mixture_of_agents(context, {"user_prompt": prompt})
            except ToolError as error:
                result = {**error.details, "error": str(error)}
            return {**result, "spent": context.spent}

    return asyncio.run(run())


def asked(served: ScriptedEndpoint) -> tuple[list[Json], list[Json]]:
    """The requests to references, and those to the aggregator."""
    bodies = [request.body for request in served.requests]
    merging = [body for body in bodies if body["messages"][0]["role"] == "system"]
    return [body for body in bodies if body not in merging], merging


def test_references_are_asked_and_their_answers_merged() -> None:
    with endpoint(REFERENCE, AGGREGATE) as served:
        result = mix(served, THREE)
        references, (merging,) = asked(served)
    spent = result.pop("spent")
    assert result == {
        "success": True,
        "response": "it is 4",
        "models_used": {"reference_models": ["a/one", "b/two", "c/three"], "aggregator_model": "d/judge"},
    }
    assert sorted(body["model"] for body in references) == ["a/one", "b/two", "c/three"]
    for body in references:
        assert body["messages"] == [{"role": "user", "content": "2 and 2?"}]
        assert body["temperature"] == 0.6
    assert (merging["model"], merging["temperature"]) == ("d/judge", 0.4)
    system, user = merging["messages"]
    assert user == {"role": "user", "content": "2 and 2?"}
    assert system["content"].endswith("Answers of the models:\n\n1. about 4\n\n2. about 4\n\n3. about 4")
    assert (spent.requests, spent.prompt_tokens, spent.completion_tokens, spent.cost_usd) == (4, 20, 8, 2.0)


def test_references_are_asked_side_by_side() -> None:
    with endpoint({**REFERENCE, "delay_seconds": 0.5}, AGGREGATE) as served:
        mix(served, {})  # imports
        started = time.monotonic()
        assert mix(served, THREE)["success"]
    assert time.monotonic() - started < 1.4


def test_elsewhere_the_runs_own_model_is_asked_several_times() -> None:
    with endpoint(REFERENCE, AGGREGATE) as served:
        used = mix(served)["models_used"]
    assert used == {"reference_models": ["some/model"] * 3, "aggregator_model": "some/model"}


def test_openrouter_has_strong_models() -> None:
    assert moa._cast(Services({}, base_url="https://openrouter.ai/api/v1", model="m")) == moa._Cast(
        OPENROUTER_REFERENCES, OPENROUTER_AGGREGATOR, {"base_url": "", "api_key": ""}
    )
    for other in ("https://openrouter.ai.evil/v1", "http://localhost:8000/v1", ""):
        assert moa._cast(Services({}, base_url=other, model="m")).references == ("m", "m", "m")


@pytest.mark.parametrize(
    ("settings", "aggregator"),
    [
        ({"MOA_REFERENCE_MODELS": "a,b"}, "m"),
        ({"MOA_REFERENCE_MODELS": "a,b", "MOA_AGGREGATOR_MODEL": "c"}, "c"),
        ({"MOA_REFERENCE_MODELS": "a,b", "MOA_BASE_URL": "https://x/v1"}, "a"),
        ({"MOA_AGGREGATOR_MODEL": "c"}, "c"),
    ],
)
def test_who_merges(settings: dict[str, str], aggregator: str) -> None:
    assert moa._cast(Services(settings, base_url="https://y/v1", model="m")).aggregator == aggregator


def test_another_endpoint_gets_its_own_key() -> None:
    with endpoint({"content": "wrong"}) as own, endpoint(REFERENCE, AGGREGATE) as other:
        named = {**THREE, "MOA_BASE_URL": other.base_url, "MOA_API_KEY": "sk-moa-0123456789"}
        assert mix(own, named)["success"]
        assert not own.requests
        assert {request.headers["authorization"] for request in other.requests} == {"Bearer sk-moa-0123456789"}


def test_who_fails_is_left_out() -> None:
    down = to_models(status=400, error="no such model", times=1)
    with endpoint(down, {**REFERENCE, "times": 1}, {**down, "times": None}, AGGREGATE) as served:
        result = mix(served, THREE)
        _, (merging,) = asked(served)
    assert result["success"]
    assert len(result["models_used"]["reference_models"]) == 1
    assert merging["messages"][0]["content"].endswith("models:\n\n1. about 4")
    assert result["spent"].requests == 2


def test_when_all_fail_it_says_why() -> None:
    with endpoint(to_models(status=401, error="no key", times=None)) as served:
        result = mix(served, THREE)
    assert result.pop("spent").requests == 0
    assert result["error"].startswith("Error in MoA processing: no reference model answered (")
    assert "a/one: HTTP 401: no key" in result["error"]
    assert (result["success"], bool(result["response"])) == (False, True)
    assert result["models_used"] == {"reference_models": [], "aggregator_model": "d/judge"}


def test_when_the_aggregator_fails_it_says_so() -> None:
    with endpoint(REFERENCE, to_models(prompt=MERGING, status=402, error="no credit", times=None)) as served:
        result = mix(served, THREE)
    assert result["error"] == "Error in MoA processing: d/judge: HTTP 402: no credit scripted"
    assert result["success"] is False


def test_a_blank_aggregate_is_asked_for_again_once() -> None:
    blank = to_models(prompt=MERGING, content="<think>hm</think>", times=1)
    with endpoint(REFERENCE, blank, AGGREGATE) as served:
        assert mix(served, THREE)["response"] == "it is 4"
    with endpoint(REFERENCE, {**blank, "times": None}) as served:
        assert "d/judge said nothing, twice" in mix(served, THREE)["error"]
        assert len(asked(served)[1]) == 2


def test_a_long_answer_is_shown_in_part() -> None:
    with endpoint({**REFERENCE, "content": "x", "content_chars": 100_000}, AGGREGATE) as served:
        assert mix(served, {**THREE, "MOA_REFERENCE_MODELS": "one"})["success"]
        _, (merging,) = asked(served)
    assert merging["messages"][0]["content"].count("x") < 61_000


def test_settings_that_make_no_sense_are_told() -> None:
    assert missing({}) == missing(THREE) == ""
    assert missing({"MOA_BASE_URL": "https://a/v1"}).startswith("MOA_BASE_URL needs MOA_REFERENCE_MODELS")
    assert "more than 10" in missing({"MOA_REFERENCE_MODELS": ",".join("abcdefghijk")})
