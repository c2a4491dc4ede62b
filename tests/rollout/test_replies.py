from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollout.messages import AssistantMessage, ToolCall, Usage
from rollout.replies import CUT, MAX_WORDS_SHOWN, Reply, read_arguments, read_reply, refusal
from rollout.retry import TryError
from rollout.texts import clean_json, dump_json
from tests.rollout.http_server import body_of
from tests.rollout.test_texts import ANY_JSON


def read(message: dict[str, Any], finish_reason: Any = "stop", **answer: Any) -> Reply:
    return read_reply(
        json.dumps({"choices": [{"message": message, "finish_reason": finish_reason}], **answer}).encode()
    )


def message(**fields: Any) -> AssistantMessage:
    return read({"role": "assistant", "content": None, **fields}).message


def call(**function: Any) -> ToolCall:
    (only,) = message(tool_calls=[{"id": "c1", "type": "function", "function": {"name": "t", **function}}]).tool_calls
    return only


SPENT = {"usage": {"prompt_tokens": 9, "completion_tokens": 3, "cost": 0.5}}


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": []},
        {"choices": [{"finish_reason": "stop"}]},
        {"choices": [{"finish_reason": "error", "message": {"content": "part"}}]},
        {"choices": [{"error": {"code": 502, "message": "upstream"}}]},
        {"error": {"message": "Rate limit exceeded"}},
    ],
)
def test_what_is_no_answer_may_have_its_price(answer: dict[str, Any]) -> None:
    with pytest.raises(TryError) as raised:
        read_reply(json.dumps({**answer, **SPENT}).encode())
    assert (raised.value.usage, raised.value.cost_usd) == (Usage(9, 3), 0.5)
    with pytest.raises(TryError) as raised:
        read_reply(json.dumps({**answer, "usage": "much"}).encode())
    assert (raised.value.usage, raised.value.cost_usd) == (Usage(), 0.0)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        (None, ""),
        ("", ""),
        ([], ""),
        (["a", "b"], "ab"),
        ([{"type": "text", "text": "a"}, {"type": "output_text", "text": "b"}], "ab"),
        ([{"type": "text", "text": {"value": "a"}}], "a"),
        ([{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": "data:AAAA"}}], "see [image]"),
        ([{"type": "image", "source": {"data": "AAAA"}}], "[image]"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([None, 3, {"type": "odd"}, {"type": 5}], "3"),
        ({"text": "a"}, "a"),
        (42, "42"),
        (True, ""),
    ],
)
def test_content(content: Any, text: str) -> None:
    assert message(content=content).content == text


def test_a_refusal_is_what_the_model_says() -> None:
    assert message(refusal="I will not").content == "I will not"
    assert message(content="text", refusal="I will not").content == "text"


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({}, ""),
        ({"reasoning": "r"}, "r"),
        ({"reasoning_content": "r"}, "r"),
        ({"reasoning": None, "reasoning_content": " r\n"}, "r"),
        ({"reasoning": "r", "reasoning_content": "r"}, "r"),
        ({"reasoning_details": [{"type": "reasoning.summary", "summary": "s"}]}, "s"),
        ({"reasoning_details": [{"type": "reasoning.text", "text": "t", "signature": "x"}]}, "t"),
        ({"reasoning_details": [{"content": [{"type": "text", "text": "c"}]}]}, "c"),
        ({"reasoning_details": [{"type": "reasoning.encrypted", "data": "AAAA"}]}, ""),
        ({"reasoning_details": {"text": "t"}}, "t"),
        ({"reasoning_details": [None, "t", 5]}, "t\n\n5"),
        (
            {"reasoning": "first and second", "reasoning_details": [{"text": "first"}, {"text": "second"}]},
            "first and second",
        ),
        ({"reasoning": "short", "reasoning_content": "short and long"}, "short and long"),
        ({"reasoning": "one", "reasoning_content": "two"}, "one\n\ntwo"),
        ({"reasoning": {"text": "t"}}, "t"),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "t"}]},
                    {"type": "text", "text": "x"},
                ]
            },
            "t",
        ),
    ],
)
def test_reasoning_is_read_once_from_wherever_it_stands(fields: dict[str, Any], reasoning: str) -> None:
    assert message(**fields).reasoning == reasoning


