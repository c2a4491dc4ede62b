from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolsets import (
    DISTRIBUTIONS,
    KNOWN_TOOLS,
    TOOLSETS,
    Distribution,
    DistributionError,
    Toolset,
    draw,
    load_distribution,
    tools_of,
)

SEVEN = {"web", "vision", "image_gen", "terminal", "file", "moa", "browser"}


def some(**probabilities: float) -> Distribution:
    return Distribution("some", "", probabilities)


def written(folder: Path, content: Any) -> str:
    path = folder / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def test_every_tool_of_a_toolset_is_known_and_every_known_tool_has_a_toolset() -> None:
    assert set(tools_of(TOOLSETS)) == set(KNOWN_TOOLS)
    assert all(set(toolset.tools) <= set(KNOWN_TOOLS) for toolset in TOOLSETS.values())
    assert len(KNOWN_TOOLS) == len(set(KNOWN_TOOLS)) == 23


def test_composites_resolve_in_the_catalogue_order_without_duplicates() -> None:
    assert tools_of(["file"]) == ("read_file", "write_file", "patch", "search_files")
    assert tools_of(["file", "terminal", "file"]) == (
        "terminal",
        "process",
        "read_file",
        "write_file",
        "patch",
        "search_files",
    )
    assert tools_of(["debugging", "search"])[:4] == ("web_search", "web_extract", "terminal", "process")
    assert tools_of(["safe"]) == ("web_search", "web_extract", "vision_analyze", "image_generate")
    assert len(tools_of(["browser"])) == 10
    assert tools_of([]) == ()


@pytest.mark.parametrize("everything", ["all", "*"])
def test_all_is_everything(everything: str) -> None:
    assert tools_of([everything]) == KNOWN_TOOLS


def test_cycles_do_no_harm() -> None:
    toolsets = {"a": Toolset("", ("terminal",), ("b",)), "b": Toolset("", ("todo",), ("a", "b"))}
    assert tools_of(["b"], toolsets) == ("terminal", "todo")


def test_an_unknown_toolset_is_named() -> None:
    with pytest.raises(ValueError, match="unknown toolset 'teminal'; choose from web, "):
        tools_of(["web", "teminal"])


def test_the_seventeen_distributions() -> None:
    assert len(DISTRIBUTIONS) == 17
    assert all(name == distribution.name for name, distribution in DISTRIBUTIONS.items())
    assert all(set(distribution.probabilities) <= SEVEN for distribution in DISTRIBUTIONS.values())
    assert DISTRIBUTIONS["default"].probabilities == dict.fromkeys(SEVEN, 100)
    assert DISTRIBUTIONS["balanced"].probabilities == dict.fromkeys(SEVEN, 50)
    assert DISTRIBUTIONS["terminal_only"].probabilities == {"terminal": 100, "file": 100}
    # a sum for each, so that a slip of the pen shows
    assert {name: sum(distribution.probabilities.values()) for name, distribution in DISTRIBUTIONS.items()} == {
        "default": 700,
        "image_gen": 290,
        "research": 260,
        "science": 422,
        "development": 260,
        "safe": 320,
        "balanced": 350,
        "minimal": 100,
        "terminal_only": 200,
        "terminal_web": 300,
        "creative": 210,
        "reasoning": 140,
        "browser_use": 250,
        "browser_only": 100,
        "browser_tasks": 124,
        "terminal_tasks": 426,
        "mixed_tasks": 341,
    }


def test_a_draw_is_known_for_ever() -> None:
    # resumed runs repeat the draws of older versions: these values must not change
    balanced = DISTRIBUTIONS["balanced"]
    assert [draw(balanced, 0, key) for key in ("a", "b", "c")] == [
        ("file", "image_gen", "web"),
        ("file", "image_gen", "vision", "web"),
        ("browser", "image_gen", "vision", "web"),
    ]


@given(st.integers(), st.text())
def test_a_draw_depends_on_seed_and_sample_alone(seed: int, key: str) -> None:
    forwards = some(web=50, terminal=50, file=50, moa=50)
    backwards = some(moa=50, file=50, terminal=50, web=50)
    assert draw(forwards, seed, key) == draw(forwards, seed, key) == draw(backwards, seed, key)


@given(st.integers(), st.text())
def test_certain_toolsets_always_come_and_impossible_ones_never(seed: int, key: str) -> None:
    drawn = draw(some(web=100, terminal=0, moa=50), seed, key)
    assert "web" in drawn
    assert "terminal" not in drawn


