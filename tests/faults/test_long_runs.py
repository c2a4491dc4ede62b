"""Long runs: what the parent and the workers hold does not grow, and what is done is read back fast.

FAULTS_ROLLOUTS and FAULTS_ROWS make the runs longer: 100,000 each take a quarter of an hour.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from endpoints.scripted import ScriptedEndpoint
from tests.faults.processes import open_files, private_kib, threads, workers
from tests.program import Workplace, answer, ending, terminal, wait_until

ROLLOUTS = int(os.environ.get("FAULTS_ROLLOUTS", "2000"))
ROWS = int(os.environ.get("FAULTS_ROWS", "4000"))
SAMPLES_OF_MEMORY = 12
LEAST_BYTES_PER_SECOND = 50_000_000  # of processor time, start included: half of what a quiet machine does
GROWTH_KIB = 2048  # between the middle and the end of a run: far less than what the rollouts of that time said


@dataclass(frozen=True)
class Held:
    """What the processes of a run hold."""

    parent_kib: int
    workers_kib: int
    files: int
    threads: int


def held(program: int) -> Held:
    crew = [process.pid for process in workers()]
    everyone = [program, *crew]
    return Held(
        private_kib(program), max(map(private_kib, crew)), max(map(open_files, everyone)), max(map(threads, everyone))
    )


def rows_so_far(place: Workplace, batch_size: int) -> int:
    return batch_size * len(list(place.run_dir().glob("batch_*.jsonl")))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_long_run_holds_no_more_at_its_end_than_in_its_middle(place: Workplace) -> None:
    place.dataset(f"{'tool' if number % 20 == 0 else 'talk'} {number:06}" for number in range(ROLLOUTS))
    replies = [
        terminal("echo 1; sleep 0.1 &", prompt="tool"),
        answer("1", prompt="tool"),
        answer("words " * 500, prompt="talk"),
    ]
    seen: list[Held] = []
    with ScriptedEndpoint(replies, record=0) as endpoint:
        flags = {"batch_size": 50, "num_workers": 2, "concurrency": 12}
        with ending(place.start(endpoint.base_url, **flags)) as process:
            for step in range(1, SAMPLES_OF_MEMORY):
                wanted = ROLLOUTS * step / SAMPLES_OF_MEMORY
                wait_until(lambda wanted=wanted: rows_so_far(place, 50) >= wanted, "it goes on", 600)  # type: ignore[misc]
                seen.append(held(process.pid))
            ended = place.ended(process, 300)
    assert ended.code == 0
    middle, end = seen[len(seen) // 2], seen[-1]
    assert end.parent_kib - middle.parent_kib < GROWTH_KIB, seen
    assert end.workers_kib - middle.workers_kib < GROWTH_KIB, seen
    assert max(each.files for each in seen) < 200, seen
    assert max(each.threads for each in seen) < 20, seen
    assert sum(stats["processed"] for stats in place.json("checkpoint.json")["batch_stats"].values()) == ROLLOUTS


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_finished_run_is_read_back_fast_and_in_flat_memory(place: Workplace) -> None:
    place.fresh = True
    place.dataset(f"question {number:06}" for number in range(ROWS))
    with ScriptedEndpoint([terminal("echo " + "word " * 2000), answer("words " * 2000)]) as endpoint:
        assert place.run(endpoint.base_url, max_samples=1).code == 0
    line = (place.run_dir() / "batch_0.jsonl").read_bytes()
    size = 0
    for start in range(1, ROWS, 1000):
        with (place.run_dir() / f"batch_{1 + start // 1000}.jsonl").open("wb") as file:
            for number in range(start, min(start + 1000, ROWS)):
                size += file.write(
                    line.replace(b'"prompt_index": 0,', b'"prompt_index": %d,' % number).replace(
                        b"000000", b"%06d" % number
                    )
                )
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    with ending(place.start("http://127.0.0.1:9/v1", resume=True)) as process:
        most_kib = 0
        while process.poll() is None:
            most_kib = max(most_kib, peak_kib(process.pid))
            time.sleep(0.05)
        ended = place.ended(process)
    assert ended.code == 0, ended.stderr
    assert [row["prompt_index"] for row in place.trajectories()] == list(range(ROWS))
    assert most_kib < 100 * 1024 + ROWS // 4, "memory does not hold the rows"
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = now.ru_utime + now.ru_stime - spent.ru_utime - spent.ru_stime  # whatever else the machine does
    assert size / seconds > LEAST_BYTES_PER_SECOND, (size, seconds)


def peak_kib(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0
    return int(status.partition("VmHWM:")[2].split()[0]) if "VmHWM" in status else 0
