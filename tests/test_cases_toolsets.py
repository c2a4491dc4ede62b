from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from endpoints.scripted import ScriptedEndpoint
from tests.program import Ended, Json, Workplace, answer, prompt_of, turns

PROMPTS = [f"question {number}" for number in range(16)]
COINS = {"terminal": 50, "file": 50, "todo": 50}


def distribution(place: Workplace, name: str, toolsets: Json) -> str:
    (place.path / name).write_text(
        json.dumps({"description": "made for a test", "toolsets": toolsets}), encoding="utf-8"
    )
    return name


def draws(
    tmp_path: Path, name: str, legs: Sequence[dict[str, Any]], prompts: Sequence[str] = PROMPTS
) -> dict[str, list[str]]:
    """Run the prompts leg by leg; return what was drawn for each."""
    place = Workplace(tmp_path / name)
    place.path.mkdir()
    place.dataset(prompts)
    coins = distribution(place, "coins.json", COINS)
    with ScriptedEndpoint([answer("4")]) as endpoint:
        for leg in legs:
            ended = place.run(endpoint.base_url, distribution=coins, **leg)
            assert ended.code == 0, ended
    return {prompt_of(row): row["toolsets_used"] for row in place.trajectories()}


def test_a_draw_depends_on_seed_and_sample_alone(tmp_path: Path) -> None:
    first = draws(tmp_path, "first", [{}])
    assert first == draws(
        tmp_path, "otherwise", [{"max_samples": 6, "num_workers": 2}, {"resume": True}], PROMPTS[::-1]
    )
    assert first != draws(tmp_path, "other seed", [{"seed": 1}])
    drawn = list(first.values())
    assert all(drawn)
    assert {name for names in drawn for name in names} == COINS.keys()
    assert len(set(map(tuple, drawn))) > 3  # each on its own


def tools_of(row: Json) -> list[str]:
    """The names of the system turn."""
    listed = turns(row, "system")[0].partition("<tools>\n")[2].partition("\n</tools>")[0]
    return [str(tool["name"]) for tool in json.loads(listed)]


def test_what_is_missing_is_named_and_a_draw_of_nothing_is_an_error(place: Workplace) -> None:
    place.dataset(PROMPTS)
    images = distribution(place, "images.json", {"image_gen": 50, "terminal": 50})
    with ScriptedEndpoint([answer("4")]) as endpoint:
        ended = place.run(endpoint.base_url, distribution=images)
        offered = {request.body["messages"][0]["content"]: request.body["tools"] for request in endpoint.requests}
    assert ended.code == 1
    (warning,) = [
        line for line in ended.stderr.splitlines() if line.startswith("warning: toolset image_gen is not available: ")
    ]
    assert len(warning) > len("warning: toolset image_gen is not available: ")
    rows = place.rows()
    assert {tuple(row["toolsets_used"]) for row in rows} == {("image_gen",), ("terminal",), ("image_gen", "terminal")}
    for row in rows:
        if row["toolsets_used"] == ["image_gen"]:
            assert row["failed"]
            assert "no tool is left of the toolsets drawn (image_gen: " in row["error"]["message"]
            assert row["prompt"] not in offered
        else:
            assert [tool["function"]["name"] for tool in offered[prompt_of(row)]] == ["terminal", "process"]
            assert tools_of(row) == ["terminal", "process"]


def ends_at_the_door(ended: Ended, place: Workplace) -> str:
    assert ended.code == 2
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    assert not (place.path / "data").exists()
    return ended.stderr


def test_a_distribution_that_was_changed_is_told(place: Workplace) -> None:
    place.dataset(["one", "two"])
    with ScriptedEndpoint([answer("1")]) as endpoint:
        coins = distribution(place, "coins.json", COINS)
        place.run(endpoint.base_url, distribution=coins, max_samples=1)
        same = place.run(endpoint.base_url, distribution=coins, max_samples=1, resume=True)
        distribution(place, "coins.json", {**COINS, "terminal": 100})
        changed = place.run(endpoint.base_url, distribution=coins, resume=True, seed=7)
        again = place.run(endpoint.base_url, distribution=coins, resume=True, seed=7)
    assert (same.code, changed.code, again.code) == (0, 0, 0)
    told = "the probabilities of distribution coins.json have changed"
    assert [told in ended.stderr for ended in (same, changed, again)] == [False, True, False]


def test_a_distribution_that_leaves_no_tool_ends_it_at_the_door(place: Workplace) -> None:
    place.dataset(PROMPTS)
    with ScriptedEndpoint([answer("4")]) as endpoint:
        only = distribution(place, "only.json", {"image_gen": 100})
        told = ends_at_the_door(place.run(endpoint.base_url, distribution=only), place)
        assert told.startswith("error: distribution 'only' leaves no toolset that works here (image_gen: ")
        told = ends_at_the_door(place.run(endpoint.base_url, distribution="reserch"), place)
        assert told.startswith("error: unknown distribution 'reserch'; choose from default, image_gen, research, ")
        wrong = distribution(place, "wrong.json", {"terminal": 101})
        assert "a number from 0 to 100" in ends_at_the_door(place.run(endpoint.base_url, distribution=wrong), place)
        assert not endpoint.requests


def test_the_distributions_are_listed_with_what_is_missing_here(place: Workplace) -> None:
    ended = place.run_words("--list_distributions")
    assert (ended.code, ended.told) == (0, "")
    assert not list(place.path.iterdir())
    lines = ended.stdout.splitlines()
    names = [line.partition(":")[0] for line in lines if line and not line.startswith(" ")]
    assert names == sorted(names)
    assert len(names) == 17
    science = lines[lines.index(next(line for line in lines if line.startswith("science:"))) :][1:8]
    chances = {words[0]: " ".join(words[2:4]) for words in (line.split() for line in science)}
    assert chances == {
        "web": "94% chance",
        "terminal": "94% chance",
        "file": "94% chance",
        "vision": "65% chance",
        "browser": "50% chance",
        "image_gen": "15% chance",
        "moa": "10% chance",
    }
    assert all("not available here: " in line for line in lines if line.startswith("  image_gen "))
    assert not [line for line in lines if line.startswith(("  terminal ", "  file ")) and "not available" in line]
