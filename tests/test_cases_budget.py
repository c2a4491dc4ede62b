"""Budgets of the whole run: what they stop, what they keep, and what is told."""

from __future__ import annotations

import json
import time

import pytest

from endpoints.script import ScriptedReply
from endpoints.scripted import ScriptedEndpoint
from tests.program import Workplace, answer, call, reply, terminal

CENT = {"prompt_tokens": 900, "completion_tokens": 100, "cost": 0.01}


def each(usage: object = None) -> list[ScriptedReply]:
    """Every rollout: a command, then an answer; a cent and 1,000 tokens each."""
    spent = usage or CENT
    return [terminal("echo hi", usage=spent), answer("done", usage=spent)]


def endless(**more: object) -> list[ScriptedReply]:
    return [call("terminal", {"command": "true"}, usage=CENT, times="forever", **more)]


@pytest.fixture
def ten(place: Workplace) -> Workplace:
    place.dataset([f"sample number {number}." for number in range(10)])
    return place


def test_the_bound_ends_the_run_and_a_resume_with_more_completes_it(ten: Workplace) -> None:
    told = "6,000 of 6,000 tokens; a larger --max_total_tokens lets the run go on"
    with ScriptedEndpoint(each()) as endpoint:
        ended = ten.run(endpoint.base_url, concurrency=1, max_total_tokens=6000)
        assert ended.code == 1, ended
        assert told in ended.stderr
        assert told in " ".join(ended.stdout.split())
        assert ended.last_line.startswith("7 not run of 10 samples; raise the budget's bound and resume with: ")
        assert "--max_total_tokens=" in ended.last_line
        assert [row["completed"] for row in ten.rows()] == [True] * 3
        asked = len(endpoint.requests)

        again = ten.run(endpoint.base_url, concurrency=1, resume="true", max_total_tokens=6000)
        assert again.code == 1
        assert again.stderr.count(told) == 1
        assert f"nothing is run: the budget is used up: {told}" in again.stderr
        assert len(endpoint.requests) == asked

        assert ten.run(endpoint.base_url, concurrency=1, resume="true", max_total_tokens=30_000).code == 0
    assert len(ten.trajectories()) == 10


def test_running_rollouts_end_after_their_turn_and_are_kept(ten: Workplace) -> None:
    with ScriptedEndpoint(endless(delay_seconds=0.05)) as endpoint:
        ended = ten.run(endpoint.base_url, num_workers=2, concurrency=2, max_turns=1000, max_cost_usd=0.4)
        assert ended.code == 1
        rows = ten.rows()
        cost = sum(row["metadata"]["cost_usd"] for row in rows)
        assert cost == pytest.approx(len(endpoint.requests) / 100)
        assert 0.4 <= cost <= 0.8, "only what was under way when the bound was met"
    assert len(rows) == 4
    for row in rows:
        assert row["partial"]
        assert not row["completed"]
        assert row["metadata"]["stop_reason"] == "budget"
        assert row["conversations"][-1]["from"] == "tool", "the turn's results are there"
    assert len(ten.trajectories()) == 4
    told = "6 not run, 4 cut short by the budget (kept) of 10 samples; raise the budget's bound and resume with: "
    assert ended.last_line.startswith(told)


def test_answers_that_cannot_be_read_are_bounded_too(place: Workplace) -> None:
    place.dataset(["one"])
    with ScriptedEndpoint([reply(body={"choices": [], "usage": CENT}, times="forever")]) as endpoint:
        ended = place.run(endpoint.base_url, max_cost_usd=0.015)
        asked = len(endpoint.requests)
    assert 2 <= asked <= 4, "nobody waits for the end of all tries"
    assert "the budget is used up: $0.0" in ended.stderr
    (row,) = place.rows()
    assert (row["error"]["kind"], row["api_calls"]) == ("interrupted", 0)
    assert row["metadata"]["cost_usd"] == pytest.approx(asked / 100)
    assert row["metadata"]["usage"]["prompt_tokens"] == 900 * asked
    assert ended.code == 1
    with ScriptedEndpoint([answer("done")]) as endpoint:
        assert "nothing is run: the budget" in place.run(endpoint.base_url, resume="true", max_cost_usd=0.015).stderr
        assert not endpoint.requests


