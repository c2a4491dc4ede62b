from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.config import PrefillMessage, RunConfig
from rollout.dialects import Dialect
from rollout.messages import AssistantMessage, Message, ToolCall, ToolDefinition, ToolMessage, UserMessage
from rollout.replies import refusal
from tests.rollout.test_texts import ANY_TEXT

HELLO: tuple[Message, ...] = (UserMessage("hello"),)
SEARCH = ToolDefinition(
    "search_files",
    "Search.",
    {
        "type": "object",
        "properties": {"pattern": {"type": "string", "pattern": "^.+$"}, "since": {"type": "string", "format": "date"}},
        "required": ["pattern"],
    },
)
THOUGHTFUL = AssistantMessage("", "r", (ToolCall("c1", "search_files", {"pattern": "é"}),), {"reasoning_content": "r"})
TURN: tuple[Message, ...] = (*HELLO, THOUGHTFUL, ToolMessage("c1", "search_files", '{"hits": []}'))


def config(base_url: str = "http://localhost:8000/v1", **flags: Any) -> RunConfig:
    return RunConfig(dataset_file=Path("p.jsonl"), batch_size=1, run_name="r", model="m", base_url=base_url, **flags)


def openrouter(**flags: Any) -> Dialect:
    return Dialect(config("https://openrouter.ai/api/v1", **flags))


def body(dialect: Dialect, messages: Sequence[Message] = HELLO, tools: Sequence[ToolDefinition] = ()) -> dict[str, Any]:
    asked = json.loads(dialect.compose(messages, tools).body)
    assert isinstance(asked, dict)
    return asked


def refused(
    dialect: Dialect,
    words: str,
    status: int = 400,
    messages: Sequence[Message] = TURN,
    tools: Sequence[ToolDefinition] = (SEARCH,),
) -> bool:
    """Tell whether a refusal in these words makes the dialect ask again."""
    error = refusal(status, json.dumps({"error": {"message": words}}).encode())
    return dialect.learn(error, dialect.compose(messages, tools))


def test_an_ordinary_host_gets_nothing_that_was_not_asked_for() -> None:
    assert body(Dialect(config())) == {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def test_what_varies_comes_last() -> None:
    dialect = Dialect(config(max_tokens=5, ephemeral_system_prompt="s"))
    first = dialect.compose(HELLO, (SEARCH,)).body
    second = dialect.compose(TURN, (SEARCH,)).body
    assert list(json.loads(first))[-2:] == ["tools", "messages"]
    assert second.startswith(first.removesuffix(b"]}"))


def test_openrouter_gets_routing_reasoning_and_tells_the_cost() -> None:
    dialect = openrouter(
        providers_allowed=("anthropic", "openai"),
        providers_ignored=("x",),
        providers_order=("deep-infra", "together.ai"),
        provider_sort="price",
        reasoning_effort="high",
        max_tokens=100,
    )
    asked = body(dialect)
    assert asked["provider"] == {
        "only": ["anthropic", "openai"],
        "ignore": ["x"],
        "order": ["deep-infra", "together.ai"],
        "sort": "price",
    }
    assert asked["reasoning"] == {"enabled": True, "effort": "high"}
    assert asked["usage"] == {"include": True}
    assert asked["max_tokens"] == 100
    assert "reasoning_effort" not in asked


def test_openrouter_without_flags() -> None:
    asked = body(openrouter())
    assert asked["reasoning"] == {"enabled": True}
    assert "provider" not in asked


@pytest.mark.parametrize(
    "flags", [{"reasoning_disabled": True, "reasoning_effort": "high"}, {"reasoning_effort": "none"}]
)
def test_no_reasoning(flags: dict[str, Any]) -> None:
    assert body(openrouter(**flags))["reasoning"] == {"effort": "none"}
    assert body(Dialect(config(**flags)))["reasoning_effort"] == "none"


def test_other_hosts_get_the_effort_in_the_plain_form_and_no_routing() -> None:
    asked = body(Dialect(config(reasoning_effort="low", providers_allowed=("x",), provider_sort="price")))
    assert asked == {"model": "m", "reasoning_effort": "low", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize("host", ["openrouter.ai.evil.example", "my-openrouter.ai", "localhost/openrouter.ai"])
def test_openrouter_is_known_by_its_host(host: str) -> None:
    assert "reasoning" not in body(Dialect(config(f"https://{host}/v1")))


def test_system_prompt_then_prefill_then_the_conversation() -> None:
    prefill = (PrefillMessage(role="user", content="2+2?"), PrefillMessage(role="assistant", content="4"))
    dialect = Dialect(config(ephemeral_system_prompt="SECRET-STYLE", prefill_messages=prefill))
    assert body(dialect)["messages"] == [
        {"role": "system", "content": "SECRET-STYLE"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "hello"},
    ]


def test_a_turn_goes_back_in_the_form_it_came() -> None:
    asked = body(Dialect(config()), TURN, (SEARCH,))
    assert asked["messages"][1:] == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "r",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "search_files", "arguments": '{"pattern":"é"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": '{"hits": []}'},
    ]
    function = {"name": "search_files", "description": "Search.", "parameters": SEARCH.parameters}
    assert asked["tools"] == [{"type": "function", "function": function}]


@pytest.mark.parametrize(("name", "sent"), [("a b/c", "a_b_c"), ("", "unnamed"), ("é" * 100, "_" * 64)])
def test_a_name_that_servers_refuse_is_mended_on_the_wire(name: str, sent: str) -> None:
    called = AssistantMessage("", tool_calls=(ToolCall("1", name, {"_raw": "{"}, "no valid JSON"),))
    function = body(Dialect(config()), (*HELLO, called))["messages"][1]["tool_calls"][0]["function"]
    assert function == {"name": sent, "arguments": '{"_raw":"{"}'}


@given(ANY_TEXT)
def test_any_text_makes_valid_utf8(text: str) -> None:
    dialect = Dialect(config(ephemeral_system_prompt=text or "x"))
    messages = (
        UserMessage(text),
        AssistantMessage(text, tool_calls=(ToolCall("1", text, {}),)),
        ToolMessage("1", "t", text),
    )
    json.loads(dialect.compose(messages, (ToolDefinition("t", text, {}),)).body.decode())


def test_tools_of_one_name_do_not_get_mixed_up() -> None:
    dialect = Dialect(config())
    for description in ("one", "two", "one"):
        (tool,) = body(dialect, tools=(ToolDefinition("t", description, {}),))["tools"]
        assert tool["function"]["description"] == description


@pytest.mark.parametrize(
    "words",
    [
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
        "Unrecognized request argument supplied: max_tokens",
    ],
)
def test_max_tokens_is_renamed(words: str) -> None:
    dialect = Dialect(config(max_tokens=9))
    assert refused(dialect, words)
    asked = body(dialect)
    assert asked["max_completion_tokens"] == 9
    assert "max_tokens" not in asked
    assert not refused(dialect, "Unsupported parameter: 'max_completion_tokens'")


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("Unrecognized request argument supplied: reasoning_effort", 400),
        ("body.reasoning_effort: Extra inputs are not permitted", 422),
        ("This model does not support reasoning_effort", 400),
    ],
)
def test_an_unknown_parameter_is_left_out(words: str, status: int) -> None:
    dialect = Dialect(config(reasoning_effort="low"))
    assert refused(dialect, words, status)
    assert "reasoning_effort" not in body(dialect)
    assert not refused(dialect, words, status)


