"""Many rollouts in flight at an endpoint that takes a second to answer: how near the ideal time, how much memory.

``python -m tests.bench.bench_in_flight [--in_flight=256] [--per_place=4] [--light] [--original=PYTHON] [--other=TEXT]``

* Efficiency: the ideal time (a rollout takes but its delays, and the next begins in the place of the first that ends)
  to the time from the first request to the last answer. Starting and ending are not in it.
* Start-up: from the start of the process to its first request.
* Memory of a rollout in flight: what the command's processes hold (PSS, the median over the run) beyond what they hold
  with hardly any in flight.

Four times as many rollouts as are in flight (``--per_place``: so many times as many; starting them all, and waiting for
the last, weighs less then); each is one terminal call, that is two requests. With ``--light`` it is a call of the todo
tool, which starts no process: hundreds of shells that are wanted at the same moment keep a small machine busy whoever
wants them, and without them the time that is lost is the program's own.
"""

from __future__ import annotations

import argparse
import heapq
import os
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.bench.bench_rollouts import FLOOR, OURS, PLAN_ONLY, add_others, measured, others_of, serving
from tests.bench.sampling import sampled
from tests.program import descendants

DELAYS = ("constant", "spread", "heavy")
ROLLOUTS_PER_PLACE = 4
LIGHT_TURNS = 1
FEW = 2
SAMPLE_SECONDS = 0.4
Command = Callable[[int], str]  # of so many in flight


@dataclass(frozen=True)
class Flight:
    """One run of a command."""

    efficiency: float
    busy: float  # of this machine's processors, by the command
    start_seconds: float
    memory_mb: float


def ours(in_flight: int) -> str:
    workers = min(os.cpu_count() or 1, in_flight)
    return f"{OURS} --num_workers={workers} --concurrency={-(-in_flight // workers)}"


def commands(others: dict[str, str]) -> dict[str, Command]:
    """Return what is measured, by name."""

    def always(command: str) -> Command:
        return lambda _: command

    return {"this program": ours, "floor": always(FLOOR), **{name: always(text) for name, text in others.items()}}


def light_commands() -> dict[str, Command]:
    """Return what is measured where no tool takes any time."""
    return {
        "this program": lambda in_flight: ours(in_flight).replace("--distribution=terminal_only", PLAN_ONLY),
        "floor": lambda _: f"{FLOOR} {LIGHT_TURNS}",
    }


def fly(command: Command, in_flight: int, delay: str, turns: int = 0, per_place: int = ROLLOUTS_PER_PLACE) -> Flight:
    """Run a command once; ``turns``: so many calls of the todo tool in each rollout, not one of the terminal."""
    rollouts = per_place * in_flight
    with (
        serving(delay, turns=turns) as endpoint,
        sampled(partial(memory_mb, {endpoint.pid}), SAMPLE_SECONDS) as samples,
    ):
        cost = measured(command(in_flight), endpoint.base_url, rollouts, in_flight)
    served = endpoint.served
    return Flight(
        efficiency=ideal_seconds(served.waits.values(), in_flight) / (served.last - served.first),
        busy=cost.cpu_seconds / cost.wall_seconds / (os.cpu_count() or 1),
        start_seconds=served.first - cost.started,
        memory_mb=statistics.median(filter(None, samples)) if any(samples) else 0.0,
    )


def ideal_seconds(rollouts: Iterable[float], in_flight: int) -> float:
    """Return how long rollouts of these seconds take, begun in this order, so many at once."""
    ends = [0.0] * in_flight
    for seconds in rollouts:
        heapq.heapreplace(ends, ends[0] + seconds)
    return max(ends)


def memory_each(command: Command, flight: Flight, in_flight: int) -> float:
    """Return the megabytes that one more rollout in flight takes."""
    few = fly(command, FEW, "constant")
    return (flight.memory_mb - few.memory_mb) / (in_flight - FEW)


def memory_mb(not_these: set[int]) -> float:
    """Return the megabytes of all processes that this one has started, but for some."""
    return sum(map(pss_mb, set(descendants(os.getpid())) - not_these))


def pss_mb(pid: int) -> float:
    """Return a process's share of memory; 0.0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in_flight", type=int, default=256)
    parser.add_argument("--per_place", type=int, default=ROLLOUTS_PER_PLACE, help="rollouts for each in flight")
    parser.add_argument("--light", action="store_true", help="rollouts whose tool starts no process")
    add_others(parser)
    options = parser.parse_args()
    others = others_of(options)
    if options.light and others:
        parser.error("--light compares with the floor alone: what tools others have is not known")
    measured_here = light_commands() if options.light else commands(others)
    print(f"{options.in_flight} in flight: {'delays':>10} {'efficiency':>11} {'CPUs busy':>10} {'start':>7}")
    for name, command in measured_here.items():
        for delay in DELAYS:
            turns = LIGHT_TURNS if options.light else 0
            flight = fly(command, options.in_flight, delay, turns, options.per_place)
            shown = f"{delay:>10} {flight.efficiency:>11.1%} {flight.busy:>10.0%} {flight.start_seconds:>6.2f}s"
            print(f"{name:<14} {shown}", flush=True)


if __name__ == "__main__":
    main()
