r"""Messages become ShareGPT conversations, the form Hermes models are trained on; and such turns are read back.

Pure: no file, no clock. What goes in comes out again for a plain parser that splits on the tags:

* inside JSON (calls, results, tool definitions) tags become ``<\/tool_call>`` and ``\u003ctool_call>``, which every
  JSON parser turns back into what they were;
* in thoughts and text a backslash goes behind the ``<`` (``<\/think>``, ``<\think>``); taking one away restores it.

Lone surrogates and NULs are replaced by U+FFFD everywhere, so that every string is valid UTF-8 and fits any database.

Every gpt turn carries ``tool_calls``, ``[]`` where it makes none, and no other turn has the key. This mix, in each row,
makes ``datasets`` take the turns for JSON objects from a file's first block on, and so read any file. With the key in
every turn, or only where calls are made, a file whose first call comes late changes its type half-way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, repeat
from typing import Any

from rollout.messages import AssistantMessage, Message, ToolCall, ToolDefinition, ToolMessage, UserMessage
from rollout.texts import clean_text, parse_json

Turn = dict[str, Any]

# Models trained on this format know these very words.
_SYSTEM = """\
You are a function calling AI model. You are provided with function signatures within <tools> </tools> XML tags. \
You may call one or more functions to assist with the user query. If available tools are not relevant in assisting \
with user query, just respond in natural conversational language. Don't make assumptions about what values to plug \
into functions. After calling & executing the functions, you will be provided with function results within \
<tool_response> </tool_response> XML tags. Here are the available tools:
<tools>
%s
</tools>
For each function call return a JSON object, with the following pydantic model json schema for each:
{'title': 'FunctionCall', 'type': 'object', 'properties': {'name': {'title': 'Name', 'type': 'string'}, \
'arguments': {'title': 'Arguments', 'type': 'object'}}, 'required': ['name', 'arguments']}
Each function call should be enclosed within <tool_call> </tool_call> XML tags.
Example:
<tool_call>
{'name': <function-name>,'arguments': <args-dict>}
</tool_call>"""

_ENCODER = json.JSONEncoder(ensure_ascii=False)
_ESCAPED_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")
_STRING_OR_NO_NUMBER = re.compile(r'"(?:[^"\\]|\\.)*"|-?Infinity|NaN')
_TAG_IN_JSON = re.compile(r"<(/?)(think|tool_call|tool_response|tools)>", re.IGNORECASE)
_TAG_IN_TEXT = re.compile(r"<(\\*/?(?:think|tool_call|tool_response)>)", re.IGNORECASE)
_THOUGHT_OPENS = "<think>"
_MAX_SEARCHES = 100  # of a text's thoughts in its native reasoning; both may be long
_THINK_TAG = re.compile(r"<(/?)(think|REASONING_SCRATCHPAD)>", re.IGNORECASE)
_BLOCK_START = {tag: re.compile(rf"<{tag}>\s*(?=\{{)") for tag in ("tool_call", "tool_response")}


def conversations(prompt: str, messages: Sequence[Message], definitions: Sequence[ToolDefinition]) -> list[Turn]:
    """Return the turns ``{"from", "value"}`` of one rollout; gpt turns also have ``tool_calls``.

    ``messages`` are the live ones without any prefill; the first one is left out when it is the user's, because the
    dataset's ``prompt`` stands for it.
    """
    turns: list[Turn] = [
        {"from": "system", "value": system_prompt(definitions)},
        {"from": "human", "value": clean_text(prompt)},
    ]
    calls: tuple[ToolCall, ...] = ()
    live = messages[1:] if messages and isinstance(messages[0], UserMessage) else messages
    for kind, group in groupby(live, key=type):
        if kind is ToolMessage:
            turns.append(_tool_turn(calls, [message for message in group if isinstance(message, ToolMessage)]))
            continue
        for message in group:
            if isinstance(message, AssistantMessage):
                turns.append(_gpt_turn(message))
                calls = message.tool_calls
            else:
                turns.append({"from": "human", "value": clean_text(message.content)})
    return turns


def system_prompt(definitions: Sequence[ToolDefinition]) -> str:
    """Return the function-calling instruction with these tools in it."""
    tools = [
        {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "required": None}
        for tool in definitions
    ]
    return _SYSTEM % _tagless_json(tools)


def json_text(value: Any) -> str:
    """Return ``value`` as one line of strict JSON, not escaped to ASCII, with every string and key cleaned.

    What JSON has no number for (NaN, infinities) becomes null.
    """
    text = _ENCODER.encode(value)
    if "\\u0000" in text:
        text = _ESCAPED_NUL.sub("\\1\ufffd", text)
    if "NaN" in text or "Infinity" in text:
        text = _STRING_OR_NO_NUMBER.sub(lambda found: found[0] if found[0][0] == '"' else "null", text)
    return clean_text(text)


def split_thinking(content: str, *, native: str = "") -> tuple[str, list[str]]:
    """Take the ``<think>`` and ``<REASONING_SCRATCHPAD>`` blocks out of a reply: (the text without them, the thoughts).

    A block that opens the reply and never ends is all thought, and so is what stands before a ``</think>`` that was
    never opened (templates that open the block in the prompt make such replies). Where the reasoning came apart from
    the text (``native``), a block behind the text's beginning is a thought only where it repeats some of that. Tags in
    backticks are what the text is about; they are text, as other stray tags are.
    """
    texts, thoughts = [], []
    opened: re.Match[str] | None = None
    end, begun = 0, False  # of what is taken; whether there is text before it
    for tag in _THINK_TAG.finditer(content):
        if _is_quoted(content, tag.start(), tag.end()):
            continue
        if opened is None:
            if not tag[1]:
                opened = tag
            elif not end and not native and tag[2].lower() == "think":
                thoughts.append(content[: tag.start()])
                end = tag.end()
        elif tag[1] and tag[2].lower() == opened[2].lower():
            thought = content[opened.end() : tag.start()].strip()
            begun = begun or bool(content[end : opened.start()].strip())
            if native and begun and (len(thoughts) >= _MAX_SEARCHES or thought not in native):
                break
            if not _is_quoted(content, opened.start(), tag.end()):
                texts.append(content[end : opened.start()])
                thoughts.append(thought)
                end = tag.end()
            opened = None
    if opened and not content[: opened.start()].strip():
        return "", [content[opened.end() :].strip()]
    texts.append(content[end:])
    return "".join(texts).strip(), [thought for thought in map(str.strip, thoughts) if thought]


def _is_quoted(text: str, start: int, end: int) -> bool:
    return text[max(start - 1, 0) : start] == "`" == text[end : end + 1]


def thinking(message: AssistantMessage) -> str:
    """Return all the reasoning of one answer, native first, each piece once, "" when there is none."""
    return _thinking_and_text(message)[0]


def turn_thinks(turn: Turn) -> bool:
    """Tell whether a saved gpt turn shows reasoning."""
    value = str(turn.get("value", ""))
    if value.startswith(_THOUGHT_OPENS):  # as every turn of ours does; one search is enough to see a thought there
        end = value.find("</think>")
        if end >= 0 and value[len(_THOUGHT_OPENS) : end].strip():
            return True
    return any(split_thinking(value)[1])


def called_tools(turn: Turn) -> list[str]:
    """Return the names a saved gpt turn calls, in order; rows of the original have them in the text alone."""
    return [name for _, name in saved_calls(turn)]


def saved_calls(turn: Turn) -> list[tuple[str, str]]:
    """Return id and name of the calls of a saved gpt turn, in order."""
    calls = turn.get("tool_calls")
    if not isinstance(calls, list):
        calls = calls_in_text(str(turn.get("value", "")))
    found = [(call.get("id"), call.get("function")) for call in calls if isinstance(call, dict)]
    return [(str(call_id), str(function.get("name", ""))) for call_id, function in found if isinstance(function, dict)]


def offered_tools(system: str) -> tuple[str, ...]:
    """Return the names of the tools that a saved system turn lists; none where it lists none."""
    listed = system.partition("<tools>\n")[2].partition("\n</tools>")[0]
    tools = parse_container(listed)
    return tuple(str(tool.get("name")) for tool in tools if isinstance(tool, dict)) if isinstance(tools, list) else ()


def answers_in_text(text: str) -> list[dict[str, Any]]:
    """Return the objects {tool_call_id, name, content} of a saved tool turn."""
    return list(_blocks("tool_response", text))


def calls_in_text(text: str, answer: str = "") -> list[dict[str, Any]]:
    """Return the calls of a gpt turn's text in the OpenAI form; their ids stand in the tool turn that answers it."""
    ids = (str(block.get("tool_call_id", "")) for block in _blocks("tool_response", answer))
    blocks = (block for block in _blocks("tool_call", text) if "name" in block)
    return [
        _openai_call(ToolCall(call_id, str(block["name"]), block.get("arguments") or {}))
        for block, call_id in zip(blocks, chain(ids, repeat("")), strict=False)
    ]


