"""What an endpoint sends back, read: a body becomes a Reply, or says why it is none. Pure.

Endpoints that call themselves OpenAI-compatible differ in nearly every field; here is the one place that knows how.
Whatever the bytes are, what comes out is a Reply or a TryError, and every text in it is safe for UTF-8 and JSON.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from json import JSONDecodeError
from typing import Any

from rollout.amounts import MAX_AMOUNT, MAX_ANSWER_TOKENS, MAX_ANSWER_USD, amount
from rollout.messages import AssistantMessage, ToolCall, Usage
from rollout.retry import TryError, Verdict, classify
from rollout.texts import dump_json, one_line, parse_json

CUT = "cut by the token limit"  # the ``problem`` of a call whose arguments stop half-way
MAX_WORDS_SHOWN = 300  # characters of an endpoint's words in a message for people
_MAX_WORDS_READ = 4000
_MAX_REASONING_ITEMS = 64  # more of them are the chunks of one text
_REASONING_FIELDS = ("reasoning", "reasoning_content", "reasoning_details")
_MESSAGE_FIELDS = {"content", "tool_calls", "function_call", "refusal", *_REASONING_FIELDS}
_CALL_ECHO = "extra_content"  # of a call: Gemini's thought signature, without which it takes no further request
_FINISH_REASONS = {"max_tokens": "length", "model_length": "length"}
# Gemini's, as such or behind "content_filter: ", in the words of its API reference (FinishReason).
_FILTERED = re.compile("content_filter.*|safety|recitation|blocklist|prohibited_content|spii", re.DOTALL)
_BAD_CALL = re.compile("(function_call_filter.*)?malformed_function_call", re.DOTALL)
_BROKEN_OFF = ("error", "abort", "insufficient_system_resource")  # vLLM's and DeepSeek's words for: no whole answer
_MARKS = re.compile(r'\\.|["{}\[\]]', re.DOTALL)  # of JSON: what is escaped, and what opens or closes something
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """One answer of the endpoint."""

    message: AssistantMessage
    finish_reason: str  # the endpoint's: stop, tool_calls, length, content_filter, ...; "" where it names none
    usage: Usage
    cost_usd: float  # 0.0 where the endpoint names none, or more than MAX_ANSWER_USD


def read_reply(body: bytes) -> Reply:
    """Read the body of an HTTP 200. Raises TryError when it is no answer; a blank answer is one."""
    answer = read_object(body)
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        raise _paid(_no_answer("an answer without choices"), answer)
    reason = _finish_reason(choice)
    if choice.get("error") or reason in _BROKEN_OFF:
        raise _paid(_error_object(choice.get("error") or {"message": f'finish_reason "{reason}"'}), answer)
    message = choice.get("message")
    if not isinstance(message, dict) or not _MESSAGE_FIELDS & message.keys():
        raise _paid(_no_answer("an answer without a message"), answer)
    said = AssistantMessage("") if _BAD_CALL.fullmatch(reason) else _message(message)
    return Reply(said, reason, *spent_on(answer))


def read_object(body: bytes) -> JsonObject:
    """Read the body of an HTTP 200 as a JSON object. Raises TryError when it is none, or an error."""
    text = body.decode("utf-8", "replace").removeprefix("\ufeff")
    try:
        answer = parse_json(text)
    except ValueError as error:
        raise _no_answer(f"no JSON ({error}): {one_line(text, 80) or 'an empty body'}") from None
    if not isinstance(answer, dict):
        raise _no_answer(f"no JSON object: {one_line(text, 80)}")
    if answer.get("error"):
        raise _paid(_error_object(answer["error"]), answer)
    return answer


def refusal(status: int, body: bytes, location: str = "") -> TryError:
    """Return what an HTTP status other than 200 means, in the endpoint's own words; ``location``: where it sends us."""
    if location and 300 <= status < 400:  # noqa: PLR2004 - HTTP's redirects
        return _error(status, f"HTTP {status}", f"it redirects to {location}; give --base_url as it is after redirects")
    text = body.decode("utf-8", "replace")
    try:
        words = _words(parse_json(text))
    except ValueError:
        title = _TITLE.search(text)
        words = title[1] if title else text
    if status == 404 and "model" not in words.lower():  # noqa: PLR2004 - no such path, rather than no such model
        return _error(status, "HTTP 404 (is the base_url whole? most end in /v1)", words)
    return _error(status, f"HTTP {status}", words)


