"""How an endpoint wants to be asked: messages and flags become the body of a request.

OpenRouter takes routing and reasoning objects, other hosts the plain OpenAI parameters, and some of those not even
these: what a server refuses by name is left out (or renamed) from then on, for every rollout of the process. The system
prompt and the prefill stand in front, at request time only; what varies comes last, so that a server's prefix cache
holds from turn to turn.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollout.config import RunConfig
from rollout.keys import host_of, is_openrouter
from rollout.messages import AssistantMessage, Message, ToolCall, ToolDefinition, ToolMessage, UserMessage
from rollout.retry import TryError
from rollout.texts import clean_json, clean_text, dump_json

_LOG = logging.getLogger(__name__)
_REFUSING_STATUSES = (400, 422)
_MAX_NAME_CHARS = 64  # of a function; servers refuse a longer one

# What a request can do without. "echo" are the reasoning fields of earlier answers, "formats" the keywords `pattern`
# and `format` of tool schemas, which some grammar compilers choke on; "no_tools" is a conversation with calls in it but
# without tools, "user_after_tool" a question right behind a tool's result.
Extra = Literal[
    "max_tokens", "reasoning_effort", "reasoning", "temperature", "echo", "formats", "no_tools", "user_after_tool"
]

_REFUSED = re.compile(
    r"unsupported|unknown|unrecogni[sz]ed|unexpected|not (supported|permitted|allowed|recogni[sz]ed)"
    r"|(does not|doesn't) support|extra (inputs|fields)|extra_forbidden"
    r"|not a valid parameter|invalid (parameter|argument)"
)
_WRONG_VALUE = re.compile(r"(unsupported|invalid|unknown) value")
_NAMED: dict[Extra, re.Pattern[str]] = {
    "max_tokens": re.compile(r"\bmax_tokens\b"),
    "reasoning_effort": re.compile(r"\breasoning_effort\b|support thinking"),
    "reasoning": re.compile(r"\breasoning\b"),
    "temperature": re.compile(r"\btemperature\b"),
}
_OF_EVERY_REQUEST = ("model", "provider", "usage")  # options that are not about how a rollout's answers are to be
_ECHO_REFUSED = re.compile(r"reasoning_(content|details)|messages.{0,200}\breasoning\b")
_SIGNATURE_REFUSED = re.compile(r"signature.{0,80}thinking|(thinking|reasoning|thought).{0,80}signature")
_FORMATS_REFUSED = re.compile(r"grammar|schema.{0,200}\b(pattern|format)\b|\b(pattern|format)\b.{0,200}schema")
_ORDER_REFUSED: dict[Extra, re.Pattern[str]] = {
    "no_tools": re.compile(r"without .?tools|toolconfig"),
    "user_after_tool": re.compile(r"role .?user.? after role .?tool|roles must alternate"),
}
_BRIDGE = b'{"role":"assistant","content":"I have the result."}'  # between a tool's result and a question
_UNSIGNED = "unsigned"  # in what is kept with a conversation: its thoughts are refused, and only its own


@dataclass(frozen=True)
class Request:
    """The body of one request, which extras are in it, and the path it goes to under the base URL."""

    body: bytes
    extras: frozenset[Extra] = frozenset()
    path: str = "chat/completions"
    first: UserMessage | None = None  # of the conversation


class Dialect:
    """How one endpoint is asked; learns from its refusals."""

    def __init__(self, config: RunConfig) -> None:
        self._host = host_of(config.base_url)
        self._off = config.reasoning_off
        self._options = _options(config, is_openrouter(self._host))
        self._preamble = b",".join(map(_encoded, _preamble(config)))
        self._refused: set[Extra] = set()
        self._tool_texts: dict[str, tuple[ToolDefinition, str]] = {}

    def compose(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> Request:
        """Return the request that asks for the next message of a conversation."""
        options, extras = self._accepted(self._options)
        spoken = self._spoken(messages, extras)
        tool_texts = self._tools(messages, tools, extras)
        if tool_texts and not tools:
            options["tool_choice"] = "none"
        parts = [dump_json(options)[:-1]]
        if tool_texts:
            parts.append(f',"tools":[{",".join(tool_texts)}]')
        parts.append(',"messages":[')
        spoken = b",".join(filter(None, (self._preamble, spoken)))
        body = b"".join(("".join(parts).encode(errors="replace"), spoken, b"]}"))
        return Request(body, frozenset(extras), first=_first(messages))

    def _spoken(self, messages: Sequence[Message], extras: set[Extra]) -> bytes:
        """Return the messages as JSON with commas between; add what a server may refuse of them to ``extras``."""
        first = _first(messages)
        echo = "echo" not in self._refused and not (first and _UNSIGNED in first.sent)
        after_tool = [type(message) for message in messages[-2:]] == [ToolMessage, UserMessage]
        bridged = after_tool and "user_after_tool" in self._refused
        said = _said(messages[:-1] if bridged else messages, echo=echo)
        if said.echoes:
            extras.add("echo")
        if after_tool and not bridged:
            extras.add("user_after_tool")
        return b",".join((said.text, _BRIDGE, _encoded(_message(messages[-1], echo=echo)))) if bridged else said.text

    def _tools(self, messages: Sequence[Message], tools: Sequence[ToolDefinition], extras: set[Extra]) -> list[str]:
        """Return the tools as JSON texts; where none is offered and a server minds that, those that were called."""
        if tools:
            if "formats" not in self._refused:
                extras.add("formats")
            return list(map(self._tool_text, tools))
        called = dict.fromkeys(message.name for message in messages if isinstance(message, ToolMessage))
        if "no_tools" in self._refused:
            return [self._tool_texts[name][1] for name in called if name in self._tool_texts]
        if called:
            extras.add("no_tools")
        return []

    def compose_question(self, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> Request:
        """Return the request for messages of no rollout, in OpenAI's form: nothing that flags say of one goes along.

        ``sampling`` holds temperature and max_tokens, where they are asked for.
        """
        kept = {name: self._options[name] for name in _OF_EVERY_REQUEST if name in self._options}
        options, extras = self._accepted({**kept, **sampling})
        body = dump_json({**options, "messages": clean_json(list(messages))})
        return Request(body.encode(errors="replace"), frozenset(extras))

    def learn(self, error: TryError, request: Request) -> bool:
        """Take note of what a refusal names; True when the same question is worth asking again without it."""
        if error.status not in _REFUSING_STATUSES:
            return False
        words = error.words
        if request.first and "echo" in request.extras and _SIGNATURE_REFUSED.search(words) and "missing" not in words:
            request.first.sent[_UNSIGNED] = True
            return True
        order = request.extras & {extra for extra, pattern in _ORDER_REFUSED.items() if pattern.search(words)}
        refused = order or request.extras & self._named_in(words)
        for extra in refused - self._refused:
            _LOG.warning("%s refuses %r: going on without it", self._host, extra)
        self._refused |= refused
        if "formats" in refused:
            self._tool_texts.clear()
        return bool(refused)

    def _named_in(self, words: str) -> set[Extra]:
        if _ECHO_REFUSED.search(words) and _REFUSED.search(words):
            return {"echo"}
        if _FORMATS_REFUSED.search(words) and not _NAMED["max_tokens"].search(words):
            return {"formats"}
        named: set[Extra] = {extra for extra, pattern in _NAMED.items() if pattern.search(words)}
        if self._off and "reasoning_effort" in named:
            return {"reasoning_effort"}  # it has no "none"; what is not asked for is as near as it gets
        if _WRONG_VALUE.search(words):
            return named & {"temperature"}  # some models take but one, their default
        return named if _REFUSED.search(words) else set()

    def _accepted(self, wanted: Mapping[str, Any]) -> tuple[dict[str, Any], set[Extra]]:
        options = dict(wanted)
        for extra in self._refused & options.keys():
            value = options.pop(extra)
            if extra == "max_tokens":
                options["max_completion_tokens"] = value
        return options, {extra for extra in _NAMED if extra in options}

    def _tool_text(self, tool: ToolDefinition) -> str:
        """Return a tool as JSON text; made once, as a rollout sends its tools with every request."""
        known, text = self._tool_texts.get(tool.name, (None, ""))
        if known != tool:
            parameters = _without_formats(tool.parameters) if "formats" in self._refused else tool.parameters
            function = {"name": tool.name, "description": tool.description, "parameters": parameters}
            text = dump_json(clean_json({"type": "function", "function": function}))
            self._tool_texts[tool.name] = (tool, text)
        return text


def _options(config: RunConfig, openrouter: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"model": config.model}
    if config.max_tokens is not None:
        options["max_tokens"] = config.max_tokens
    effort = "none" if config.reasoning_off else config.reasoning_effort
    if not openrouter:
        return {**options, "reasoning_effort": effort} if effort else options
    if effort == "none":
        options["reasoning"] = {"effort": "none"}
    else:
        # Enabled even when no effort is named: a rollout without reasoning would be thrown away.
        options["reasoning"] = {"enabled": True, **({"effort": effort} if effort else {})}
    routing = {
        "only": list(config.providers_allowed),
        "ignore": list(config.providers_ignored),
        "order": list(config.providers_order),
        "sort": config.provider_sort,
    }
    if any(routing.values()):
        options["provider"] = {key: value for key, value in routing.items() if value}
    options["usage"] = {"include": True}  # brings the cost back
    return options


def _preamble(config: RunConfig) -> list[dict[str, Any]]:
    prefill = [{"role": message.role, "content": clean_text(message.content)} for message in config.prefill_messages]
    if not config.ephemeral_system_prompt:
        return prefill
    return [{"role": "system", "content": clean_text(config.ephemeral_system_prompt)}, *prefill]


@dataclass(frozen=True)
class Said:
    """A conversation as it is sent, kept with its first message: it grows by a few messages a request."""

    number: int  # of messages
    last: Message | None
    text: bytes  # JSON, with commas between
    echoes: bool  # reasoning of earlier answers is in it


def _said(messages: Sequence[Message], *, echo: bool) -> Said:
    first = _first(messages)
    kept: Said | None = first.sent.get(echo) if first else None
    if not kept or kept.number > len(messages) or messages[kept.number - 1] is not kept.last:
        kept = Said(0, None, b"", echoes=False)
    news = messages[kept.number :]
    parts = [kept.text] if kept.text else []
    echoes = kept.echoes or (echo and any(map(_echoes, news)))
    said = Said(
        len(messages),
        messages[-1] if messages else None,
        b",".join((*parts, *(_encoded(_message(new, echo=echo)) for new in news))),
        echoes=echoes,
    )
    if first:
        first.sent[echo] = said
    return said


def _first(messages: Sequence[Message]) -> UserMessage | None:
    first = messages[0] if messages else None
    return first if isinstance(first, UserMessage) else None


def _echoes(message: Message) -> bool:
    return isinstance(message, AssistantMessage) and bool(message.echo or any(call.echo for call in message.tool_calls))


def _encoded(message: dict[str, Any]) -> bytes:
    return dump_json(message).encode(errors="replace")


def _message(message: Message, *, echo: bool) -> dict[str, Any]:
    content = clean_text(message.content)
    if isinstance(message, UserMessage):
        return {"role": "user", "content": content}
    if isinstance(message, AssistantMessage):
        calls = {"tool_calls": [_call(call, echo=echo) for call in message.tool_calls]} if message.tool_calls else {}
        return {"role": "assistant", "content": content, **(message.echo if echo else {}), **calls}
    return {"role": "tool", "tool_call_id": message.tool_call_id, "content": content}


def _call(call: ToolCall, *, echo: bool) -> dict[str, Any]:
    # The model's name may be no name at all; servers refuse the whole conversation then.
    name = re.sub(r"[^A-Za-z0-9_-]", "_", call.name)[:_MAX_NAME_CHARS] or "unnamed"
    function = {"name": name, "arguments": dump_json(call.arguments)}
    return {"id": call.id, "type": "function", "function": function, **(call.echo if echo else {})}


def _without_formats(schema: Any, *, names: bool = False) -> Any:
    """Drop the keywords ``pattern`` and ``format`` of a JSON schema; ``names`` marks an object of property names."""
    if isinstance(schema, list):
        return [_without_formats(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_formats(value, names=key == "properties" and not names)
        for key, value in schema.items()
        if names or key not in ("pattern", "format")
    }
