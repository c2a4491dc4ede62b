"""All that this program promises of its speed, in one table of figures and ratios taken in one run on one machine.

    python -m tests.bench [--in_flight=256,1000] [--rollouts=200] [--original=PYTHON] [--other=COMMAND]

``--other`` is the command of another batch runner, which is timed against the same endpoint with the same prompts.
In it {base_url}, {dataset} (a JSONL file with a "prompt" a line), {rollouts} and {in_flight} are filled in; it runs in
a folder of its own that is its HOME. "The least" is what nobody can do without: bare aiohttp and a ``bash -c``. How
each figure is taken stands in bench_rollouts.py, bench_in_flight.py and bench_run_dir.py. Ratios travel between
machines; figures do not, and nothing does from a machine that has other things to do.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path

from tests.bench import bench_in_flight, bench_rollouts, bench_run_dir

OURS, LEAST = "this program", "floor"
TITLES = {LEAST: "the least"}
PASSES = {"scan": "resume: reading all rows", "merge": "merge", "merge and statistics": "merge and statistics"}
Row = tuple[str, dict[str, float], str]  # what, figures by command, how to show one


def rollouts_row(rollouts: int, others: dict[str, str]) -> Row:
    tell(f"{rollouts} rollouts, answered at once")
    costs = bench_rollouts.run(rollouts, others)
    per_second = {name: rollouts / cost.cpu_seconds for name, cost in costs.items()}
    return f"rollouts per CPU second, {rollouts} answered at once", per_second, "{:.1f}"


def flight_rows(in_flight: int, others: dict[str, str]) -> Iterable[Row]:
    efficiency: dict[str, dict[str, float]] = {delay: {} for delay in bench_in_flight.DELAYS}
    memory: dict[str, float] = {}
    starts: dict[str, float] = {}
    for name, command in bench_in_flight.commands(others).items():
        for delay, reached in efficiency.items():
            tell(f"{in_flight} in flight, delays {delay}: {TITLES.get(name, name)}")
            flight = bench_in_flight.fly(command, in_flight, delay)
            reached[name] = flight.efficiency
            if delay == "constant":
                memory[name] = bench_in_flight.memory_each(command, flight, in_flight)
                starts[name] = flight.start_seconds
    for delay, reached in efficiency.items():
        yield f"of the ideal time, {in_flight} in flight, {delay} delays around 1 s", reached, "{:.1%}"
    yield f"MB for a rollout in flight, {in_flight} of them", memory, "{:.2f}"
    yield f"seconds from start to first request, {in_flight} in flight", starts, "{:.2f}"


def folder_rows(rows: int) -> Iterable[tuple[str, bench_run_dir.Figure]]:
    tell(f"a run folder of {rows} rows")
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        figures = bench_run_dir.bench(Path(folder), rows, rows)
    return [(words, figures[name]) for name, words in PASSES.items()]


def table(rows: Iterable[Row], passes: Iterable[tuple[str, bench_run_dir.Figure]], names: list[str]) -> str:
    """Return the table as Markdown; behind a figure its ratio to this program's."""
    lines = ["| | " + " | ".join(TITLES.get(name, name) for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    for what, figures, form in rows:
        cells = [
            form.format(figures[name]) + ("" if name == OURS else f" ({figures[name] / figures[OURS]:.2f} x)")
            for name in names
        ]
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    lines += ["", "| files of a run | MB/s | CPU time of json.loads over the same lines, to this |", "|---|---|---|"]
    lines += [f"| {what} | {figure.mb_per_second:.0f} | {figure.to_json:.2f} x |" for what, figure in passes]
    return "\n".join(lines)


def tell(what: str) -> None:
    print(f"... {what}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in_flight", default="256", help="rollouts in flight; several numbers: comma-separated")
    parser.add_argument("--rollouts", type=int, default=200, help="for the CPU time of one")
    parser.add_argument("--rows", type=int, default=20_000, help="of the run folder, 10 kB each")
    bench_rollouts.add_others(parser)
    options = parser.parse_args()
    others = bench_rollouts.others_of(options)
    rows = [rollouts_row(options.rollouts, others)]
    for in_flight in options.in_flight.split(","):
        rows += flight_rows(int(in_flight), others)
    print(table(rows, folder_rows(options.rows), [OURS, LEAST, *others]))


if __name__ == "__main__":
    main()