def test_rollouts_that_asked_before_the_refusal_was_known_ask_again_too() -> None:
    dialect = Dialect(config(reasoning_effort="low"))
    request = dialect.compose(HELLO, ())
    error = refusal(400, b'{"error": "unknown field reasoning_effort"}')
    assert dialect.learn(error, request)
    assert dialect.learn(error, request)
    assert not dialect.learn(error, dialect.compose(HELLO, ()))


def test_openrouters_reasoning_object_can_be_refused() -> None:
    dialect = openrouter(provider_sort="price")
    assert refused(dialect, "reasoning is not supported by this model", messages=HELLO, tools=())
    asked = body(dialect)
    assert "reasoning" not in asked
    assert asked["provider"] == {"sort": "price"}


def test_an_effort_for_a_model_that_does_not_think_is_left_out() -> None:
    dialect = Dialect(config(reasoning_effort="low"))
    assert refused(dialect, '"llama3.2" does not support thinking')
    assert "reasoning_effort" not in body(dialect)


def test_an_effort_the_server_does_not_have_is_the_users_mistake() -> None:
    words = "Unsupported value: 'xhigh' is not supported with this model; reasoning_effort is one of 'low', 'high'."
    assert not refused(Dialect(config(reasoning_effort="xhigh")), words)


def test_no_reasoning_where_the_server_has_no_word_for_it() -> None:
    dialect = Dialect(config(reasoning_disabled=True))
    assert refused(dialect, "Invalid value for reasoning_effort: 'none'. Supported values are: 'low', 'high'.")
    assert "reasoning_effort" not in body(dialect)


@pytest.mark.parametrize(
    "words",
    [
        "'messages.1': property 'reasoning_content' is unsupported",
        "messages.1.assistant.reasoning_content: Extra inputs are not permitted",
        "messages[1]: unknown field reasoning",
    ],
)
def test_reasoning_that_must_not_be_sent_back(words: str) -> None:
    dialect = Dialect(config())
    assert refused(dialect, words)
    assert "reasoning_content" not in body(dialect, TURN)["messages"][1]
    assert not refused(dialect, words)


def test_thoughts_whose_signature_is_refused_stay_out_of_that_conversation_alone() -> None:
    words = "messages.1.content.0: Invalid `signature` in `thinking` block"
    dialect = Dialect(config())
    conversation = (UserMessage("hello"), *TURN[1:])
    assert refused(dialect, words, messages=conversation)
    assert "reasoning_content" not in body(dialect, conversation)["messages"][1]
    assert "reasoning_content" in body(dialect, TURN)["messages"][1]
    assert not refused(dialect, words, messages=conversation)