def test_a_text_in_thousands_of_chunks_is_one_text() -> None:
    words = [f"word{number} " for number in range(5000)]
    assert message(reasoning_details=[{"text": word} for word in words]).reasoning == "".join(words).strip()


def test_reasoning_is_kept_as_it_came() -> None:
    fields = {"reasoning": "s", "reasoning_details": [{"type": "reasoning.encrypted", "data": "AAAA", "index": 0}]}
    assert message(**fields, reasoning_content="").echo == fields
    assert message(content="x", reasoning="").echo == {}
    assert message(content="x", reasoning_content="").echo == {"reasoning_content": ""}, "DeepSeek wants it back"


def test_think_blocks_stay_in_the_text() -> None:
    assert message(content="<think>a</think>b") == AssistantMessage("<think>a</think>b")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (" \n", {}),
        (None, {}),
        ("null", {}),
        ('{"a": "x\ny\\u0000\\ud800"}', {"a": "x\ny\ufffd\ufffd"}),
    ],
)
def test_arguments(arguments: Any, expected: dict[str, Any]) -> None:
    assert call(arguments=arguments) == ToolCall("c1", "t", expected)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ('{"a":1}{"a":1}', "no valid JSON (Extra data: line 1 column 8 (char 7))"),
        (r'{"p":"C:\path"}', "no valid JSON (Invalid \\escape: line 1 column 9 (char 8))"),
        ("{'a': 1}", "no valid JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))"),
        ("[" * 3000 + "]" * 3000, "no valid JSON (nested too deeply)"),
        ("[1,2]", "not a JSON object"),
        ("42", "not a JSON object"),
        ('"text"', "not a JSON object"),
        ('{"path":"a.txt","content":"hel', CUT),
        ('{"path":', CUT),
        ('{"a": tru', CUT),
        ('{"a": "}"', CUT),
        (r'{"a": "\"}', "no valid JSON (Unterminated string starting at: line 1 column 7 (char 6))"),
        ("hello", "no valid JSON (Expecting value: line 1 column 1 (char 0))"),
        ("ls -la", "no valid JSON (Expecting value: line 1 column 1 (char 0))"),
        ('{"a":1};', "no valid JSON (Extra data: line 1 column 8 (char 7))"),
        ('{"a":1}</tool_call>', "no valid JSON (Extra data: line 1 column 8 (char 7))"),
        ('{"a":"}"}\n```', "no valid JSON (Extra data: line 2 column 1 (char 10))"),
        ("NaN", "no valid JSON (NaN is no number in JSON)"),
        ('{"timeout": -Infinity}', "no valid JSON (-Infinity is no number in JSON)"),
        ('{"timeout": 1e999}', "no valid JSON (1e999 is no number in JSON)"),
        ('{"timeout": %s}' % ("9" * 5000), "no valid JSON (a number with more digits than any reader takes)"),
    ],
)
def test_bad_arguments_are_kept_and_told(arguments: str, problem: str) -> None:
    assert call(arguments=arguments) == ToolCall("c1", "t", {"_raw": arguments}, problem)


@given(st.dictionaries(st.text(), ANY_JSON, min_size=1).map(json.dumps), st.data())
def test_arguments_that_stop_half_way_are_cut(whole: str, data: st.DataObject) -> None:
    assume(not read_arguments(whole)[1])  # with numbers that JSON has
    part = whole[: data.draw(st.integers(1, len(whole) - 1))]
    if not part.endswith(("}", "]")):  # what looks whole is told to the model, which knows
        assert read_arguments(part)[1] == CUT


def test_arguments_that_are_a_list_are_kept_as_text() -> None:
    assert call(arguments=[1, 2]) == ToolCall("c1", "t", {"_raw": "[1,2]"}, "not a JSON object")


@given(st.text() | ANY_JSON | ANY_JSON.map(json.dumps))
def test_any_arguments_give_an_object(raw: Any) -> None:
    arguments, problem = read_arguments(clean_json(raw))
    dump_json(arguments).encode(errors="strict" if not problem else "replace")
    if problem:
        assert list(arguments) == ["_raw"]


