from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from endpoints.script import ScriptedReply
from endpoints.scripted import ScriptedEndpoint
from tests.program import (
    Json,
    Played,
    Workplace,
    answer,
    play,
    prompt_of,
    prompts_of,
    reply,
    results,
    terminal,
    turns,
)

GOOD = answer("4")


def body(value: Any) -> ScriptedReply:
    return reply(body=value)


PART = {"finish_reason": "error", "message": {"role": "assistant", "content": "part"}}
BAD_BODIES = [
    body({"error": {"code": 502, "message": "upstream"}}),
    body({"choices": None}),
    body({"choices": []}),
    body({"choices": [PART]}),
]
RETRIED: dict[str, list[ScriptedReply]] = {
    "no answers": [*BAD_BODIES, answer("4", usage=None)],
    "rate limit": [reply(status=429, error="slow down", headers={"Retry-After": "1"}, times=2), GOOD],
    "server errors": [*[reply(status=status) for status in (500, 502, 503, 529)], GOOD],
    "broken wires": [reply(reset="before"), reply(reset="body", content="x"), reply(body="<html>busy</html>"), GOOD],
}


@pytest.fixture(scope="module")
def retried(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return play(Workplace(tmp_path_factory.mktemp("retried")), RETRIED, verbose=True)


def test_what_may_pass_is_tried_again(retried: Played) -> None:
    assert retried.ended.code == 0, retried.ended
    assert [len(retried.asked(prompt)) for prompt in RETRIED] == [5, 3, 5, 4]
    for prompt in RETRIED:
        row = retried.row(prompt)
        assert (row["completed"], row["api_calls"]) == (True, 1)
        assert turns(row, "gpt") == ["<think>\nthat is it\n</think>\n4"]
    assert retried.row("no answers")["metadata"]["usage"]["prompt_tokens"] == 0
    assert retried.row("rate limit")["metadata"]["usage"]["prompt_tokens"] > 0


def test_what_is_waited_for_is_told_to_those_who_ask(retried: Played) -> None:
    told = [line for line in retried.ended.stderr.splitlines() if "; trying again in " in line]
    assert len(told) == len(retried.requests) - len(RETRIED)
    assert any(line.startswith("HTTP 429: slow down") for line in told)


def test_how_many_requests_were_refused_is_told(retried: Played) -> None:
    """Two of them with 429, four with 5xx, and one whose body says 502."""
    assert "  refused requests           7  answered with 429 or 5xx" in retried.ended.stdout.splitlines()
    assert [leg["refused_requests"] for leg in retried.place.json("checkpoint.json")["legs"]] == [7]


def test_a_server_is_given_the_time_it_asks_for(retried: Played) -> None:
    times = [request.time for request in retried.requests if "rate limit" in str(request.body["messages"])]
    assert all(later - earlier >= 1 for earlier, later in pairwise(times))
    assert times[-1] - times[0] < 30


REFUSED: dict[str, tuple[str, ScriptedReply]] = {
    "bill": ("billing", reply(status=402, error="Insufficient credits")),
    "quota": ("billing", reply(status=429, error={"message": "You exceeded your quota", "code": "insufficient_quota"})),
    "key": ("auth", reply(status=401, error="Invalid API key")),
    "ban": ("auth", reply(status=403, error="not for you")),
    "model": ("model_not_found", reply(status=404, error="model not found")),
    "field": ("bad_request", reply(status=400, error="Unsupported parameter: 'frobnicate'")),
    "words": ("content_blocked", reply(status=400, error="blocked by our content policy")),
    "shape": ("bad_request", reply(status=422, error="no such shape")),
}


def test_what_cannot_pass_fails_at_once_and_is_tried_on_resume(tmp_path: Path) -> None:
    place = Workplace(tmp_path)
    # Between refusals that stop a run when they come in a row, there are samples that are answered.
    scenes = {
        prompt: lines
        for name, (_, line) in REFUSED.items()
        for prompt, lines in ((name, [line]), (f"{name[:2]}-ok", [GOOD]))
    }
    started = time.monotonic()
    played = play(place, scenes, concurrency=1)
    assert time.monotonic() - started < 40
    assert played.ended.code == 1
    assert {name: len(played.asked(name)) for name in REFUSED} == dict.fromkeys(REFUSED, 1)
    rows = {name: played.row(name) for name in REFUSED}
    assert {name: row["error"]["kind"] for name, row in rows.items()} == {
        name: kind for name, (kind, _) in REFUSED.items()
    }
    assert rows["bill"]["error"]["message"].startswith("HTTP 402: Insufficient credits")
    for row in rows.values():
        assert (row["failed"], row["completed"], row["partial"]) == (True, False, False)
    assert len(place.trajectories()) == len(REFUSED)
    failures = place.json("statistics.json")["failures"]
    assert {kind: entry["count"] for kind, entry in failures.items()} == {
        "billing": 2,
        "auth": 2,
        "bad_request": 2,
        "model_not_found": 1,
        "content_blocked": 1,
    }
    assert "Invalid API key" in failures["auth"]["example"]
    assert "      HTTP 404: model not found" in played.ended.stdout
    assert played.ended.last_line.startswith("8 failed of 16 samples; resume with: ")

    with ScriptedEndpoint([GOOD]) as endpoint:
        assert place.run(endpoint.base_url, resume=True).code == 0
        assert sorted(prompts_of(endpoint)) == sorted(REFUSED)
    assert [prompt_of(row) for row in place.trajectories()] == list(scenes)
    statistics = place.json("statistics.json")
    assert (statistics["failures"], statistics["outcomes"]["completed"]) == ({}, 16)


def test_an_endpoint_that_refuses_everything_ends_the_dispatch(place: Workplace) -> None:
    prompts = [f"question {number}" for number in range(12)]
    place.dataset(prompts)
    with ScriptedEndpoint([reply(status=401, error="No auth credentials found")]) as endpoint:
        ended = place.run(endpoint.base_url, concurrency=1)
        asked = len(endpoint.requests)
    assert 3 <= asked <= 5
    assert ended.code == 1
    assert (
        "the endpoint refused 3 samples in a row, so no more are sent (auth: HTTP 401: No auth credentials found"
        in ended.stderr
    )
    assert f"{asked} failed, {12 - asked} not run of 12 samples; resume with: " in ended.last_line
    assert "Traceback" not in ended.stderr
    assert place.trajectories() == []
    assert place.json("checkpoint.json")["completed_prompts"] == []


def test_a_rollout_has_a_time_to_end(place: Workplace) -> None:
    scenes = {
        "never answers": [reply(stall="headers", times="forever")],
        "bad for ever": [body({"choices": []})],
        "works too long": [terminal("sleep 60")],
        "in time": [GOOD],
    }
    started = time.monotonic()
    played = play(place, scenes, timeout_seconds=2)
    assert time.monotonic() - started < 40
    assert played.ended.code == 1
    assert [prompt_of(row) for row in place.trajectories()] == ["in time"]
    for prompt in list(scenes)[:3]:
        assert played.row(prompt)["error"]["kind"] == "timeout"
    assert len(played.asked("bad for ever")) >= 2
    with ScriptedEndpoint([GOOD]) as endpoint:
        assert place.run(endpoint.base_url, resume=True).code == 0
        assert len(endpoint.requests) == 3


def test_what_a_server_does_not_know_is_left_out_from_then_on(place: Workplace) -> None:
    place.dataset(["first", "second"])
    refusals = [
        reply(prompt="first", status=400, error="Unsupported parameter: 'max_tokens'; use 'max_completion_tokens'"),
        reply(prompt="first", status=400, error="Unknown parameter: reasoning_effort"),
    ]
    replies = [*refusals, GOOD.model_copy(update={"prompt": "first"}), GOOD]
    with ScriptedEndpoint(replies) as endpoint:
        ended = place.run(endpoint.base_url, concurrency=1, max_tokens=77, reasoning_effort="high")
        bodies = [request.body for request in endpoint.requests]
    assert ended.code == 0, ended
    known = [
        {name: sent.get(name) for name in ("max_tokens", "max_completion_tokens", "reasoning_effort")}
        for sent in bodies
    ]
    assert [tuple(sent.values()) for sent in known] == [
        (77, None, "high"),
        (None, 77, "high"),
        (None, 77, None),
        (None, 77, None),
    ]
    assert not [sent for sent in bodies if "reasoning" in sent or "provider" in sent]


def through_proxy(place: Workplace, base_url: str, proxy: ScriptedEndpoint, **flags: Any) -> None:
    """Reach hosts that are not there: whatever is asked of them, the scripted endpoint answers as their proxy."""
    place.env["http_proxy"] = proxy.base_url.removesuffix("/v1")
    ended = place.run(base_url, **flags)
    assert ended.code == 0, ended


KEYS = {"OPENROUTER_API_KEY": "sk-or-v1-0123456789abcdef0123", "OPENAI_API_KEY": "sk-proj-9876543210fedcba9876"}


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ("openrouter.ai", KEYS["OPENROUTER_API_KEY"]),
        ("openrouter.ai.example.com", KEYS["OPENAI_API_KEY"]),
    ],
)
def test_routing_and_keys_go_to_the_host_they_are_meant_for(place: Workplace, host: str, key: str) -> None:
    place.dataset(["first"])
    place.env = dict(KEYS)
    flags: Json = {
        "providers_allowed": "anthropic,openai",
        "providers_ignored": "azure",
        "providers_order": "deep-infra, together.ai",
        "provider_sort": "price",
        "reasoning_effort": "low",
    }
    with ScriptedEndpoint([terminal("echo hi"), GOOD]) as proxy:
        through_proxy(place, f"http://{host}/api/v1", proxy, **flags)
        requests = list(proxy.requests)
    assert len(requests) == 2
    for request in requests:
        assert request.headers["host"] == host
        assert request.headers["authorization"] == f"Bearer {key}"
        if host == "openrouter.ai":
            assert request.body["provider"] == {
                "only": ["anthropic", "openai"],
                "ignore": ["azure"],
                "order": ["deep-infra", "together.ai"],
                "sort": "price",
            }
            assert request.body["reasoning"] == {"enabled": True, "effort": "low"}
            assert "reasoning_effort" not in request.body
        else:
            assert request.body["reasoning_effort"] == "low"
            assert not [name for name in ("provider", "reasoning", "usage") if name in request.body]


