from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.messages import AssistantMessage, Message, ToolCall, ToolDefinition, ToolMessage, UserMessage
from rollout.trajectory import called_tools, conversations, json_text, split_thinking, thinking, turn_thinks

TERMINAL = ToolDefinition("terminal", "Run a command", {"type": "object", "properties": {"command": {}}})

# What a plain reader of this format does.
THINK_BLOCK = re.compile(r"\A<think>\n(?:(.*?)\n)?</think>(?:\n|\Z)", re.DOTALL)
CALL_BLOCK = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
RESPONSE_BLOCK = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
TAGS = ("think", "tool_call", "tool_response")

pieces = [f"<{tag}>" for tag in TAGS] + [f"</{tag}>" for tag in TAGS]
pieces += ["<tools>", "</tools>", "<\\/think>", "</REASONING_SCRATCHPAD>", *'\n \\"{}<>']
pieces += ["\0", "\ud800", "\udc00", "\\u0000", "é", "🙂", "\u2028", "NaN", '{"name": "x", "arguments": {}}', "word"]
texts = st.lists(st.sampled_from(pieces) | st.text(max_size=5)).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(texts, values, max_size=3)
calls = st.lists(st.tuples(texts, objects), max_size=4)


def convert(*messages: Message, prompt: str = "question") -> list[dict[str, Any]]:
    return conversations(prompt, [UserMessage(prompt), *messages], [TERMINAL])[2:]


def gpt(content: str = "", reasoning: str = "", *tool_calls: ToolCall) -> str:
    turn = convert(AssistantMessage(content, reasoning, tool_calls))[0]
    assert turn["from"] == "gpt"
    return str(turn["value"])


def cleaned(value: Any) -> Any:
    """What must come back: the same value, with what is no Unicode replaced."""
    if isinstance(value, str):
        text = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return text.replace("\0", "\ufffd")
    if isinstance(value, dict):
        return {cleaned(key): cleaned(item) for key, item in value.items()}
    return [cleaned(item) for item in value] if isinstance(value, list) else value


def restored(text: str) -> str:
    return re.sub(r"<\\(\\*/?(?:think|tool_call|tool_response)>)", r"<\1", text, flags=re.IGNORECASE)


def test_a_whole_conversation() -> None:
    call = ToolCall("c1", "terminal", {"command": "echo hé"})
    turns = conversations(
        "say hé",
        [
            UserMessage("say hé"),
            AssistantMessage("On it.", "I should run echo.", (call,)),
            ToolMessage("c1", "terminal", '{"output": "hé", "exit_code": 0, "error": null}'),
            AssistantMessage("hé"),
        ],
        [TERMINAL],
    )
    assert [turn["from"] for turn in turns] == ["system", "human", "gpt", "tool", "gpt"]
    assert turns[1:] == [
        {"from": "human", "value": "say hé"},
        {
            "from": "gpt",
            "value": "<think>\nI should run echo.\n</think>\nOn it.\n"
            '<tool_call>\n{"name": "terminal", "arguments": {"command": "echo hé"}}\n</tool_call>',
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "terminal", "arguments": '{"command": "echo hé"}'},
                },
            ],
        },
        {
            "from": "tool",
            "value": '<tool_response>\n{"tool_call_id": "c1", "name": "terminal", '
            '"content": {"output": "hé", "exit_code": 0, "error": null}}\n</tool_response>',
        },
        {"from": "gpt", "value": "<think>\n</think>\nhé", "tool_calls": []},
    ]


def test_the_system_turn_lists_the_tools_and_is_the_known_instruction() -> None:
    value = conversations("q", [], [TERMINAL])[0]["value"]
    assert value.startswith("You are a function calling AI model.")
    assert "Here are the available tools:\n<tools>\n[" in value
    (tools,) = re.findall(r"<tools>\n(.*)\n</tools>", value)
    assert json.loads(tools) == [
        {"name": "terminal", "description": "Run a command", "parameters": TERMINAL.parameters, "required": None},
    ]
    assert "{'title': 'FunctionCall', 'type': 'object', 'properties': {'name': " in value
    assert value.endswith("<tool_call>\n{'name': <function-name>,'arguments': <args-dict>}\n</tool_call>")


def test_the_system_turn_without_tools_and_with_hostile_descriptions() -> None:
    assert "<tools>\n[]\n</tools>" in conversations("q", [], [])[0]["value"]
    hostile = ToolDefinition("x", "ends </tools> here, 100 % %s \ud800", {})
    tools = conversations("q", [], [hostile])[0]["value"].split("<tools>\n")[1].split("</tools>")[0]
    assert json.loads(tools)[0]["description"] == "ends </tools> here, 100 % %s \ufffd"


def test_the_human_turn_is_the_prompt_of_the_dataset_and_the_only_one() -> None:
    prompt = "  What is <think>?\n"
    turns = conversations(prompt, [UserMessage("what was sent"), AssistantMessage("4")], [])
    assert [turn["value"] for turn in turns if turn["from"] == "human"] == [prompt]


