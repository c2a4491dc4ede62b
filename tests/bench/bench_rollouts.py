"""CPU and time of one-tool rollouts against an endpoint that answers at once, as ratios in one run.

    python -m tests.bench.bench_rollouts [--rollouts=200] [--original=PYTHON]

Compares this program with the floor (tests/bench/floor.py) and, where ``--original`` names a Python that has the
original installed (``pip install hermes-agent``), with the original's batch_runner on the same prompts and endpoint.
Whole-process figures: user and system seconds of the process and all that it waited for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
REPEATS = 3
LIMIT_SECONDS = 400.0


@dataclass(frozen=True)
class Cost:
    """One process, from start to end."""

    cpu_seconds: float
    wall_seconds: float


def measured(command: list[str], cwd: Path, env: dict[str, str]) -> Cost:
    """Run a command to its end; the best of nothing is taken: this is one run."""
    started = time.monotonic()
    with (cwd / "output.txt").open("wb") as output:
        process = subprocess.Popen(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[:3]} ended with {process.returncode}:\n{(cwd / 'output.txt').read_text()[-2000:]}")
    return Cost(usage.ru_utime + usage.ru_stime, time.monotonic() - started)


def flags(base_url: str, run_name: str, rollouts: int) -> list[str]:
    """Return the flags both batch runners take."""
    return [
        "--dataset_file=prompts.jsonl",
        f"--batch_size={max(rollouts // 20, 1)}",
        f"--run_name={run_name}",
        "--distribution=terminal_only",
        "--model=bench",
        f"--base_url={base_url}",
        "--api_key=none",
        "--num_workers=4",
    ]


def commands(base_url: str, rollouts: int, original: str | None) -> dict[str, list[str]]:
    """Return what is measured, by name."""
    ours = [sys.executable, str(ROOT / "batch_runner.py"), *flags(base_url, "ours", rollouts), "--sandbox=local"]
    floor = [sys.executable, "-m", "tests.bench.floor", base_url, str(rollouts)]
    found = {"floor": floor, "this program": ours}
    if original:
        found["original"] = [original, "-m", "batch_runner", *flags(base_url, "original", rollouts)]
    return found


def run(rollouts: int, original: str | None) -> dict[str, list[Cost]]:
    """Measure each command in turn, several times; the original once."""
    costs: dict[str, list[Cost]] = {}
    pipe = subprocess.PIPE
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.endpoint"], cwd=ROOT, stdin=pipe, stdout=pipe, text=True
    )
    with server:
        assert server.stdout
        base_url = server.stdout.readline().strip()
        for repeat in range(REPEATS):
            for name, command in commands(base_url, rollouts, original).items():
                if name == "original" and repeat:
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    place = Path(folder)
                    lines = [json.dumps({"prompt": f"say hello, number {number}"}) for number in range(rollouts)]
                    (place / "prompts.jsonl").write_text("\n".join(lines))
                    env = {**os.environ, "HOME": folder, "TERMINAL_ENV": "local"}
                    if name == "floor":
                        env["PYTHONPATH"] = str(ROOT)
                    costs.setdefault(name, []).append(measured(command, place, env))
        assert server.stdin
        server.stdin.close()
    return costs


def table(costs: dict[str, list[Cost]], rollouts: int) -> str:
    """Return the medians, and their ratios to this program's."""
    medians = {
        name: Cost(
            sorted(cost.cpu_seconds for cost in measured)[len(measured) // 2],
            sorted(cost.wall_seconds for cost in measured)[len(measured) // 2],
        )
        for name, measured in costs.items()
    }
    ours = medians["this program"]
    lines = [f"{rollouts} rollouts: {'CPU':>8} {'wall':>8} {'CPU each':>10} {'CPU ratio':>10} {'wall ratio':>10}"]
    for name, cost in medians.items():
        each = 1000 * cost.cpu_seconds / rollouts
        ratios = f"{cost.cpu_seconds / ours.cpu_seconds:>9.2f}x {cost.wall_seconds / ours.wall_seconds:>9.2f}x"
        lines.append(f"{name:<13} {cost.cpu_seconds:>7.2f}s {cost.wall_seconds:>7.2f}s {each:>8.1f}ms {ratios}")
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--original", help="a Python that has hermes-agent installed")
    arguments = parser.parse_args()
    print(table(run(arguments.rollouts, arguments.original), arguments.rollouts))


if __name__ == "__main__":
    main()
