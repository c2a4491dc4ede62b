from __future__ import annotations

import asyncio
import time
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.gate import Gate, GateClosedError, Lately, Places
from rollout.pacer import divided


async def request(gate: Gate, seconds: float = 0.0, *, refused: bool = False, wait: float = 0.0) -> None:
    with await gate.enter() as passage:
        await asyncio.sleep(seconds)
        passage.answered, passage.refused, passage.wait_seconds = not refused, refused, wait


def test_everything_goes_through_at_first() -> None:
    async def run() -> int:
        gate = Gate()
        tasks = [asyncio.create_task(request(gate, 0.05)) for _ in range(100)]
        await asyncio.sleep(0.01)
        most = gate.report().open_requests
        await asyncio.gather(*tasks)
        return most

    assert asyncio.run(run()) == 100


def test_so_many_at_once() -> None:
    async def run() -> int:
        gate = Gate()
        gate.pace(3, inf, 0.0)
        tasks = [asyncio.create_task(request(gate, 0.3)) for _ in range(10)]
        most = 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.001)
            seen = gate.report()
            most = max(most, seen.open_requests)
            assert seen.open_requests + seen.waiting_requests <= 10
        return most

    assert asyncio.run(run()) == 3


def test_so_many_a_second() -> None:
    async def run() -> float:
        gate = Gate()
        gate.pace(100, 50, 0.0)
        started = time.monotonic()
        await asyncio.gather(*(request(gate) for _ in range(12)))
        return time.monotonic() - started

    assert asyncio.run(run()) >= 0.16  # of 12, up to 3 were saved up


def test_nothing_before_the_time() -> None:
    async def run() -> float:
        gate = Gate()
        gate.pace(100, inf, time.monotonic() + 0.1)
        started = time.monotonic()
        await request(gate)
        return time.monotonic() - started

    assert asyncio.run(run()) >= 0.09


def test_a_refusal_is_told_at_once_and_a_wait_is_kept() -> None:
    async def run() -> tuple[int, float]:
        told = []
        gate = Gate(on_refusal=lambda: told.append(gate.report().refused))
        await request(gate, refused=True, wait=0.2)
        started = time.monotonic()
        await request(gate)
        return told[0], time.monotonic() - started

    refused, waited = asyncio.run(run())
    assert refused == 1
    assert waited >= 0.19


def test_a_pace_that_was_on_its_way_does_not_end_a_wait() -> None:
    async def run() -> float:
        gate = Gate()
        await request(gate, refused=True, wait=0.2)
        started = time.monotonic()
        gate.pace(100, inf, 0.0)
        await request(gate)
        return time.monotonic() - started

    assert asyncio.run(run()) >= 0.19


@pytest.mark.parametrize("before", [[], [1e6 / 64]])  # as gates are told that there is no limit
def test_many_gates_that_share_a_low_rate_do_not_send_one_each_at_first(before: list[float]) -> None:
    async def run() -> int:
        gates = [Gate() for _ in range(64)]
        for per_second in [*before, 1 / 64]:
            for gate in gates:
                gate.pace(1, per_second, 0.0)
            await asyncio.sleep(0.01)
        tasks = [asyncio.create_task(request(gate)) for gate in gates]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return sum(gate.report().sent for gate in gates)

    assert asyncio.run(run()) == 0


def test_who_gives_up_waiting_leaves_no_trace() -> None:
    async def run() -> tuple[int, int]:
        gate = Gate()
        gate.pace(1, inf, 0.0)
        first = asyncio.create_task(request(gate, 0.05))
        await asyncio.sleep(0.01)
        others = [asyncio.create_task(request(gate)) for _ in range(5)]
        await asyncio.sleep(0.01)
        for task in others[:4]:
            task.cancel()
        await asyncio.gather(first, *others, return_exceptions=True)
        seen = gate.report()
        return seen.open_requests, seen.answered

    assert asyncio.run(run()) == (0, 2)


