from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from math import inf

import pytest

from rollout.gate import Gate
from rollout.wall import OvertimeError, met_with, wall_time


def told(block: Callable[[], Awaitable[None]], seconds: float = 0.1) -> str | None:
    """What is told when the wall time is over; None when the block ended before that."""

    async def run() -> str | None:
        try:
            async with wall_time(seconds):
                await block()
        except OvertimeError as error:
            return str(error)
        return None

    return asyncio.run(run())


def closed_for(seconds: float) -> Gate:
    gate = Gate()
    gate.pace(8, inf, time.monotonic() + seconds)
    return gate


async def passes(gate: Gate, seconds: float = 0.0) -> None:
    with await gate.enter():
        await asyncio.sleep(seconds)


def test_what_ends_in_time_is_not_disturbed() -> None:
    assert told(lambda: asyncio.sleep(0)) is None


def test_nothing_is_told_where_nothing_went_wrong() -> None:
    assert told(lambda: asyncio.sleep(9)) == ""


def test_the_last_trouble_is_told_and_forgotten_after_an_answer() -> None:
    async def block(*troubles: str) -> None:
        for trouble in troubles:
            met_with(trouble)
        await asyncio.sleep(9)

    assert told(lambda: block("HTTP 500", "HTTP 429: slow down")) == "; last: HTTP 429: slow down"
    assert told(lambda: block("HTTP 500", "")) == ""


def test_the_first_wait_for_a_turn_does_not_count() -> None:
    gate = closed_for(0.3)
    assert told(lambda: passes(gate)) is None


def test_what_was_used_before_the_first_turn_and_after_it_counts() -> None:
    async def block() -> None:
        await asyncio.sleep(0.08)
        await passes(closed_for(0.2), 0.08)

    assert told(block, 0.15) == ""


def test_later_waits_count_and_are_told() -> None:
    async def block() -> None:
        await passes(Gate())
        met_with("HTTP 429")
        await passes(closed_for(9))

    assert told(block) == "; last: HTTP 429; a request was waiting for its turn at the endpoint's limit"


def test_a_wait_that_is_over_is_not_told() -> None:
    async def block() -> None:
        await passes(Gate())
        await passes(closed_for(0.02))
        await asyncio.sleep(9)

    assert told(block) == ""


def test_each_rollout_has_its_own() -> None:
    async def block(trouble: str) -> str:
        try:
            async with wall_time(0.05):
                met_with(trouble)
                await asyncio.create_task(asyncio.sleep(9))
        except OvertimeError as error:
            return str(error)
        return "not over"

    async def run() -> list[str]:
        return await asyncio.gather(*map(block, ["one", "two"]))

    assert asyncio.run(run()) == ["; last: one", "; last: two"]


def test_a_time_out_of_the_blocks_own_is_its_own() -> None:
    async def block() -> None:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(9)

    with pytest.raises(TimeoutError):
        told(block, 9)


def test_outside_of_a_rollout_nothing_is_told() -> None:
    met_with("HTTP 500")
    asyncio.run(passes(closed_for(0.01)))
