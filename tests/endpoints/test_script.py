from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endpoints.script import Kind, Script, ScriptedReply, ScriptError, fingerprint, kind_of, load_script, turn_of

Message = dict[str, Any]
PROMPT: Message = {"role": "user", "content": "roll a die"}
CALL: Message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "terminal"}}]}
RESULT: Message = {"role": "tool", "tool_call_id": "1", "content": "{}"}
SAID: Message = {"role": "assistant", "content": "well"}
SUMMARY: Message = {"role": "user", "content": "sum up what you found"}


def script(*lines: dict[str, Any]) -> Script:
    return Script("script", tuple(ScriptedReply.model_validate(line) for line in lines))


def told(chosen: Script, *messages: Message) -> Any:
    """Return what the reply says, or its status."""
    choice = chosen.reply_to(messages)
    if choice is None:
        return None
    reply = choice[0]
    return reply.content if reply.content is not None else reply.status


# Which turn a request is


@pytest.mark.parametrize(
    ("messages", "prompt", "number"),
    [
        ([PROMPT], "roll a die", 0),
        ([PROMPT, CALL, RESULT], "roll a die", 1),
        ([PROMPT, CALL, RESULT, CALL, RESULT, SUMMARY], "roll a die", 2),
        ([{"role": "system", "content": "be brief"}, PROMPT, CALL, RESULT], "roll a die", 1),
        ([{"role": "user", "content": "hi"}, SAID, PROMPT], "roll a die", 0),
        ([{"role": "user", "content": "hi"}, SAID, PROMPT, CALL, RESULT, SAID], "roll a die", 2),
        ([{"role": "user", "content": [{"type": "text", "text": "roll "}, {"text": "it"}]}], "roll it", 0),
        ([SAID], "", 1),
        ([], "", 0),
    ],
)
def test_the_turn_is_read_off_the_request(messages: list[Message], prompt: str, number: int) -> None:
    turn = turn_of(messages)
    assert (turn.prompt, turn.number) == (prompt, number)


@given(
    prefill=st.lists(st.sampled_from(["hello", "bye"]), max_size=3),
    turns=st.integers(0, 5),
    system=st.booleans(),
    summary=st.booleans(),
)
def test_prefill_and_summary_do_not_move_the_turn(prefill: list[str], turns: int, system: bool, summary: bool) -> None:
    messages: list[Message] = [{"role": "system", "content": "s"}] if system else []
    for text in prefill:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    messages += [PROMPT, *[CALL, RESULT] * turns]
    if summary and turns:
        messages.append(SUMMARY)
    turn = turn_of(messages)
    assert (turn.prompt, turn.number) == ("roll a die", turns)


# Which line answers


TOOLS = [{"type": "function", "function": {"name": "terminal"}}]


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        ({"messages": [PROMPT], "tools": TOOLS}, "chat"),
        ({"messages": [PROMPT, CALL, RESULT], "tools": TOOLS}, "chat"),
        ({"messages": [PROMPT, CALL, RESULT, SUMMARY]}, "chat"),  # at the turn limit
        ({"messages": [PROMPT, SAID, SUMMARY]}, "chat"),
        ({"messages": [PROMPT]}, "auxiliary"),
        ({"messages": [{"role": "system", "content": "s"}, PROMPT], "tools": []}, "auxiliary"),
    ],
)
def test_what_tools_ask_is_told_from_the_rollout(request_: Message, kind: str) -> None:
    assert kind_of(request_) == kind


def test_what_tools_ask_has_lines_of_its_own() -> None:
    lines = script(
        {"content": "chat"},
        {"to": "auxiliary", "content": "else"},
        {"to": "auxiliary", "prompt": "die", "content": "seen"},
        {"to": "auxiliary", "prompt": "merge", "content": "merged"},
        {"to": "images", "image": "aaaa"},
        {"to": "images", "prompt": "dog", "status": 400},
    )
    merge: Message = {"role": "system", "content": "merge these"}

    def said(kind: Kind, *messages: Message) -> Any:
        choice = lines.reply_to(messages, kind)
        return choice and (choice[0].content or choice[0].image or choice[0].status)

    assert said("chat", PROMPT) == said("chat", {"role": "user", "content": "merge a dog"}) == "chat"
    assert said("auxiliary", PROMPT) == "seen"
    assert said("auxiliary", SUMMARY) == "else"
    assert said("auxiliary", merge, PROMPT) == "merged"  # of the two that fit
    assert said("images", {"role": "user", "content": "a cat"}) == "aaaa"
    assert said("images", {"role": "user", "content": "a dog"}) == 400


