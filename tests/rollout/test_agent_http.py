from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollout.agent import Agent, AgentLimits, AgentResult
from rollout.chat_model import CallLimits, OpenAIChatModel
from rollout.config import RunConfig
from rollout.messages import Usage, UserMessage
from rollout.retry import RetryPolicy
from tests.rollout.http_server import Answer, Asked, error, raw, says, serve
from tests.rollout.test_agent import Tools


def over_http(*answers: Answer, **flags: Any) -> tuple[AgentResult, list[Asked], Tools]:
    async def main() -> tuple[AgentResult, list[Asked], Tools]:
        async with serve(*answers) as endpoint:
            config = RunConfig(
                dataset_file=Path("p.jsonl"), batch_size=1, run_name="r", base_url=endpoint.base_url, **flags
            )
            quick = CallLimits(retry=RetryPolicy(max_tries=3, first_delay_seconds=0.01, max_delay_seconds=0.01))
            model, tools = OpenAIChatModel(config, "key", quick), Tools()
            try:
                result = await Agent("do it", model, tools, AgentLimits()).run()
            finally:
                await model.close()
            return result, endpoint.requests, tools

    return asyncio.run(main())


def tool_call(arguments: Any, name: str = "terminal", call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_whole_rollout_over_http() -> None:
    first = says(None, "tool_calls", reasoning_content="hm", tool_calls=[tool_call('{"command": "ls"}')])
    result, requests, tools = over_http(error(503), first, says("done"), ephemeral_system_prompt="SECRET-STYLE")
    assert result.completed
    assert [ran.arguments for ran in tools.ran] == [{"command": "ls"}]
    assert [message["role"] for message in requests[2].body["messages"]] == ["system", "user", "assistant", "tool"]
    assert requests[2].body["messages"][2]["reasoning_content"] == "hm"
    assert "SECRET-STYLE" not in repr(result)
    assert sum(isinstance(message, UserMessage) for message in result.messages) == 1


UNREADABLE = raw(json.dumps({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3, "cost": 0.5}}))


def test_answers_that_cannot_be_read_cost_the_rollout_what_they_cost() -> None:
    result, requests, _ = over_http(UNREADABLE, UNREADABLE, says("done"))
    assert result.completed
    assert (len(requests), result.api_calls) == (3, 1)
    assert (result.usage, result.cost_usd) == (Usage(18, 6), 1.0)


@pytest.mark.parametrize("last", [UNREADABLE, error(401, "who?"), error(400, "maximum context length is 8192 tokens")])
def test_so_they_do_when_no_answer_follows(last: Answer) -> None:
    result, requests, _ = over_http(UNREADABLE, last)
    unreadable = len(requests) if last is UNREADABLE else 1
    assert not result.completed
    assert result.api_calls == 0
    assert (result.usage, result.cost_usd) == (Usage(9 * unreadable, 3 * unreadable), 0.5 * unreadable)


@pytest.mark.parametrize("finish_reason", ["length", "tool_calls", "stop", None])
def test_half_a_call_over_http_is_never_run(finish_reason: str | None) -> None:
    half = says(None, finish_reason, tool_calls=[tool_call('{"path":"a.txt","content":"hel')])
    result, requests, tools = over_http(half)
    assert result.stop_reason == "cut_by_token_limit"
    assert (tools.ran, len(requests)) == ([], 2)


@pytest.mark.parametrize("arguments", ["", None, "null", {}, "{}"])
def test_no_arguments_over_http(arguments: Any) -> None:
    result, _, tools = over_http(says(None, "tool_calls", tool_calls=[tool_call(arguments)]), says("done"))
    assert result.completed
    assert [ran.arguments for ran in tools.ran] == [{}]


@pytest.mark.parametrize("arguments", ['{"a":1}{"a":1}', r'{"p":"C:\path"}', "[1,2]", [1, 2]])
def test_bad_arguments_over_http_are_told_to_the_model(arguments: Any) -> None:
    result, requests, tools = over_http(says(None, "tool_calls", tool_calls=[tool_call(arguments)]), says("done"))
    assert result.completed
    assert tools.ran == []
    told = requests[1].body["messages"][-1]
    assert told["role"] == "tool"
    assert "Invalid arguments for terminal" in json.loads(told["content"])["error"]
    sent_back = requests[1].body["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert isinstance(json.loads(sent_back), dict)


def test_answers_that_are_none_over_http() -> None:
    bad = [raw('{"choices": null}'), raw('{"choices": []}')]
    result, requests, _ = over_http(*bad, says("done"))
    assert (result.completed, result.api_calls, len(requests)) == (True, 1, 3)
    result, _, _ = over_http(raw('{"choices": null}'))
    assert result.failure is not None
    assert result.failure.kind == "bad_response"
