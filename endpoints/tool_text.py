"""Tools for a model that has none: definitions, calls and results are folded into plain chat, and read back from text.

The small model that comes with the program does not keep to the tags of its own chat template, so it is shown tools in
a form it does keep to: signatures in the system turn, a call as one JSON object, a result as a <tool_response> block.
Pure; in front of the prompt nothing varies from one rollout to the next, so the engine works that part out once.

Rules that change what the model may say, because small models do not plan or stop by themselves:

* It thinks first, in a <think> block, which comes back as ``reasoning_content``: what it will do, and then it makes a
  call, or that no tool is needed, or what it found, and then it answers. Not with reasoning_effort none.
* After ``MAX_CALLS`` calls since the prompt, or once it has made the same call twice, it may only write text. So it may
  when a conversation with calls offers no tools any more: it would go on calling.
* Tools of ``TOO_HARD`` are not offered, and of a tool with required arguments only those: it gets lost in the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from endpoints.chat_request import ChatMessage, ChatRequest, Function, JsonObject

MAX_CALLS = 8
TOO_HARD = frozenset({"process"})
_DEFAULT_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."  # what it was trained with
_INSTRUCTIONS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

To call a function, answer with one JSON object holding the function name and its arguments, and nothing else:
{{"name": <function-name>, "arguments": <args-json-object>}}
Work step by step: before each call, say in one sentence between <think> and </think> what you will do. When all steps \
are done, answer in plain text, with what the functions returned."""
_THINK = re.compile(r"\A<think>\n?(.*?)\n?</think>\n?", re.DOTALL)
_CALL = re.compile(r'\A\{"name": ("(?:[^"\\]|\\.)*"), "arguments": (.*)\Z', re.DOTALL)


@dataclass(frozen=True)
class Offer:
    """What the model may write next; see ``tool_grammar.call_grammar``."""

    tools: dict[str, JsonObject]  # name → schema of the arguments
    text: bool
    step: int


def fold(request: ChatRequest) -> list[JsonObject]:
    """Return the conversation as system, user and assistant turns of text alone."""
    system = [message.text for message in request.messages if message.role in {"system", "developer"}]
    if shown := _shown(request.offered):
        signatures = "\n".join(_signature(request.offered[name], schema) for name, schema in shown.items())
        system = [*(system or [_DEFAULT_SYSTEM]), _INSTRUCTIONS.format(tools=signatures)]
    folded = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    for message in request.messages:
        if message.role == "user":
            _add(folded, "user", message.text)
        elif message.role == "tool":
            _add(folded, "user", f"<tool_response>\n{message.text}\n</tool_response>")
        elif message.role == "assistant":
            _add(folded, "assistant", _said(message))
    return folded


def offer(request: ChatRequest) -> Offer:
    """Work out what the model may write next."""
    since_prompt = _since_prompt(request.messages)
    tools = {} if _must_stop(since_prompt) else _shown(request.offered)
    replies = sum(message.role == "assistant" for message in since_prompt)
    step = 0 if request.reasoning_effort == "none" or not request.tools else replies + 1
    return Offer(tools, text=not request.wants_call, step=step)


def unfold(text: str, *, call_id: str, cut: bool) -> tuple[JsonObject, str]:
    """Read the model's text as (assistant message, finish_reason). ``cut``: it ended at the token limit.

    A call that was cut keeps its broken arguments, as with any OpenAI-compatible endpoint, and finish_reason length.
    """
    message: JsonObject = {"role": "assistant", "content": None}
    thought = _THINK.match(text)
    if thought:
        message["reasoning_content"] = thought[1].strip()
        text = text[thought.end() :]
    text = text.strip()
    call = _CALL.match(text)
    if call is None:
        message["content"] = text
        return message, "length" if cut else "stop"
    arguments = call[2] if cut else call[2].removesuffix("}")
    function = {"name": json.loads(call[1]), "arguments": arguments}
    message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
    return message, "length" if cut else "tool_calls"


def _add(folded: list[JsonObject], role: str, text: str) -> None:
    """Append a turn; neighbours of one role become one turn, as many chat templates want them to alternate."""
    if folded and folded[-1]["role"] == role:
        folded[-1]["content"] += "\n" + text
    else:
        folded.append({"role": role, "content": text})


def _shown(functions: Mapping[str, Function]) -> dict[str, JsonObject]:
    """Return the schemas of the arguments, without what the model only gets lost in."""
    within_reach = {name: function for name, function in functions.items() if name not in TOO_HARD} or functions
    return {name: _within_reach(function.parameters or {}) for name, function in within_reach.items()}


def _within_reach(schema: JsonObject) -> JsonObject:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list) or not required:
        return schema
    return {**schema, "properties": {name: value for name, value in properties.items() if name in required}}


def _signature(function: Function, schema: JsonObject) -> str:
    shown = {"name": function.name, "description": function.description or "", "parameters": schema}
    return json.dumps({"type": "function", "function": shown}, ensure_ascii=False)


def _said(message: ChatMessage) -> str:
    """Return an assistant message as the text it was made of."""
    thought = f"<think>\n{message.reasoning_content}\n</think>" if message.reasoning_content else ""
    calls = [
        f'{{"name": {json.dumps(call.function.name)}, "arguments": {call.function.arguments_text}}}'
        for call in message.tool_calls or []
    ]
    return "\n".join(part for part in (thought, message.text, *calls) if part)


def _since_prompt(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    start = max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)
    return messages[start + 1 :]


def _must_stop(since_prompt: Sequence[ChatMessage]) -> bool:
    calls = [
        (call.function.name, call.function.arguments_text)
        for message in since_prompt
        for call in message.tool_calls or []
    ]
    return len(calls) >= MAX_CALLS or len(set(calls)) < len(calls)
