from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.agent import MAX_STRIKES, SUMMARY_REQUEST, Agent, AgentLimits, AgentResult
from rollout.chat_model import ContextOverflowError, GateClosedError, ModelError
from rollout.messages import (
    AssistantMessage,
    Failure,
    Message,
    ToolCall,
    ToolDefinition,
    ToolMessage,
    Usage,
    UserMessage,
)
from rollout.replies import CUT, Reply
from sandboxes.base import SandboxError

SPENT = Usage(10, 5, 2, 1)
LIMITS = AgentLimits()


@dataclass
class Script:
    """A model that gives prepared replies, the last one for ever; an exception among them is raised."""

    replies: Sequence[Reply | Exception]
    asked: list[tuple[tuple[Message, ...], tuple[str, ...]]] = field(default_factory=list)

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> Reply:
        await asyncio.sleep(0)
        self.asked.append((tuple(messages), tuple(tool.name for tool in tools)))
        reply = self.replies[min(len(self.asked), len(self.replies)) - 1]
        if isinstance(reply, Exception):
            raise reply
        return reply


@dataclass
class Tools:
    """Two tools that note what they were asked."""

    definitions: tuple[ToolDefinition, ...] = (ToolDefinition("terminal", "", {}), ToolDefinition("read_file", "", {}))
    ran: list[ToolCall] = field(default_factory=list)
    fault: Exception | None = None

    def resolve(self, name: str) -> str | None:
        plain = name.lower().replace("-", "_")
        return plain if plain in [tool.name for tool in self.definitions] else None

    async def run(self, call: ToolCall) -> ToolMessage:
        await asyncio.sleep(0)
        if self.fault:
            raise self.fault
        self.ran.append(call)
        return ToolMessage(call.id, call.name, json.dumps({"output": f"{call.name} {call.arguments}"}))


def says_text(content: str, finish_reason: str = "stop", reasoning: str = "") -> Reply:
    return Reply(AssistantMessage(content, reasoning), finish_reason, SPENT, 0.5)


def calls(*tool_calls: ToolCall, content: str = "", finish_reason: str = "tool_calls") -> Reply:
    return Reply(AssistantMessage(content, tool_calls=tool_calls), finish_reason, SPENT, 0.5)


def call(name: str = "terminal", call_id: str = "c1", problem: str = "", **arguments: Any) -> ToolCall:
    return ToolCall(call_id, name, arguments, problem)


def run(
    *replies: Reply | Exception, tools: Tools | None = None, limits: AgentLimits = LIMITS
) -> tuple[AgentResult, Script]:
    script = Script(replies)
    return asyncio.run(Agent("do it", script, tools or Tools(), limits).run()), script


def errors(result: AgentResult) -> list[str]:
    contents = [json.loads(message.content) for message in result.messages if isinstance(message, ToolMessage)]
    return [content["error"] for content in contents if "error" in content]


def test_an_answer_at_once() -> None:
    result, script = run(says_text("done"))
    assert result == AgentResult(
        (UserMessage("do it"), AssistantMessage("done")), "completed", None, api_calls=1, usage=SPENT, cost_usd=0.5
    )
    assert result.completed
    assert not result.partial
    assert script.asked == [((UserMessage("do it"),), ("terminal", "read_file"))]


def test_calls_are_run_in_order_and_answered() -> None:
    tools = Tools()
    result, script = run(
        calls(call("terminal", "a", command="ls"), call("read_file", "b", path="x")), says_text("done"), tools=tools
    )
    assert [ran.name for ran in tools.ran] == ["terminal", "read_file"]
    assert [type(message) for message in result.messages] == [
        UserMessage,
        AssistantMessage,
        ToolMessage,
        ToolMessage,
        AssistantMessage,
    ]
    assert script.asked[1][0] == result.messages[:-1]
    assert (result.api_calls, result.usage, result.cost_usd) == (2, SPENT + SPENT, 1.0)


def test_the_turn_limit_asks_for_a_summary_without_tools() -> None:
    result, script = run(calls(call()), calls(call()), says_text("so far"), limits=AgentLimits(max_turns=2))
    assert (result.stop_reason, result.completed, result.partial) == ("turn_limit", False, False)
    assert result.messages[-2:] == (UserMessage(SUMMARY_REQUEST), AssistantMessage("so far"))
    assert script.asked[2][1] == ()
    assert result.api_calls == 3


