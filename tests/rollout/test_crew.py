"""What several workers make of limits together."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from tests.rollout.simulated_crew import Crew
from tests.rollout.simulated_endpoint import Bucket, Chance, Limit, OpenAtOnce, Sliding


def about_a_second(random: Random) -> float:
    return max(0.1, random.gauss(1, 0.25))


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize(
    ("limit", "capacity", "used", "share"),
    [
        (lambda: OpenAtOnce(lambda _: 40), 40, 0.88, 0.02),
        (lambda: OpenAtOnce(lambda _: 8), 8, 0.82, 0.08),
        (lambda: OpenAtOnce(lambda now: 60 if now < 20 else 15), 30, 0.85, 0.04),
        (lambda: OpenAtOnce(lambda now: 15 if now < 20 else 60), 45, 0.75, 0.02),
        (lambda: Sliding(1, 20), 20, 0.8, 0.025),
        (lambda: Bucket(lambda _: 50, 50), 50, 0.93, 0.02),
        (lambda: Chance(0.0, OpenAtOnce(lambda _: 40), wait_seconds=1.0), 40, 0.85, 0.02),
    ],
)
def test_what_there_is_is_used_by_however_many(
    limit: Callable[[], Limit], capacity: float, used: float, share: float, workers: int
) -> None:
    crew = Crew(limit(), workers, about_a_second).play()
    assert crew.per_second >= used * capacity
    assert crew.refused_share < share


@pytest.mark.parametrize("workers", [1, 8])
def test_next_to_nothing_is_used_by_however_many(workers: int) -> None:
    few = Crew(Bucket(lambda _: 2, 2), workers, lambda random: random.uniform(0.08, 0.12), seconds=120).play()
    assert few.per_second >= 0.9 * 2
    one = Crew(OpenAtOnce(lambda _: 1), workers, lambda _: 1.0, seconds=120).play()
    assert one.per_second >= 0.8
