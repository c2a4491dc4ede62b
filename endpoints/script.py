"""The file of prepared replies: which line answers which request. Pure; the HTTP side is in ``scripted.py``.

One JSON object a line, one reply each (``ScriptedReply`` names the keys); a line ``{"server": {...}}``
(``ServerLimits``) may stand first. What is promised:

* A conversation goes through the lines from the top, its first turn getting the first answer, and nothing is
  remembered of it: the turn is read off the request. The prompt is the last user message in front of the first tool
  call; the turn is the number of assistant messages after it. So prefill does not count, and a request for a summary
  is just the next turn.
* A line that is no answer (an error status, a broken or odd body, nothing said) is used up by requests that are equal
  in every message: it is served ``times`` times (1 by default; null or "forever": always), then comes the next line.
  An answer that carries ``times`` is used up in the same way. Equal prompts share that count.
* After the last line, the last line is repeated.
* A line with ``prompt`` is for conversations whose prompt contains that text. If there is any for a conversation, only
  those lines are; else the lines without ``prompt`` are. A conversation for which there is no line gets status 400.
* Lines with ``"to": "auxiliary"`` are for what tools ask models: requests that offer no tools and hold no answer yet.
  These are all first turns; ``prompt`` is looked for in all their messages, and of several the one that stands first
  counts. Where there are no such lines, they get the others.
* Lines with ``"to": "images"`` are for POST /v1/images/generations, and for nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

JsonObject = dict[str, Any]
ModelT = TypeVar("ModelT", bound=BaseModel)
OK_STATUS = 200
FIRST_ERROR_STATUS = 400
MAX_COUNTED_REQUESTS = 100_000  # distinct requests whose repeats are counted; the oldest are forgotten
Kind = Literal["chat", "auxiliary", "images"]  # of a request
_SAYS = ("content", "tool_calls", "reasoning", "reasoning_content", "reasoning_details", "content_chars")
_DOES = (*_SAYS, "message", "image", "body", "error", "status", "stall", "reset", "endless")


class ScriptError(ValueError):
    """The file cannot be used; the message is one line, ``file:line: what is wrong``."""


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ScriptedToolCall(_Closed):
    """One call of a prepared answer."""

    name: str
    """Name of the tool."""
    arguments: JsonObject | str | None = Field(default_factory=dict)
    """An object is sent as JSON text, text as it is (broken or not), null as null."""
    id: str | None = None
    """Default: call_<turn>_<number>, both from 1. Empty text sends an empty id."""


class ScriptedReply(_Closed):
    """One line of the file: what is said (content …, or message, or body, or error), and how it travels."""

    prompt: str | None = None
    """Only for conversations whose prompt contains this text."""
    times: Annotated[int, Field(ge=1)] | Literal["forever"] | None = 1
    """How many equal requests this line answers before the next line's turn comes; null or "forever": all."""
    content: str | list[Any] | None = None
    """The message's content: text, a list of parts, or null."""
    content_chars: Annotated[int, Field(ge=0)] | None = None
    """Repeats ``content`` (default "x") up to this many characters, for very large replies."""
    reasoning: str | None = None
    """The message's field of this name; left out when not given."""
    reasoning_content: str | None = None
    """The message's field of this name; left out when not given."""
    reasoning_details: list[Any] | None = None
    """The message's field of this name; left out when not given."""
    tool_calls: list[ScriptedToolCall] = Field(default_factory=list)
    """Calls, in order."""
    finish_reason: str | None = None
    """Default: tool_calls when there are any, else stop. null is sent as null."""
    usage: JsonObject | None = None
    """Default: about a token for four characters. null leaves it out."""
    model: str | None = None
    """Name of the model that answered. Default: the one that was asked for."""
    message: JsonObject | None = None
    """The whole message, instead of content, reasoning and tool_calls."""
    to: Kind = "chat"
    """Which requests it answers: chat, auxiliary (of tools to models) or images (POST /v1/images/generations)."""
    image: str | None = None
    """With "to": "images": the picture in base64, or its URL; empty text makes a small PNG of the prompt."""
    body: Any = None
    """The whole body: text is sent as it is, anything else as JSON."""
    error: str | JsonObject | None = None
    """Body ``{"error": …}``; text becomes {"message": text, "code": status}."""
    status: Annotated[int, Field(ge=200, le=599)] = OK_STATUS
    """HTTP status. An error status without a body of its own gets an ``error``."""
    headers: dict[str, str] = Field(default_factory=dict)
    """More response headers, such as Retry-After."""
    content_type: str = "application/json"
    """The Content-Type header."""
    content_length: Annotated[int, Field(ge=0)] | None = None
    """The Content-Length header, true or not; the connection is closed after the body."""
    gzip: bool = False
    """Compress the body."""
    chunked: bool = False
    """Send the body in chunks."""
    delay_seconds: Annotated[float, Field(ge=0)] | tuple[float, float] = 0.0
    """Waits before the response; [min, max] draws from that range, the same for the same messages."""
    stall: Literal["headers", "body"] | None = None
    """Goes silent before the headers, or in the middle of the body, and keeps the connection open."""
    reset: Literal["before", "headers", "body"] | None = None
    """Resets the connection before anything is sent, after the headers, or in the middle of the body."""
    endless: bool = False
    """After the body come spaces, without end."""

    @model_validator(mode="after")
    def _consistent(self) -> ScriptedReply:
        given = self.model_fields_set
        forms: list[str] = [name for name in ("message", "image", "body", "error") if name in given]
        forms += ["content and the like"] if given.intersection(_SAYS) else []
        if len(forms) > 1:
            raise ValueError(f"{' and '.join(forms)} exclude each other")
        if not given.intersection(_DOES):
            raise ValueError(f"it says nothing: give one of {', '.join(_DOES)}")
        wrong = given.intersection(_SAYS) if self.to == "images" else "image" in given
        if wrong:
            raise ValueError('lines with "to": "images", and no others, say "image", and no content')
        if self.stall and self.reset:
            raise ValueError("stall and reset exclude each other")
        if isinstance(self.delay_seconds, tuple) and not 0 <= self.delay_seconds[0] <= self.delay_seconds[1]:
            raise ValueError("delay_seconds must be a number, or [min, max] with 0 <= min <= max")
        return self

    @cached_property
    def is_answer(self) -> bool:
        """Whether a client takes this as the next assistant message and goes on to the next turn."""
        if self.status != OK_STATUS or self.stall or self.reset or self.endless or self.content_length is not None:
            return False
        if "json" not in self.content_type or self.error is not None:
            return False
        if self.to == "images":
            return True
        if "body" in self.model_fields_set:
            return _holds_message(self.body)
        return self.finish_reason != "error" and _says_something(self.message or self._message_like())

    @cached_property
    def repeats(self) -> int | None:
        """How many equal requests it answers; None: all of them."""
        if self.is_answer and "times" not in self.model_fields_set:
            return None
        return self.times if isinstance(self.times, int) else None

    @cached_property
    def is_error(self) -> bool:
        """Whether its body is an ``error`` object."""
        says_nothing = not self.model_fields_set.intersection((*_SAYS, "message", "image", "body"))
        return self.error is not None or (self.status >= FIRST_ERROR_STATUS and says_nothing)

    def _message_like(self) -> JsonObject:
        return {"content": self.content or self.content_chars, "tool_calls": self.tool_calls}