def test_who_waits_before_another_try_does_wait() -> None:
    """Its rollout does not run tools: no other one is needed to keep the endpoint busy."""

    async def run() -> list[int]:
        gate = Gate()
        pauses = [asyncio.create_task(gate.pause(60)) for _ in range(3)]
        await asyncio.sleep(0.01)
        waiting = [gate.report().pausing_requests]
        pauses[0].cancel()
        gate.close()
        await asyncio.gather(*pauses, return_exceptions=True)
        return [*waiting, gate.report().pausing_requests]

    assert asyncio.run(run()) == [3, 0]


def test_a_request_that_is_cancelled_makes_room() -> None:
    async def run() -> None:
        gate = Gate()
        gate.pace(1, inf, 0.0)
        stuck = asyncio.create_task(request(gate, 100))
        await asyncio.sleep(0.01)
        stuck.cancel()
        await asyncio.wait_for(request(gate), 1)

    asyncio.run(run())


@given(st.integers(0, 300), st.lists(st.integers(1, 50), max_size=8))
def test_places_are_shared_by_what_is_wanted(places: int, wanted: list[int]) -> None:
    given_out = divided(places, wanted)
    if places >= sum(wanted):
        assert all(share >= want for share, want in zip(given_out, wanted, strict=True))
    else:
        assert sum(given_out) == places
        assert all(share <= want for share, want in zip(given_out, wanted, strict=True))


def test_once_closed_it_lets_nobody_through_but_what_is_under_way_is_answered() -> None:
    async def run() -> tuple[list[object], float]:
        gate = Gate()
        gate.pace(1, inf, 0.0)
        tasks = [asyncio.create_task(request(gate, 0.05)) for _ in range(3)]
        await asyncio.sleep(0.01)
        tasks[2].cancel()
        gate.close()
        started = time.monotonic()
        await gate.pause(60)
        paused = time.monotonic() - started
        ends = await asyncio.gather(*tasks, request(gate), return_exceptions=True)
        return [type(end) for end in ends], paused

    ends, paused = asyncio.run(run())
    assert ends == [type(None), GateClosedError, asyncio.CancelledError, GateClosedError]
    assert paused < 5


def test_new_places_are_taken_up_one_after_another() -> None:
    places = Places()
    assert places.at(0) == inf
    places.allow(10, 0)
    assert [places.at(now) for now in (0, 0.125, 0.25)] == [1, 5.5, 10]  # the first ones, too
    places.allow(30, 5)
    assert [places.at(now) for now in (5, 5.1, 5.2, 9)] == [11, pytest.approx(20.5), 30, 30]
    assert [places.when(wanted) for wanted in (11, 20.5, 30, 31)] == [5, pytest.approx(5.1), pytest.approx(5.2), inf]
    places.allow(4, 6)
    assert places.at(6) == 4


def test_what_may_still_be_refused_is_what_was_sent_as_lately_as_refusals_come() -> None:
    lately = Lately()
    for at in (1.0, 1.1, 1.1, 1.3):
        lately.sent(at)
    assert lately.unsettled(1.3) == (1.3,), "nothing was refused yet"
    lately.over(1.3)
    lately.refused(0.2)  # and half as long again
    for at in (2.0, 2.1, 2.1, 2.2):
        lately.sent(at)
    lately.over(2.1)
    lately.over(1.1)  # long ago
    assert lately.unsettled(2.25) == (2.0, 2.1, 2.2)
    assert lately.unsettled(2.45) == (2.2,)
    assert lately.unsettled(9.0) == ()
    lately.over(2.2)


def test_after_a_refusal_places_are_taken_up_slowly_from_what_is_still_open() -> None:
    places = Places()
    places.allow(30, 0)
    places.refused(28, 10)
    assert places.at(10.05) == 0
    places.left(20, 10.05)  # what became free is not taken up at once
    assert places.at(10.1) == 21
    assert places.when(22) == pytest.approx(10.1 + 0.3 / 3)  # slowly first
    places.allow(25, 10.2)  # told by the controller: it goes on from there, no faster
    assert places.at(10.2) == pytest.approx(21 + 9 / 9 + 1)
    assert places.at(10.4) < 25
    assert places.at(10.8) == 25
    places.refused(25, 20)
    places.allow(12, 20.05)
    assert [places.at(20.05), places.at(20.1)] == [0, 12]
