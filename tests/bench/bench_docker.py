"""What containers cost: a container, a command in its open shell beside a fresh exec, files, whole runs, many at once.

``python -m tests.bench.bench_docker`` uses the engine of $DOCKER_HOST with the images of ``tests/engines.py``. Runs are
of the real program against scripted replies, beside the engine's own create, start and remove with as many at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import docker
from docker.utils import kwargs_from_env

from endpoints.scripted import ScriptedEndpoint
from sandboxes.base import Sandbox, SandboxSpec
from sandboxes.docker import DockerBackend
from tests import engines
from tests.bench.sampling import sampled
from tests.program import Workplace, answer, terminal

SPEC = SandboxSpec("bench", "bench")
MINUTE = 60.0


async def measured(what: str, times: int, body: Callable[[], Awaitable[object]]) -> float:
    """Print the median of several times in milliseconds, and return it."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        await body()
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds) * 1000
    print(f"{what:44} {median:9.2f} ms")
    return median


async def one_container(backend: DockerBackend, rounds: int) -> None:
    made: list[Sandbox] = []

    async def make() -> None:
        made.append(await backend.open(SPEC))

    async def end() -> None:
        await made.pop().close()

    await measured("make a container, with its open shell", rounds, make)
    await measured("remove it", rounds, end)
    sandbox = await backend.open(SPEC)
    with_shell = await measured(
        "a command in the open shell", 20 * rounds, lambda: sandbox.exec("true", timeout_seconds=MINUTE)
    )
    with_exec = await measured("a fresh exec", 5 * rounds, lambda: asyncio.to_thread(fresh_exec))
    print(f"{'':44} {with_exec / with_shell:9.1f} x")
    await measured("write_file, 2 kB", 5 * rounds, lambda: sandbox.write_file("small", b"x" * 2000))
    await measured("read_file, 2 kB", 5 * rounds, lambda: sandbox.read_file("small", max_bytes=10_000))
    data = os.urandom(20_000_000)
    await measured("write_file, 20 MB", 3, lambda: sandbox.write_file("big", data))
    await measured("read_file, 20 MB", 3, lambda: sandbox.read_file("big", max_bytes=30_000_000))
    await sandbox.close()


def fresh_exec() -> None:
    """Run the same command by the engine's own means."""
    api = docker.APIClient(version="auto", **kwargs_from_env())
    (container,) = api.containers(filters={"label": f"batch-runner.rollout={SPEC.rollout_id}"})
    started = api.exec_create(container["Id"], ["sh", "-c", "true"])
    api.exec_start(started["Id"])
    api.close()


async def side_by_side(backend: DockerBackend, count: int) -> None:
    async def rollout() -> None:
        sandbox = await backend.open(SPEC)
        for _ in range(10):
            await sandbox.exec("true", timeout_seconds=MINUTE)
        await sandbox.close()

    started = time.perf_counter()
    await asyncio.gather(*(rollout() for _ in range(count)))
    seconds = time.perf_counter() - started
    print(f"{count} containers side by side, 10 commands each {seconds:6.1f} s, {count / seconds:.1f} containers/s")


def bare(count: int, at_once: int) -> float:
    """Return the seconds that the engine takes to make, start and remove so many containers."""

    def one(number: int) -> None:
        api = docker.APIClient(version="auto", **kwargs_from_env())
        made = api.create_container(engines.TOOLS, ["sleep", "60"], name=f"bare-{os.getpid()}-{number}")
        api.start(made["Id"])
        api.remove_container(made["Id"], force=True)
        api.close()

    with ThreadPoolExecutor(at_once) as pool:
        started = time.perf_counter()
        list(pool.map(one, range(count)))
        return time.perf_counter() - started


def program(count: int, at_once: int, command: str) -> float:
    """Return the seconds of a run with one container for each rollout, its own start and end included."""
    with tempfile.TemporaryDirectory() as folder, ScriptedEndpoint([terminal(command), answer("done")]) as endpoint:
        kept = {name: value for name, value in os.environ.items() if re.match("TERMINAL_|DOCKER_", name)}
        place = Workplace(Path(folder), {**kept, "TERMINAL_MAX_CONTAINERS": str(at_once)})
        place.dataset([f"sample {number}" for number in range(count)])
        flags = {"sandbox": "docker", "num_workers": 2, "concurrency": -(-at_once // 2), "batch_size": count}
        started = time.perf_counter()
        ended = place.ended(place.start(endpoint.base_url, **flags), 600)
        if ended.code:
            raise SystemExit(ended.stderr)
        return time.perf_counter() - started


def whole_runs(count: int) -> None:
    for at_once in (4, 8):
        engine, ours = bare(count, at_once), program(count, at_once, "echo hello")
        print(
            f"{count} rollouts, {at_once} at once: {60 * count / ours:.0f} a minute; create+start+remove alone "
            f"{60 * count / engine:.0f}; {ours / engine:.2f} x its time"
        )


@contextmanager
def watched() -> Iterator[list[tuple[int, float]]]:
    """Look again and again how many containers of ours run, and how much memory is available in megabytes."""
    with closing(docker.APIClient(version="auto", **kwargs_from_env())) as api:

        def look() -> tuple[int, float]:
            available = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text(encoding="ascii"))
            running = api.containers(filters={"label": "batch-runner", "status": "running"})
            return len(running), int(available[1]) / 1024 if available else 0

        with sampled(look, 0.3) as seen:
            yield seen


def many_at_once(count: int) -> None:
    with watched() as seen:
        seconds = program(count, count, f"echo begun; sleep {count // 3}")
    most = max(running for running, _ in seen)
    used = max(megabytes for _, megabytes in seen) - min(megabytes for _, megabytes in seen)
    print(
        f"{count} rollouts with containers at once: {seconds:.1f} s, of which their command {count // 3} s; "
        f"{most} ran at the same time, {used / most:.0f} MB each"
    )


async def main(rounds: int, count: int) -> None:
    os.environ.setdefault("TERMINAL_DOCKER_IMAGE", engines.TOOLS)
    backend = DockerBackend()
    if reason := backend.unavailable():
        raise SystemExit(reason)
    await one_container(backend, rounds)
    await side_by_side(backend, count)
    await asyncio.to_thread(whole_runs, 40)
    await asyncio.to_thread(many_at_once, 50)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--count", type=int, default=16, help="containers side by side")
    options = parser.parse_args()
    asyncio.run(main(options.rounds, options.count))