def parse_container(text: str) -> dict[str, Any] | list[Any] | None:
    """Return the object or array that ``text`` is as JSON; None when it is anything else."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        value: dict[str, Any] | list[Any] = parse_json(text)
    except ValueError:
        return None
    return value


def _gpt_turn(message: AssistantMessage) -> Turn:
    thought, text = _thinking_and_text(message)
    parts = [f"<think>\n{_tagless_text(thought)}\n</think>" if thought else "<think>\n</think>"]
    if text:
        parts.append(_tagless_text(text))
    for call in message.tool_calls:
        block = _tagless_json({"name": call.name, "arguments": call.arguments})
        parts.append(f"<tool_call>\n{block}\n</tool_call>")
    return {"from": "gpt", "value": "\n".join(parts), "tool_calls": [_openai_call(call) for call in message.tool_calls]}


def _openai_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": clean_text(call.name), "arguments": json_text(call.arguments)}
    return {"id": clean_text(call.id), "type": "function", "function": function}


def _tool_turn(calls: Sequence[ToolCall], results: Sequence[ToolMessage]) -> Turn:
    place = {call.id: number for number, call in enumerate(calls)}
    in_call_order = sorted(results, key=lambda result: place.get(result.tool_call_id, len(calls)))
    return {"from": "tool", "value": "\n".join(map(_response_block, in_call_order))}


def _response_block(result: ToolMessage) -> str:
    content = parse_container(result.content)
    response = {
        "tool_call_id": result.tool_call_id,
        "name": result.name,
        "content": result.content if content is None else content,
    }
    return f"<tool_response>\n{_tagless_json(response)}\n</tool_response>"


def _thinking_and_text(message: AssistantMessage) -> tuple[str, str]:
    thought = clean_text(message.reasoning).strip()
    text, inline = split_thinking(clean_text(message.content), native=thought)
    pieces, native = list(dict.fromkeys(inline)), f"\n\n{thought}\n\n"
    repeated = {piece for piece in pieces[:_MAX_SEARCHES] if f"\n\n{piece}\n\n" in native}  # as servers do
    return "\n\n".join(filter(None, [thought, *(piece for piece in pieces if piece not in repeated)])), text


def _tagless_json(value: Any) -> str:
    return _TAG_IN_JSON.sub(lambda tag: f"<\\/{tag[2]}>" if tag[1] else f"\\u003c{tag[2]}>", json_text(value))


def _tagless_text(text: str) -> str:
    return _TAG_IN_TEXT.sub(r"<\\\1", text)


def _blocks(tag: str, value: str) -> Iterator[dict[str, Any]]:
    """Read the objects out of a turn's blocks, after its leading thought; tags inside their own strings do no harm."""
    decoder = json.JSONDecoder()
    end = max(value.find("</think>"), 0) if value.startswith("<think>") else 0
    while start := _BLOCK_START[tag].search(value, end):
        try:
            block, end = decoder.raw_decode(value, start.end())
        except (ValueError, RecursionError):
            end = start.end()
        else:
            yield block
