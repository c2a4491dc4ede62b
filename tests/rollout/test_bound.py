from __future__ import annotations

from math import inf, isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.bound import Bound

FLOOR = 1.0
amounts = st.floats(0.1, 1e4)


def bound(value: float) -> Bound:
    return Bound(value, FLOOR, 0.98, 10.0, 0.1)


@given(
    st.one_of(amounts, st.just(inf)), st.lists(st.tuples(amounts, st.floats(0, 30), st.floats(0, 1000)), max_size=30)
)
def test_whatever_it_meets_it_is_a_number_between_its_floor_and_what_was_met(
    value: float, happens: list[tuple[float, float, float]]
) -> None:
    subject, now = bound(value), 0.0
    for limit, seconds, per_second in happens:
        before = subject.value
        subject.cut(limit, now)
        assert subject.known
        assert isfinite(subject.value)
        assert FLOOR <= subject.value <= max(before, FLOOR)
        assert subject.value >= min(before / 4, limit) * 0.4
        subject.grow(seconds, per_second)
        now += seconds


@given(st.floats(20, 1e4))
def test_it_grows_back_to_where_the_limit_was_and_rests_there_and_goes_beyond(limit: float) -> None:
    subject = bound(2 * limit)
    subject.cut(limit, 0.0)
    grown = []
    for _ in range(100):
        subject.grow(0.1, 100.0)
        grown.append(subject.value / limit)
    assert grown == sorted(grown)
    assert grown[20] == pytest.approx(0.98, rel=0.01)  # two seconds
    assert grown[30] < 1.0
    assert grown[-1] > 1.5


def test_it_goes_beyond_a_limit_the_later_the_more_that_has_cost_but_once_is_luck() -> None:
    def seconds_to_go_beyond(subject: Bound) -> float:
        seconds = 0.0
        while subject.value < 105.0:
            subject.grow(0.1, 100.0)
            seconds += 0.1
        return seconds

    waits: list[float] = []
    subject = bound(100.0)
    for lost_seconds in (0.0, 0.02, 1.0, 1.0, 1.0, 60.0):
        subject = bound(100.0) if len(waits) < 3 else subject
        subject.value = 100.0
        subject.settle()
        subject.cut(100.0, 0.0, lost_seconds=lost_seconds)
        waits.append(seconds_to_go_beyond(subject))
    assert waits == sorted(waits)
    assert waits[1] < 1.1 * waits[0]
    assert waits[4] > 2 * waits[2]
    assert waits[2] > 1.5 * waits[1]
    subject.forget()
    subject.settle()
    subject.cut(100.0, 0.0, lost_seconds=0.0)
    assert seconds_to_go_beyond(subject) == pytest.approx(waits[0], rel=0.5)


def test_cuts_that_follow_each_other_go_twice_as_deep_and_after_a_while_slightly_again() -> None:
    subject = bound(100.0)
    kept = []
    for _ in range(4):
        before = subject.value
        subject.cut(before, 0.0)
        kept.append(subject.value / before / 0.98)
    subject.settle()
    before = subject.value
    subject.cut(before, 0.0)
    assert kept == pytest.approx([0.97, 0.94, 0.88, 0.76])
    assert subject.value / before / 0.98 == pytest.approx(0.97)


def test_what_was_used_of_what_was_allowed_tells_where_a_rate_ends() -> None:
    subject = bound(inf)
    subject.cut(100.0, 0.0)
    assert not subject.is_measured(10.0)
    for _ in range(10):
        subject.use(30, 1.0)
    assert subject.is_measured(10.0)
    assert subject.measured == pytest.approx(30)


def test_with_few_answers_it_feels_for_more_slowly_but_never_stands_still() -> None:
    quick, slow, idle = (bound(100.0) for _ in range(3))
    for subject, per_second in ((quick, 10.0), (slow, 5.0), (idle, 0.0)):
        subject.cut(100.0, 0.0)
        for _ in range(60):
            subject.grow(0.1, per_second)
    assert quick.value > slow.value > idle.value
    before = idle.value
    for _ in range(1000):
        idle.grow(0.1, 0.0)
    assert idle.value > 2 * before


def test_a_limit_met_before_much_was_asked_is_believed_when_it_is_met_twice() -> None:
    subject = bound(8.0)
    subject.cut(1.0, 0.0, unsure=True)
    assert (subject.value, subject.known) == (FLOOR, False), "as low as it was met, whatever was allowed"
    assert subject.is_least
    for _ in range(3):
        subject.start()
    assert not subject.is_least
    subject.cut(3.0, 1.0, unsure=True)
    assert not subject.known
    assert not subject.has_regrown
    subject.start()
    assert subject.has_regrown
    subject.cut(3.0, 2.0, unsure=True)
    assert subject.known


@pytest.mark.parametrize(
    ("limit", "taken", "is_beyond"), [(3, 3, False), (3, 4, True), (8, 8, False), (100, 104, True)]
)
def test_more_than_one_more_must_be_taken_for_a_limit_to_be_gone(limit: int, taken: int, *, is_beyond: bool) -> None:
    subject = bound(2.0 * limit)
    subject.cut(limit, 0.0)
    assert subject.is_far_beyond(taken) is is_beyond


def test_one_refusal_is_little_evidence_and_what_was_found_otherwise_is_more() -> None:
    bound = Bound(100.0, 1.0, 0.98, 10.0)
    assert not bound.was_met_once
    bound.cut(80.0, 0.0)
    assert bound.was_met_once
    bound.cut(78.0, 5.0)
    assert not bound.was_met_once
    bound.forget()
    bound.cut(80.0, 10.0)
    assert bound.was_met_once
    bound.set(20.0, 60.0, 11.0)
    assert not bound.was_met_once
