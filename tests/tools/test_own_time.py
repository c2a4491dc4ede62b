from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from tools.own_time import OwnTime, in_line, own_time, own_timeout, turn, wait_by


@dataclass
class Clock:
    seconds: float = 1000.0

    def __call__(self) -> float:
        return self.seconds


async def waits(seconds: float) -> None:
    with in_line():
        await asyncio.sleep(seconds)


def in_time(work: Coroutine[Any, Any, Any], seconds: float) -> bool:
    async def run() -> bool:
        try:
            async with own_timeout(seconds) as timer:
                await work
        except TimeoutError:
            assert timer.expired()
            return False
        return True

    return asyncio.run(run())


def test_a_clock_stands_still_while_anything_waits() -> None:
    real = Clock()
    clock = OwnTime(real)
    with clock.stopped():
        real.seconds += 5
        with clock.stopped():
            real.seconds += 5
        real.seconds += 5
        assert clock() == 1000.0
    assert (clock(), clock.left_out) == (1000.0, 15.0)
    real.seconds += 2
    assert clock() == 1002.0


def test_a_wait_in_line_does_not_count_and_all_else_does() -> None:
    async def work(own_seconds: float) -> None:
        await waits(0.2)
        await asyncio.sleep(own_seconds)
        await waits(0.2)
        await asyncio.sleep(own_seconds)

    assert in_time(work(0.01), 0.15)
    assert not in_time(work(0.1), 0.15)


def test_it_stands_still_for_tasks_begun_inside_and_for_all_limits_around() -> None:
    async def inner() -> None:
        async with own_timeout(0.1):
            await asyncio.gather(waits(0.3), waits(0.2))

    async def work() -> None:
        await asyncio.create_task(inner())

    assert in_time(work(), 0.1)


def test_other_work_waits_on_a_clock_of_its_own() -> None:
    async def run() -> None:
        started = time.monotonic()
        waiting = asyncio.create_task(waits(9))
        with pytest.raises(TimeoutError):
            async with own_timeout(0.05):
                await asyncio.sleep(9)
        assert time.monotonic() - started < 5
        waiting.cancel()

    asyncio.run(run())


def test_who_is_left_behind_in_line_disturbs_nobody() -> None:
    async def late() -> None:
        await asyncio.sleep(0.05)
        await waits(0.01)

    async def run() -> None:
        async with own_timeout(9):
            left = [asyncio.create_task(work) for work in (waits(0.05), late())]
            await asyncio.sleep(0.01)
        await asyncio.gather(*left)

    asyncio.run(run())


def test_a_cancelled_wait_is_over() -> None:
    async def run() -> None:
        with own_time() as clock:
            task = asyncio.create_task(waits(9))
            await asyncio.sleep(0.01)
            assert clock.stands
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not clock.stands
            assert clock.left_out > 0

    asyncio.run(run())


def test_a_place_is_waited_for_in_line_and_given_back() -> None:
    async def run() -> bool:
        places = asyncio.Semaphore(1)

        async def hold() -> None:
            async with turn(places):
                await asyncio.sleep(0.3)

        async def work() -> None:
            async with turn(places):
                pass

        holding = asyncio.create_task(hold())
        await asyncio.sleep(0)
        async with own_timeout(0.1):
            await work()
        await holding
        return places.locked()

    assert asyncio.run(run()) is False


def is_done_within(work: Coroutine[Any, Any, Any], seconds: float) -> bool:
    async def run() -> bool:
        with own_time() as clock:
            task = asyncio.ensure_future(work)
        await wait_by(clock, seconds, task)
        done = task.done()
        task.cancel()
        return done

    return asyncio.run(run())


def test_a_task_is_waited_for_by_the_same_clock() -> None:
    async def work(in_line_seconds: float, own_seconds: float) -> None:
        await waits(in_line_seconds)
        await asyncio.sleep(own_seconds)
        await waits(in_line_seconds)

    async def nothing() -> None:
        pass

    assert is_done_within(nothing(), 0.0001)
    assert is_done_within(work(0.3, 0.05), 0.4)
    assert not is_done_within(work(0.1, 1.0), 0.2)


def test_who_waits_for_a_task_may_be_cancelled_and_the_task_goes_on() -> None:
    async def run() -> bool:
        task = asyncio.ensure_future(asyncio.sleep(0.1))
        waiting = asyncio.ensure_future(wait_by(OwnTime(), 9.0, task))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await task
        return task.cancelled()

    assert not asyncio.run(run())