def _error_object(error: Any) -> TryError:
    """Return what an ``error`` inside an HTTP 200 means: as its code would as a status."""
    code = int(_number(error.get("code"))) if isinstance(error, dict) else 0
    if code in range(400, 600):
        return _error(code, f"HTTP 200 with error {code}", _words(error))
    return _error(200, "HTTP 200 with an error", _words(error))


def _error(status: int, what: str, words: str) -> TryError:
    words = " ".join(words.split())[:_MAX_WORDS_READ]
    lowered = words.lower()
    shown = one_line(words, MAX_WORDS_SHOWN)
    return TryError(classify(status, lowered), f"{what}: {shown}" if shown else what, status=status, words=lowered)


def _no_answer(what: str) -> TryError:
    return TryError(Verdict("bad_response", retry=True), f"HTTP 200, but {what}", status=200)


def _paid(error: TryError, answer: JsonObject) -> TryError:
    """Return the error with what the answer says that it cost."""
    error.usage, error.cost_usd = spent_on(answer)
    return error


def _words(error: Any) -> str:
    """Return all an error object says, the sentence first; gateways keep their provider's words in ``metadata.raw``."""
    if isinstance(error, str):
        return error
    if isinstance(error, list):
        return "; ".join(_words(item) for item in error[:5])
    if not isinstance(error, dict):
        return ""
    metadata = error.get("metadata")
    raw = metadata.get("raw") if isinstance(metadata, dict) else None
    said = [error.get(key) for key in ("message", "msg", "detail", "error", "errors")] + [raw]
    named = [error.get(key) for key in ("code", "type", "param", "loc")]
    pieces = [_words(item) for item in said if item]
    pieces += [str(item) for item in named if isinstance(item, (str, list)) and item]
    return " ".join(filter(None, dict.fromkeys(pieces)))


def _message(message: JsonObject) -> AssistantMessage:
    content, thoughts = _content(message.get("content"))
    content = content or _text(message.get("refusal"))
    return AssistantMessage(
        content=content,
        reasoning=_reasoning(message, thoughts),
        tool_calls=_tool_calls(message),
        echo=_echo(message),
    )


def _echo(message: JsonObject) -> JsonObject:
    """Return the reasoning fields; DeepSeek and Kimi want theirs back although there may be nothing in it."""
    fields = {key: message[key] for key in _REASONING_FIELDS if message.get(key)}
    return fields or {key: "" for key in ("reasoning_content",) if message.get(key) == ""}


def _content(content: Any) -> tuple[str, list[str]]:
    """Return the text of a message's content, and the thoughts among its parts."""
    texts: list[str] = []
    thoughts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else ""
        if kind in ("thinking", "reasoning"):
            thoughts.append(_text(part))
        elif isinstance(kind, str) and "image" in kind:
            texts.append("[image]")
        else:
            texts.append(_text(part))
    return "".join(texts), thoughts