@pytest.mark.parametrize("words", ["Unexpected role 'user' after role 'tool'", "tools= is missing"])
def test_a_server_that_takes_no_request_for_a_summary_costs_the_summary_alone(words: str) -> None:
    result, _ = run(calls(call()), ModelError("bad_request", words), limits=AgentLimits(max_turns=1))
    assert (result.stop_reason, result.partial, result.failure) == ("turn_limit", False, None)
    assert isinstance(result.messages[-1], ToolMessage)
    result, _ = run(calls(call()), ModelError("server", "HTTP 500"), limits=AgentLimits(max_turns=1))
    assert result.failure == Failure("server", "HTTP 500")


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason"), [("length", "cut_by_token_limit"), ("content_filter", "content_filter")]
)
def test_a_summary_that_is_cut_is_partial(finish_reason: str, stop_reason: str) -> None:
    result, _ = run(calls(call()), says_text("I found that the", finish_reason), limits=AgentLimits(max_turns=1))
    assert (result.stop_reason, result.partial) == (stop_reason, True)
    assert result.messages[-1] == AssistantMessage("I found that the")


def test_an_answer_in_the_last_turn_is_complete() -> None:
    result, script = run(calls(call()), says_text("done"), limits=AgentLimits(max_turns=2))
    assert result.completed
    assert len(script.asked) == 2


def test_calls_in_the_summary_are_ignored() -> None:
    tools = Tools()
    result, _ = run(calls(call(), content="so far"), limits=AgentLimits(max_turns=1), tools=tools)
    assert result.stop_reason == "turn_limit"
    assert result.messages[-1] == AssistantMessage("so far")
    assert len(tools.ran) == 1


@pytest.mark.parametrize(
    ("trouble", "stop_reason"),
    [
        (calls(call()), "turn_limit"),
        (says_text(""), "turn_limit"),
        (says_text("<think>and", "length"), "turn_limit"),
        (ContextOverflowError("too long"), "context_overflow"),
        (ModelError("server", "down"), "failed"),
    ],
)
def test_a_summary_that_never_comes_leaves_no_question_behind(trouble: Reply | Exception, stop_reason: str) -> None:
    result, script = run(calls(call()), trouble, limits=AgentLimits(max_turns=1))
    assert not result.completed
    assert result.stop_reason == stop_reason
    assert isinstance(result.messages[-1], ToolMessage)
    assert len(script.asked) == 2


def test_a_variant_of_a_name_is_stored_under_the_right_one() -> None:
    tools = Tools()
    result, _ = run(calls(call("Read-File")), says_text("done"), tools=tools)
    assert isinstance(result.messages[1], AssistantMessage)
    assert result.messages[1].tool_calls[0].name == tools.ran[0].name == "read_file"
    assert result.completed


def test_an_unknown_name_is_answered_and_its_siblings_run() -> None:
    tools = Tools()
    result, _ = run(calls(call("nope", "a"), call("terminal", "b")), says_text("sorry"), tools=tools)
    assert result.completed
    assert errors(result) == ["Unknown tool 'nope'. Available tools: terminal, read_file."]
    answered = [message for message in result.messages if isinstance(message, ToolMessage)]
    assert [(message.tool_call_id, message.name) for message in answered] == [("a", "nope"), ("b", "terminal")]
    assert [ran.id for ran in tools.ran] == ["b"]


def test_broken_arguments_are_told_and_never_run() -> None:
    tools = Tools()
    broken = ToolCall("a", "terminal", {"_raw": "{'a"}, "no valid JSON (oh)")
    result, _ = run(calls(broken, call(call_id="b")), says_text("done"), tools=tools)
    assert [ran.id for ran in tools.ran] == ["b"]
    assert errors(result) == [
        "Invalid arguments for terminal: no valid JSON (oh). Nothing was run; send one JSON object."
    ]
    assert result.completed


def test_three_strikes_in_a_row() -> None:
    result, script = run(calls(call("nope")))
    assert (result.stop_reason, result.partial, result.completed) == ("invalid_tool_calls", True, False)
    assert len(script.asked) == MAX_STRIKES
    assert len(errors(result)) == MAX_STRIKES
    assert isinstance(result.messages[-1], ToolMessage)


def test_a_turn_in_which_something_ran_takes_the_strikes_back() -> None:
    bad, mixed = calls(call("nope")), calls(call("nope"), call())
    result, _ = run(bad, bad, mixed, bad, bad, says_text("done"))
    assert result.completed


def test_without_tools_calls_are_no_calls() -> None:
    result, _ = run(calls(call("nope")), tools=Tools(definitions=()))
    assert result.stop_reason == "empty_replies"


