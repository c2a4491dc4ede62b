"""The program is killed, at any moment, again and again: what was recorded stays, and nothing is left alive."""

from __future__ import annotations

import json
import random
import signal
import time

import pytest

from endpoints.script import ScriptedReply
from endpoints.scripted import ScriptedEndpoint
from sandboxes import BACKENDS
from tests.faults.processes import GONE_SECONDS, assert_gone, below, below_me, sandboxes, spawner, wait_for_workers
from tests.faults.recorded import all_but_merged, whole_rows
from tests.program import (
    Json,
    Workplace,
    answer,
    ending,
    processes_with,
    prompt_of,
    prompts_of,
    terminal,
    wait_until,
)

WORKERS, PER_WORKER = 2, 4
FLAGS: Json = {"batch_size": 7, "num_workers": WORKERS, "concurrency": PER_WORKER}
TIMES = ("run_name", "completed_at", "duration_seconds", "rollout_seconds", "legs")
SANDBOXES = [name for name in ("local", "bubblewrap") if not BACKENDS[name].unavailable()]
LONG = 600


def two_turns(delay_seconds: tuple[float, float]) -> list[ScriptedReply]:
    wait = {"delay_seconds": delay_seconds}
    return [terminal("echo $((6 * 7))", **wait), answer("42", **wait)]


def kill_again_and_again(place: Workplace, endpoint: ScriptedEndpoint, kills: int, dice: random.Random) -> None:
    """Kill the program and resume it; whatever is recorded at a kill must never be asked for again."""
    done: set[str] = set()
    for attempt in range(kills):
        before = len(endpoint.requests)
        with ending(place.start(endpoint.base_url, resume=attempt > 0, **FLAGS)) as process:
            time.sleep(dice.uniform(0.3, 1.5))
            process.kill()
            process.communicate()
        assert_gone(below_me)
        assert not sandboxes(place)
        asked = set(prompts_of(endpoint)[before:])
        assert not done & asked
        done = set(whole_rows(place))
        checkpoint = place.run_dir() / "checkpoint.json"
        promised = json.loads(checkpoint.read_bytes())["completed_prompts"] if checkpoint.exists() else []
        assert {f"question {index:03}" for index in promised} <= done
        assert len(asked - done) <= WORKERS * PER_WORKER


def check_killed_run(place: Workplace, samples: int, kills: int, seed: int) -> None:
    prompts = [f"question {number:03}" for number in range(samples)]
    place.dataset(prompts)
    with ScriptedEndpoint(two_turns((0.05, 0.3)), record=100_000) as endpoint:
        kill_again_and_again(place, endpoint, kills, random.Random(seed))
        before = len(endpoint.requests)
        done = set(whole_rows(place))
        ended = place.run(endpoint.base_url, resume=True, **FLAGS)
        assert ended.code == 0, ended.stderr
        assert not done & set(prompts_of(endpoint)[before:])
        assert place.run(endpoint.base_url, run_name="whole", **{**FLAGS, "concurrency": 16}).code == 0
    assert sorted(prompt_of(row) for row in place.rows()) == prompts
    assert [(row["prompt_index"], prompt_of(row)) for row in place.trajectories()] == list(enumerate(prompts))
    assert place.json("checkpoint.json")["completed_prompts"] == list(range(samples))
    statistics, wanted = place.json("statistics.json"), place.json("statistics.json", "whole")
    assert {key: statistics[key] for key in statistics if key not in TIMES} == {
        key: wanted[key] for key in wanted if key not in TIMES
    }
    assert not list(place.run_dir().glob(".*.tmp"))


def test_a_run_that_is_killed_twice_ends_like_one_that_was_not(place: Workplace) -> None:
    check_killed_run(place, samples=16, kills=2, seed=1)


@pytest.mark.slow
def test_a_run_that_is_killed_twenty_times_ends_like_one_that_was_not(place: Workplace) -> None:
    check_killed_run(place, samples=200, kills=20, seed=2)


@pytest.mark.slow
def test_a_run_that_is_killed_at_once_begins_at_the_next_start(place: Workplace) -> None:
    place.dataset(["one", "two"])
    with ScriptedEndpoint([answer("1")]) as endpoint:
        with ending(place.start(endpoint.base_url)) as process:
            wait_until(place.run_dir().exists, "it has begun")
            process.kill()
            process.communicate()
        assert_gone(below_me)
        assert place.run(endpoint.base_url).code == 0, "a folder without rows is no run yet"
    assert len(place.trajectories()) == 2


@pytest.mark.parametrize("kind", SANDBOXES)
def test_commands_do_not_outlive_a_killed_program(place: Workplace, kind: str) -> None:
    nap = f"sleep 4321.{len(kind)}"
    place.dataset(["sleep"])
    with ScriptedEndpoint([terminal(f"(setsid {nap} &) ; trap '' TERM HUP; {nap}")]) as endpoint:
        with ending(place.start(endpoint.base_url, sandbox=kind)) as process:
            wait_until(lambda: len(processes_with(nap)) >= 2, "the commands run")
            process.kill()
            process.communicate()
        killed_at = time.monotonic()
        wait_until(lambda: not (processes_with(nap) or sandboxes(place)), "the sandbox is gone", GONE_SECONDS)
        assert_gone(below_me, killed_at + GONE_SECONDS - time.monotonic())