def test_what_was_cut_short_is_done_and_says_so(place: Workplace) -> None:
    place.dataset(["one"])
    with ScriptedEndpoint(endless()) as endpoint:
        ended = place.run(endpoint.base_url, max_turns=1000, max_total_tokens=5000)
        assert ended.code == 1
        assert ended.last_line == "1 cut short by the budget (kept) of 1 sample; nothing is left to run"
        asked = len(endpoint.requests)
        assert place.run(endpoint.base_url, resume="true", max_total_tokens=5000).code == 0, "nothing is left to do"
        assert len(endpoint.requests) == asked


def test_hours_count_over_all_legs(ten: Workplace) -> None:
    with ScriptedEndpoint(endless(delay_seconds=0.1)) as endpoint:
        started = time.monotonic()
        ended = ten.run(endpoint.base_url, concurrency=2, max_turns=1000, max_hours=4 / 3600)
        assert ended.code == 1
        assert "of 0.0011 hours; a larger --max_hours lets the run go on" in ended.stderr
        assert time.monotonic() - started < 20
        asked = len(endpoint.requests)
        again = ten.run(endpoint.base_url, resume="true", max_hours=4 / 3600)
        assert (again.code, len(endpoint.requests)) == (1, asked)
    assert [leg["rows"] for leg in ten.json("checkpoint.json")["legs"]] == [2, 0]


def test_requests_that_wait_for_their_turn_or_another_try_are_not_sent(ten: Workplace) -> None:
    busy = reply(status=503, headers={"Retry-After": "60"}, times="forever")
    first = terminal("sleep 0.6", prompt="number 0.", usage={"prompt_tokens": 90_000})
    with ScriptedEndpoint([first, busy]) as endpoint:
        started = time.monotonic()
        ended = ten.run(endpoint.base_url, concurrency=5, max_total_tokens=90_000)
        assert time.monotonic() - started < 20
    assert ended.code == 1
    assert len(ten.rows()) == 1, "what had no answer is as if it had not begun"
    assert ended.last_line.startswith("9 not run, 1 cut short by the budget (kept) of 10 samples")


def test_auxiliary_costs_count(place: Workplace) -> None:
    place.env = {"MOA_REFERENCE_MODELS": "scripted", "MOA_AGGREGATOR_MODEL": "scripted"}
    (place.path / "moa.json").write_text(json.dumps({"description": "d", "toolsets": {"moa": 100}}), encoding="utf-8")
    place.dataset(["first", "second"])
    script = [
        call("mixture_of_agents", {"user_prompt": "why?"}, usage=CENT),
        answer("done", usage=CENT),
        reply(to="auxiliary", content="because", usage={**CENT, "cost": 0.5}, times="forever", delay_seconds=0.6),
    ]
    with ScriptedEndpoint(script) as endpoint:
        ended = place.run(endpoint.base_url, concurrency=1, max_cost_usd=0.5, distribution="moa.json")
    (row,) = place.rows()
    assert row["metadata"]["stop_reason"] == "budget"
    assert row["metadata"]["cost_usd"] == pytest.approx(1.01)
    assert ended.last_line.startswith("1 not run, 1 cut short by the budget (kept) of 2 samples")


def test_an_endpoint_that_names_no_cost_is_told(ten: Workplace) -> None:
    with ScriptedEndpoint(each({"prompt_tokens": 900, "completion_tokens": 100})) as endpoint:
        ended = ten.run(endpoint.base_url, max_cost_usd=1)
    assert ended.code == 0
    assert ended.stderr.count("does not say what requests cost, so --max_cost_usd bounds nothing") == 1
