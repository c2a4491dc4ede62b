"""A rollout's sandbox, begun ahead of need: its place, its failure, its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rollout.on_demand import SandboxOnDemand
from sandboxes import places
from sandboxes.base import SandboxError, SandboxSpec
from sandboxes.places import PlaceQueue
from tests.sandboxes.support import descriptors

SPEC = SandboxSpec("tests", "on-demand")
MINUTE = 60


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such.sock")


def with_places(number: int, body: Callable[[PlaceQueue], Awaitable[None]]) -> None:
    async def main(folder: Path) -> None:
        await body(PlaceQueue(folder))

    before = descriptors()
    with places.offered(number) as folder:
        asyncio.run(main(folder))
    assert descriptors() <= before


def test_it_is_the_same_one_however_it_was_begun() -> None:
    async def main() -> None:
        demand = SandboxOnDemand("local", SPEC)
        demand.begin()
        first, second = await asyncio.gather(demand.open(), demand.open())
        assert first is second is await demand.open()
        assert (await first.exec("echo hello", timeout_seconds=MINUTE)).output == "hello\n"
        await demand.close()
        await demand.close()
        with pytest.raises(SandboxError):
            await first.exec("echo hello", timeout_seconds=MINUTE)

    asyncio.run(main())


def test_one_that_is_never_begun() -> None:
    asyncio.run(SandboxOnDemand("local", SPEC).close())


def test_one_that_is_begun_later_unless_it_is_over_by_then() -> None:
    async def main() -> None:
        started: list[float] = []
        demands = [SandboxOnDemand("local", SPEC, started=started.append) for _ in range(3)]
        for demand in demands:
            demand.begin_later(0.1)
        await demands[0].close()
        await demands[1].open()
        assert len(started) == 1
        await asyncio.sleep(0.5)
        assert len(started) == 2
        for demand in demands:
            await demand.close()

    asyncio.run(main())


@pytest.mark.usefixtures("no_engine")
def test_a_failure_is_told_to_who_opens_it() -> None:
    async def body(queue: PlaceQueue) -> None:
        demand = SandboxOnDemand("docker", SPEC, queue)
        demand.begin()
        for _ in range(2):
            with pytest.raises(SandboxError, match="no Docker engine answers"):
                await demand.open()
        await demand.close()
        unseen = SandboxOnDemand("docker", SPEC, queue)
        unseen.begin()
        await asyncio.sleep(0.1)
        await unseen.close()

    with_places(1, body)


@pytest.mark.usefixtures("no_engine")
def test_a_failure_gives_the_place_back_at_once() -> None:
    async def body(queue: PlaceQueue) -> None:
        demands = [SandboxOnDemand("docker", SPEC, queue) for _ in range(3)]
        for demand in demands:
            with pytest.raises(SandboxError, match="no Docker engine answers"):
                await asyncio.wait_for(demand.open(), 10)
        for demand in demands:
            await demand.close()

    with_places(1, body)


@pytest.mark.usefixtures("no_engine")
def test_who_waits_for_a_place_can_be_ended() -> None:
    async def body(queue: PlaceQueue) -> None:
        held = await queue.take()
        waiting = SandboxOnDemand("docker", SPEC, queue)
        waiting.begin()
        opening = asyncio.create_task(waiting.open())
        await asyncio.sleep(0.1)
        opening.cancel()  # a tool call that is cancelled does not stop the making
        await asyncio.gather(opening, return_exceptions=True)
        await asyncio.wait_for(waiting.close(), 1)
        held.give_back()
        (await asyncio.wait_for(queue.take(), 10)).give_back()

    with_places(1, body)


def test_sandboxes_without_a_bound_need_no_place() -> None:
    async def body(queue: PlaceQueue) -> None:
        held = await queue.take()
        demand = SandboxOnDemand("local", SPEC, queue)
        await asyncio.wait_for(demand.open(), 10)
        await demand.close()
        held.give_back()

    with_places(1, body)


def test_sandboxes_are_made_in_turn() -> None:
    """The first is ready long before the last, and one that fails or is given up leaves its turn to the next."""

    async def main() -> None:
        started: list[float] = []
        bad = SandboxOnDemand("local", replace(SPEC, cwd="/no/such/folder"))
        demands = [SandboxOnDemand("local", SPEC, started=started.append) for _ in range(20)]
        for demand in (bad, *demands):
            demand.begin()
        await asyncio.sleep(0)
        given_up = [asyncio.create_task(demands.pop(at).close()) for at in (0, -1)]
        with pytest.raises(SandboxError, match="/no/such/folder"):
            await bad.open()
        await demands[0].open()
        assert len(started) < 10
        await asyncio.gather(*given_up)
        for demand in demands:
            first = await demand.open()
            assert (await first.exec("echo hello", timeout_seconds=MINUTE)).output == "hello\n"
            await demand.close()
        assert len(started) >= len(demands)

    asyncio.run(main())
