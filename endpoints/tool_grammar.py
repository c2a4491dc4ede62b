"""The grammar that holds a small model to its tools: whatever it writes is one well-formed call, or plain text.

Made for one request, in LLGuidance's Lark dialect, from the tools' JSON schemas. A schema may hold keywords that the
engine does not know, and a grammar with one of those would be ignored as a whole; so only the keywords listed here are
used, and what is left out is left to the tool to check.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Schema = dict[str, Any]

_PLAIN_KEYWORDS = ("type", "enum", "const", "required", "minimum", "maximum", "minLength", "maxLength", "minItems")
_SCHEMA_KEYWORDS = ("items", "additionalProperties")
_LIST_KEYWORDS = ("anyOf", "oneOf")
_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_MAX_DEPTH = 12  # deeper, and around a recursive $ref, any value goes
# Without these separators the model is held to compact JSON, which is not its habit, and writes nonsense.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_INTEGER_RANGE = {"minimum": -1_000_000_000, "maximum": 1_000_000_000}  # else a model may write zeros without end
_TEXT = r"/[\p{L}0-9\x22'*-][^\n]*(\n+[^{<`\n][^\n]*)*/"
_THINK = r'"<think>\nI will " /[^<{\n]{10,240}/ "\n</think>\n"'  # "I will": a plan, not advice to the user


def call_grammar(tools: Mapping[str, Schema], *, think: bool, text: bool) -> str:
    """Return the grammar of a reply: an optional <think> block, then a call of one of the tools, or text if allowed.

    ``tools`` maps names to the schemas of their arguments; it may be empty when text is allowed.
    """
    rules, choices = [], []
    for number, (name, schema) in enumerate(tools.items()):
        opening = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        rules.append(f"arguments{number}: %json {json.dumps(argument_schema(schema))}")
        rules.append(f'call{number}: {opening} arguments{number} "}}"')
        choices.append(f"call{number}")
    if text:
        rules.append(f"text: {_TEXT}")
        choices.append("text")
    rules.append(f"think: {_THINK}")
    rules.append(f"start: {'think ' if think else ''}({' | '.join(choices)})")
    return "\n".join(["%llguidance {}", *rules, ""])


def argument_schema(schema: Schema) -> Schema:
    """Return a schema for a call's arguments that the engine takes, with the model's own spacing."""
    plain = _plain(schema, schema.get("$defs") or schema.get("definitions") or {}, _MAX_DEPTH)
    if plain.get("type") != "object":
        plain = {"type": "object"}
    return {**plain, "x-guidance": _SPACING}


def _plain(schema: Any, definitions: Schema, depth: int) -> Schema:
    if not isinstance(schema, dict) or depth == 0:
        return {}
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _plain(definitions.get(reference.rpartition("/")[2]), definitions, depth - 1)
    plain = {key: schema[key] for key in _PLAIN_KEYWORDS if _usable(key, schema.get(key))}
    if plain.get("type") == "integer":
        plain = {**_INTEGER_RANGE, **plain}
    if isinstance(properties := schema.get("properties"), dict):
        plain["properties"] = {str(name): _plain(value, definitions, depth - 1) for name, value in properties.items()}
        plain["additionalProperties"] = False
        plain["required"] = [name for name in plain.get("required", []) if name in properties]
    for key in _SCHEMA_KEYWORDS:
        if isinstance(value := schema.get(key), dict):
            plain[key] = _plain(value, definitions, depth - 1)
    for key in _LIST_KEYWORDS:
        if isinstance(branches := schema.get(key), list) and branches:
            plain["anyOf"] = [_plain(branch, definitions, depth - 1) for branch in branches]
    return plain


def _usable(key: str, value: Any) -> bool:
    if key == "type":
        return isinstance(value, (str, list)) and _TYPES.issuperset([value] if isinstance(value, str) else value)
    if key in {"enum", "required"}:
        return isinstance(value, list) and bool(value)
    if key == "const":
        return value is not None
    return isinstance(value, (int, float)) and not isinstance(value, bool)