def test_ids_are_made_unique() -> None:
    same = calls(call(call_id="x"), call(call_id="x"), call(call_id=""), call(call_id=""), call(call_id="x_1"))
    result, _ = run(same, same, says_text("done"))
    made = [
        made.id for message in result.messages if isinstance(message, AssistantMessage) for made in message.tool_calls
    ]
    answered = [message.tool_call_id for message in result.messages if isinstance(message, ToolMessage)]
    assert len(set(made)) == len(made) == 10
    assert answered == made
    assert made[0] == "x"


@given(
    st.lists(
        st.lists(st.sampled_from(["", "x", "call", "x_1", "call_0", "call_2"]), min_size=1, max_size=5), max_size=5
    )
)
def test_whatever_the_ids_each_call_is_answered_once(turns: list[list[str]]) -> None:
    result, _ = run(*(calls(*(call(call_id=call_id) for call_id in turn)) for turn in turns), says_text("done"))
    made = [
        made.id for message in result.messages if isinstance(message, AssistantMessage) for made in message.tool_calls
    ]
    answered = [message.tool_call_id for message in result.messages if isinstance(message, ToolMessage)]
    assert made == answered
    assert len(set(made)) == len(made)
    assert all(made)


def test_a_hundred_calls_in_one_turn_and_a_few_too_many() -> None:
    tools = Tools()
    many = calls(*(call(call_id=str(number)) for number in range(130)))
    result, _ = run(many, says_text("done"), tools=tools)
    assert len(tools.ran) == 128
    assert errors(result) == ["Not run: only 128 calls are taken per turn. Send it again if needed."] * 2
    assert result.completed


@pytest.mark.parametrize(
    "cut",
    [
        calls(ToolCall("c1", "terminal", {"_raw": '{"command":"ec'}, CUT), finish_reason="length"),
        calls(ToolCall("c1", "terminal", {"_raw": '{"command":"ec'}, CUT)),
        calls(call("read_file"), ToolCall("c2", "terminal", {"_raw": '{"'}, CUT)),
        calls(call(command="rm x"), finish_reason="length"),
        says_text("", "length", reasoning="long thoughts"),
        says_text("<think>long", "length"),
        says_text("<REASONING_SCRATCHPAD>long", "length"),
    ],
)
def test_a_cut_answer_is_asked_for_once_more_and_never_run(cut: Reply) -> None:
    tools = Tools()
    result, script = run(cut, tools=tools)
    assert (result.stop_reason, result.partial) == ("cut_by_token_limit", True)
    assert result.messages == (UserMessage("do it"),)
    assert (len(script.asked), result.api_calls, result.usage) == (2, 2, SPENT + SPENT)
    result, _ = run(cut, says_text("short"), tools=tools)
    assert result.completed
    assert tools.ran == []


def test_a_text_cut_by_the_token_limit_is_kept_as_partial() -> None:
    result, script = run(says_text("half a sen", "length"))
    assert (result.stop_reason, result.partial, len(script.asked)) == ("cut_by_token_limit", True, 1)
    assert result.messages[-1] == AssistantMessage("half a sen")


@pytest.mark.parametrize(
    ("reply", "stop_reason", "requests"),
    [
        (says_text("<REASONING_SCRATCHPAD>half"), "unclosed_reasoning", 3),
        (says_text("<REASONING_SCRATCHPAD>a</REASONING_SCRATCHPAD><REASONING_SCRATCHPAD>b"), "unclosed_reasoning", 3),
        (says_text("\n<think>half"), "unclosed_reasoning", 3),
        (calls(call(), content="<REASONING_SCRATCHPAD>half"), "unclosed_reasoning", 3),
        (says_text(""), "empty_replies", 4),
        (says_text(" \n\t"), "empty_replies", 4),
        (says_text("\u200b\u2060 \ufeff"), "empty_replies", 4),
        (says_text("", reasoning="only thoughts"), "empty_replies", 4),
        (says_text("<think>only thoughts</think>\n"), "empty_replies", 4),
        (says_text("only thoughts, begun by the template</think>\n\n"), "empty_replies", 4),
        (says_text("<think>a</think>" * 200), "empty_replies", 4),
        (says_text("<think>a</think>" * 200, reasoning="b"), "empty_replies", 4),
        (says_text("<REASONING_SCRATCHPAD>a</REASONING_SCRATCHPAD> <think>b</think>"), "empty_replies", 4),
    ],
)
def test_an_unusable_answer_is_asked_for_again_and_rolled_back(reply: Reply, stop_reason: str, requests: int) -> None:
    turn = calls(call())
    result, script = run(turn, reply)
    assert (result.stop_reason, result.partial, result.completed) == (stop_reason, True, False)
    assert (len(script.asked), result.api_calls) == (requests + 1, requests + 1)
    assert isinstance(result.messages[-1], ToolMessage)
    result, _ = run(turn, *[reply] * (requests - 1), says_text("done"))
    assert result.completed
    assert result.messages[-1] == AssistantMessage("done")


