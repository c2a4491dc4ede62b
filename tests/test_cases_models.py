"""The tools that ask other models, in the program as its users have it: vision, image_gen and moa."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from endpoints.script import ScriptedReply
from endpoints.scripted import ScriptedEndpoint
from model_tools import missing_tools, tool_settings
from rollout.preflight import unavailable_toolsets
from tests.program import Ended, Json, Workplace, answer, call, reply, results, terminal

PAINTER_KEY = "sk-painter-0123456789"
RUN_KEY = "sk-of-the-run-0123456789"
OPENAI_KEY = "sk-of-openai-0123456789"
MERGING = "Several models have answered"
MAIN_USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "cost": 0.001}
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 2}, "cost": 0.25}
TOOLSETS = {"vision": 100, "image_gen": 100, "moa": 100, "terminal": 100}
COUNTED = ("vision_analyze", "image_generate", "mixture_of_agents")


def auxiliary(**values: Any) -> ScriptedReply:
    return reply(to="auxiliary", **values)


MAIN = [
    call("image_generate", {"prompt": "a red cat", "aspect_ratio": "square"}, usage=MAIN_USAGE),
    terminal("cp generated_images/image_*.png cat.png && head -c 4 cat.png | od -An -c", usage=MAIN_USAGE),
    call("vision_analyze", {"image_url": "cat.png", "question": "what is shown?"}, usage=MAIN_USAGE),
    call("mixture_of_agents", {"user_prompt": "what do cats want?"}, usage=MAIN_USAGE),
    answer("done", usage=MAIN_USAGE),
]
OTHERS = [
    auxiliary(prompt="what is shown?", content="<think>fur</think>a red cat", usage=USAGE),
    auxiliary(prompt="what do cats want?", status=500, error="down", times=1),
    auxiliary(prompt="what do cats want?", content="food", usage=USAGE),
    auxiliary(prompt=MERGING, content="food and sleep", usage=USAGE),
    reply(to="images", image="", usage={"input_tokens": 4, "output_tokens": 50, "cost": 0.5}),
]


def distribution(place: Workplace, toolsets: Json = TOOLSETS) -> str:
    text = json.dumps({"description": "made for a test", "toolsets": toolsets})
    (place.path / "models.json").write_text(text, encoding="utf-8")
    return "models.json"


def told(row: Json) -> list[Any]:
    made, listed, seen, mixed = results(row)
    assert (made["success"], listed["exit_code"]) == (True, 0), (made, listed)
    assert "P   N   G" in listed["output"]
    return [Path(made["image"]).parent.name, seen, mixed]


MIXED = {
    "success": True,
    "response": "food and sleep",
    "models_used": {"reference_models": ["scripted"] * 3, "aggregator_model": "scripted"},
}
TOLD = ["generated_images", {"success": True, "analysis": "a red cat"}, MIXED]


def test_every_tool_does_its_job_and_its_cost_is_counted(place: Workplace) -> None:
    place.env = {"IMAGE_MODEL": "brush", "OPENAI_API_KEY": OPENAI_KEY}
    place.dataset(["paint a cat and look at it"])
    with ScriptedEndpoint([*MAIN, *OTHERS]) as endpoint:
        ended = place.run(
            endpoint.base_url,
            distribution=distribution(place),
            api_key=RUN_KEY,
            max_tokens=99,
            ephemeral_system_prompt="be brief",
        )
        requests = list(endpoint.requests)
    assert ended.code == 0, ended
    (row,) = place.trajectories()
    assert told(row) == TOLD
    assert set(row["toolsets_used"]) == set(TOOLSETS)
    for name in COUNTED:
        assert row["tool_stats"][name] == {"count": 1, "success": 1, "failure": 0}
    assert_counts(row, ended, place)
    # Nothing of the run's own goes along with what its tools ask, but its key.
    others = [request for request in requests if not request.body.get("tools")]
    assert len(others) == 1 + 1 + 3 + 1 + 1  # one reference is asked again
    for request in others:
        assert request.headers["authorization"] == f"Bearer {RUN_KEY}"
        assert "max_tokens" not in request.body
        assert "be brief" not in json.dumps(request.body)
    for path in place.run_dir().iterdir():
        assert RUN_KEY not in path.read_text(encoding="utf-8")


def assert_counts(row: Json, ended: Ended, place: Workplace) -> None:
    """Five requests of the rollout, one for a picture, five of other models."""
    assert row["api_calls"] == 5 + 1 + 5
    assert row["metadata"]["usage"] == {
        "prompt_tokens": 5 * 100 + 4 + 5 * 7,
        "completion_tokens": 5 * 10 + 50 + 5 * 3,
        "reasoning_tokens": 5 * 2,
        "cached_tokens": 0,
    }
    cost = 5 * 0.001 + 0.5 + 5 * 0.25
    assert row["metadata"]["cost_usd"] == pytest.approx(cost)
    statistics = place.json("statistics.json")
    assert f"{cost:.2f}" in ended.stdout
    assert str(cost)[:5] in json.dumps(statistics)


def test_a_scripted_file_serves_all_of_them(place: Workplace) -> None:
    place.env = {"IMAGE_MODEL": "brush"}
    place.dataset(["paint a cat and look at it"])
    lines = [line.model_dump_json(exclude_unset=True) for line in [*MAIN, *OTHERS]]
    (place.path / "script.jsonl").write_text("\n".join(lines), encoding="utf-8")
    ended = place.run("scripted:script.jsonl", distribution=distribution(place))
    assert ended.code == 0, ended
    (row,) = place.trajectories()
    assert told(row) == TOLD


def test_endpoints_of_their_own_get_their_own_keys(place: Workplace) -> None:
    place.dataset(["paint a cat and look at it"])
    with ScriptedEndpoint(MAIN) as own, ScriptedEndpoint(OTHERS) as other:
        place.env = {
            "IMAGE_BASE_URL": other.base_url,
            "IMAGE_API_KEY": PAINTER_KEY,
            "VISION_BASE_URL": other.base_url,
            "VISION_MODEL": "eyes",
            "MOA_BASE_URL": other.base_url,
            "MOA_REFERENCE_MODELS": "scripted,scripted,scripted",
            "OPENAI_API_KEY": OPENAI_KEY,
        }
        ended = place.run(own.base_url, distribution=distribution(place), api_key=RUN_KEY)
        asked = {(request.path, request.headers["authorization"]) for request in other.requests}
        assert {request.headers["authorization"] for request in own.requests} == {f"Bearer {RUN_KEY}"}
    assert ended.code == 0, ended
    assert told(place.trajectories()[0]) == TOLD
    assert asked == {
        ("/v1/images/generations", f"Bearer {PAINTER_KEY}"),
        ("/v1/chat/completions", f"Bearer {OPENAI_KEY}"),
    }
    said = ended.stdout + ended.stderr + "".join(path.read_text() for path in place.run_dir().iterdir())
    assert not [key for key in (PAINTER_KEY, RUN_KEY, OPENAI_KEY) if key in said]


def test_a_refused_key_of_another_model_does_not_stop_the_run(place: Workplace) -> None:
    """Nor a bill: that is the tool's trouble, which the model is told of."""
    prompts = [f"question {number}" for number in range(4)]
    place.dataset(prompts)
    mixing = [call("mixture_of_agents", {"user_prompt": "what?"}), answer("alone")]
    refusing = [auxiliary(status=401, error="no such key", times=None)]
    with ScriptedEndpoint([*mixing, *refusing]) as endpoint:
        ended = place.run(endpoint.base_url, distribution=distribution(place, {"moa": 100}))
    assert ended.code == 0, ended
    rows = place.trajectories()
    assert [row["completed"] for row in rows] == [True] * len(prompts)
    for row in rows:
        (result,) = results(row)
        assert "HTTP 401: no such key" in result["error"]
        assert row["tool_stats"]["mixture_of_agents"] == {"count": 1, "success": 0, "failure": 1}
        assert row["api_calls"] == 2


def test_image_gen_is_offered_only_when_it_is_set_up() -> None:
    def unavailable(**environ: str) -> dict[str, str]:
        return unavailable_toolsets(missing_tools(tool_settings(environ)))

    assert unavailable()["image_gen"].startswith("set IMAGE_MODEL")
    for environ in ({"IMAGE_MODEL": "brush"}, {"FAL_KEY": "k"}):
        assert not {"image_gen", "vision", "moa"} & unavailable(**environ).keys()