def test_no_key_is_seen_by_a_sandbox_or_written_down(place: Workplace) -> None:
    explicit = "sk-live-aaaabbbbcccc0000dddd1111"
    token = "ghp_0123456789abcdefghijABCDEFGHIJ012345"  # noqa: S105 - in the shape of a key, and made up
    place.dataset(["spy"])
    place.env = {**KEYS, "MY_TOKEN": "tok-123-tok-123-tok-123", "HARMLESS": "harmless"}
    spying = terminal(
        "env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>&1 | tr '\\0' '\\n' | grep -a -e tok- -e sk- -e armless"
    )
    found = terminal(f"echo {token[:20]}''{token[20:]}; echo {explicit[:12]}''{explicit[12:]}")
    refusal = reply(status=503, error=f"who is {explicit}?", headers={"Retry-After": "0"})
    with ScriptedEndpoint([refusal, spying, found, GOOD]) as endpoint:
        ended = place.run(endpoint.base_url, api_key=explicit, verbose=True)
        assert {request.headers["authorization"] for request in endpoint.requests} == {f"Bearer {explicit}"}
        sent = [str(message) for message in endpoint.requests[-1].body["messages"] if message["role"] == "tool"]
    assert ended.code == 0, ended
    assert "masked                     2  key-shaped strings in tool results" in ended.stdout
    (row,) = place.trajectories()
    seen = results(row)[0]["output"]
    assert "PATH=" in seen
    assert "HARMLESS" not in seen.partition("PATH=")[0]
    written = [path.read_text(encoding="utf-8") for path in place.run_dir().iterdir()]
    for secret in (explicit, token, *KEYS.values(), "tok-123-tok-123-tok-123"):
        assert not [text for text in (*written, *sent, ended.stdout, ended.stderr) if secret in text]
    assert explicit not in ended.last_line
