from __future__ import annotations

import pytest

from rollout.recent import LEAST_SECONDS, Recent


def told(*counts: tuple[float, int], seconds: float = 10.0) -> Recent:
    recent = Recent(seconds)
    for at, count in counts:
        recent.add(count, at)
    return recent


def test_what_was_told_after_a_time_is_counted() -> None:
    recent = told((1, 5), (2, 7), (3, -1))
    assert [recent.since(at) for at in (0, 1, 2.5, 3)] == [11, 6, -1, 0]


def test_a_rate_is_over_the_time_that_its_counts_are_about() -> None:
    recent = told((1, 5), (2, 6), (3, 6))
    assert recent.per_second(1, 3) == 6
    assert recent.per_second(1.5, 3) == 6  # what was told at 2 happened since 1
    assert told((5.0, 8)).per_second(1, 5.0) == pytest.approx(8 / LEAST_SECONDS)
    assert told().per_second(1, 5.0) == 0


def test_what_is_older_than_anybody_asks_for_is_forgotten() -> None:
    recent = told(*((float(second), 1) for second in range(1000)), seconds=5)
    assert recent.since(0) <= 7
    assert recent.per_second(5, 999) == 1
