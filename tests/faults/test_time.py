"""Rollouts that take too long, and clocks that jump."""

from __future__ import annotations

import threading
import time
from datetime import datetime
from pathlib import Path

import pytest

from endpoints.scripted import ScriptedEndpoint
from sandboxes import BACKENDS
from tests.faults.processes import sandboxes
from tests.faults.shims import JUMPING_CLOCK, preloaded
from tests.program import Workplace, answer, ending, processes_with, prompt_of, reply, terminal, wait_until

SANDBOXES = [name for name in ("local", "bubblewrap") if not BACKENDS[name].unavailable()]


@pytest.mark.parametrize(
    "kind", [SANDBOXES[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in SANDBOXES[1:])]
)
def test_a_rollout_that_takes_too_long_ends_as_timeout_with_its_sandbox_gone(place: Workplace, kind: str) -> None:
    nap = f"sleep 7654.{len(kind)}"
    place.dataset(["a command", "a stubborn one", "a background one", "the model", "a body", "quick"])
    replies = [
        terminal(nap, prompt="a command"),
        terminal(f"trap '' TERM INT HUP; {nap}; {nap}", prompt="a stubborn one"),
        terminal(f"(setsid {nap} &)", prompt="a background one"),
        answer("late", delay_seconds=600, prompt="a background one"),
        answer("late", delay_seconds=600, prompt="the model"),
        reply(content="late", stall="body", prompt="a body"),
        answer("1", prompt="quick"),
    ]
    with (
        ScriptedEndpoint(replies) as endpoint,
        ending(place.start(endpoint.base_url, sandbox=kind, timeout_seconds=3, concurrency=8)) as process,
    ):
        wait_until(lambda: len(place.rows()) == 6, "all have ended", 25)
        wait_until(lambda: not (processes_with(nap) or sandboxes(place)), "their sandboxes are gone", 1)
        ended = place.ended(process)
    assert ended.code == 1
    ends = {prompt_of(row): row.get("error", {}).get("kind", "done") for row in place.rows()}
    assert ends.pop("quick") == "done"
    assert set(ends.values()) == {"timeout"}
    failed = [row for row in place.rows() if row.get("failed")]
    assert all("--timeout_seconds=3" in row["error"]["message"] for row in failed)
    assert all(3 <= row["metadata"]["duration_seconds"] < 15 for row in failed)
    assert place.json("statistics.json")["failures"]["timeout"]["count"] == 5


@pytest.mark.slow
def test_a_clock_that_jumps_disturbs_nobody(place: Workplace, tmp_path: Path) -> None:
    """A day forward, two days back, again and again, in all processes of the run."""
    wrong = tmp_path / "wrong"
    place.env.update(preloaded(JUMPING_CLOCK, tmp_path), CLOCK_WRONG_BY=str(wrong))
    prompts = [f"question {number}" for number in range(12)]
    place.dataset(prompts)
    over = threading.Event()

    def jump() -> None:
        sign = 1
        with wrong.open("wb") as file:
            while not over.is_set():
                file.truncate(1_000_000_000 + sign * 86_400)
                sign = -sign
                over.wait(0.1)

    jumping = threading.Thread(target=jump)
    jumping.start()
    try:
        replies = [
            reply(status=429, error="slow down", headers={"Retry-After": "1"}),
            terminal("sleep 0.5; echo 1", delay_seconds=0.3),
            answer("1", delay_seconds=0.3),
        ]
        with ScriptedEndpoint(replies) as endpoint:
            started = time.monotonic()
            ended = place.run(endpoint.base_url, concurrency=4, timeout_seconds=60)
            took = time.monotonic() - started
    finally:
        over.set()
        jumping.join()
    assert ended.code == 0, ended.stderr
    assert "stuck" not in ended.stderr
    rows = place.trajectories()
    assert [prompt_of(row) for row in rows] == prompts
    assert all(0 < row["metadata"]["duration_seconds"] < took for row in rows)
    assert 0 < place.json("statistics.json")["duration_seconds"] < took
    stamps = [datetime.fromisoformat(row["metadata"]["timestamp"]) for row in rows]
    assert (max(stamps) - min(stamps)).total_seconds() > 80_000, "the clock did jump"
