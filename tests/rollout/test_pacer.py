from __future__ import annotations

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


def test_where_nobody_has_told_what_it_wants_places_go_by_rollouts() -> None:
    pacer = Pacer(Controller(_requests=Bound(1.0, 1.0, 1.0, 1.0)))
    shares = pacer.news({1: 2, 2: 30})
    assert [share["requests"] for share in shares.values()] == [0, 1]
