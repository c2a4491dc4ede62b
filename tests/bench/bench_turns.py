"""CPU of one more completion in a rollout that goes on anyway, to that of bare aiohttp: no start-up, and no row, in it.

    python -m tests.bench.bench_turns [--rollouts=50] [--turns=40] [--repeats=3]

Each turn is a call of the todo tool, and the conversation grows as it does. What that call takes, its arguments checked
and its result masked, stands in a line of its own. The difference
between rollouts of that many turns and of one, by their number; the middle one of the repeats, after one of each
command that does not count: the first run of all compiles what it imports.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from statistics import median

from model_tools import Toolbox
from sandboxes.base import Sandbox, SandboxError
from tests.bench.bench_rollouts import FLOOR, OURS, PLAN_ONLY, measured, serving
from tools.base import ToolContext
from tools.calls import ToolCall

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


def tool_milliseconds(calls: int = 5000) -> float:
    """Return the CPU time of one call of the todo tool, by a toolbox that does nothing else."""

    async def no_sandbox() -> Sandbox:
        raise SandboxError("the todo tool needs none")

    async def run() -> float:
        toolbox = Toolbox(("todo",), ToolContext(no_sandbox))
        call = ToolCall("call_1", "todo", {})
        begun = time.process_time()
        for _ in range(calls):
            await toolbox.run(call)
        return 1000 * (time.process_time() - begun) / calls

    asyncio.run(run())
    return asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=50)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    for command in COMMANDS.values():
        milliseconds_each(command, 1, 2)
    tries: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(options.repeats):  # in turns: whatever else the machine does then, it does to both
        for name, command in COMMANDS.items():
            tries[name].append(milliseconds_each(command, options.rollouts, options.turns))
    costs = {name: median(all_) for name, all_ in tries.items()}
    costs["its tool alone"] = tool_milliseconds()
    costs["without it"] = costs["this program"] - costs["its tool alone"]
    for name, cost in costs.items():
        print(f"{name:<15} {cost:>6.3f} ms a completion {cost / costs['bare aiohttp']:>6.2f}x")


if __name__ == "__main__":
    main()
