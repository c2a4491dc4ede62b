"""What several workers make of limits together."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from statistics import mean
from unittest.mock import patch

import pytest

from tests.rollout.simulated_crew import Crew
from tests.rollout.simulated_endpoint import Bucket, Chance, Limit, OpenAtOnce, Sliding


def about_a_second(random: Random) -> float:
    return max(0.1, random.gauss(1, 0.25))


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize(
    ("limit", "capacity", "used", "share"),
    [
        (lambda: OpenAtOnce(lambda _: 40), 40, 0.9, 0.012),
        (lambda: OpenAtOnce(lambda _: 15), 15, 0.92, 0.02),
        (lambda: OpenAtOnce(lambda _: 8), 8, 0.92, 0.035),
        (lambda: OpenAtOnce(lambda _: 3), 3, 0.9, 0.07),
        (lambda: OpenAtOnce(lambda _: 2), 2, 0.9, 0.08),
        (lambda: OpenAtOnce(lambda now: 60 if now < 20 else 15), 30, 0.87, 0.03),
        (lambda: OpenAtOnce(lambda now: 15 if now < 20 else 60), 45, 0.88, 0.012),
        (lambda: Bucket(lambda now: 20 if now < 20 else 60, 20), 46.7, 0.83, 0.015),
        (lambda: Sliding(1, 20), 20, 0.8, 0.025),
        (lambda: Bucket(lambda _: 50, 50), 50, 0.95, 0.015),
        (lambda: Chance(0.0, OpenAtOnce(lambda _: 40), wait_seconds=1.0), 40, 0.82, 0.01),
    ],
)
def test_what_there_is_is_used_by_however_many(
    limit: Callable[[], Limit], capacity: float, used: float, share: float, workers: int
) -> None:
    crews = [Crew(limit(), workers, about_a_second, random=Random(seed)).play() for seed in range(3)]
    assert mean(crew.per_second for crew in crews) >= used * capacity
    assert mean(crew.refused_share for crew in crews) < share


@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize(
    ("limit", "seconds", "used", "share"),
    [
        (lambda: Bucket(lambda _: 2, 2), 0.1, 0.9 * 2, 0.11),
        (lambda: Bucket(lambda _: 2, 2), 1.0, 0.82 * 2, 0.11),
        (lambda: OpenAtOnce(lambda _: 1), 1.0, 0.94, 0.09),
        (lambda: OpenAtOnce(lambda _: 1), 0.3, 0.94 / 0.3, 0.05),
    ],
)
def test_next_to_nothing_is_used_by_however_many(
    limit: Callable[[], Limit], seconds: float, used: float, share: float, workers: int
) -> None:
    def latency(random: Random) -> float:
        return seconds * random.uniform(0.8, 1.2)

    crews = [Crew(limit(), workers, latency, seconds=120, random=Random(seed)).play() for seed in range(4)]
    assert mean(crew.per_second for crew in crews) >= used
    assert mean(crew.refused_share for crew in crews) < share


@pytest.mark.parametrize(("seconds", "refused"), [(1.0, 220), (2.0, 80)])
def test_refusals_that_take_long_are_no_room(seconds: float, refused: int) -> None:
    """Until it is refused a request looks like one that was taken."""
    with patch("tests.rollout.simulated_crew.REFUSAL_SECONDS", seconds):
        crew = Crew(OpenAtOnce(lambda _: 20), 4, lambda random: random.uniform(1.6, 2.4), seconds=40).play()
    assert crew.per_second >= 0.8 * 10
    assert crew.refused < refused


def test_a_rate_that_one_refusal_told_of_is_forgotten_with_the_limit_that_was_to_blame() -> None:
    """With this seed a refusal for too many at once is blamed on the rate, shortly before the limit rises."""
    rising = OpenAtOnce(lambda now: 15 if now < 20 else 60)
    crew = Crew(rising, 4, about_a_second, random=Random(4)).play()
    assert crew.per_second >= 0.75 * 45
    assert crew.refused_share < 0.015