def test_odd_calls() -> None:
    calls = message(
        tool_calls=[
            None,
            {},
            "text",
            {"id": "a"},
            {"id": 7, "function": {"name": None, "arguments": None}},
            {"id": "b", "function": None},
            {"name": "flat", "arguments": '{"x": 1}'},
        ]
    ).tool_calls
    assert calls == (
        ToolCall("a", "", {}),
        ToolCall("", "", {}),
        ToolCall("b", "", {}),
        ToolCall("", "flat", {"x": 1}),
    )


def test_one_call_without_its_list_and_the_legacy_form() -> None:
    function = {"name": "t", "arguments": "{}"}
    assert message(tool_calls={"id": "a", "function": function}).tool_calls == (ToolCall("a", "t", {}),)
    assert message(function_call=function).tool_calls == (ToolCall("", "t", {}),)
    assert message(content="x", tool_calls=[], function_call=None).tool_calls == ()


@pytest.mark.parametrize(
    ("reason", "read_as"),
    [
        ("stop", "stop"),
        ("MAX_TOKENS", "length"),
        ("SAFETY", "content_filter"),
        ("content_filter: PROHIBITED_CONTENT", "content_filter"),
        (None, ""),
        (5, ""),
        ("tool_calls", "tool_calls"),
    ],
)
def test_finish_reason(reason: Any, read_as: str) -> None:
    assert read({"content": "x"}, reason).finish_reason == read_as


@pytest.mark.parametrize("reason", ["error", "abort", "insufficient_system_resource"])
def test_an_answer_that_was_broken_off_is_none(reason: str) -> None:
    with pytest.raises(TryError, match=f'finish_reason "{reason}"') as refused:
        read({"content": "The answer is bec"}, reason)
    assert refused.value.verdict.retry


@pytest.mark.parametrize("reason", ["malformed_function_call", "function_call_filter: MALFORMED_FUNCTION_CALL"])
def test_a_call_that_the_server_could_not_read_is_none(reason: str) -> None:
    said = read({"tool_calls": [{"id": "a", "function": {"name": "t", "arguments": "{}"}}]}, reason)
    assert said.message == AssistantMessage("")


def test_what_else_a_server_says_of_a_call_is_kept_for_it() -> None:
    signed = {"google": {"thought_signature": "SIG"}}
    entry = {"id": "a", "function": {"name": "t", "arguments": "{}"}, "extra_content": signed, "index": 0}
    assert message(tool_calls=[entry]).tool_calls == (ToolCall("a", "t", {}, echo={"extra_content": signed}),)