def test_lines_are_used_up_by_each_kind_apart() -> None:
    lines = script(
        {"content": "one", "times": 1},
        {"content": "two"},
        {"to": "auxiliary", "status": 500},
        {"to": "auxiliary", "content": "x"},
    )
    assert told(lines, PROMPT) == "one"
    first, second = (lines.reply_to([PROMPT], "auxiliary") for _ in range(2))
    assert first
    assert second
    assert (first[0].status, second[0].content) == (500, "x")
    assert told(lines, PROMPT) == "two"


def test_without_lines_of_its_own_what_tools_ask_is_a_chat() -> None:
    lines = script({"content": "chat"})
    assert lines.reply_to([PROMPT], "auxiliary") == lines.reply_to([PROMPT])
    assert lines.reply_to([PROMPT], "images") is None


def test_each_turn_gets_its_answer_and_the_last_line_is_repeated() -> None:
    lines = script({"content": "one"}, {"content": "two"})
    assert told(lines, PROMPT) == "one"
    assert told(lines, PROMPT) == "one"  # nothing is remembered
    assert told(lines, PROMPT, CALL, RESULT) == "two"
    assert told(lines, PROMPT, CALL, RESULT, CALL, RESULT) == "two"


def test_errors_are_used_up_by_equal_requests() -> None:
    lines = script({"status": 500}, {"status": 503, "times": 2}, {"content": "one"}, {"content": "two"})
    assert [told(lines, PROMPT) for _ in range(5)] == [500, 503, 503, "one", "one"]
    assert told(lines, PROMPT, CALL, RESULT) == "two"


def test_other_requests_have_their_own_count() -> None:
    lines = script({"status": 500}, {"content": "one"})
    other = {"role": "user", "content": "toss a coin"}
    assert [told(lines, PROMPT), told(lines, other)] == [500, 500]
    assert [told(lines, PROMPT), told(lines, other)] == ["one", "one"]


@pytest.mark.parametrize("times", [None, "forever"])
def test_an_error_without_end(times: str | None) -> None:
    lines = script({"status": 500, "times": times}, {"content": "never"})
    assert [told(lines, PROMPT) for _ in range(9)] == [500] * 9


def test_errors_at_the_end_go_on_for_ever() -> None:
    lines = script({"content": "one"}, {"status": 500}, {"status": 402})
    assert told(lines, PROMPT) == "one"
    assert [told(lines, PROMPT, CALL, RESULT) for _ in range(4)] == [500, 402, 402, 402]
    assert told(lines, PROMPT, CALL, RESULT, CALL, RESULT) == 402


def test_an_answer_with_times_is_used_up_as_well() -> None:
    lines = script({"content": "half", "times": 2}, {"content": "whole"}, {"content": "next"})
    assert [told(lines, PROMPT) for _ in range(4)] == ["half", "half", "whole", "whole"]
    assert told(lines, PROMPT, SAID | {"tool_calls": [1]}, RESULT) == "next"


@pytest.mark.parametrize(
    "line",
    [
        {"content": ""},
        {"content": None},
        {"content": "x", "finish_reason": "error"},
        {"content": "x", "status": 429},
        {"content": "x", "stall": "body"},
        {"content": "x", "reset": "headers"},
        {"content": "x", "endless": True},
        {"content": "x", "content_length": 3},
        {"content": "x", "content_type": "text/html"},
        {"reasoning": "only thought"},
        {"message": {"content": None}},
        {"message": {}},
        {"error": "upstream", "status": 200},
        {"body": "no JSON"},
        {"body": {"choices": []}},
        {"body": {"choices": None}},
        {"body": {"choices": [{"message": {"content": "x"}}], "error": {"code": 502}}},
        {"body": {"choices": [{"message": {"content": "x"}, "finish_reason": "error"}]}},
        {"body": [1]},
    ],
)
def test_what_is_no_answer_is_served_once(line: dict[str, Any]) -> None:
    lines = script(line, {"content": "good"})
    assert lines.reply_to([PROMPT]) == (lines.replies[0], turn_of([PROMPT]))
    assert told(lines, PROMPT) == "good"


@pytest.mark.parametrize(
    "line",
    [
        {"content": "x", "gzip": True, "chunked": True, "delay_seconds": [0, 1]},
        {"tool_calls": [{"name": "terminal"}]},
        {"content": [{"type": "text", "text": "x"}]},
        {"message": {"content": "x"}},
        {"body": {"choices": [{"message": {"content": "x"}}]}},
        {"body": '{"choices": [{"message": {"tool_calls": [{}]}}]}'},
    ],
)
def test_what_is_an_answer_is_served_again(line: dict[str, Any]) -> None:
    lines = script(line, {"content": "next"})
    assert [lines.reply_to([PROMPT]), lines.reply_to([PROMPT])] == [(lines.replies[0], turn_of([PROMPT]))] * 2


