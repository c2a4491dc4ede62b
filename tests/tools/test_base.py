from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from sandboxes.base import Sandbox
from tools.base import JsonObject, ToolContext, ToolError, ToolLimits, tool


class Point(BaseModel):
    x: int
    y: int = 0


@tool("drawing", name="draw_line", limit_seconds=lambda limits: limits.max_foreground_seconds)
async def line(  # noqa: PLR0913 - one argument of each kind
    _context: ToolContext,
    *,
    title: Annotated[str, Field(description="What it says")],
    points: list[Point],
    colour: Literal["red", "blue"] = "red",
    width: Annotated[int | None, Field(ge=1)] = None,
    closed: bool = False,
    label: str = "",
    options: dict[str, Any] | None = None,
    count: int | str | None = 3,
) -> JsonObject:
    """Draw a line.

    Through all points.
    """
    return {
        "title": title,
        "points": [(point.x, point.y) for point in points],
        "colour": colour,
        "width": width,
        "closed": closed,
        "label": label,
        "options": options,
        "count": count,
    }


async def no_sandbox() -> Sandbox:
    raise AssertionError("a sandbox was asked for")


def context() -> ToolContext:
    return ToolContext(no_sandbox)


def run(**arguments: Any) -> JsonObject:
    return asyncio.run(line(context(), arguments))


def refusal(**arguments: Any) -> str:
    with pytest.raises(ToolError) as caught:
        run(**arguments)
    return str(caught.value)


def test_a_tool_is_made_of_its_function() -> None:
    assert (line.name, line.toolset) == ("draw_line", "drawing")
    assert line.description == "Draw a line.\n\nThrough all points."
    assert line.limit_seconds(ToolLimits(max_foreground_seconds=7)) == 7


def test_the_schema_holds_what_a_model_needs_and_nothing_else() -> None:
    assert line.parameters == {
        "type": "object",
        "required": ["title", "points"],
        "properties": {
            "title": {"type": "string", "description": "What it says"},  # a name, not the keyword
            "points": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["x"],
                    "properties": {"x": {"type": "integer"}, "y": {"type": "integer", "default": 0}},
                },
            },
            "colour": {"type": "string", "enum": ["red", "blue"], "default": "red"},
            "width": {"type": "integer", "minimum": 1},
            "closed": {"type": "boolean"},
            "label": {"type": "string"},
            "options": {"type": "object", "additionalProperties": True},
            "count": {"anyOf": [{"type": "integer"}, {"type": "string"}], "default": 3},
        },
    }


def test_a_tool_without_arguments() -> None:
    @tool("drawing")
    async def clear(_context: ToolContext) -> JsonObject:
        return {"cleared": True}

    assert clear.name == "clear"
    assert clear.parameters == {"type": "object", "properties": {}}
    assert asyncio.run(clear(context(), {"anything": 1})) == {"cleared": True}


def test_defaults_are_filled_in() -> None:
    assert run(title="t", points=[{"x": 1}]) == {
        "title": "t",
        "points": [(1, 0)],
        "colour": "red",
        "width": None,
        "closed": False,
        "label": "",
        "options": None,
        "count": 3,
    }


@pytest.mark.parametrize(
    ("given_argument", "understood"),
    [
        ({"closed": "true"}, {"closed": True}),
        ({"closed": "False"}, {"closed": False}),
        ({"width": "3"}, {"width": 3}),
        ({"width": 3.0}, {"width": 3}),
        ({"label": 7}, {"label": "7"}),
        ({"options": '{"a": [1]}'}, {"options": {"a": [1]}}),
        ({"points": '[{"x": "5"}]'}, {"points": [(5, 0)]}),
        ({"points": ' [{"x": 5, "y": 6, "z": 7}]\n'}, {"points": [(5, 6)]}),
        ({"width": None, "label": None, "colour": None}, {"width": None, "label": "", "colour": "red"}),
        ({"no_such_argument": 1}, {}),
        ({"title": "[1]"}, {"title": "[1]"}),  # text stays text
    ],
)
def test_what_models_write_is_understood(given_argument: JsonObject, understood: JsonObject) -> None:
    arguments = {"title": "t", "points": [{"x": 1}], **given_argument}
    plain = run(title="t", points=[{"x": 1}])
    assert run(**arguments) == {**plain, **understood}


def test_what_is_wrong_is_said_in_one_readable_line() -> None:
    assert refusal(points=[]) == "Invalid arguments for draw_line: title: Field required"
    assert refusal(titel="t", points=[]).endswith("title: Field required (unknown: titel)")
    assert "width: Input should be greater than or equal to 1" in refusal(title="t", points=[], width=0)
    assert "colour: Input should be 'red' or 'blue'" in refusal(title="t", points=[], colour="green")
    assert "points.0.x: Input should be a valid integer" in refusal(title="t", points=[{"x": "much"}])
    assert "points: Input should be a valid list" in refusal(title="t", points="[1, 2")
    assert "title: Input should be a valid string" in refusal(title=None, points=[])
    assert "\n" not in refusal()


def test_deep_json_text_is_refused() -> None:
    assert "points" in refusal(title="t", points="[" * 100_000)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(list(line.parameters["properties"])) | st.text(), JSON))
def test_any_arguments_are_taken_or_refused(arguments: JsonObject) -> None:
    try:
        checked = line.checked(arguments)
    except ToolError:
        return
    assert set(checked) == set(line.parameters["properties"])
    assert isinstance(checked["title"], str)


def test_only_async_functions_are_tools() -> None:
    def blocking(_context: ToolContext) -> JsonObject:
        return {}

    with pytest.raises(TypeError, match="tool blocking must be an async function"):
        tool("drawing")(blocking)  # type: ignore[arg-type]


def test_an_error_carries_its_details() -> None:
    error = ToolError("no such file", similar_files=["a"])
    assert (str(error), error.details) == ("no such file", {"similar_files": ["a"]})


def test_state_belongs_to_one_rollout() -> None:
    @dataclass
    class Memory:
        words: list[str] = field(default_factory=list)

    mine, yours = context(), context()
    mine.state(Memory).words.append("x")
    assert mine.state(Memory).words == ["x"]
    assert yours.state(Memory).words == []
