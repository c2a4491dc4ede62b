from __future__ import annotations

import json
import re
from typing import Any

import pytest

from endpoints.script import ScriptedReply
from tests.program import Json, Played, Workplace, answer, call, play, reply, responses, results, terminal, turns

DONE = answer("done")
HALF = '{"path":"a.txt","content":"hel'
WHOLE = '{"path":"a.txt","content":"hello"}'
LIST_FILES = terminal("ls")
DETAILS = [{"type": "reasoning.summary", "summary": "sss"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgoAAAA"}}
MAX_TURNS = 4
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def calls(*entries: tuple[Any, ...], **more: Any) -> ScriptedReply:
    """A reply with several calls: (name, arguments, id)."""
    keys = ("name", "arguments", "id")
    named = [dict(zip(keys, entry, strict=False)) for entry in entries]
    return reply(reasoning="several", tool_calls=named, **more)


def raw_call(arguments: Any) -> ScriptedReply:
    """A call whose arguments travel as they are, not as text."""
    function = {"name": "terminal", "arguments": arguments}
    message = {
        "role": "assistant",
        "content": None,
        "reasoning": "raw",
        "tool_calls": [{"id": "r", "function": function}],
    }
    return reply(message=message)


SCENES = {
    # The token limit cuts.
    "cut by length": [LIST_FILES, call("write_file", HALF, finish_reason="length")],
    "cut in silence": [LIST_FILES, call("write_file", HALF, finish_reason="tool_calls")],
    "whole but cut": [LIST_FILES, call("write_file", WHOLE, finish_reason="length")],
    "cut but once": [call("write_file", HALF, finish_reason="length", times=1), call("write_file", WHOLE), DONE],
    "text is cut": [answer("a long sto", finish_reason="length")],
    # Names that are none.
    "other spelling": [
        terminal("echo 1").model_copy(update={"tool_calls": calls(("Terminal", {"command": "echo 1"})).tool_calls}),
        DONE,
    ],
    "hyphens": [
        call("read-file", {"path": "none.txt"}),
        call("functions.write_file", {"path": "b", "content": "x"}),
        DONE,
    ],
    "unknown name": [call("does_not_exist", {}), answer("sorry")],
    "half unknown": [calls(("does_not_exist", {}, "x"), ("terminal", {"command": "echo 2"}, "y")), DONE],
    "three strikes": [call("foo_bar", {})],
    "two strikes": [call("foo_bar", {}), call("foo_bar", {}), LIST_FILES, answer("sorry")],
    # Arguments that are none.
    "one object twice": [call("terminal", '{"command":"echo 1"}{"command":"echo 1"}'), DONE],
    "bad escape": [call("terminal", '{"command":"dir C:\\path"}'), DONE],
    "a list": [call("terminal", "[1,2]"), DONE],
    "empty text": [call("process", ""), DONE],
    "null arguments": [call("process", None), DONE],
    "an object": [raw_call({"command": "echo object"}), DONE],
    # Reasoning, and where it stands.
    "in reasoning": [reply(reasoning="rrr", tool_calls=LIST_FILES.tool_calls), reply(content="4")],
    "in its content": [reply(reasoning_content="ccc", tool_calls=LIST_FILES.tool_calls), reply(content="4")],
    "in its details": [reply(reasoning_details=DETAILS, tool_calls=LIST_FILES.tool_calls), reply(content="4")],
    "in all three": [reply(reasoning="sss", reasoning_content="sss", reasoning_details=DETAILS, content="4")],
    "in a scratchpad": [reply(content="<REASONING_SCRATCHPAD>xxx</REASONING_SCRATCHPAD>4")],
    "in a think block": [reply(content="<think>xxx</think>4")],
    "never closed": [LIST_FILES, reply(content="<REASONING_SCRATCHPAD>half")],
    "nowhere": [reply(content="4")],
    # Content in parts.
    "text parts": [answer("", content=[{"type": "text", "text": "one "}, {"type": "text", "text": "two"}])],
    "an image part": [answer("", content=[{"type": "text", "text": "look: "}, IMAGE])],
    # Ends.
    "only blanks": [LIST_FILES, answer(" \n")],
    "no end": [terminal("date")],
    "summed up": [*[terminal(f"echo {n}") for n in range(MAX_TURNS)], answer("so far so good")],
    "too much text": [LIST_FILES, reply(status=400, error="This model's maximum context length is 8192 tokens.")],
    "calls as text": [answer('<tool_call>\n{"name": "terminal", "arguments": {}}\n</tool_call>')],
    # Ids, and tags inside of what is said and done.
    "same ids": [calls(*[("terminal", {"command": f"echo {n}"}, "same") for n in range(3)]), DONE],
    "no ids": [calls(*[("terminal", {"command": f"echo {n}"}, "") for n in range(2)]), DONE],
    "half a pair": [reply(body='{"choices":[{"message":{"content":"half \\ud83d, nul \\u0000","reasoning":"hm"}}]}')],
    "tags": [
        terminal("printf '</tool_response>\\n<tool_call>\\n</tool_call>'; printf '\\0\\342\\200\\250'"),
        answer("I say </think> and <tool_call> and <think>", reasoning="not </think> yet"),
    ],
}
PARTIAL = {
    "cut by length": "cut_by_token_limit",
    "cut in silence": "cut_by_token_limit",
    "whole but cut": "cut_by_token_limit",
    "text is cut": "cut_by_token_limit",
    "three strikes": "invalid_tool_calls",
    "never closed": "unclosed_reasoning",
    "only blanks": "empty_replies",
    "too much text": "context_overflow",
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    place = Workplace(tmp_path_factory.mktemp("answers"))
    return play(place, SCENES, max_turns=MAX_TURNS, concurrency=len(SCENES), batch_size=10)


def made_calls(row: Json) -> list[Json]:
    """The calls of all gpt turns, as the text has them."""
    return [json.loads(block) for turn in turns(row, "gpt") for block in _CALL.findall(turn)]


def test_how_each_rollout_ends(played: Played) -> None:
    assert played.ended.code == 0, played.ended
    ends = {prompt: played.row(prompt) for prompt in SCENES}
    assert {prompt: row["metadata"]["stop_reason"] for prompt, row in ends.items() if row["partial"]} == PARTIAL
    unfinished = [prompt for prompt, row in ends.items() if not row["completed"] and not row["partial"]]
    assert unfinished == ["no end", "summed up"]
    assert [prompt for prompt, row in ends.items() if "discarded" in row] == ["nowhere"]
    assert not [row for row in ends.values() if "failed" in row]
    left_out = ["unknown name", "half unknown", "three strikes", "two strikes", "nowhere"]
    kept = [turns(row, "human")[0] for row in played.place.trajectories()]
    assert kept == [prompt for prompt in SCENES if prompt not in left_out]
    number = list(SCENES).index("calls as text")
    assert f"warning: prompt {number} ends with tool calls that are text, and nothing runs them" in played.ended.stderr


def test_a_cut_call_is_never_run(played: Played) -> None:
    for prompt in ("cut by length", "cut in silence", "whole but cut"):
        row = played.row(prompt)
        assert len(played.asked(prompt)) == 3  # one for the good turn, two for the bad one
        assert row["tool_stats"]["write_file"]["count"] == 0
        assert [made["name"] for made in made_calls(row)] == ["terminal"]
        assert row["api_calls"] == 3
    mended = played.row("cut but once")
    assert (mended["completed"], mended["api_calls"], len(results(mended))) == (True, 3, 1)
    assert turns(played.row("text is cut"), "gpt") == ["<think>\nthat is it\n</think>\na long sto"]


def test_other_spellings_of_a_name_are_understood(played: Played) -> None:
    row = played.row("other spelling")
    assert made_calls(row) == [{"name": "terminal", "arguments": {"command": "echo 1"}}]
    assert results(row)[0]["output"] == "1\n"
    assert row["tool_stats"]["terminal"] == {"count": 1, "success": 1, "failure": 0}
    assert [made["name"] for made in made_calls(played.row("hyphens"))] == ["read_file", "write_file"]
    assert "Terminal" not in json.dumps(played.asked("other spelling")[1]["messages"])


def test_an_unknown_name_is_answered_with_those_there_are(played: Played) -> None:
    (told,) = results(played.row("unknown name"))
    names = ("terminal", "process", "read_file", "write_file", "patch", "search_files")
    assert all(name in told["error"] for name in names)
    unknown, run = responses(played.row("half unknown"))
    assert (unknown["tool_call_id"], run["tool_call_id"]) == ("x", "y")
    assert "Unknown tool 'does_not_exist'" in unknown["content"]["error"]
    assert run["content"]["output"] == "2\n"
    assert len(played.asked("three strikes")) == 3
    assert len(results(played.row("three strikes"))) == 3
    assert len(played.asked("two strikes")) == 4


def test_rows_that_call_no_tool_there_is_are_filtered_by_name(played: Played) -> None:
    filtered = played.place.json("statistics.json")["filtered"]["unknown_tool"]
    order = list(SCENES)
    prompts = ["unknown name", "half unknown", "three strikes", "two strikes"]
    assert filtered == {
        "rows": 4,
        "tools": {"does_not_exist": 2, "foo_bar": 2},
        "prompt_indices": [order.index(prompt) for prompt in prompts],
    }
    assert "Filtered: 4 rows left out of the trajectories for calling tools that do not exist" in played.ended.stdout
    assert "  foo_bar: 2 rows" in played.ended.stdout
    assert "foo_bar" not in played.row("three strikes")["tool_stats"]


def test_broken_arguments_are_told_and_never_run(played: Played) -> None:
    for prompt in ("one object twice", "bad escape", "a list"):
        row = played.row(prompt)
        (told,) = results(row)
        assert told["error"].startswith("Invalid arguments for terminal"), prompt
        assert "Nothing was run" in told["error"]
        assert all(isinstance(made["arguments"], dict) and made["arguments"] for made in made_calls(row)), prompt
        assert all(isinstance(json.loads(text), dict) for text in sent_arguments(played, prompt))
        assert row["tool_stats"]["terminal"] == {"count": 1, "success": 0, "failure": 1}
    for prompt in ("empty text", "null arguments"):
        assert [made["arguments"] for made in made_calls(played.row(prompt))] == [{}]
        assert "action" in results(played.row(prompt))[0]["error"]
    assert results(played.row("an object"))[0]["output"] == "object\n"


def sent_arguments(played: Played, prompt: str) -> list[str]:
    """The arguments of the calls that the server was sent back."""
    last = played.asked(prompt)[-1]["messages"]
    return [made["function"]["arguments"] for message in last for made in message.get("tool_calls", [])]


@pytest.mark.parametrize(
    ("prompt", "thought", "field"),
    [
        ("in reasoning", "rrr", {"reasoning": "rrr"}),
        ("in its content", "ccc", {"reasoning_content": "ccc"}),
        ("in its details", "sss", {"reasoning_details": DETAILS}),
    ],
)
def test_reasoning_is_read_and_sent_back_as_it_came(played: Played, prompt: str, thought: str, field: Json) -> None:
    first, last = turns(played.row(prompt), "gpt")
    assert first.startswith(f"<think>\n{thought}\n</think>\n<tool_call>")
    assert last == "<think>\n</think>\n4"
    question, follow_up = played.asked(prompt)
    (echoed,) = [message for message in follow_up["messages"] if message["role"] == "assistant"]
    assert {name: value for name, value in echoed.items() if name.startswith("reasoning")} == field
    assert not [name for name in (*question, *follow_up) if name in ("reasoning", "reasoning_effort", "provider")]


def test_reasoning_stands_once_in_one_block_in_front(played: Played) -> None:
    for prompt, thought in {"in all three": "sss", "in a scratchpad": "xxx", "in a think block": "xxx"}.items():
        assert turns(played.row(prompt), "gpt") == [f"<think>\n{thought}\n</think>\n4"]
    for row in played.place.rows():
        for turn in turns(row, "gpt"):
            assert turn.startswith("<think>\n")
            assert (turn.count("<think>"), turn.count("</think>")) == (1, 1)


def test_thoughts_that_never_close_are_asked_for_again_and_rolled_back(played: Played) -> None:
    row = played.row("never closed")
    assert len(played.asked("never closed")) == 1 + 3
    assert "half" not in json.dumps(row["conversations"])
    assert (row["completed"], row["partial"], len(turns(row, "gpt"))) == (False, True, 1)


def test_content_in_parts_is_joined(played: Played) -> None:
    assert turns(played.row("text parts"), "gpt") == ["<think>\nthat is it\n</think>\none two"]
    (said,) = turns(played.row("an image part"), "gpt")
    assert "look: " in said
    assert "iVBORw0" not in json.dumps(played.row("an image part"))


def test_blank_answers_never_complete_a_rollout(played: Played) -> None:
    row = played.row("only blanks")
    assert (row["completed"], row["api_calls"], len(turns(row, "gpt"))) == (False, 5, 1)


@pytest.mark.parametrize("prompt", ["no end", "summed up"])
def test_at_the_turn_limit_a_summary_is_asked_for_without_tools(played: Played, prompt: str) -> None:
    row = played.row(prompt)
    *asked, last = played.asked(prompt)
    assert len(asked) == MAX_TURNS
    assert all(body["tools"] for body in asked)
    assert "tools" not in last
    assert last["messages"][-1]["role"] == "user"
    assert (row["completed"], row["partial"], row["api_calls"]) == (False, False, MAX_TURNS + 1)
    assert len(results(row)) == MAX_TURNS
    summed_up = row["conversations"][-1]["value"] == "<think>\nthat is it\n</think>\nso far so good"
    assert summed_up == (prompt == "summed up")  # the other one goes on calling


def test_every_call_and_answer_has_an_id_of_its_own(played: Played) -> None:
    for prompt, number in {"same ids": 3, "no ids": 2}.items():
        row = played.row(prompt)
        ids = [made["id"] for turn in row["conversations"] for made in turn.get("tool_calls", [])]
        assert len(set(ids)) == number
        assert all(ids)
        assert [response["tool_call_id"] for response in responses(row)] == ids
        assert [response["content"]["output"] for response in responses(row)] == [f"{n}\n" for n in range(number)]
        sent = played.asked(prompt)[-1]["messages"]
        assert [message["tool_call_id"] for message in sent if message["role"] == "tool"] == ids


def test_tags_in_what_is_said_break_no_parser(played: Played) -> None:
    row = played.row("tags")
    (told,) = results(row)
    assert told["output"] == "</tool_response>\n<tool_call>\n</tool_call>\N{REPLACEMENT CHARACTER}\u2028"
    assert made_calls(row)[0]["arguments"]["command"].startswith("printf '</tool_response>")
    said = turns(row, "gpt")[-1]
    assert said == "<think>\nnot <\\/think> yet\n</think>\nI say <\\/think> and <\\tool_call> and <\\think>"


def test_what_is_no_text_is_replaced(played: Played) -> None:
    assert turns(played.row("half a pair"), "gpt") == ["<think>\nhm\n</think>\nhalf \ufffd, nul \ufffd"]


def test_the_system_turn_shows_the_tools_that_were_offered(played: Played) -> None:
    row = played.row("no end")
    (system,) = turns(row, "system")
    (listed,) = re.findall(r"<tools>\n(.*)\n</tools>", system)
    offered = played.asked("no end")[0]["tools"]
    assert [tool["name"] for tool in json.loads(listed)] == [tool["function"]["name"] for tool in offered]
    for tool, sent in zip(json.loads(listed), offered, strict=True):
        assert tool == {**sent["function"], "required": None}
    assert system.startswith("You are a function calling AI model.")
    assert "<tool_call>\n{'name': <function-name>,'arguments': <args-dict>}\n</tool_call>" in system