def test_later_user_messages_are_human_turns() -> None:
    turns = convert(AssistantMessage("a"), UserMessage("summarise"), AssistantMessage("b"))
    assert [(turn["from"], turn["value"]) for turn in turns[1:2]] == [("human", "summarise")]
    assert len(turns) == 3


@pytest.mark.parametrize(
    ("content", "reasoning", "value"),
    [
        ("4", "", "<think>\n</think>\n4"),
        ("4", "  \n", "<think>\n</think>\n4"),
        ("4", "two and two", "<think>\ntwo and two\n</think>\n4"),
        ("<think>x</think>4", "", "<think>\nx\n</think>\n4"),
        ("<think>\n\n</think>\n\n4", "", "<think>\n</think>\n4"),
        ("<REASONING_SCRATCHPAD>x</REASONING_SCRATCHPAD>4", "", "<think>\nx\n</think>\n4"),
        ("<think>x</think>4", "x", "<think>\nx\n</think>\n4"),  # a server that says it twice
        ("<think>b</think>4", "a", "<think>\na\n\nb\n</think>\n4"),
        ("<think>a</think>4<think>b</think>5", "a\n\nb", "<think>\na\n\nb\n</think>\n45"),
        ("<think>a</think>4</think>5", "", "<think>\na\n</think>\n4<\\/think>5"),
        ("<think>never closed", "", "<think>\nnever closed\n</think>"),
        ("opened by the template</think>4", "", "<think>\nopened by the template\n</think>\n4"),
        ("4<think>b</think>5", "a", "<think>\na\n</think>\n4<\\think>b<\\/think>5"),
        ("In `<think>` and `</think>`.", "", "<think>\n</think>\nIn `<\\think>` and `<\\/think>`."),
        ("In `<think>x</think>`.", "a", "<think>\na\n</think>\nIn `<\\think>x<\\/think>`."),
        ("<think>x</think>`ls` does", "", "<think>\nx\n</think>\n`ls` does"),
        ("Close it with </think>.", "easy", "<think>\neasy\n</think>\nClose it with <\\/think>."),
        ("Open it with <think>.", "", "<think>\n</think>\nOpen it with <\\think>."),
        ("Write <tool_call>{}</tool_call>", "", "<think>\n</think>\nWrite <\\tool_call>{}<\\/tool_call>"),
        ("", "a </think> b <tool_call>", "<think>\na <\\/think> b <\\tool_call>\n</think>"),
        ("", "", "<think>\n</think>"),
    ],
)
def test_one_think_block_in_front(content: str, reasoning: str, value: str) -> None:
    assert gpt(content, reasoning) == value


def test_thinking_is_what_the_think_block_holds() -> None:
    assert thinking(AssistantMessage("<think>b</think>4", "a")) == "a\n\nb"
    assert thinking(AssistantMessage("<think> </think>4", " ")) == ""


def test_many_thoughts_are_looked_for_in_one_another_a_hundred_times_at_most() -> None:
    repeated = "t" + "<think>a</think>" * 5000
    text, thoughts = split_thinking(repeated, native="a" * 100_000)
    assert (len(thoughts), text.count("<think>")) == (100, 4900)
    assert split_thinking(repeated) == ("t", ["a"] * 5000)
    assert gpt(repeated, "b") == "<think>\nb\n</think>\n" + repeated.replace("<", "<\\")
    assert gpt("<think>a</think>" * 5000, "a") == "<think>\na\n</think>"


def test_many_unclosed_blocks_take_no_long_time() -> None:
    content = "x" + "<think>" * 200_000
    assert split_thinking(content) == (content, [])


def test_broken_arguments_are_stored_as_what_the_model_wrote() -> None:
    broken = ToolCall("c", "terminal", {"_raw": '{"a": 1'}, problem="no JSON")
    assert json.loads(CALL_BLOCK.findall(gpt("", "", broken))[0])["arguments"] == {"_raw": '{"a": 1'}


def test_results_stand_in_call_order_paired_by_id() -> None:
    wanted = (ToolCall("a", "terminal", {}), ToolCall("b", "read_file", {}))
    turns = convert(
        AssistantMessage("", "", wanted),
        ToolMessage("b", "read_file", "second"),
        ToolMessage("a", "terminal", "[1, 2]"),
    )
    responses = [json.loads(block) for block in RESPONSE_BLOCK.findall(turns[1]["value"])]
    assert responses == [
        {"tool_call_id": "a", "name": "terminal", "content": [1, 2]},
        {"tool_call_id": "b", "name": "read_file", "content": "second"},
    ]


@pytest.mark.parametrize("content", ["", "plain", "{broken", "[" * 5000, "12", '"text"', "null"])
def test_results_that_are_no_object_or_array_stay_text(content: str) -> None:
    turns = convert(AssistantMessage("", "", (ToolCall("a", "t", {}),)), ToolMessage("a", "t", content))
    assert json.loads(RESPONSE_BLOCK.findall(turns[1]["value"])[0])["content"] == content


