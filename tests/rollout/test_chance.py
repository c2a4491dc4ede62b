from __future__ import annotations

import pytest

from rollout.chance import Chance


def far_below(chance: Chance, share: float, seconds: int, now: float = 0.0) -> float:
    """A rate of 100 a second that became one of 10, of which a share is refused; return the time."""
    for _ in range(5):
        chance.saw(20, 0, (100.0,), 0.2, now)
        now += 0.2
    owed = 0.0
    for _ in range(5 * seconds):
        owed += 2 * share
        refused = int(owed)
        owed -= refused
        chance.saw(2 - refused, refused, (10.0,), 0.2, now)
        now += 0.2
    return now


@pytest.mark.parametrize(("share", "suspected"), [(0.0, False), (0.01, False), (0.1, True), (0.3, True), (0.6, False)])
def test_what_is_refused_as_well_when_far_less_is_asked_has_nothing_to_do_with_it(
    share: float, suspected: bool
) -> None:
    chance = Chance()
    now = far_below(chance, share, 30)
    assert chance.is_suspected(now) == suspected


def test_it_takes_a_while_for_what_is_refused_at_first_may_be_a_limit_that_fell() -> None:
    chance = Chance()
    assert not chance.is_suspected(far_below(chance, 0.3, 4))


def test_on_trial_as_much_is_expected_and_not_much_more() -> None:
    chance = Chance()
    now = far_below(chance, 0.1, 30)
    chance.try_(now)
    assert chance.is_tried(now)
    chance.saw(45, 5, (50.0,), 1.1, now + 1.1)
    assert chance.explains(now + 1.1)
    chance.saw(20, 30, (20.0,), 1.1, now + 2.2)
    assert not chance.explains(now + 2.2)


@pytest.mark.parametrize(("per_second", "explains"), [(11, False), (13, True)])
def test_a_trial_must_bring_more_than_there_was(per_second: int, explains: bool) -> None:
    """Otherwise it is a limit, which refuses a share of whatever is too much."""
    chance = Chance()
    now = far_below(chance, 0.1, 30)
    chance.try_(now)
    for second in range(1, 9):
        chance.saw(per_second, 1, (float(per_second),), 1.0, now + second)
        assert chance.explains(now + second) == (explains or second < 7)


def test_of_few_requests_one_more_may_be_refused_than_is_likely() -> None:
    chance = Chance()
    now = far_below(chance, 0.1, 30)
    chance.try_(now)
    chance.saw(2, 3, (2.0,), 0.9, now + 0.9)
    assert chance.explains(now + 0.9)
    chance.saw(0, 2, (2.0,), 0.05, now + 0.95)
    assert not chance.explains(now + 0.95)


def test_after_a_trial_that_failed_the_next_one_waits_longer_and_longer() -> None:
    chance, now, waits = Chance(), 0.0, []
    for _ in range(3):
        now = far_below(chance, 0.1, 30, now)
        failed = now
        while not chance.is_suspected(now):
            now = far_below(chance, 0.1, 10, now)
        chance.try_(now)
        waits.append(now - failed)
        chance.fail(now + 1)
        now += 1
    assert waits[0] < 1 < waits[1] < waits[2]


def test_until_it_is_seen_what_refusals_mean_where_less_is_asked_they_may_be_chance() -> None:
    chance = Chance(far_below=0.7, settle_seconds=1.0)
    assert not chance.may_be(far_below(chance, 0.1, 0)), "as much is asked as ever"
    assert chance.may_be(far_below(chance, 0.1, 4))
    assert not chance.may_be(far_below(chance, 0.6, 8)), "so many are a limit that fell"
    now = far_below(chance, 0.1, 8)
    chance.try_(now)
    chance.fail(now)
    assert not chance.may_be(far_below(chance, 0.1, 8, now)), "it was tried, and was a limit"