@pytest.mark.parametrize(
    "content",
    [
        "<REASONING_SCRATCHPAD>x</REASONING_SCRATCHPAD>4",
        "<think>x</think>4",
        "thoughts</think>4",
        "Put it into a <think> block.",
        "a < b",
    ],
)
def test_thoughts_with_an_answer_are_an_answer(content: str) -> None:
    result, _ = run(says_text(content))
    assert result.completed
    assert result.messages[-1] == AssistantMessage(content)


def test_a_model_that_repeats_a_tag_for_ever_holds_nobody_up() -> None:
    result, _ = run(says_text("<REASONING_SCRATCHPAD>" * 100_000 + "</REASONING_SCRATCHPAD>"))
    assert result.stop_reason == "empty_replies"


@pytest.mark.parametrize("turns", [[], [calls(call())]])
def test_context_overflow_keeps_what_there_is(turns: list[Reply]) -> None:
    result, _ = run(*turns, ContextOverflowError("HTTP 400: too long"))
    assert (result.stop_reason, result.partial, result.failure) == ("context_overflow", True, None)
    assert len(result.messages) == 1 + 2 * len(turns)


def test_a_failing_endpoint_is_a_failure_with_what_was_said_before() -> None:
    result, _ = run(calls(call()), ModelError("billing", "HTTP 402: no credits"))
    assert result.failure == Failure("billing", "HTTP 402: no credits")
    assert (result.stop_reason, result.completed, result.partial) == ("failed", False, False)
    assert (len(result.messages), result.api_calls, result.cost_usd) == (3, 1, 0.5)


@pytest.mark.parametrize("reply", [says_text("", "content_filter"), calls(call(), finish_reason="content_filter")])
def test_an_answer_withheld_by_a_filter_is_a_failure(reply: Reply) -> None:
    tools = Tools()
    result, _ = run(reply, tools=tools)
    assert result.failure is not None
    assert result.failure.kind == "content_blocked"
    assert (tools.ran, result.api_calls) == ([], 1)


def test_an_answer_shortened_by_a_filter_is_partial() -> None:
    result, _ = run(says_text("well,", "content_filter"))
    assert (result.stop_reason, result.partial) == ("content_filter", True)
    assert result.messages[-1] == AssistantMessage("well,")


@pytest.mark.parametrize("kind", ["sandbox", "image_unavailable"])
def test_a_dead_sandbox_is_a_failure(kind: Any) -> None:
    result, _ = run(calls(call()), tools=Tools(fault=SandboxError("gone", kind)))
    assert result.failure == Failure(kind, "gone")
    assert not result.partial


def test_a_fault_of_the_program_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        run(calls(call()), tools=Tools(fault=ZeroDivisionError()))


def test_cancellation_passes_through() -> None:
    class Slow(Script):
        async def complete(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> Reply:
            await asyncio.sleep(60)
            return await super().complete(messages, tools)

    async def main() -> None:
        task = asyncio.create_task(Agent("do it", Slow([]), Tools(), AgentLimits()).run())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_log_lines_are_short() -> None:
    lines: list[str] = []
    script = Script([calls(call(command="echo\n" + "x" * 500)), says_text("done")])
    asyncio.run(Agent("do it", script, Tools(), AgentLimits(log_prefix_chars=20), lines.append).run())
    assert lines == ['-> terminal {"command":"echo\\nx…', '<- terminal {"output": "termina…']


def test_when_nothing_is_asked_any_more_what_there_is_stays() -> None:
    result, _ = run(calls(call()), GateClosedError())
    assert (result.stop_reason, result.partial, result.failure) == ("budget", True, None)
    assert isinstance(result.messages[-1], ToolMessage)
    no_answer, _ = run(says_text(""), GateClosedError())
    assert no_answer.failure
    assert (no_answer.failure.kind, no_answer.api_calls) == ("interrupted", 1)