@pytest.mark.parametrize("kind", SANDBOXES)
@pytest.mark.slow
def test_a_start_sweeps_what_is_left_when_everything_was_killed_at_once(place: Workplace, kind: str) -> None:
    nap = f"sleep 5432.{len(kind)}"
    place.dataset(["sleep", "answer"])
    replies = [terminal(f"(setsid {nap} &) ; {nap}", prompt="sleep"), answer("1", prompt="answer")]
    with ScriptedEndpoint(replies) as endpoint:
        with ending(place.start(endpoint.base_url, sandbox=kind)) as process:
            wait_until(lambda: len(processes_with(nap)) >= 2, "the commands run")
            wait_until(lambda: whole_rows(place) == ["answer"], "the other one is done")
            doomed = below(process.pid)
            for each in doomed:
                each.kill(signal.SIGSTOP)  # so that none can clean up after another
            process.kill()
            for each in doomed:
                if nap not in each.command:
                    each.kill()
            for each in doomed:
                each.kill(signal.SIGCONT)
            process.communicate()
        assert kind == "bubblewrap" or processes_with(nap), "the test has left something to sweep"
        left = sandboxes(place)
        assert left
    with ScriptedEndpoint([answer("1")]) as endpoint:
        ended = place.run(endpoint.base_url, sandbox=kind, resume=True)
        assert prompts_of(endpoint) == ["sleep"]
    assert ended.code == 0
    assert f"removed {len(left)} sandboxes" in ended.stderr
    assert not processes_with(nap)
    assert not sandboxes(place)


@pytest.mark.slow
def test_a_start_sweeps_nothing_of_a_run_that_lives(place: Workplace) -> None:
    place.dataset(["sleep", "answer"])
    replies = [
        terminal("sleep 2; echo rested", prompt="sleep"),
        answer("1", prompt="sleep"),
        answer("1", prompt="answer"),
    ]
    with ScriptedEndpoint(replies) as endpoint, ending(place.start(endpoint.base_url)) as process:
        wait_until(lambda: sandboxes(place), "the sandbox is made")
        other = place.run(endpoint.base_url, run_name="other")
        assert (other.code, other.told) == (0, "")
        ended = place.ended(process)
    assert (ended.code, ended.told) == (0, "")
    assert "rested" in str(place.trajectories()[0]["conversations"])


@pytest.mark.slow
def test_a_program_that_is_killed_in_the_middle_of_the_merge(place: Workplace) -> None:
    all_but_merged(place, 2000)
    half_made = place.run_dir() / ".trajectories.jsonl.tmp"
    for _ in range(2):
        with ending(place.start("http://127.0.0.1:9/v1", resume=True)) as process:
            wait_until(lambda: half_made.exists() and half_made.stat().st_size > 0, "it merges")
            process.kill()
            process.communicate()
        assert not (place.run_dir() / "trajectories.jsonl").exists()
    assert place.run("http://127.0.0.1:9/v1", resume=True).code == 0
    assert len(place.trajectories()) == 2000
    assert not half_made.exists()


@pytest.mark.slow
def test_workers_end_without_parent_and_spawner(place: Workplace) -> None:
    place.dataset([f"{number}" for number in range(4)])
    with ScriptedEndpoint([terminal("sleep 600")]) as endpoint:
        with ending(place.start(endpoint.base_url, num_workers=2, concurrency=2)) as process:
            wait_until(lambda: len(sandboxes(place)) == 4, "the sandboxes are made")
            wait_for_workers(2)
            spawner(process.pid).kill()
            process.kill()
            process.communicate()
        assert_gone(below_me)
        wait_until(lambda: not sandboxes(place), "the sandboxes are gone", GONE_SECONDS)


@pytest.mark.slow
def test_a_stopped_worker_does_not_outlive_a_killed_program(place: Workplace) -> None:
    place.dataset(["sleep"])
    with ScriptedEndpoint([terminal("sleep 600")]) as endpoint:
        with ending(place.start(endpoint.base_url)) as process:
            wait_until(lambda: sandboxes(place), "the sandbox is made")
            (worker,) = wait_for_workers(1)
            worker.kill(signal.SIGSTOP)
            process.kill()
            process.communicate()
        assert_gone(below_me)


@pytest.mark.slow
def test_a_scripted_endpoint_does_not_outlive_a_killed_program(place: Workplace) -> None:
    (place.path / "replies.jsonl").write_text(json.dumps({"content": "late", "delay_seconds": LONG}) + "\n")
    place.dataset(["wait"])
    with ending(place.start("scripted:replies.jsonl")) as process:
        wait_until(lambda: processes_with("endpoints.scripted"), "the endpoint runs")
        wait_for_workers(1)
        process.kill()
        process.communicate()
    assert_gone(below_me)


@pytest.mark.slow
def test_a_spawner_that_is_stopped_before_it_has_a_worker_is_not_left_behind(place: Workplace) -> None:
    place.dataset(["one", "two", "three"])
    with ScriptedEndpoint([answer("late", delay_seconds=LONG)]) as endpoint:
        with ending(place.start(endpoint.base_url)) as process:
            wait_until(lambda: below(process.pid), "the spawner is born")
            spawner(process.pid).kill(signal.SIGSTOP)
            process.send_signal(signal.SIGINT)
            assert place.ended(process, 10).code == 130
        assert_gone(below_me)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_spawner_is_not_left_behind(place: Workplace, number: signal.Signals) -> None:
    place.dataset(["one", "two", "three"])
    with ScriptedEndpoint([answer("late", delay_seconds=LONG)]) as endpoint:
        with ending(place.start(endpoint.base_url)) as process:
            wait_for_workers(1)
            spawner(process.pid).kill(signal.SIGSTOP)
            process.send_signal(number)
            process.communicate(timeout=10)
        assert_gone(below_me)
