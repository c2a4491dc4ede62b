from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from rollout.filters import drop_reason, no_reasoning, other_tools, reasoning_turns, unknown_tools
from rollout.messages import AssistantMessage, Message, ToolCall, ToolDefinition, ToolMessage, UserMessage
from rollout.trajectory import conversations


def row(*messages: Message) -> dict[str, Any]:
    return {"prompt_index": 0, "conversations": conversations("q", [UserMessage("q"), *messages], [])}


def call(name: str) -> AssistantMessage:
    return AssistantMessage("", "", (ToolCall("a", name, {}),))


def original_row(*values: str) -> dict[str, Any]:
    """As the original runner writes it: no ``tool_calls``, and columns of another catalogue."""
    turns = [{"from": "human", "value": "q"}, *({"from": "gpt", "value": value} for value in values)]
    zero = {"count": 0, "success": 0, "failure": 0}
    stamp = datetime.now(UTC).isoformat()
    return {"conversations": turns, "metadata": {"timestamp": stamp}, "tool_stats": {"skills_list": zero}}


@pytest.mark.parametrize(
    ("messages", "lacks"),
    [
        ([AssistantMessage("4")], True),
        ([AssistantMessage("4", " \n")], True),
        ([AssistantMessage("<think>\n\n</think>\n4")], True),
        ([AssistantMessage("<REASONING_SCRATCHPAD></REASONING_SCRATCHPAD>4")], True),
        ([], True),
        ([AssistantMessage("4", "two and two")], False),
        ([AssistantMessage("<think>x</think>4")], False),
        ([AssistantMessage("<REASONING_SCRATCHPAD>x</REASONING_SCRATCHPAD>4")], False),
        ([call("terminal"), ToolMessage("a", "terminal", "<think>x</think>"), AssistantMessage("4")], True),
        ([call("terminal"), ToolMessage("a", "terminal", "1"), AssistantMessage("4", "late")], False),
    ],
)
def test_rollouts_without_reasoning(messages: list[Message], lacks: bool) -> None:
    assert no_reasoning(row(*messages)) is lacks


def test_a_think_tag_in_a_call_is_no_reasoning() -> None:
    shouting = AssistantMessage("", "", (ToolCall("a", "terminal", {"command": "echo '<think>x</think>'"}),))
    assert no_reasoning(row(shouting))


def test_turns_with_reasoning_are_counted() -> None:
    assert reasoning_turns(row(AssistantMessage("a", "b"), UserMessage("go on"), AssistantMessage("c"))) == (2, 1)
    assert reasoning_turns(original_row("<think>\nx\n</think>\n4", "<think>\n</think>\n5")) == (2, 1)
    assert reasoning_turns({"prompt_index": 1}) == (0, 0)


def test_rows_that_call_unknown_tools_are_dropped_and_say_which() -> None:
    bad = row(call("foo_bar"), call("terminal"), call("baz"), call("foo_bar"))
    assert unknown_tools(bad) == ("foo_bar", "baz")
    assert drop_reason(bad) == "unknown tool: foo_bar, baz"
    assert drop_reason(row(call("Terminal"))) == "unknown tool: Terminal"


def test_rows_that_call_known_tools_stay() -> None:
    talk = AssistantMessage('I will not write <tool_call>\n{"name": "foo"}\n</tool_call>', '<tool_call>{"name": "x"}')
    assert drop_reason(row(talk, call("terminal"), call("browser_vision"))) == ""


def test_tools_that_the_row_itself_offers_are_known_there() -> None:
    offered = [ToolDefinition("mcp_x_add", "Says </tools> and <tools>.", {"type": "object"})]
    calls: list[Message] = [UserMessage("q"), call("mcp_x_add"), call("mcp_x_sub"), call("terminal")]
    ours = {"conversations": conversations("q", calls, offered)}
    assert unknown_tools(ours) == ("mcp_x_sub",)
    assert other_tools(ours) == (("mcp_x_add",), ("mcp_x_sub",))
    assert drop_reason({"conversations": ours["conversations"][1:]}) == "unknown tool: mcp_x_add, mcp_x_sub"
    for system in ("", "<tools>\n[", "<tools>\n{}\n</tools>", '<tools>\n[1, {}, {"name": 7}]\n</tools>'):
        odd = [{"from": "system", "value": system}, *ours["conversations"][1:]]
        assert other_tools({"conversations": odd}) == ((), ("mcp_x_add", "mcp_x_sub"))


def test_the_originals_rows_are_judged_by_their_conversation() -> None:
    good = '<think>\n</think>\n<tool_call>\n{"name": "terminal", "arguments": {}}\n</tool_call>'
    assert unknown_tools(original_row(good)) == ()
    assert unknown_tools(original_row(good.replace("terminal", "foo_bar"))) == ("foo_bar",)


@pytest.mark.parametrize(
    "conversation",
    [None, 7, [], ["text"], [{"from": "gpt"}], [{"value": "x"}], [{"from": "gpt", "tool_calls": [1, {}]}]],
)
def test_odd_rows_are_no_reason_to_fall_over(conversation: Any) -> None:
    assert drop_reason({"conversations": conversation}) == ""
    assert no_reasoning({"conversations": conversation})