@pytest.mark.parametrize(
    ("reported", "usage"),
    [
        (None, Usage()),
        ([], Usage()),
        ({"prompt_tokens": 5, "completion_tokens": 2.0, "total_tokens": 7}, Usage(5, 2)),
        ({"prompt_tokens": "5", "completion_tokens": None}, Usage(5, 0)),
        ({"input_tokens": 5, "output_tokens": 2}, Usage(5, 2)),
        ({"prompt_tokens": -1, "completion_tokens": True}, Usage()),
        ({"prompt_tokens": "many", "completion_tokens": 10**400}, Usage()),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, Usage(9, 0, 0, 4)),
        ({"prompt_tokens": 9, "prompt_cache_hit_tokens": 4, "prompt_tokens_details": None}, Usage(9, 0, 0, 4)),
        ({"completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 6}}, Usage(0, 9, 6)),
        ({"completion_tokens": 9, "completion_tokens_details": 3, "reasoning_tokens": 6}, Usage(0, 9, 6)),
    ],
)
def test_usage(reported: Any, usage: Usage) -> None:
    assert read({"content": "x"}, usage=reported).usage == usage


@pytest.mark.parametrize(
    ("cost", "usd"), [(0.25, 0.25), ("0.5", 0.5), (None, 0.0), (-1, 0.0), ({"total": 1}, 0.0), ("nan", 0.0)]
)
def test_cost(cost: Any, usd: float) -> None:
    assert read({"content": "x"}, usage={"cost": cost}).cost_usd == usd


@pytest.mark.parametrize(
    ("error", "status", "kind", "told"),
    [
        ({"code": 502, "message": "up"}, 502, "server", "HTTP 200 with error 502: up"),
        ({"code": "429", "message": "slow"}, 429, "rate_limit", "HTTP 200 with error 429: slow 429"),
        ({"code": "server_error", "message": "up"}, 200, "server", "HTTP 200 with an error: up server_error"),
        ({"code": 7}, 200, "bad_response", "HTTP 200 with an error"),
        ("just text", 200, "bad_response", "HTTP 200 with an error: just text"),
        (True, 200, "bad_response", "HTTP 200 with an error"),
    ],
)
def test_an_error_object(error: Any, status: int, kind: str, told: str) -> None:
    for answer in ({"error": error}, {"choices": [{"error": error, "message": {"content": "part"}}]}):
        with pytest.raises(TryError) as caught:
            read_reply(json.dumps(answer).encode())
        assert (caught.value.status, caught.value.verdict.kind, str(caught.value)) == (status, kind, told)


def test_no_error_is_no_error() -> None:
    assert read({"content": "x"}, error=None).message.content == "x"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ('{"error": {"message": "bad", "code": "c", "param": "p"}}', "HTTP 400: bad c p"),
        ('{"error": "bad"}', "HTTP 400: bad"),
        ('{"message": "bad"}', "HTTP 400: bad"),
        ('{"detail": "bad"}', "HTTP 400: bad"),
        (
            '{"detail": [{"loc": ["body", "x"], "msg": "Extra inputs are not permitted"}]}',
            "HTTP 400: Extra inputs are not permitted ['body', 'x']",
        ),
        (
            '{"error": {"message": "Provider returned error", "metadata": {"raw": "too hot", "provider_name": "P"}}}',
            "HTTP 400: Provider returned error too hot",
        ),
        ("<html><head><title>Bad\n Gateway</title></head><body>x</body></html>", "HTTP 400: Bad Gateway"),
        ("plain\r\n words", "HTTP 400: plain words"),
        ("", "HTTP 400"),
        ("{}", "HTTP 400"),
        ("[]", "HTTP 400"),
    ],
)
def test_the_endpoints_own_words(body: str, told: str) -> None:
    assert str(refusal(400, body.encode())) == told


def test_words_are_bounded() -> None:
    assert str(refusal(404, b"404: Not Found")) == "HTTP 404 (is the base_url whole? most end in /v1): 404: Not Found"
    assert str(refusal(404, b'{"error": "no such model"}')) == "HTTP 404: no such model"
    assert len(str(refusal(400, b"x" * 1_000_000))) <= MAX_WORDS_SHOWN + len("HTTP 400: ")


@given(st.binary() | ANY_JSON.map(json.dumps).map(str.encode))
def test_any_body_is_a_reply_or_a_try_error(body: bytes) -> None:
    try:
        read_reply(body)
    except TryError as error:
        assert error.verdict.retry  # noqa: PT017 - either outcome is right
    assert "\n" not in str(refusal(500, body))


def mangled(value: Any) -> st.SearchStrategy[Any]:
    """Return answers that look right but for anything in any place."""
    if isinstance(value, dict):
        whole: st.SearchStrategy[Any] = st.fixed_dictionaries({key: mangled(item) for key, item in value.items()})
    elif isinstance(value, list):
        whole = st.tuples(*map(mangled, value)).map(list)
    else:
        whole = st.just(value)
    return st.integers(0, 7).flatmap(lambda dice: whole if dice else ANY_JSON)


FULL = {
    **body_of("x", reasoning="r", reasoning_details=[{"type": "reasoning.text", "text": "r"}]),
    "usage": {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}, "cost": 0.1},
}
FULL["choices"][0]["message"]["tool_calls"] = [{"id": "a", "function": {"name": "t", "arguments": "{}"}}]


@given(mangled(FULL))
def test_an_answer_with_anything_anywhere_never_crashes(answer: Any) -> None:
    try:
        reply = read_reply(json.dumps(answer).encode())
    except TryError:
        return
    dump_json([reply.message.echo, reply.message.content, reply.message.reasoning]).encode()
    for tool_call in reply.message.tool_calls:
        dump_json(tool_call.arguments).encode()
    assert reply.cost_usd >= 0
