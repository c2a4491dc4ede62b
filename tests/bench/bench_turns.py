"""CPU of one more completion in a rollout that goes on anyway, to that of bare aiohttp: no start-up, and no row, in it.

    python -m tests.bench.bench_turns [--rollouts=50] [--turns=40]

Each turn is a call of the todo tool, which costs next to nothing, and the conversation grows as it does. The difference
between rollouts of that many turns and of one, by their number.
"""

from __future__ import annotations

import argparse

from tests.bench.bench_rollouts import FLOOR, OURS, PLAN_ONLY, measured, serving

IN_FLIGHT = 32
COMMANDS = {
    "this program": OURS.replace("--distribution=terminal_only", PLAN_ONLY) + " --max_turns=100000",
    "bare aiohttp": f"{FLOOR} {{turns}}",
}


def milliseconds_each(command: str, rollouts: int, turns: int) -> float:
    """Return the CPU time of one more turn."""
    cpu = []
    for many in (turns, 1):
        with serving(turns=many) as endpoint:
            filled = command.replace("{turns}", str(many))
            cpu.append(measured(filled, endpoint.base_url, rollouts, IN_FLIGHT).cpu_seconds)
    return 1000 * (cpu[0] - cpu[1]) / (rollouts * (turns - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=50)
    parser.add_argument("--turns", type=int, default=40)
    options = parser.parse_args()
    costs = {name: milliseconds_each(command, options.rollouts, options.turns) for name, command in COMMANDS.items()}
    for name, cost in costs.items():
        print(f"{name:<13} {cost:>6.2f} ms a completion {cost / costs['bare aiohttp']:>6.2f}x")


if __name__ == "__main__":
    main()
