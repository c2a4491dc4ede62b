"""Tools for a model that has none: definitions, calls and results are folded into plain chat, and read back from text.

The small model that comes with the program does not keep to the tags of its own chat template, so it is shown tools in
a form it does keep to: signatures in the system turn, a call as one JSON object, a result as a <tool_response> block.
Pure; in front of the prompt nothing varies from one rollout to the next, so the engine works that part out once.

Two rules change what the model may say:

* Thinking first: on the first turn after the prompt it must write one sentence in a <think> block, which comes back as
  ``reasoning_content``. Not with reasoning_effort none.
* Stop rule: after ``MAX_CALLS`` calls since the prompt, or once it has made the same call twice, it may only write
  text. Small models do not stop by themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

JsonObject = dict[str, Any]

MAX_CALLS = 8
_DEFAULT_SYSTEM = "You are a helpful assistant with a Linux computer."
_INSTRUCTIONS = """\
# Tools

{tools}

You do the user's task yourself, one step after the other, by calling tools. To call one, answer with one JSON object:
{example}
Its result comes back in <tool_response></tool_response>. Before the first call, say in one sentence between <think> and \
</think> what you will do. When the whole task is done, answer the user in plain text with what the tools returned."""
_NUDGE = "Go on with the next step of the task; if all is done, answer it."
_THINK = re.compile(r"\A<think>\n?(.*?)\n?</think>\n?", re.DOTALL)
_CALL = re.compile(r'^\{"name": ("(?:[^"\\]|\\.)*"), "arguments": (.*)\Z', re.DOTALL | re.MULTILINE)


class BadRequestError(ValueError):
    """The request makes no sense; the message says why."""


@dataclass(frozen=True)
class Offer:
    """What the model may write next."""

    tools: dict[str, JsonObject]  # name → schema of the arguments; empty: no call
    text: bool
    think: bool


def fold(messages: Sequence[JsonObject], tools: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the conversation as system, user and assistant turns of text alone. Raises BadRequestError."""
    system = [_text(message) for message in messages if message.get("role") in {"system", "developer"}]
    if tools:
        signatures = "\n".join(_signature(tool["function"]) for tool in tools)
        system = [*(system or [_DEFAULT_SYSTEM]), _INSTRUCTIONS.format(tools=signatures, example=_example(tools[0]["function"]))]
    folded = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    for message in messages:
        match message.get("role"):
            case "system" | "developer":
                continue
            case "user":
                _add(folded, "user", _text(message))
            case "tool":
                _add(folded, "user", f"<tool_response>\n{_text(message)}\n</tool_response>\n{_NUDGE}")
            case "assistant":
                _add(folded, "assistant", _said(message))
            case role:
                raise BadRequestError(f"unknown role {role!r}")
    return folded


def offer(request: JsonObject) -> Offer:
    """Work out what the model may write next: the request's tools and tool_choice, and the two rules above."""
    tools = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in request.get("tools") or []}
    choice = request.get("tool_choice")
    if isinstance(choice, dict):
        wanted = (choice.get("function") or {}).get("name")
        if wanted not in tools:
            raise BadRequestError(f"tool_choice names {wanted!r}, which is not among the tools")
        tools = {wanted: tools[wanted]}
    since_prompt = _since_prompt(request["messages"])
    think = bool(tools) and not any(message.get("role") == "assistant" for message in since_prompt)
    if request.get("reasoning_effort") == "none":
        think = False
    if choice == "none" or _must_stop(since_prompt):
        tools = {}
    forced = bool(tools) and (choice == "required" or isinstance(choice, dict))
    return Offer(tools, not forced, think)


def unfold(text: str, *, call_id: str, cut: bool) -> tuple[JsonObject, str]:
    """Read the model's text as (assistant message, finish_reason). ``cut``: it ended at the token limit.

    A call that was cut keeps its broken arguments, as with any OpenAI-compatible endpoint, and finish_reason length.
    """
    message: JsonObject = {"role": "assistant", "content": None}
    thought = _THINK.match(text)
    if thought:
        message["reasoning_content"] = thought[1].strip()
        text = text[thought.end() :]
    call = _CALL.search(text.rstrip())
    message["content"] = text[: call.start() if call else None].strip() or None
    if call is None:
        return message, "length" if cut else "stop"
    arguments = call[2]
    if not cut:
        arguments = arguments.removesuffix("}")
    function = {"name": json.loads(call[1]), "arguments": arguments}
    message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
    return message, "length" if cut else "tool_calls"


def _add(folded: list[JsonObject], role: str, text: str) -> None:
    """Append a turn; neighbours of one role become one turn, as many chat templates want them to alternate."""
    if folded and folded[-1]["role"] == role:
        folded[-1]["content"] += "\n" + text
    else:
        folded.append({"role": role, "content": text})


def _signature(function: JsonObject) -> str:
    """One tool in the shortest form a model understands: the whole schemas would cost it twenty seconds of reading."""
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties") or {}
    required = parameters.get("required") or []
    arguments = ", ".join(
        f"{name}{'' if name in required else '?'}: {_type(schema)}" for name, schema in properties.items()
    )
    return f"{function['name']}({arguments}): {' '.join(str(function.get('description') or '').split())}"


def _example(function: JsonObject) -> str:
    required = (function.get("parameters") or {}).get("required") or []
    return _call_text(function["name"], json.dumps(dict.fromkeys(required, "...")))


def _call_text(name: Any, arguments: str) -> str:
    return f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'


def _type(schema: Any) -> str:
    if not isinstance(schema, dict):
        return "any"
    if isinstance(schema.get("enum"), list):
        return "|".join(json.dumps(value) for value in schema["enum"])
    return str(schema.get("type", "any"))


def _said(message: JsonObject) -> str:
    """Return an assistant message as the text it was made of."""
    calls = [call.get("function") or {} for call in message.get("tool_calls") or []]
    lines = [_text(message)] if message.get("content") else []
    for function in calls:
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        lines.append(_call_text(function.get("name"), text or "{}"))
    return "\n".join(lines)


def _since_prompt(messages: Sequence[JsonObject]) -> list[JsonObject]:
    start = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    return list(messages[start + 1 :])


def _must_stop(since_prompt: Sequence[JsonObject]) -> bool:
    calls = [
        (function.get("name"), str(function.get("arguments")))
        for message in since_prompt
        for function in (call.get("function") or {} for call in message.get("tool_calls") or [])
    ]
    return len(calls) >= MAX_CALLS or len(set(calls)) < len(calls)


def _text(message: JsonObject) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    raise BadRequestError("content must be text, a list of parts, or null")