@pytest.mark.parametrize("words", ["messages.1.reasoning_details.0: invalid signature", "Invalid thought signature."])
def test_signatures_are_known_in_other_words(words: str) -> None:
    dialect = Dialect(config())
    conversation = (UserMessage("hello"), *TURN[1:])
    assert refused(dialect, words, messages=conversation)
    assert not refused(dialect, words, messages=conversation)


def test_a_signature_that_is_missing_is_not_mended_by_leaving_out_more() -> None:
    words = "Function call is missing a thought_signature in functionCall parts."
    assert not refused(Dialect(config()), words, messages=(UserMessage("hello"), *TURN[1:]))


def test_what_a_server_said_of_a_call_goes_back_to_it() -> None:
    signed = {"google": {"thought_signature": "SIG"}}
    asked = AssistantMessage("", tool_calls=(ToolCall("c1", "search_files", {}, echo={"extra_content": signed}),))
    dialect = Dialect(config())
    conversation = (UserMessage("hello"), asked)
    assert body(dialect, conversation)["messages"][1]["tool_calls"][0]["extra_content"] == signed
    assert refused(dialect, "messages.1: reasoning_details: extra inputs are not permitted", messages=conversation)
    assert "extra_content" not in body(dialect, conversation)["messages"][1]["tool_calls"][0]


@pytest.mark.parametrize(
    "words",
    [
        "Unexpected role 'user' after role 'tool'",
        "After the optional system message, conversation roles must alternate user/assistant/user/assistant/...",
    ],
)
def test_a_server_that_takes_no_question_right_behind_a_result(words: str) -> None:
    dialect = Dialect(config())
    conversation = (UserMessage("hello"), *TURN[1:], UserMessage("sum up"))
    assert not refused(dialect, words)
    assert refused(dialect, words, messages=conversation)
    roles = [message["role"] for message in body(dialect, conversation)["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]
    assert body(dialect, conversation)["messages"][-1]["content"] == "sum up"
    assert not refused(dialect, words, messages=conversation)


@pytest.mark.parametrize(
    "words",
    [
        "Anthropic doesn't support tool calling without `tools=` param specified",
        "The toolConfig field must be defined when using toolUse and toolResult content blocks.",
    ],
)
def test_a_server_that_takes_no_results_without_tools(words: str) -> None:
    dialect = Dialect(config())
    body(dialect, TURN, (SEARCH,))
    assert not refused(dialect, words)
    assert "tools" not in body(dialect, TURN)
    assert refused(dialect, words, tools=())
    asked = body(dialect, TURN)
    assert ([tool["function"]["name"] for tool in asked["tools"]], asked["tool_choice"]) == (["search_files"], "none")
    assert "tools" not in body(dialect)
    assert not refused(dialect, words, tools=())


@pytest.mark.parametrize(
    "words",
    [
        "failed to parse grammar",
        "invalid schema: keyword 'format' is not supported",
        "the format of the value at toolConfig.tools.0.toolSpec.inputSchema.json is invalid",
    ],
)
def test_schema_keywords_that_a_grammar_cannot_take(words: str) -> None:
    dialect = Dialect(config())
    body(dialect, tools=(SEARCH,))
    assert refused(dialect, words)
    (tool,) = body(dialect, tools=(SEARCH,))["tools"]
    assert tool["function"]["parameters"]["properties"] == {"pattern": {"type": "string"}, "since": {"type": "string"}}
    assert not refused(dialect, words)


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("Unsupported parameter: 'max_tokens'", 400),  # not sent
        ("unknown field reasoning_effort", 500),
        ("tools are not supported", 400),
        ("Provider returned error: usage not supported", 400),
        ("prompt is too long", 400),
        ("", 400),
    ],
)
def test_what_there_is_nothing_to_learn_from(words: str, status: int) -> None:
    dialect = openrouter(provider_sort="price")
    before = body(dialect, TURN, (SEARCH,))
    assert not refused(dialect, words, status)
    assert body(dialect, TURN, (SEARCH,)) == before


def test_a_refusal_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    dialect = Dialect(config(reasoning_effort="low"))
    request = dialect.compose(HELLO, ())
    error = refusal(400, b'{"error": "unknown field reasoning_effort"}')
    with caplog.at_level(logging.WARNING):
        dialect.learn(error, request)
        dialect.learn(error, request)
    assert caplog.messages == ["localhost refuses 'reasoning_effort': going on without it"]


@given(st.text(max_size=200), st.sampled_from([400, 422]))
def test_learning_always_comes_to_an_end(words: str, status: int) -> None:
    dialect = Dialect(config(reasoning_effort="low", max_tokens=3))
    rounds = 0
    while refused(dialect, f"unsupported {words} max_tokens reasoning_effort", status):
        rounds += 1
        assert rounds < 6
