from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.silence import Sent, Silence

TICK = 0.2
NONE, ONE = Sent(-inf), Sent(inf)  # since the last refusal


def used_up(*, taken: int = 600, since: float = 10.0, until: float = 70.0, is_limit: bool = True) -> Silence:
    """A silence of an endpoint that took so many in its first seconds, and none until now."""
    silence = Silence()
    silence.took(taken, since)
    refuse(silence, since + 5.0, until, open_requests=0, is_limit=is_limit)
    return silence


def refuse(silence: Silence, now: float, until: float, *, open_requests: int, is_limit: bool) -> None:
    """Refuse every try between two moments."""
    while now < until:
        silence.meet(open_requests, 100, now, is_limit=is_limit)
        now = silence.until


def reopened(silence: Silence) -> float:
    """Have the next try taken; return when that is known."""
    now = silence.until
    silence.places(0, 100, TICK, now - 0.01, sent=NONE)
    assert silence.places(1, 100, TICK, now, sent=ONE) == 1, "no second one until the first has told"
    now += 0.4
    silence.places(1, 100, TICK, now, sent=ONE)
    return now


def test_it_is_tried_less_and_less_often_and_with_one_request() -> None:
    silence = Silence()
    assert silence.places(30, 100, TICK, 1.0, sent=NONE) == inf
    silence.took(30, 1.0)
    pauses = []
    now = 2.0
    for _ in range(8):
        silence.meet(7, 30, now, is_limit=False)
        assert silence.is_met
        assert silence.places(7, 100, TICK, now, sent=NONE) == 8
        pauses.append(round(silence.until - now, 3))
        now = silence.until
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 4.0, 4.0]


def test_what_it_took_in_a_stretch_of_time_is_its_rate_when_it_takes_some_again() -> None:
    silence = used_up()
    assert silence.rate(silence.until) == (0.0, 0.0)
    rate, seconds = silence.rate(reopened(silence))
    assert seconds == pytest.approx(58, abs=3)  # from its first request to its last refusal
    assert rate == pytest.approx(600 / seconds)
    assert silence.rate(silence.until + 1) == (0.0, 0.0), "told once"


@pytest.mark.parametrize(
    "changes",
    [
        {"is_limit": False},  # it is overloaded, or away: that tells of no rate
        {"since": 30.0},  # nobody goes by forty seconds
        {"until": 200.0},
        {"taken": 0},
    ],
)
def test_other_silences_tell_of_no_rate(changes: dict[str, float]) -> None:
    silence = used_up(**changes)  # type: ignore[arg-type]
    assert silence.rate(reopened(silence)) == (0.0, 0.0)


def test_what_one_silence_was_about_says_nothing_of_the_next() -> None:
    silence = used_up(until=15.5)
    silence.end()  # by an ordinary refusal
    refuse(silence, 20.0, 70.0, open_requests=80, is_limit=False)
    assert silence.rate(reopened(silence)) == (0.0, 0.0)


def test_while_as_much_is_open_as_there_may_be_it_tells_of_no_rate_either() -> None:
    silence = Silence()
    silence.took(600, 10.0)
    refuse(silence, 15.0, 70.0, open_requests=60, is_limit=True)
    assert silence.rate(reopened(silence)) == (0.0, 0.0)


def test_once_one_was_taken_the_places_grow_quickly_to_what_they_were_and_the_silence_is_over() -> None:
    silence = used_up()
    now = reopened(silence)
    grown: list[float] = []
    while silence.is_met:
        now += TICK
        grown.append(silence.places(int(grown[-1]) if grown else 1, 64, TICK, now, sent=ONE))
    assert grown == sorted(grown)
    assert grown[0] < 12
    assert grown[-1] >= 64
    assert len(grown) <= 6


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 50), st.floats(0.01, 10)), max_size=40))
def test_whatever_comes_it_is_tried_again_before_long(events: list[tuple[bool, bool, int, float]]) -> None:
    silence, now, places = Silence(), 0.0, inf
    for is_refused, is_sent, count, seconds in events:
        now += seconds
        if is_refused:
            silence.meet(count, 50, now, is_limit=True)
            assert now < silence.until <= now + 4.0
        else:
            silence.took(count, now)
        silence.places(count, 50, seconds, now, sent=ONE if is_sent else NONE)
        rate, window = silence.rate(now)
        assert rate >= 0
        assert 0 <= window <= 60
    end = max(now, silence.until) + 1
    while now < end:
        now += TICK
        places = silence.places(0, 50, TICK, now, sent=ONE)
    assert places >= 1
