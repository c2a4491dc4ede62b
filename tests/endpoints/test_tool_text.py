from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endpoints.chat_request import BadRequestError, ChatRequest, parse_request
from endpoints.tool_text import MAX_CALLS, Offer, fold, offer, unfold

Json = dict[str, Any]
PROMPT: Json = {"role": "user", "content": "which kernel?"}


def tool(name: str, *required: str, **properties: Json) -> Json:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": f"the {name}", "parameters": schema}}


TERMINAL = tool(
    "terminal", "command", command={"type": "string"}, timeout={"type": "integer"}, workdir={"type": "string"}
)
READ = tool("read_file", "path", path={"type": "string"})


def called(command: str, number: int = 1, **more: Any) -> list[Json]:
    function = {"name": "terminal", "arguments": json.dumps({"command": command})}
    return [
        {
            "role": "assistant",
            "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
            **more,
        },
        {"role": "tool", "tool_call_id": f"call_{number}", "content": '{"output": "6.1"}'},
    ]


def asked(*messages: Json, **more: Any) -> ChatRequest:
    return parse_request(json.dumps({"model": "m", "messages": messages, "tools": [TERMINAL, READ], **more}).encode())


# Folding


def test_tools_go_into_the_system_turn() -> None:
    system, user = fold(asked(PROMPT))
    assert system["role"] == "system"
    lines = system["content"].split("\n")
    tools = [json.loads(line) for line in lines[lines.index("<tools>") + 1 : lines.index("</tools>")]]
    assert [entry["function"]["name"] for entry in tools] == ["terminal", "read_file"]
    assert tools[0]["function"]["description"] == "the terminal"
    assert user == PROMPT


def test_the_users_system_turn_stands_in_front() -> None:
    system = fold(asked({"role": "system", "content": "Be brief."}, PROMPT))[0]["content"]
    assert system.startswith("Be brief.\n\n# Tools")


def test_what_stands_in_front_of_the_prompt_is_the_same_for_all() -> None:
    one = fold(asked(PROMPT))
    other = fold(asked({"role": "user", "content": "something else"}, *called("ls")))
    assert one[0] == other[0]


def test_only_required_arguments_are_shown_if_there_are_any() -> None:
    free = tool("patch", mode={"type": "string"}, path={"type": "string"})
    request = asked(PROMPT, tools=[TERMINAL, free])
    assert set(offer(request).tools["terminal"]["properties"]) == {"command"}
    assert set(offer(request).tools["patch"]["properties"]) == {"mode", "path"}
    assert '"timeout"' not in fold(request)[0]["content"]


def test_tools_that_are_too_hard_are_not_offered_unless_there_is_no_other() -> None:
    process = tool("process", "action", action={"type": "string"})
    assert set(offer(asked(PROMPT, tools=[process, READ])).tools) == {"read_file"}
    assert set(offer(asked(PROMPT, tools=[process])).tools) == {"process"}


def test_calls_and_results_become_text() -> None:
    folded = fold(asked(PROMPT, *called("uname -r", reasoning_content="I will ask.")))
    assert folded[2:] == [
        {
            "role": "assistant",
            "content": '<think>\nI will ask.\n</think>\n{"name": "terminal", "arguments": {"command": "uname -r"}}',
        },
        {"role": "user", "content": '<tool_response>\n{"output": "6.1"}\n</tool_response>'},
    ]


def test_neighbours_of_one_role_become_one_turn() -> None:
    result: Json = {"role": "tool", "content": "b"}
    folded = fold(asked(PROMPT, *called("ls"), result, {"role": "user", "content": "sum up"}))
    assert [turn["role"] for turn in folded] == ["system", "user", "assistant", "user"]
    assert folded[-1]["content"].endswith("\n<tool_response>\nb\n</tool_response>\nsum up")


@pytest.mark.parametrize("arguments", [None, "", "  ", {}])
def test_calls_without_arguments(arguments: Any) -> None:
    message = {
        "role": "assistant",
        "content": "Now:",
        "tool_calls": [{"function": {"name": "a", "arguments": arguments}}],
    }
    assert fold(asked(PROMPT, message))[-1]["content"] == 'Now:\n{"name": "a", "arguments": {}}'


def test_without_tools_nothing_is_added() -> None:
    parts = [{"type": "text", "text": "hi "}, {"type": "input_audio", "input_audio": {}}, {"text": "there"}]
    assert fold(asked({"role": "user", "content": parts}, tools=[])) == [{"role": "user", "content": "hi there"}]


# What may come next


