"""How fast the dataset and the run folder are read and written: MB/s, memory, and ratios that travel.

``python -m tests.bench.bench_run_dir --samples 1000000 --rows 100000`` writes its files to a temporary folder (or below
``--folder``) and removes them. The yardstick of the ratios is Python's own ``json.loads`` over the same lines, in CPU
time: above 1.0 is faster than that. The files were just written and sit in the page cache.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rollout.filters import drop_reason
from rollout.jsonl import JsonObject
from rollout.merge import Fate, MergeRules
from rollout.messages import AssistantMessage, Message, ToolCall, ToolMessage, Usage, UserMessage
from rollout.original_rows import complete_row
from rollout.resume import match_rows
from rollout.rows import encode_row
from rollout.run_dir import RunDir
from rollout.samples import Dataset
from rollout.statistics import RunStatistics
from rollout.trajectory import conversations
from toolsets import KNOWN_TOOLS

BATCH_SIZE = 100
CHANCE = random.Random(0)
TEXTS = [" ".join(CHANCE.choices([f"word{number}" for number in range(5000)], k=220)) for _ in range(1000)]


FIGURES: dict[str, Figure] = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=200_000, help="lines of the dataset, 2 kB each")
    parser.add_argument("--rows", type=int, default=20_000, help="rows of the run, 10 kB each")
    parser.add_argument("--folder", type=Path, help="where the files go for the time of the run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        bench(Path(folder), options.samples, min(options.rows, options.samples))


@dataclass(frozen=True)
class Figure:
    """What one pass over files took."""

    mb_per_second: float
    to_json: float  # CPU time of json.loads over the same lines, to this one's


def bench(folder: Path, samples: int, rows: int) -> dict[str, Figure]:
    """Measure all passes, print a line for each, and return them by name."""
    show(f"{'':22} {'MB':>8} {'seconds':>8} {'CPU s':>8} {'MB/s':>8} {'x json':>8} {'peak MB':>8}")
    FIGURES.clear()
    path = folder / "prompts.jsonl"
    with path.open("wb") as file:
        file.writelines(dataset_lines(samples))
    yardstick = json_loads([path])
    with measured("open the dataset", path.stat().st_size, yardstick), Dataset.open(path) as dataset:
        pass
    with Dataset.open(path) as dataset, RunDir.open("bench", resume=False, data=folder / "data") as run_dir:
        started = time.perf_counter()
        write_rows(run_dir, dataset, rows)
        show(f"append, fsync per {BATCH_SIZE:<4} {(time.perf_counter() - started) / rows * 1e6:.0f} us a row")
        bench_folder(run_dir, dataset, rows)
    return dict(FIGURES)


def bench_folder(run_dir: RunDir, dataset: Dataset, rows: int) -> None:
    files = sorted(run_dir.path.glob("batch_*.jsonl"))
    size = sum(file.stat().st_size for file in files)
    yardstick = json_loads(files)
    with measured("scan", size, yardstick):
        index = run_dir.scan()
    with measured("match", size, yardstick):
        match = match_rows(dataset.keys, index)
    assert sum(match.done) == rows
    with measured("merge", size, yardstick):
        run_dir.merge(index, match, MergeRules(lambda _row: "", lambda _row, _fate: None))
    statistics = RunStatistics()

    def count(row: JsonObject, fate: Fate) -> None:
        statistics.add(row, final=fate != "superseded")

    with measured("merge and statistics", size, yardstick):
        run_dir.merge(index, match, MergeRules(drop_reason, count, complete_row))
    assert statistics.kept == rows


def dataset_lines(count: int) -> Iterator[bytes]:
    for number in range(count):
        yield json.dumps({"prompt": f"{TEXTS[number % len(TEXTS)]} {number}", "id": number}).encode() + b"\n"


def write_rows(run_dir: RunDir, dataset: Dataset, count: int) -> None:
    for index in range(count):
        batch_num = run_dir.first_batch + index // BATCH_SIZE
        run_dir.append(batch_num, encode_row(a_row(index, dataset[index].prompt)))
        if index % BATCH_SIZE == BATCH_SIZE - 1:
            run_dir.finish_batch(batch_num)
    run_dir.sync()


def a_row(index: int, prompt: str) -> JsonObject:
    call = AssistantMessage("Let me look.", "First the files.", (ToolCall("call_1", "terminal", {"command": "ls -l"}),))
    result = ToolMessage("call_1", "terminal", json.dumps({"output": TEXTS[0] * 2, "exit_code": 0, "error": None}))
    messages: list[Message] = [UserMessage(prompt), call, result, AssistantMessage(TEXTS[1], "Done.")]
    stats = {name: {"count": 0, "success": 0, "failure": 0} for name in KNOWN_TOOLS}
    metadata = {
        "batch_num": index // BATCH_SIZE,
        "timestamp": datetime.now(UTC).isoformat(),
        "model": "bench",
        "image": "",
        "cwd": "",
        "sandbox": "local",
        "stop_reason": "answered",
        "duration_seconds": 1.0,
        "usage": asdict(Usage()),
        "cost_usd": 0.0,
        "sample_json": "",
    }
    return {
        "prompt_index": index,
        "conversations": conversations(prompt, messages, ()),
        "metadata": metadata,
        "completed": True,
        "partial": False,
        "api_calls": 2,
        "toolsets_used": ["terminal"],
        "tool_stats": stats,
        "tool_error_counts": dict.fromkeys(stats, 0),
    }


def json_loads(paths: list[Path]) -> float:
    """Return the CPU seconds of the yardstick."""
    started = time.process_time()
    for path in paths:
        with path.open("rb") as file:
            for line in file:
                json.loads(line)
    return time.process_time() - started


@contextmanager
def measured(name: str, size: int, yardstick: float) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    speed = size / wall / 1e6
    FIGURES[name] = Figure(speed, yardstick / cpu)
    show(f"{name:22} {size / 1e6:8.0f} {wall:8.2f} {cpu:8.2f} {speed:8.0f} {yardstick / cpu:8.2f} {peak_mb:8.0f}")


def show(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
