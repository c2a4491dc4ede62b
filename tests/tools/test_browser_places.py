from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from tools.browser_places import Places
from tools.own_time import own_timeout


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("IDLE", 0.1), ("MAX_IDLE", 0.4), ("WAIT", 0.5)):
        monkeypatch.setattr(f"tools.browser_places.{name}_SECONDS", seconds)


@dataclass(eq=False)
class Holder:
    places: Places
    close_seconds: float = 0.0
    in_use: bool = False
    used_at: float = field(default_factory=time.monotonic)
    has_place: bool = False
    closing: asyncio.Task[None] | None = None

    async def take(self) -> Holder:
        await self.places.take(self)
        self.has_place, self.used_at = True, time.monotonic()
        return self

    def idle_seconds(self) -> float:
        return time.monotonic() - self.used_at if self.has_place and not self.in_use else 0.0

    def give_up(self) -> None:
        assert self.has_place
        self.has_place = False
        self.places.leave(self)
        self.closing = asyncio.create_task(self._closed())

    async def _closed(self) -> None:
        await asyncio.sleep(self.close_seconds)
        self.places.closed()


def at(number: int, work: Callable[[Places], Awaitable[None]]) -> None:
    async def run() -> None:
        places = Places(number)
        try:
            await work(places)
        finally:
            places.stop()

    asyncio.run(run())


def test_nobody_waits_while_there_are_places_and_nobody_gives_up() -> None:
    async def work(places: Places) -> None:
        holders = [await Holder(places).take() for _ in range(3)]
        await asyncio.sleep(0.2)
        assert all(holder.has_place for holder in holders)
        assert places.free == 0

    at(3, work)


def test_the_longest_idle_gives_up_for_who_waits_and_no_more_than_wait() -> None:
    async def work(places: Places) -> None:
        first, second, third = [await Holder(places, close_seconds=0.05).take() for _ in range(3)]
        await asyncio.sleep(0.05)
        first.used_at = time.monotonic()
        started = time.monotonic()
        await Holder(places).take()
        assert 0.05 <= time.monotonic() - started < 5
        assert [first.has_place, second.has_place, third.has_place] == [True, False, True]

    at(3, work)


def test_who_is_in_use_gives_up_nothing_and_the_wait_ends() -> None:
    async def work(places: Places) -> None:
        busy = await Holder(places, in_use=True).take()
        with pytest.raises(TimeoutError):
            await Holder(places).take()
        assert busy.has_place
        busy.in_use, busy.used_at = False, time.monotonic()
        await Holder(places).take()
        assert not busy.has_place

    at(1, work)


def test_idle_for_long_is_too_long_in_any_case() -> None:
    async def work(places: Places) -> None:
        holder = await Holder(places).take()
        await asyncio.sleep(0.02)
        assert holder.has_place
        await asyncio.sleep(0.5)
        assert (holder.has_place, places.free) == (False, 1)

    at(1, work)


def test_a_wait_for_a_place_is_no_time_of_the_tools_own() -> None:
    async def work(places: Places) -> None:
        await Holder(places).take()
        async with own_timeout(0.05):
            await Holder(places).take()

    at(1, work)


def test_first_come_first_served() -> None:
    async def work(places: Places) -> None:
        await Holder(places).take()
        waiting = [asyncio.create_task(Holder(places).take()) for _ in range(3)]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert done == {waiting[0]}
        await asyncio.gather(*waiting)

    at(1, work)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_places_are_counted_right(seed: int) -> None:
    dice = Random(seed)

    async def one(places: Places) -> None:
        holder = Holder(places, close_seconds=dice.uniform(0, 0.02))
        for _ in range(4):
            taking = asyncio.create_task(holder.take())
            if dice.random() < 0.5:
                await asyncio.sleep(dice.uniform(0, 0.02))
                taking.cancel()
            await asyncio.wait([taking])
            holder.in_use = True
            await asyncio.sleep(dice.uniform(0, 0.02))
            holder.in_use, holder.used_at = False, time.monotonic()
            assert places.free >= 0
            if holder.has_place:
                holder.give_up()

    async def work(places: Places) -> None:
        await asyncio.gather(*(one(places) for _ in range(20)))
        await asyncio.sleep(0.1)
        assert places.free == 3

    at(3, work)
