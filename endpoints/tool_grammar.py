"""The grammar that holds a small model to its tools: whatever it writes is one well-formed call, or plain text.

Made for one request, in LLGuidance's Lark dialect, from the tools' JSON schemas. A schema may hold keywords that the
engine does not know, and a grammar with one of those would be ignored as a whole; so only the keywords listed here are
used, and what is left out is left to the tool to check.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
# Text: no line begins with <, or with { and a quotation mark, where a made-up result or a sham call would be.
_TEXT = r"/[\p{L}0-9\x22\x2f'*#$(.-][^\n]*(\n+([^{<`\n][^\n]*|```\w*|\{([^\x22\n][^\n]*)?))*\n*/"
# How a thought begins steers what follows it. These are the model's own beginnings: where a step is left, it is most
# likely to say "I"; where none is, "The" or "Now". "first" and "now" keep it from saying the same thing again.
_PLANS = {True: r'"<think>\nI will first " sentence', False: r'"<think>\nI will now " sentence'}
_FINDINGS = {
    True: r'"<think>\nNo tool is needed.\n</think>\n"',
    False: r'"<think>\n" ("The " | "Now I know ") sentence',
}
_SENTENCE = r'/[^<{\n]{5,160}/ "\n</think>\n"'


def call_grammar(tools: Mapping[str, Schema], *, step: int, text: bool) -> str:
    """Return the grammar of a reply: perhaps a <think> block, then a call of one of the tools, or text if it will do.

    ``tools`` maps names to the schemas of their arguments; without any, the reply is text. ``step`` counts the replies
    since the prompt, this one included; by what it thinks the model decides between a call and an answer. Step 0 does
    not think.
    """
    rules = [f"text: {_TEXT}", f"sentence: {_SENTENCE}"]
    for number, (name, schema) in enumerate(tools.items()):
        opening = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        rules.append(f"arguments{number}: %json {json.dumps(argument_schema(schema))}")
        rules.append(f'call{number}: {opening} arguments{number} "}}"')
    call = f"({' | '.join(f'call{number}' for number in range(len(tools)))})" if tools else ""
    answer = "text" if text or not tools else ""
    choices = [call, answer]
    if step:
        plan, finding = _PLANS[step == 1], _FINDINGS[step == 1]
        choices = [call and f"{plan} {call}", answer and f"{finding} {answer}"]
    rules.append(f"start: {' | '.join(choice for choice in choices if choice)}")
    return "\n".join(["%llguidance {}", *rules, ""])


def argument_schema(schema: Schema) -> Schema:
    """Return a schema for a call's arguments that the engine takes, with the model's own spacing."""
    plain = _plain(schema, schema.get("$defs") or schema.get("definitions") or {}, _MAX_DEPTH)
    if plain.get("type") != "object":
        plain = {"type": "object"}
    return {**plain, "x-guidance": _SPACING}


def _plain(schema: Any, definitions: Any, depth: int) -> Schema:
    if not isinstance(schema, dict) or depth == 0:
        return {}
    reference = schema.get("$ref")
    if isinstance(reference, str) and isinstance(definitions, dict):
        return _plain(definitions.get(reference.rpartition("/")[2]), definitions, depth - 1)
    plain = {key: schema[key] for key in _PLAIN_KEYWORDS if _usable(key, schema.get(key))}
    if plain.get("type") == "integer":
        plain = {**_INTEGER_RANGE, **plain}
    if isinstance(properties := schema.get("properties"), dict):
        plain["properties"] = {str(name): _plain(value, definitions, depth - 1) for name, value in properties.items()}
        plain["additionalProperties"] = False
        plain["required"] = [name for name in plain.get("required", []) if name in properties]
    for key in _SCHEMA_KEYWORDS:
        if key not in plain and isinstance(value := schema.get(key), dict):
            plain[key] = _plain(value, definitions, depth - 1)
    for key in _LIST_KEYWORDS:
        if isinstance(branches := schema.get(key), list) and branches:
            plain["anyOf"] = [_plain(branch, definitions, depth - 1) for branch in branches]
    return plain


def _usable(key: str, value: Any) -> bool:
    match key:
        case "type":
            names = [value] if isinstance(value, str) else value
            return isinstance(names, list) and bool(names) and all(name in _TYPES for name in names)
        case "required":
            return isinstance(value, list) and all(isinstance(name, str) for name in value)
        case "enum":
            return isinstance(value, list) and bool(value)
        case "const":
            return value is not None
        case "minimum" | "maximum":
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        case _:
            return isinstance(value, int) and not isinstance(value, bool) and value >= 0