def test_lines_for_a_prompt() -> None:
    lines = script(
        {"content": "any"},
        {"prompt": "die", "content": "six"},
        {"prompt": "coin", "content": "heads"},
        {"content": "two"},
    )
    assert told(lines, PROMPT) == "six"
    assert told(lines, PROMPT, CALL, RESULT) == "six"
    assert told(lines, {"role": "user", "content": "toss a coin"}) == "heads"
    assert told(lines, {"role": "user", "content": "anything"}) == "any"
    both = {"role": "user", "content": "a coin or a die"}
    assert [told(lines, both), told(lines, both, CALL, RESULT)] == ["six", "heads"]


def test_a_prompt_without_a_line() -> None:
    assert told(script({"prompt": "die", "content": "six"}), {"role": "user", "content": "toss a coin"}) is None


LINES = st.sampled_from([{"status": 500}, {"content": "x"}, {"status": 429, "times": 3}])


@given(st.lists(LINES, min_size=1, max_size=6))
def test_every_answer_is_reached(lines: list[dict[str, Any]]) -> None:
    chosen = script(*lines)
    answers = sum(line == {"content": "x"} for line in lines)
    for turn in range(answers):
        replies = [told(chosen, PROMPT, *[CALL, RESULT] * turn) for _ in range(3 * len(lines) + 1)]
        assert replies[-1] == "x"
        assert replies == sorted(replies, key=lambda reply: reply == "x")  # once answered, always answered


@given(st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3), max_size=3))
def test_fingerprints_do_not_mind_the_order_of_keys(messages: list[Message]) -> None:
    assert fingerprint(messages) == fingerprint([dict(reversed(message.items())) for message in messages])
    assert fingerprint(messages) != fingerprint([*messages, {}])


# The file


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "replies.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_a_file_is_loaded(tmp_path: Path) -> None:
    path = write(tmp_path, {"server": {"max_concurrent": 3, "models": ["a", "b"]}}, "", {"content": "naïve"}, "  ")
    loaded = load_script(path)
    assert loaded.limits.max_concurrent == 3
    assert loaded.limits.models == ["a", "b"]
    assert [reply.content for reply in loaded.replies] == ["naïve"]
    assert loaded.name == str(path)


def test_bom_and_crlf_are_tolerated(tmp_path: Path) -> None:
    path = tmp_path / "replies.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"content": "a\xe2\x80\xa8b"}\r\n{"status": 500}\r\n')
    assert [reply.status for reply in load_script(path).replies] == [200, 500]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"conten": "x"}', 'unknown key "conten"; allowed keys are prompt, times, content,'),
        ("{", "not JSON"),
        ("[1]", "must be a JSON object; allowed keys are"),
        ('{"content": 3}', "content"),
        ('{"status": 99, "content": "x"}', "status: Input should be greater than or equal to 200"),
        ('{"content": "x", "times": 0}', "times"),
        ('{"prompt": "x"}', "it says nothing: give one of content, tool_calls"),
        ('{"content": "x", "body": "y"}', "body and content and the like exclude each other"),
        ('{"stall": "body", "reset": "body"}', "stall and reset exclude each other"),
        ('{"content": "x", "delay_seconds": [2, 1]}', "delay_seconds must be a number, or [min, max]"),
        ('{"content": "x", "delay_seconds": -1}', "delay_seconds"),
        ('{"tool_calls": [{"name": "a", "x": 1}]}', 'key "tool_calls.0.x"; allowed keys are name, arguments, id'),
        ('{"tool_calls": [{}]}', "tool_calls.0.name: Field required"),
        ('{"server": {}}', "must be the first line"),
        ('{"image": ""}', 'lines with "to": "images", and no others, say "image"'),
        ('{"to": "images", "content": "x"}', 'lines with "to": "images", and no others, say "image", and no content'),
        ('{"to": "images"}', "it says nothing"),
        ('{"to": "nobody", "content": "x"}', "to: Input should be 'chat', 'auxiliary' or 'images'"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path, {"content": "x"}, "", line)
    with pytest.raises(ScriptError) as raised:
        load_script(path)
    message = str(raised.value)
    assert message.startswith(f"{path}:3: ")
    assert words in message
    assert "\n" not in message


def test_mistakes_in_the_server_line(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r'replies.jsonl:1: unknown key "max"; allowed keys are max_concurrent'):
        load_script(write(tmp_path, {"server": {"max": 1}}, {"content": "x"}))
    with pytest.raises(ScriptError, match="no other key"):
        load_script(write(tmp_path, {"server": {}, "content": "x"}))


@pytest.mark.parametrize("lines", [[], [{"server": {}}]])
def test_a_file_without_a_reply(tmp_path: Path, lines: list[Any]) -> None:
    with pytest.raises(ScriptError, match="no reply in it"):
        load_script(write(tmp_path, *lines))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match="No such file"):
        load_script(tmp_path / "missing.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"content": "\xe9"}')
    with pytest.raises(ScriptError, match="cannot be read"):
        load_script(tmp_path / "latin.jsonl")