class ServerLimits(_Closed):
    """The line ``{"server": {...}}``: what the endpoint as a whole puts up with."""

    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    """More requests at once get status 429."""
    requests_per_second: Annotated[float, Field(gt=0)] | None = None
    """Faster than that, after a burst of one second's worth, gets status 429 with Retry-After."""
    models: list[str] = Field(default_factory=lambda: ["scripted"])
    """What GET /v1/models names."""


@dataclass(frozen=True)
class Turn:
    """Where a conversation stands."""

    prompt: str
    number: int  # answers given since the prompt


@dataclass(frozen=True)
class _Plan:
    """The lines of one kind of conversation, cut into turns: what is used up first, the answer last."""

    turns: tuple[tuple[ScriptedReply, ...], ...]

    def lines(self, turn: int) -> tuple[ScriptedReply, ...]:
        return self.turns[turn] if turn < len(self.turns) else self.turns[-1][-1:]


@dataclass
class Script:
    """A file of replies, and how far equal requests have used up its lines."""

    name: str
    replies: tuple[ScriptedReply, ...]
    limits: ServerLimits = field(default_factory=ServerLimits)
    _plans: dict[tuple[Kind, tuple[str | None, ...]], _Plan] = field(default_factory=dict)
    _seen: dict[str, int] = field(default_factory=dict)

    @cached_property
    def _prompts(self) -> dict[Kind, tuple[str, ...]]:
        """The kinds that lines are for, and the prompts of these."""
        prompts: dict[Kind, dict[str, None]] = {}
        for reply in self.replies:
            prompts.setdefault(reply.to, {}).update({} if reply.prompt is None else {reply.prompt: None})
        return {kind: tuple(texts) for kind, texts in prompts.items()}

    def reply_to(self, messages: Sequence[JsonObject], kind: Kind = "chat") -> tuple[ScriptedReply, Turn] | None:
        """Choose the line for a request, and count the request. None: no line is for this conversation."""
        if kind == "auxiliary" and kind not in self._prompts:
            kind = "chat"
        if kind == "auxiliary":
            turn = Turn("\n".join(_text(message.get("content")) for message in messages), 0)
        else:
            turn = turn_of(messages)
        plan = self._plan(turn.prompt, kind)
        if plan is None:
            return None
        lines = plan.lines(turn.number)
        return lines[0] if len(lines) == 1 else self._next_of(lines, [{"kind": kind}, *messages]), turn

    def _plan(self, prompt: str, kind: Kind) -> _Plan | None:
        found = [text for text in self._prompts.get(kind, ()) if text in prompt]
        if kind == "auxiliary" and found:  # the answers that a model is shown may hold other models' prompts
            found = [min(found, key=prompt.index)]
        wanted: tuple[str | None, ...] = tuple(found) or (None,)
        if (kind, wanted) not in self._plans:
            lines = [reply for reply in self.replies if reply.to == kind and reply.prompt in wanted]
            if not lines:
                return None
            self._plans[kind, wanted] = _Plan(tuple(_turns(lines)))
        return self._plans[kind, wanted]

    def _next_of(self, lines: Sequence[ScriptedReply], messages: Sequence[JsonObject]) -> ScriptedReply:
        key = fingerprint(messages)
        seen = self._seen.pop(key, 0)
        self._seen[key] = seen + 1
        if len(self._seen) > MAX_COUNTED_REQUESTS:
            del self._seen[next(iter(self._seen))]
        for line in lines:
            if line.repeats is None or seen < line.repeats:
                return line
            seen -= line.repeats
        return lines[-1]


