from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from endpoints.script import ScriptedReply
from endpoints.scripted import ScriptedEndpoint
from tests.program import (
    Scenes,
    Workplace,
    answer,
    descendants,
    ending,
    nap,
    processes_with,
    prompt_of,
    prompts_of,
    script,
    terminal,
    wait_until,
)

LONG = 50  # seconds: no test waits for it


def endpoint_of(scenes: Scenes) -> ScriptedEndpoint:
    return ScriptedEndpoint(script(scenes))


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The grandchildren, which the spawner forks, and whatever they have started."""
    return [pid for child in descendants(process.pid) for pid in descendants(child)]


def test_a_killed_program_loses_nothing_that_was_recorded(place: Workplace) -> None:
    command = nap(1304)
    prompts = [f"question {number}" for number in range(6)]
    place.dataset(prompts)
    scenes: dict[str, list[ScriptedReply]] = {prompt: [answer("4")] for prompt in prompts}
    with endpoint_of({**scenes, prompts[2]: [terminal(command)]}) as endpoint:
        with ending(place.start(endpoint.base_url, batch_size=1, concurrency=1)) as process:
            wait_until(lambda: processes_with(command), "the command runs")
            family = descendants(process.pid)
            process.kill()
            process.communicate()
        wait_until(lambda: not processes_with(command), "the sandbox is gone", 10)
        wait_until(lambda: not any(map(alive, family)), "all its processes are gone", 10)
    recorded = {path.name: path.read_bytes() for path in place.run_dir().glob("batch_*")}
    assert place.json("checkpoint.json")["completed_prompts"] == [0, 1]
    assert not list(place.run_dir().glob("*.tmp"))
    assert not list(place.run_dir().glob("trajectories*"))

    with endpoint_of(scenes) as endpoint:
        ended = place.run(endpoint.base_url, batch_size=1, resume=True)
        assert sorted(prompts_of(endpoint)) == prompts[2:]
    assert ended.code == 0
    assert {name: (place.run_dir() / name).read_bytes() for name in recorded} == recorded
    assert [prompt_of(row) for row in place.trajectories()] == prompts
    assert place.json("checkpoint.json")["completed_prompts"] == list(range(6))
    assert not [path for path in place.run_dir().iterdir() if path.name.endswith(".tmp")]


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_a_killed_worker_costs_the_sample_that_it_was_at(place: Workplace) -> None:
    prompts = [f"question {number}" for number in range(5)]
    place.dataset(prompts)
    scenes: dict[str, list[ScriptedReply]] = {prompt: [answer("4")] for prompt in prompts}
    scenes[prompts[3]] = [answer("never said", delay_seconds=LONG, times=2), answer("4")]
    with endpoint_of(scenes) as endpoint:
        with ending(place.start(endpoint.base_url, batch_size=5, concurrency=1)) as process:
            for attempt in (1, 2):
                wait_until(lambda: prompts_of(endpoint).count(prompts[3]) == attempt, "the row is at work")  # noqa: B023
                wait_until(lambda: len(place.rows()) >= 3, "the rows before it are on disk")
                assert sorted(prompt_of(row) for row in place.rows())[:3] == prompts[:3]
                for pid in workers_of(process):
                    os.kill(pid, signal.SIGKILL)
            ended = place.ended(process)
        assert ended.code == 1
        assert "died with 1 rollouts in flight" in ended.stderr
        assert ended.last_line.startswith("1 failed of 5 samples; resume with: ")
        (failed,) = [row for row in place.rows() if row.get("failed")]
        assert (failed["error"]["kind"], failed["prompt"]) == ("worker_died", prompts[3])
        asked = prompts_of(endpoint)
        assert [asked.count(prompt) for prompt in prompts] == [1, 1, 1, 2, 1]

        ended = place.run(endpoint.base_url, batch_size=5, resume=True)
        assert prompts_of(endpoint)[len(asked) :] == [prompts[3]]
    assert ended.code == 0
    assert [prompt_of(row) for row in place.trajectories()] == prompts
    assert place.json("statistics.json")["failures"] == {}


def test_a_file_that_cannot_be_written_stops_the_run(place: Workplace) -> None:
    place.dataset(["first", "second", "third"])
    scenes = {
        "first": [answer("4")],
        "second": [answer("4", delay_seconds=2)],
        "third": [answer("4", delay_seconds=LONG)],
    }
    with endpoint_of(scenes) as endpoint, ending(place.start(endpoint.base_url, batch_size=1)) as process:
        wait_until((place.run_dir() / "batch_0.jsonl").exists, "the first row is there")
        (place.run_dir() / "batch_1.jsonl").mkdir()
        ended = place.ended(process, LONG - 10)
    assert ended.code == 1
    assert ended.stdout == ""
    assert ended.told.startswith("error: cannot write data/r/batch_1.jsonl: Is a directory; resume with: ")
    assert ended.told.count("\n") == 1
    assert place.json("checkpoint.json")["completed_prompts"] == [0]
    assert [prompt_of(json.loads(line)) for line in (place.run_dir() / "batch_0.jsonl").read_bytes().splitlines()] == [
        "first"
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_a_run_that_can_go_on(place: Workplace, number: signal.Signals) -> None:
    command = nap(1305)
    place.dataset(["first", "second", "third", "fourth"])
    scenes = {"first": [answer("4")], "second": [terminal(command)], "third": [answer("4")], "fourth": [answer("4")]}
    with endpoint_of(scenes) as endpoint, ending(place.start(endpoint.base_url, concurrency=1)) as process:
        wait_until(lambda: processes_with(command), "the command runs")
        started = time.monotonic()
        process.send_signal(number)
        ended = place.ended(process)
        assert time.monotonic() - started < 10
        assert sorted(set(prompts_of(endpoint))) == ["first", "second"]
    assert ended.code == 130
    assert not processes_with(command)
    assert ended.last_line.startswith("Interrupted: 1 interrupted, 2 not run of 4 samples; resume with: ")
    assert ended.last_line.endswith(" --resume")
    assert place.json("checkpoint.json")["completed_prompts"] == [0]
    assert [row["prompt_index"] for row in place.trajectories()] == [0]
    (cut,) = [row for row in place.rows() if row.get("failed")]
    assert cut["error"]["kind"] == "interrupted"
    if number == signal.SIGINT:
        with endpoint_of({**scenes, "second": [answer("4")]}) as endpoint:
            assert place.run(endpoint.base_url, resume=True).code == 0
            assert sorted(prompts_of(endpoint)) == ["fourth", "second", "third"]
        assert [row["prompt_index"] for row in place.trajectories()] == [0, 1, 2, 3]


def test_two_processes_never_share_a_run(place: Workplace) -> None:
    place.dataset(["first"])
    with endpoint_of({"first": [answer("4", delay_seconds=LONG)]}) as endpoint:
        with ending(place.start(endpoint.base_url)) as process:
            wait_until(lambda: endpoint.requests, "the first one works")
            for flags in ({}, {"resume": True}):
                second = place.run(endpoint.base_url, **flags)
                assert second.code == 2
                told = f"error: another process (pid {process.pid}) is running this run in data/r\n"
                assert (second.stdout, second.stderr) == ("", told)
            process.send_signal(signal.SIGTERM)
            assert place.ended(process).code == 130
        assert len(endpoint.requests) == 1
