from __future__ import annotations

import asyncio
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rollout.gate import Gate
from rollout.levels import STRETCH_SECONDS, Levels, Told, most_together

BEGIN = 1000.0


def at(stretch: float) -> float:
    return BEGIN + stretch * STRETCH_SECONDS


def played(*changes: tuple[float, int]) -> Levels:
    levels = Levels()
    for stretch, count in changes:
        levels.open(count, at(stretch))
    return levels


def test_each_stretch_has_the_most_that_was_open_in_it() -> None:
    levels = played((0.1, 1), (0.2, 2), (0.3, 1), (3.5, 5), (4.5, 0))
    assert levels.told(at(6.5))[-7:] == [2, 1, 1, 5, 5, 0, 0]


def test_what_is_refused_was_never_open() -> None:
    levels = played((0.1, 3), (2.1, 4))
    assert levels.told(at(3.1), doubtful=[at(2.1)])[-4:] == [3, 3, 3, 3]
    assert levels.told(at(3.1))[-4:] == [3, 3, 4, 4]
    levels.refused(at(2.1), 3, at(4.1))
    assert levels.told(at(5.1))[-6:] == [3, 3, 3, 3, 3, 3]


def test_what_was_open_at_different_times_is_not_added() -> None:
    first, second = played((0.5, 8), (2.5, 1)), played((0.5, 1), (4.5, 8), (5.5, 0))
    told = [Told(each.told(at(9.5)), at(9.5)) for each in (first, second)]
    assert most_together(told, at(0), at(9.5)) == 9
    assert most_together(told, at(1.5), at(1.5)) == 9
    assert most_together(told, at(3.5), at(3.5)) == 2
    assert most_together(told, at(8.5), at(9.5)) == 1


def test_of_what_is_not_told_yet_the_latest_counts() -> None:
    early, late = played((0.5, 2), (1.5, 4)), played((0.5, 3), (8.5, 5))
    told = [Told(early.told(at(2.5)), at(2.5)), Told(late.told(at(9.5)), at(9.5))]
    assert most_together(told, at(9), at(9)) == 9
    assert most_together([*told, Told((), 0.0)], at(9), at(9)) == 9
    assert most_together([], at(9), at(9)) == 0


def test_of_what_is_too_long_ago_nothing_is_known() -> None:
    levels = played((0.5, 5), (100.5, 7))
    told = [Told(levels.told(at(101.5)), at(101.5))]
    assert most_together(told, at(0), at(60)) == 0
    assert most_together(told, at(80), at(80)) == 5
    assert most_together(told, at(101), at(101)) == 7


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.001, 3.0), st.integers(0, 9)), max_size=40))
def test_together_is_never_less_than_at_any_moment_nor_more_than_the_most_of_each(
    changes: list[tuple[int, float, int]],
) -> None:
    workers, now = [Levels() for _ in range(3)], 0.0
    current, most_each, most = [0, 0, 0], [0, 0, 0], 0
    for worker, later, count in changes:
        now = min(now + later, 30.0)
        workers[worker].open(count, at(now))
        current[worker] = count
        most_each[worker] = max(most_each[worker], count)
        most = max(most, sum(current))
    told = [Told(each.told(at(now)), at(now)) for each in workers]
    assert most <= most_together(told, at(0), at(now)) <= sum(most_each)


def test_a_gate_tells_of_what_was_taken_however_much_was_refused_beside_it() -> None:
    """An endpoint that takes three at once, asked by ten."""

    async def run() -> list[int]:
        gate, taken = Gate(), 0

        async def ask() -> None:
            nonlocal taken
            with await gate.enter() as passage:
                if taken >= 3:
                    await asyncio.sleep(0.05)
                    passage.refused = True
                    return
                taken += 1
                await asyncio.sleep(0.2)
                taken -= 1
                passage.answered = True

        tasks = [asyncio.create_task(ask()) for _ in range(10)]
        await asyncio.sleep(0.1)
        told = list(gate.report().most_open)
        await asyncio.gather(*tasks)
        return [max(told), max(gate.report().most_open)]

    assert asyncio.run(run()) == [3, 3]


def test_a_gate_that_nothing_happens_at_has_no_news() -> None:
    async def run() -> list[bool]:
        gate = Gate()
        with await gate.enter():
            news = [gate.report() for _ in range(2)]
            await asyncio.sleep(STRETCH_SECONDS * 40)
            news += [gate.report()]
            await asyncio.sleep(STRETCH_SECONDS * 5)
            news += [gate.report()]
        news += [gate.report()]
        return [later.says_the_same(earlier) for earlier, later in pairwise(news)]

    is_old = asyncio.run(run())
    assert is_old[2]
    assert not is_old[3]
