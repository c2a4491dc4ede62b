"""CPU and time of one-tool rollouts against an endpoint that answers at once, as ratios in one run.

    python -m tests.bench.bench_rollouts [--rollouts=200] [--original=PYTHON] [--other=COMMAND]

Compares this program with the floor (tests/bench/floor.py) and, where ``--original`` names a Python that has the
original installed (``pip install hermes-agent``), with the original's batch_runner on the same prompts and endpoint.
``--other`` is any other's command; see ``words``. Whole-process figures: user and system seconds of the process and all
that it waited for.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.endpoint import Served

ROOT = Path(__file__).resolve().parent.parent.parent
REPEATS = 3
FLAGS = (
    "--dataset_file={dataset} --batch_size={batch_size} --run_name=bench --distribution=terminal_only --model=bench "
    "--base_url={base_url} --api_key=none"
)
OURS = f"{shlex.quote(sys.executable)} {shlex.quote(str(ROOT / 'batch_runner.py'))} {FLAGS} --sandbox=local"
FLOOR = (
    f"env PYTHONPATH={shlex.quote(str(ROOT))} {shlex.quote(sys.executable)} -m tests.bench.floor "
    "{base_url} {rollouts} {in_flight}"
)
PLAN_ONLY = "--distribution=todo.json"  # a file that ``measured`` makes; the toolset alone that starts no process
ORIGINAL = "{python} -m batch_runner " + FLAGS + " --num_workers=4"


@dataclass(frozen=True)
class Cost:
    """One process, from start to end."""

    cpu_seconds: float
    wall_seconds: float
    started: float  # monotonic


@dataclass
class Endpoint:
    """The endpoint in a process of its own; ``served`` is there once it has ended."""

    base_url: str
    pid: int
    served: Served = field(default_factory=Served)


@contextmanager
def serving(delay: str = "none", limit: str = "", turns: int = 0) -> Iterator[Endpoint]:
    """Run the endpoint meanwhile."""
    pipe = subprocess.PIPE
    words = [sys.executable, "-m", "tests.bench.endpoint", delay, limit, str(turns)]
    with subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdin
        assert server.stdout
        endpoint = Endpoint(server.stdout.readline().strip(), server.pid)
        try:
            yield endpoint
        finally:
            server.stdin.close()
            if told := server.stdout.read():
                endpoint.served = Served(**json.loads(told))


def words(command: str, base_url: str, rollouts: int, in_flight: int) -> list[str]:
    """Return a command's words, with {base_url}, {dataset}, {rollouts}, {in_flight} and {batch_size} filled in."""
    values = {
        "base_url": base_url,
        "dataset": "prompts.jsonl",
        "rollouts": rollouts,
        "in_flight": in_flight,
        "batch_size": max(rollouts // 20, 1),
    }
    for name, value in values.items():
        command = command.replace(f"{{{name}}}", str(value))
    return shlex.split(command)


def measured(command: str, base_url: str, rollouts: int, in_flight: int) -> Cost:
    """Run a command over so many prompts, in a folder of its own, to its end."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        lines = [json.dumps({"prompt": f"say hello, number {number}"}) for number in range(rollouts)]
        (place / "prompts.jsonl").write_text("\n".join(lines))
        (place / "todo.json").write_text('{"toolsets": {"todo": 100}}')
        asked = words(command, base_url, rollouts, in_flight)
        env = {**os.environ, "HOME": folder, "TERMINAL_ENV": "local"}
        started = time.monotonic()
        with (place / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                asked, cwd=place, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said = (place / "output.txt").read_text(errors="replace")[-2000:]
            raise SystemExit(f"{shlex.join(asked)} ended with {process.returncode}:\n{said}")
        return Cost(usage.ru_utime + usage.ru_stime, time.monotonic() - started, started)


def run(rollouts: int, others: dict[str, str], repeats: int = REPEATS) -> dict[str, Cost]:
    """Measure each command in turn, several times, others once; return the medians by name."""
    costs: dict[str, list[Cost]] = {}
    with serving() as endpoint:
        for repeat in range(repeats):
            for name, command in {"floor": FLOOR, "this program": OURS, **others}.items():
                if name in others and repeat:
                    continue
                costs.setdefault(name, []).append(measured(command, endpoint.base_url, rollouts, 32))
    return {name: sorted(all_, key=lambda cost: cost.cpu_seconds)[len(all_) // 2] for name, all_ in costs.items()}


def table(costs: dict[str, Cost], rollouts: int) -> str:
    """Return the costs, and their ratios to this program's."""
    ours = costs["this program"]
    lines = [f"{rollouts} rollouts: {'CPU':>8} {'wall':>8} {'CPU each':>10} {'CPU ratio':>10} {'wall ratio':>10}"]
    for name, cost in costs.items():
        each = 1000 * cost.cpu_seconds / rollouts
        ratios = f"{cost.cpu_seconds / ours.cpu_seconds:>9.2f}x {cost.wall_seconds / ours.wall_seconds:>9.2f}x"
        lines.append(f"{name:<13} {cost.cpu_seconds:>7.2f}s {cost.wall_seconds:>7.2f}s {each:>8.1f}ms {ratios}")
    return "\n".join(lines)


def add_others(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name other batch runners."""
    parser.add_argument("--original", help="a Python that has hermes-agent installed")
    parser.add_argument(
        "--other", help="command of another batch runner; {base_url}, {dataset}, {in_flight} are filled in"
    )


def others_of(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the commands of other batch runners by name."""
    found = {"other": arguments.other} if arguments.other else {}
    if arguments.original:
        found["original"] = ORIGINAL.replace("{python}", shlex.quote(arguments.original))
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=200)
    add_others(parser)
    arguments = parser.parse_args()
    print(table(run(arguments.rollouts, others_of(arguments)), arguments.rollouts))


if __name__ == "__main__":
    main()
