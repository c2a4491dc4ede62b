from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endpoints.tool_grammar import argument_schema, call_grammar

Json = dict[str, Any]
COMMAND: Json = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


def start_of(tools: dict[str, Json], step: int, text: bool) -> str:
    return call_grammar(tools, step=step, text=text).rstrip("\n").rpartition("\n")[2]


def test_without_thinking_it_is_a_call_or_text() -> None:
    assert start_of({"terminal": COMMAND}, 0, text=True) == "start: (call0) | text"
    assert start_of({"terminal": COMMAND}, 0, text=False) == "start: (call0)"


def test_the_first_step_plans_a_call_or_says_that_no_tool_is_needed() -> None:
    plan, direct = r'"<think>\nI will first " sentence (call0)', r'"<think>\nNo tool is needed.\n</think>\n" text'
    assert start_of({"terminal": COMMAND}, 1, text=True) == f"start: {plan} | {direct}"
    assert start_of({"terminal": COMMAND}, 1, text=False) == f"start: {plan}"


def test_a_later_step_plans_a_call_or_says_what_it_found() -> None:
    plan, found = r'"<think>\nI will now " sentence (call0)', r'"<think>\n" ("The " | "Now I know ") sentence'
    assert start_of({"terminal": COMMAND}, 3, text=True) == f"start: {plan} | {found} text"
    assert start_of({"terminal": COMMAND}, 3, text=False) == f"start: {plan}"
    assert start_of({}, 3, text=True) == f"start: {found} text"


def test_without_tools_it_is_text() -> None:
    assert start_of({}, 0, text=True) == start_of({}, 0, text=False) == "start: text"


def test_one_rule_a_tool() -> None:
    grammar = call_grammar({"terminal": COMMAND, 'odd"name': {}}, step=0, text=True)
    assert grammar.startswith("%llguidance {}\n")
    assert r'call0: "{\"name\": \"terminal\", \"arguments\": " arguments0 "}"' in grammar
    assert r'call1: "{\"name\": \"odd\\\"name\", \"arguments\": " arguments1 "}"' in grammar
    assert grammar.endswith("\nstart: (call0 | call1) | text\n")


def text_rule() -> re.Pattern[str]:
    grammar = call_grammar({}, step=0, text=True)
    rule = next(line for line in grammar.split("\n") if line.startswith("text: "))
    return re.compile(rule.removeprefix("text: /").removesuffix("/").replace(r"\p{L}", "A-Za-z\u00c0-\uffff"))


@pytest.mark.parametrize("text", ["Done.", "42", "'x'", 'It is:\n\n```json\n{\n  "a": 1\n}\n```', "a\n{ x }\n"])
def test_text_that_may_be_written(text: str) -> None:
    assert text_rule().fullmatch(text)


@pytest.mark.parametrize("text", ["", " x", '{"name": "terminal"', 'Now:\n{"name": "terminal"', "So:\n<tool_response>"])
def test_text_that_may_not(text: str) -> None:
    assert not text_rule().fullmatch(text)


def test_a_schema_is_closed_and_spaced_as_the_model_writes() -> None:
    schema = argument_schema(COMMAND)
    assert schema.pop("x-guidance") == {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    assert schema == {**COMMAND, "additionalProperties": False}


def test_what_the_engine_does_not_know_is_left_out() -> None:
    odd = {
        "type": "string",
        "pattern": "(?<=x)y",
        "format": "uri",
        "not": {"const": "z"},
        "description": "d",
        "default": "e",
        "title": "t",
        "enum": ["a", "b"],
    }
    schema = argument_schema({"type": "object", "properties": {"x": odd}, "$schema": "s", "patternProperties": {}})
    assert schema["properties"] == {"x": {"type": "string", "enum": ["a", "b"]}}
    assert "patternProperties" not in schema


def test_integers_have_an_end() -> None:
    properties = {"a": {"type": "integer"}, "b": {"type": "integer", "minimum": 1, "maximum": 9}}
    schema = argument_schema({"type": "object", "properties": properties})
    assert schema["properties"]["a"] == {"type": "integer", "minimum": -1_000_000_000, "maximum": 1_000_000_000}
    assert schema["properties"]["b"] == {"type": "integer", "minimum": 1, "maximum": 9}


def test_references_are_followed_and_rings_are_cut() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    schema = argument_schema(
        {"type": "object", "properties": {"first": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}}
    )
    assert schema["properties"]["first"]["properties"]["next"]["type"] == "object"
    assert "$ref" not in json.dumps(schema)


def test_lists_and_choices() -> None:
    items = {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "minItems": 1}
    schema = argument_schema({"type": "object", "properties": {"x": items, "y": {"oneOf": [{"type": "boolean"}]}}})
    assert schema["properties"]["x"] == items
    assert schema["properties"]["y"] == {"anyOf": [{"type": "boolean"}]}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "string"},
        {"type": "odd"},
        {"type": "object", "properties": [], "required": 3},
        {"type": "object", "properties": {"a": 1, "b": {"type": 2, "enum": 3, "minimum": "x"}}, "required": ["c", 4]},
        {"type": [], "$defs": 3},
    ],
)
def test_a_schema_that_makes_no_sense_is_no_failure(schema: Json) -> None:
    assert argument_schema(schema)["type"] == "object"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "properties", "items", "anyOf", "$ref", "required", "enum", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=3))
def test_any_schema_makes_a_grammar_of_whole_lines(schema: Json) -> None:
    grammar = call_grammar({"a\nb": schema, "c": COMMAND}, step=2, text=True)
    arguments = [line for line in grammar.split("\n") if line.startswith("arguments")]
    assert [json.loads(line.partition("%json ")[2])["type"] for line in arguments] == ["object", "object"]
