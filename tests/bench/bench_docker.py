"""What containers cost: a container, a command in its open shell beside a fresh exec, files, many at once.

``python -m tests.bench.bench_docker`` uses the engine of $DOCKER_HOST with the images of ``tests/engines.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable

import docker
from docker.utils import kwargs_from_env

from sandboxes.base import Sandbox, SandboxSpec
from sandboxes.docker import DockerBackend
from tests import engines

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


async def main(rounds: int, count: int) -> None:
    os.environ.setdefault("TERMINAL_DOCKER_IMAGE", engines.TOOLS)
    backend = DockerBackend()
    if reason := backend.unavailable():
        raise SystemExit(reason)
    await one_container(backend, rounds)
    await side_by_side(backend, count)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--count", type=int, default=16, help="containers side by side")
    options = parser.parse_args()
    asyncio.run(main(options.rounds, options.count))