def test_toolsets_are_flipped_on_their_own_at_their_rate() -> None:
    distribution = some(web=90, terminal=10, file=50)
    draws = [draw(distribution, 7, str(sample)) for sample in range(4000)]
    counts = Counter(name for drawn in draws for name in drawn)
    assert counts["web"] / 4000 == pytest.approx(0.9, abs=0.08)  # the fallback adds some
    assert counts["terminal"] / 4000 == pytest.approx(0.1, abs=0.03)
    assert counts["file"] / 4000 == pytest.approx(0.5, abs=0.04)
    both = sum(1 for drawn in draws if {"file", "terminal"} <= set(drawn))
    assert both / 4000 == pytest.approx(0.05, abs=0.02)


def test_another_seed_is_another_draw() -> None:
    balanced = DISTRIBUTIONS["balanced"]
    assert any(draw(balanced, 0, str(sample)) != draw(balanced, 1, str(sample)) for sample in range(5))


def test_when_nothing_comes_up_the_likeliest_is_taken() -> None:
    distribution = some(web=0.1, terminal=0.2, file=0.1)
    draws = {draw(distribution, 0, str(sample)) for sample in range(50)}
    assert ("terminal",) in draws
    assert () not in draws


def test_toolsets_that_always_come_change_nothing_of_the_draw() -> None:
    plain = DISTRIBUTIONS["balanced"]
    more = replace(plain, always=("mcp_a", "mine"))
    for sample in range(20):
        assert draw(more, 0, str(sample)) == (*draw(plain, 0, str(sample)), "mcp_a", "mine")


def test_a_distribution_file_may_name_added_toolsets(tmp_path: Path) -> None:
    path = written(tmp_path, {"toolsets": {"mcp_a": 50}})
    with pytest.raises(DistributionError, match="unknown toolset 'mcp_a'; choose from web"):
        load_distribution(path)
    added = {**TOOLSETS, "mcp_a": Toolset("", ("mcp_a_x", "mcp_a_b"))}
    assert load_distribution(path, added).probabilities == {"mcp_a": 50}
    assert tools_of(["mcp_a", "todo"], added) == ("todo", "mcp_a_b", "mcp_a_x")


def test_half_a_surrogate_pair_in_a_key_is_no_trouble() -> None:
    assert draw(DISTRIBUTIONS["minimal"], 0, "\ud800") == ("web",)


def test_a_distribution_is_found_by_its_name() -> None:
    assert load_distribution("research") is DISTRIBUTIONS["research"]


def test_a_distribution_file(tmp_path: Path) -> None:
    path = written(tmp_path, '\ufeff{"description": "Mine", "toolsets": {"terminal": 100, "debugging": 2.5, "all": 0}}')
    assert load_distribution(path) == Distribution("mine", "Mine", {"terminal": 100, "debugging": 2.5, "all": 0})
    path = written(tmp_path, {"name": "yours", "probabilities": {"web": 1}})
    assert load_distribution(path) == Distribution("yours", "", {"web": 1})


@pytest.mark.parametrize("name", ["reserch", "", "web", "x" * 1000, "tests"])
def test_an_unknown_name_lists_the_choices(name: str) -> None:
    with pytest.raises(DistributionError) as caught:
        load_distribution(name)
    assert "choose from default, image_gen, research" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["no/such.json", "missing.json", "/"])
def test_an_unreadable_file_is_named_with_the_reason(path: str) -> None:
    with pytest.raises(DistributionError, match=rf"distribution {path}: (No such file or directory|Is a directory)"):
        load_distribution(path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not JSON: .*line 1 column 2"),
        ("[" * 100_000, "not JSON"),
        ("[]", "must be a JSON object like"),
        ({}, '"toolsets" must be an object'),
        ({"toolsets": {}}, '"toolsets" must be an object'),
        ({"toolsets": ["web"]}, '"toolsets" must be an object'),
        ({"toolset": {"web": 1}}, "unknown key 'toolset'"),
        ({"toolsets": {"web": 1}, "description": 7}, "'description' must be text"),
        ({"toolsets": {"webb": 1}}, "unknown toolset 'webb'; choose from web, search, vision"),
        ({"toolsets": {"web": 101}}, "'web' must be a number from 0 to 100, not 101"),
        ({"toolsets": {"web": -1}}, "from 0 to 100, not -1"),
        ({"toolsets": {"web": "50"}}, "from 0 to 100, not '50'"),
        ({"toolsets": {"web": True}}, "from 0 to 100, not True"),
        ({"toolsets": {"web": None}}, "from 0 to 100, not None"),
        ('{"toolsets": {"web": NaN}}', "from 0 to 100, not nan"),
        ('{"toolsets": {"web": 1e999}}', "from 0 to 100, not inf"),
        ({"toolsets": {"web": 0, "file": 0}}, "every probability is 0"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, content: Any, complaint: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(DistributionError, match=complaint) as caught:
        load_distribution(path)
    assert str(caught.value).startswith(f"distribution {path}: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bytes.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DistributionError, match="not JSON"):
        load_distribution(str(path))