def load_script(path: str | Path) -> Script:
    """Read a file of replies. Raises ScriptError for the first thing that is wrong with it."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ScriptError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ScriptError(f"{path}: cannot be read: {error}") from None
    limits, replies = ServerLimits(), []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        value = _json_object(where, line)
        if "server" not in value:
            replies.append(_checked(where, ScriptedReply, value))
        elif replies or set(value) != {"server"} or not isinstance(value["server"], dict):
            raise ScriptError(f'{where}: {{"server": {{...}}}} must be the first line and have no other key')
        else:
            limits = _checked(where, ServerLimits, value["server"])
    if not replies:
        raise ScriptError(f'{path}: no reply in it; a line is a JSON object, such as {{"content": "Hello"}}')
    return Script(str(path), tuple(replies), limits)


def turn_of(messages: Sequence[JsonObject]) -> Turn:
    """Read off a request which prompt it is about and how many answers it has had."""
    first_call = next((i for i, message in enumerate(messages) if _calls_tools(message)), len(messages))
    start = next((i for i in reversed(range(first_call)) if messages[i].get("role") == "user"), -1)
    answers = sum(message.get("role") == "assistant" for message in messages[start + 1 :])
    return Turn(_text(messages[start].get("content")) if start >= 0 else "", answers)


def kind_of(request: JsonObject) -> Kind:
    """Tell a rollout's own chat completion from one that a tool asks for."""
    answered = any(message.get("role") == "assistant" or _calls_tools(message) for message in request["messages"])
    return "chat" if request.get("tools") or answered else "auxiliary"


def fingerprint(messages: Sequence[JsonObject]) -> str:
    """Name the messages: equal text for equal messages, and for no others."""
    return hashlib.blake2b(json.dumps(messages, sort_keys=True).encode(), digest_size=16).hexdigest()


def _turns(lines: Sequence[ScriptedReply]) -> Iterator[tuple[ScriptedReply, ...]]:
    turn: list[ScriptedReply] = []
    for line in lines:
        turn.append(line)
        if line.repeats is None and line.is_answer:
            yield tuple(turn)
            turn = []
    if turn:
        yield tuple(turn)


def _calls_tools(message: JsonObject) -> bool:
    return message.get("role") == "tool" or bool(message.get("tool_calls"))


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _says_something(message: Any) -> bool:
    return isinstance(message, dict) and bool(message.get("content") or message.get("tool_calls"))


def _holds_message(body: Any) -> bool:
    """Whether a raw body is a chat completion with something in it."""
    if isinstance(body, str):
        try:
            body = json.loads(body)
        except ValueError:
            return False
    choices = body.get("choices") if isinstance(body, dict) and not body.get("error") else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or choice.get("finish_reason") == "error":
        return False
    return _says_something(choice.get("message"))


def _json_object(where: str, line: str) -> JsonObject:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ScriptError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ScriptError(f"{where}: must be a JSON object; allowed keys are {_keys(ScriptedReply)}")
    return value


def _checked(where: str, model: type[ModelT], value: JsonObject) -> ModelT:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        what = f'unknown key "{key}"' if problem["type"] == "extra_forbidden" else f"{key}: {problem['msg']}"
        what = what.removeprefix(": ").replace("Value error, ", "")
        closed = ScriptedToolCall if key.startswith("tool_calls.") else model
        raise ScriptError(f"{where}: {what}; allowed keys are {_keys(closed)}") from None


def _keys(model: type[BaseModel]) -> str:
    return ", ".join(model.model_fields)
