from __future__ import annotations

from math import inf

import pytest

from rollout.bound import Bound
from rollout.controller import Controller, Seen
from rollout.pacer import Pacer


def test_the_only_place_goes_to_a_worker_that_wants_to_ask() -> None:
    """The others' rollouts run tools, or wait before another try; they would leave it empty."""
    controller = Controller(_requests=Bound(1.0, 1.0, 1.0, 1.0))
    pacer = Pacer(controller)
    for worker in range(4):
        pacer.seen(worker, Seen(waiting_requests=3 if worker == 2 else 0))
    shares = pacer.news(dict.fromkeys(range(4), 5))
    assert [share["requests"] for share in shares.values()] == [0, 0, 1, 0]


def test_where_nobody_has_told_what_it_wants_the_place_goes_where_there_is_least_to_do() -> None:
    """New rollouts go to the other worker; those here would wait for ever."""
    pacer = Pacer(Controller(_requests=Bound(1.0, 1.0, 1.0, 1.0)))
    shares = pacer.news({1: 30, 2: 2})
    assert [share["requests"] for share in shares.values()] == [0, 1]


def places(pacer: Pacer, rollouts: dict[int, int], **seen: Seen) -> list[float]:
    """Tell it of workers 1 and 2, and let it decide; return the places of each."""
    for number, worker in enumerate(("first", "second"), 1):
        pacer.seen(number, seen.get(worker, Seen()))
    pacer._paced_at = -inf
    pacer.news(rollouts)
    return [pacer._told[worker]["requests"] for worker in (1, 2)]


def test_a_place_is_given_to_another_worker_when_its_request_is_over() -> None:
    controller = Controller(_requests=Bound(1.0, 1.0, 1.0, 1.0))
    controller._requests.cut(1.0, 0.0)
    pacer = Pacer(controller)
    both = {1: 5, 2: 5}
    waits, asks = Seen(waiting_requests=3), Seen(open_requests=1, waiting_requests=2)
    assert places(pacer, both, first=waits, second=waits) == [1, 0]
    assert places(pacer, both, first=asks, second=waits) == [1, 0]
    assert places(pacer, {1: 5, 2: 4}, first=asks, second=waits) == [0, 0], "it goes to the second, as soon as it can"
    assert places(pacer, {1: 5, 2: 4}, first=waits, second=waits) == [0, 1]
    assert places(pacer, {1: 5, 2: 4}, first=waits) == [1, 0], "the second runs tools"


def test_where_places_become_fewer_nobody_gets_more_before_there_is_room() -> None:
    controller = Controller(_requests=Bound(12.0, 1.0, 1.0, 1.0))
    controller._requests.cut(12.0, 0.0)
    controller._requests.value = 12.0
    pacer = Pacer(controller)
    assert places(pacer, {1: 18, 2: 6}) == [9, 3]
    controller._requests.value = 8.0
    asks = Seen(open_requests=9), Seen(open_requests=3)
    assert places(pacer, {1: 6, 2: 6}, first=asks[0], second=asks[1]) == [4, 3]
    assert places(pacer, {1: 6, 2: 6}, first=Seen(open_requests=5), second=asks[1]) == [4, 3]
    assert places(pacer, {1: 6, 2: 6}, first=Seen(open_requests=4), second=asks[1]) == [4, 4]


def test_where_not_every_worker_has_a_place_those_that_have_share_the_rate() -> None:
    controller = Controller(_requests=Bound(2.0, 1.0, 1.0, 1.0), _rate=Bound(3.0, 1.0, 1.0, 1.0))
    pacer = Pacer(controller)
    for worker in range(4):
        pacer.seen(worker, Seen(waiting_requests=worker))
    shares = pacer.news(dict.fromkeys(range(4), 5)).values()
    assert [share["requests"] for share in shares] == [0, 1, 1, 0]
    assert [share["per_second"] for share in shares] == [0, 1.5, 1.5, 0]
    pacer = Pacer(Controller(_requests=Bound(8.0, 1.0, 1.0, 1.0), _rate=Bound(3.0, 1.0, 1.0, 1.0)))
    assert [share["per_second"] for share in pacer.news({1: 2, 2: 4}).values()] == [pytest.approx(1), pytest.approx(2)]


@pytest.mark.parametrize(("places", "workers"), [(1, 1), (3, 1), (8, 2), (9, 3), (15, 4), (200, 4)])
def test_few_places_are_shared_by_few_workers_once_the_limit_is_known(places: int, workers: int) -> None:
    bound = Bound(float(places), 1.0, 1.0, 1.0)
    pacer = Pacer(Controller(_requests=bound))
    assert pacer.workers(4) == 4
    pacer.news({1: places})
    assert pacer.workers(4) == 4, "that is where it begins"
    bound.cut(places, 0.0)
    bound.value = places
    pacer._paced_at = -inf
    pacer.news({1: places})
    assert pacer.workers(4) == workers


def test_a_worker_that_has_spoken_is_told_everything_again() -> None:
    pacer = Pacer(Controller())
    assert list(pacer.news({1: 4})) == [1]
    pacer._paced_at = -inf
    assert pacer.news({1: 4}) == {}, "nothing has changed"
    pacer.spoke(1)
    assert list(pacer.news({1: 4})) == [1]


def test_it_says_what_holds_rollouts_back_and_which_way_their_number_goes() -> None:
    pacer = Pacer(Controller(max_rollouts=4))
    assert pacer.words(3) == ""
    pacer.seen(1, Seen(sent=10, refused=1, refused_since=1.0, wait_seconds=60, open_requests=4, most_open=[4]))
    pacer.news({1: 4})
    assert pacer.words(4) == "at most 4: waits 60 s as the endpoint asks"
    assert pacer.words(6) == "on the way down to 4: waits 60 s as the endpoint asks"