@pytest.mark.parametrize(
    ("messages", "step"),
    [
        ([PROMPT], 1),
        ([PROMPT, *called("ls")], 2),
        ([PROMPT, *called("ls"), *called("pwd", 2)], 3),
        ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}, PROMPT], 1),
    ],
)
def test_steps_are_counted_from_the_prompt(messages: list[Json], step: int) -> None:
    assert offer(asked(*messages)).step == step
    assert offer(asked(*messages, reasoning_effort="none")).step == 0


def test_tool_choice() -> None:
    assert offer(asked(PROMPT, tool_choice="none")) == Offer({}, text=True, step=1)
    assert offer(asked(PROMPT, tool_choice="required")).text is False
    named = offer(asked(PROMPT, tool_choice={"type": "function", "function": {"name": "read_file"}}))
    assert (set(named.tools), named.text) == ({"read_file"}, False)


def test_the_same_call_twice_ends_the_calls() -> None:
    assert offer(asked(PROMPT, *called("ls"), *called("pwd", 2))).tools
    assert not offer(asked(PROMPT, *called("ls"), *called("ls", 2))).tools


def test_many_calls_end_the_calls() -> None:
    calls = [message for number in range(MAX_CALLS) for message in called(f"echo {number}", number)]
    assert offer(asked(PROMPT, *calls[:-2])).tools
    assert not offer(asked(PROMPT, *calls)).tools
    assert offer(asked(PROMPT, *calls, PROMPT)).tools  # a new prompt, a new count


# Reading the model's text


def test_text() -> None:
    assert unfold("  It is 6.1.\n", call_id="c", cut=False) == ({"role": "assistant", "content": "It is 6.1."}, "stop")
    assert unfold("It is", call_id="c", cut=True)[1] == "length"


def test_a_call_with_a_thought() -> None:
    text = '<think>\nI will ask.\n</think>\n{"name": "terminal", "arguments": {"command": "uname -r"}}'
    message, finish_reason = unfold(text, call_id="call_7", cut=False)
    function = {"name": "terminal", "arguments": '{"command": "uname -r"}'}
    assert finish_reason == "tool_calls"
    assert message == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I will ask.",
        "tool_calls": [{"id": "call_7", "type": "function", "function": function}],
    }


def test_a_call_that_was_cut_keeps_what_there_is() -> None:
    message, finish_reason = unfold('{"name": "terminal", "arguments": {"command": "una', call_id="c", cut=True)
    assert finish_reason == "length"
    assert message["tool_calls"][0]["function"] == {"name": "terminal", "arguments": '{"command": "una'}


@pytest.mark.parametrize("text", ['{"name": "term', "<think>\nI wi", ""])
def test_cut_before_there_is_anything(text: str) -> None:
    assert unfold(text, call_id="c", cut=True) == ({"role": "assistant", "content": text}, "length")


NAMES = st.text(min_size=1, max_size=8)


@given(name=NAMES, arguments=st.dictionaries(st.text(max_size=5), st.text() | st.integers(), max_size=4))
def test_what_is_folded_is_unfolded(name: str, arguments: Json) -> None:
    function = {"name": name, "arguments": json.dumps(arguments)}
    message: Json = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    text = fold(asked(PROMPT, {**message, "reasoning_content": "I will see."}))[-1]["content"]
    read, finish_reason = unfold(text, call_id="c", cut=False)
    assert finish_reason == "tool_calls"
    assert read["reasoning_content"] == "I will see."
    assert read["tool_calls"][0]["function"] == function


# Requests


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": "hi"}, "messages: Input should be a valid"),
        ({"messages": [{"role": "robot"}]}, "messages.0.role"),
        ({"messages": [{"content": "x"}]}, "messages.0.role: Field required"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "cannot see images"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function"),
        ({"tools": [{"function": {}}]}, "tools.0.function.name"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool that is not among the tools"),
        ({"tool_choice": {"function": {"name": "no_such"}}}, "tool that is not among the tools"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n: "),
    ],
)
def test_requests_that_make_no_sense(change: Json, words: str) -> None:
    with pytest.raises(BadRequestError) as raised:
        asked(PROMPT, **change) if "messages" not in change else parse_request(json.dumps(change).encode())
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff"])
def test_bodies_that_are_no_request(body: bytes) -> None:
    with pytest.raises(BadRequestError):
        parse_request(body)


def test_what_is_not_known_is_ignored() -> None:
    request = asked({**PROMPT, "name": "me", "reasoning_details": []}, seed=3, provider={"order": []}, max_tokens=5)
    assert request.max_tokens == 5