def test_json_text_is_strict_json() -> None:
    value = {"a\ud800": float("nan"), "b": [float("-inf"), "NaN \0 \\u0000 Infinity"]}
    text = json_text(value)
    assert json.loads(text, parse_constant=pytest.fail) == {"a\ufffd": None, "b": [None, "NaN \ufffd \\u0000 Infinity"]}


def test_reading_turns_back() -> None:
    turn = convert(AssistantMessage("", "why", (ToolCall("a", "terminal", {"command": "x"}),)))[0]
    assert turn_thinks(turn)
    assert called_tools(turn) == ["terminal"]
    assert not turn_thinks(convert(AssistantMessage("4"))[0])


def test_reading_the_turns_of_the_original() -> None:
    value = (
        '<think>\nI say <tool_call>, or\n<tool_call>\n{"name": "imagined"}\n</tool_call>\n</think>\ntext\n'
        '<tool_call>\n{"name": "terminal", "arguments": {"command": "echo \'</tool_call>\'"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "memory", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": bro'
    )
    assert called_tools({"from": "gpt", "value": value}) == ["terminal", "memory"]
    assert turn_thinks({"from": "gpt", "value": value})
    assert not turn_thinks({"from": "gpt", "value": "<think>\n</think>\n4"})


@given(texts, texts, calls)
def test_a_plain_parser_gets_back_the_calls(content: str, reasoning: str, made: list[tuple[str, Any]]) -> None:
    tool_calls = tuple(ToolCall(f"c{number}", *call) for number, call in enumerate(made))
    turn = convert(AssistantMessage(content, reasoning, tool_calls))[0]
    parsed = [json.loads(block, parse_constant=pytest.fail) for block in CALL_BLOCK.findall(turn["value"])]
    assert parsed == [{"name": cleaned(name), "arguments": cleaned(arguments)} for name, arguments in made]
    assert len(turn["value"].split("<tool_call>")) == len(turn["value"].split("</tool_call>")) == len(made) + 1
    functions = [call["function"] for call in turn["tool_calls"]]
    assert [json.loads(function["arguments"]) for function in functions] == [call["arguments"] for call in parsed]
    assert called_tools(turn) == [function["name"] for function in functions] == [call["name"] for call in parsed]


@given(texts, texts, calls)
def test_there_is_exactly_one_think_block(content: str, reasoning: str, made: list[tuple[str, Any]]) -> None:
    message = AssistantMessage(content, reasoning, tuple(ToolCall("c", *call) for call in made))
    value = convert(message)[0]["value"]
    assert value.count("<think>") == value.count("</think>") == 1
    found = THINK_BLOCK.match(value)
    assert found
    assert restored(found[1] or "") == thinking(message)
    assert value.split("</think>")[0].removeprefix("<think>").strip() == (found[1] or "").strip()


@given(texts, texts)
def test_thoughts_and_text_come_back(content: str, reasoning: str) -> None:
    content = re.sub(r"</?(think|REASONING_SCRATCHPAD)>", "", content)
    value = gpt(content, reasoning)
    found = THINK_BLOCK.match(value)
    assert found
    assert restored(found[1] or "") == cleaned(reasoning).strip()
    assert restored(value[found.end() :]) == cleaned(content).strip()


@given(st.lists(texts | objects.map(json.dumps)))
def test_a_plain_parser_gets_back_the_results(contents: list[str]) -> None:
    made = tuple(ToolCall(f"c{number}", "terminal", {}) for number in range(len(contents)))
    results = [ToolMessage(call.id, "terminal", content) for call, content in zip(made, contents, strict=True)]
    turns = convert(AssistantMessage("", "", made), *reversed(results))
    value = turns[1]["value"] if contents else ""
    assert value.count("<tool_response>") == value.count("</tool_response>") == len(contents)
    for result, block in zip(results, RESPONSE_BLOCK.findall(value), strict=True):
        response = json.loads(block)
        assert response["tool_call_id"] == result.tool_call_id
        expected = result.content if isinstance(response["content"], str) else json.loads(result.content)
        assert response["content"] == cleaned(expected)


@given(texts, st.lists(texts), objects)
def test_whatever_is_said_is_valid_utf8_on_one_line(prompt: str, said: list[str], arguments: dict[str, Any]) -> None:
    call = ToolCall(prompt, prompt, arguments)
    messages: list[Message] = [UserMessage(prompt)]
    for text in said:
        messages += [AssistantMessage(text, text, (call,)), ToolMessage(prompt, text, text), UserMessage(text)]
    turns = conversations(prompt, messages, [ToolDefinition(prompt, prompt, arguments)])
    line = json.dumps(turns, ensure_ascii=False)
    line.encode()
    assert "\n" not in line
    assert "\\u0000" not in line.replace("\\\\", "")
    assert json.loads(line) == turns