def _text(value: Any) -> str:
    """Return the text of a value that should be one: a string, or objects and lists of them."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(_text(item) for item in value)
    if isinstance(value, dict):
        keys = ("text", "summary", "thinking", "content", "refusal", "value")
        return next(filter(None, (_text(value.get(key)) for key in keys)), "")
    return "" if value is None or isinstance(value, bool) else str(value)


def _reasoning(message: JsonObject, thoughts: list[str]) -> str:
    """Join the pieces of native reasoning, each once: fields often repeat one another, whole or in part."""
    details = message.get("reasoning_details")
    if not isinstance(details, list) or len(details) > _MAX_REASONING_ITEMS:
        details = [details]
    texts = [*map(_text, (message.get("reasoning"), message.get("reasoning_content"), *details)), *thoughts]
    pieces: list[str] = []
    for text in map(str.strip, texts):
        if text and not any(text in piece for piece in pieces):
            pieces = [piece for piece in pieces if piece not in text] + [text]
    return "\n\n".join(pieces)


def _tool_calls(message: JsonObject) -> tuple[ToolCall, ...]:
    calls = message.get("tool_calls") or message.get("function_call")
    entries = calls if isinstance(calls, list) else [calls]
    return tuple(_tool_call(entry) for entry in entries if isinstance(entry, dict) and entry)


def _tool_call(entry: JsonObject) -> ToolCall:
    function = entry.get("function")
    function = function if isinstance(function, dict) else entry
    call_id, name = entry.get("id"), function.get("name")
    arguments, problem = read_arguments(function.get("arguments"))
    return ToolCall(
        id=call_id if isinstance(call_id, str) else "",
        name=name if isinstance(name, str) else "",
        arguments=arguments,
        problem=problem,
        echo={_CALL_ECHO: entry[_CALL_ECHO]} if entry.get(_CALL_ECHO) else {},
    )


def read_arguments(raw: Any) -> tuple[JsonObject, str]:
    """Return the arguments object of a call and ``""``; or ``{"_raw": text}`` and what is wrong with it."""
    if isinstance(raw, str) and raw.strip():
        try:
            value = parse_json(raw, strict_numbers=True)
        except ValueError as error:
            cut = isinstance(error, JSONDecodeError) and _is_open(raw)
            return {"_raw": raw}, CUT if cut else f"no valid JSON ({error})"
    else:
        value = None if isinstance(raw, str) else raw
    if value is None and (not isinstance(raw, str) or raw.strip() in ("", "null")):
        return {}, ""
    if isinstance(value, dict):
        return value, ""
    return {"_raw": raw if isinstance(raw, str) else dump_json(raw)}, "not a JSON object"


def _is_open(text: str) -> bool:
    """Tell whether a text ends inside a JSON object, so that more of it was to come."""
    text = text.strip()
    if not text.startswith("{") or text.endswith(("}", "]")):
        return False
    depth, quoted = 0, False
    for mark in _MARKS.findall(text):
        if mark == '"':
            quoted = not quoted
        elif len(mark) == 1 and not quoted:
            depth += 1 if mark in "{[" else -1
            if depth == 0:  # what follows is no part of it
                return False
    return True


def _finish_reason(choice: JsonObject) -> str:
    reason = choice.get("finish_reason")
    reason = reason.strip().lower() if isinstance(reason, str) else ""
    return "content_filter" if _FILTERED.fullmatch(reason) else _FINISH_REASONS.get(reason, reason)


def spent_on(answer: JsonObject) -> tuple[Usage, float]:
    """Return what an answer says that it took and cost in USD; nothing where it says nothing that can be true."""
    reported = answer.get("usage")
    reported = reported if isinstance(reported, dict) else {}
    return _usage(reported), _number(reported.get("cost"), MAX_ANSWER_USD)


def _usage(usage: JsonObject) -> Usage:
    prompt, completion = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    prompt = prompt if isinstance(prompt, dict) else {}
    completion = completion if isinstance(completion, dict) else {}
    return Usage(
        prompt_tokens=_count(usage.get("prompt_tokens"), usage.get("input_tokens")),
        completion_tokens=_count(usage.get("completion_tokens"), usage.get("output_tokens")),
        reasoning_tokens=_count(completion.get("reasoning_tokens"), usage.get("reasoning_tokens")),
        cached_tokens=_count(prompt.get("cached_tokens"), usage.get("prompt_cache_hit_tokens")),
    )


def _count(value: Any, otherwise: Any) -> int:
    """Return the first of the two that is a number above 0, as a count of tokens; else 0."""
    return int(_number(value, MAX_ANSWER_TOKENS)) or int(_number(otherwise, MAX_ANSWER_TOKENS))


def _number(value: Any, most: float = MAX_AMOUNT) -> float:
    """Return a number that came as a number or as text; 0.0 for anything else, for what no endpoint means (amounts)."""
    if value is None or isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return 0.0
    try:
        return amount(float(value), most)
    except (ValueError, OverflowError):
        return 0.0
