from __future__ import annotations

from collections.abc import Callable
from math import inf
from random import Random
from statistics import mean

import pytest

from rollout.controller import START_REQUESTS, Controller, Host, Seen
from tests.rollout.simulated_endpoint import Bucket, Chance, Down, Limit, Once, OpenAtOnce, Run, Sliding, Window

Latency = Callable[[Random], float]


def about(seconds: float) -> Latency:
    return lambda random: max(0.05, random.gauss(seconds, seconds / 4))


def skewed(seconds: float) -> Latency:
    return lambda random: random.expovariate(1 / seconds)


LIMITS: dict[str, tuple[Callable[[], Limit], Latency, float]] = {  # what it minds, how fast it is, answers a second
    "50 at once": (lambda: OpenAtOnce(lambda _: 50), about(1.0), 50),
    "50 at once, skewed": (lambda: OpenAtOnce(lambda _: 50), skewed(1.0), 50),
    "10 at once": (lambda: OpenAtOnce(lambda _: 10), about(0.2), 50),
    "200 at once": (lambda: OpenAtOnce(lambda _: 200), about(1.0), 200),
    "50 a second": (lambda: Bucket(lambda _: 50, 50), about(0.1), 50),
    "20 a second, slow": (lambda: Bucket(lambda _: 20, 20), about(1.0), 20),
    "100 a second, quick": (lambda: Bucket(lambda _: 100, 20), about(0.05), 100),
    "50 in each second": (lambda: Window(1, 50), about(1.0), 50),
    "50 in any second": (lambda: Sliding(1, 50), about(1.0), 50),
    "20 a second, nothing saved up": (lambda: Bucket(lambda _: 20, 5), about(0.3), 20),
    "100 a second, says when": (lambda: Bucket(lambda _: 100, 100, says_when=True), skewed(2.0), 100),
}


@pytest.mark.parametrize("name", LIMITS)
def test_it_stays_just_below_a_limit_nobody_told_it(name: str) -> None:
    limit, latency, capacity = LIMITS[name]
    run = Run(limit(), latency, seconds=120).play()
    assert run.rate(30, 120) >= 0.88 * capacity
    assert run.refused_share < 0.02


@pytest.mark.parametrize(("wait_seconds", "used"), [(1.0, 0.92), (2.0, 0.88), (5.0, 0.82)])
def test_where_each_refusal_holds_everybody_up_it_feels_for_more_the_more_seldom(
    wait_seconds: float, used: float
) -> None:
    runs = [
        Run(Chance(0.0, OpenAtOnce(lambda _: 40), wait_seconds), about(1.0), seconds=120, random=Random(seed)).play()
        for seed in range(4)
    ]
    assert mean(run.rate(0, 120) for run in runs) >= used * 40
    assert mean(run.refused_share for run in runs) < 0.01


@pytest.mark.parametrize("wait_seconds", [0.0, 2.0, 60.0])
def test_an_outage_that_asks_for_waits_is_no_limit(wait_seconds: float) -> None:
    class Away(Down):
        def retry_after(self, _now: float) -> float:
            return wait_seconds

    run = Run(Away(20, 320), about(1.0), seconds=420, controller=Controller(max_rollouts=20)).play()
    assert run.rate(10, 20) >= 0.9 * 20
    assert run.rate(390, 420) >= 0.85 * 20


@pytest.mark.parametrize("most", [10, 20])
def test_where_answers_take_half_a_minute_little_is_refused_as_well(most: int) -> None:
    run = Run(OpenAtOnce(lambda _: most), about(30.0), seconds=1200).play()
    assert run.rate(300, 1200) >= 0.9 * most / 30
    assert run.refused_share < 0.06


@pytest.mark.parametrize(("per_second", "share"), [(2, 0.06), (5, 0.04), (10, 0.025)])
def test_a_slow_endpoint_is_not_asked_again_and_again_for_more(per_second: int, share: float) -> None:
    run = Run(Bucket(lambda _: per_second, per_second), about(0.05), seconds=120).play()
    assert run.rate(0, 120) >= 0.9 * per_second
    assert run.refused_share < share


def test_what_was_saved_up_for_a_minute_is_used_and_then_the_rate_is_kept() -> None:
    run = Run(Bucket(lambda _: 10, 600), about(0.5), seconds=300).play()
    assert run.rate(60, 300) >= 0.9 * 10
    assert run.refused_share < 0.04  # most of it when the rate falls to a thirtieth at once


@pytest.mark.parametrize(("before", "after"), [(20, 60), (60, 20)])
def test_it_follows_a_limit_that_changes(before: int, after: int) -> None:
    run = Run(OpenAtOnce(lambda now: before if now < 60 else after), about(0.5), seconds=120).play()
    assert run.rate(30, 60) >= 0.88 * 2 * before
    assert run.rate(90, 120) >= 0.9 * 2 * after
    assert run.refused_share < 0.02


@pytest.mark.parametrize(
    ("limit", "capacity", "used", "share"),
    [
        (lambda: OpenAtOnce(lambda _: 150), 150, 0.9, 0.005),
        (lambda: OpenAtOnce(lambda now: 15 if now < 20 else 60), 45, 0.85, 0.01),
        (lambda: OpenAtOnce(lambda now: 60 if now < 20 else 15), 30, 0.9, 0.025),
        (lambda: Bucket(lambda _: 50, 50), 50, 0.95, 0.015),
        (lambda: Bucket(lambda now: 60 if now < 20 else 20, 20), 100 / 3, 0.9, 0.025),
        (lambda: Bucket(lambda now: 20 if now < 20 else 60, 20), 140 / 3, 0.84, 0.02),
        (lambda: Sliding(1, 20), 20, 0.86, 0.02),
        (lambda: Sliding(1, 50), 50, 0.88, 0.015),
        (lambda: Window(1, 20), 20, 0.88, 0.025),
    ],
)
def test_most_of_a_minute_is_used_though_nobody_told_it_where_to_begin(
    limit: Callable[[], Limit], capacity: float, used: float, share: float
) -> None:
    """Growth from the start included; hardly more than the first few of what is too much is ever sent."""
    runs = [Run(limit(), about(1.0), random=Random(seed)).play() for seed in range(4)]
    assert mean(run.rate(0, 60) for run in runs) >= used * capacity
    assert mean(run.refused_share for run in runs) < share


@pytest.mark.parametrize("seed", range(4))
def test_where_one_request_at_a_time_is_enough_it_is_the_rate_that_is_bound(seed: int) -> None:
    run = Run(Bucket(lambda _: 5, 5), about(0.05), seconds=120, random=Random(seed)).play()
    assert run.rate(0, 120) >= 0.95 * 5
    assert run.refused_share < 0.09


def test_a_limit_that_falls_and_rises_again_is_found_both_times() -> None:
    run = Run(OpenAtOnce(lambda now: 15 if 20 < now < 40 else 40), about(1.0), seconds=60).play()
    assert run.rate(0, 60) >= 0.8 * (40 + 15 + 40) / 3
    assert run.refused_share < 0.03


@pytest.mark.parametrize(
    ("limit", "capacity"),
    [(lambda: Sliding(60, 1200), 20), (lambda: Window(60, 1200), 20), (lambda: Sliding(30, 900), 30)],
)
def test_what_an_endpoint_gives_a_minute_is_learnt_when_it_was_used_up_once(
    limit: Callable[[], Limit], capacity: int
) -> None:
    """From then on that is asked for, spread over the minute, and next to nothing refused."""
    first = Run(limit(), about(0.5), seconds=70).play()
    run = Run(limit(), about(0.5), seconds=240).play()
    assert run.rate(70, 240) >= 0.93 * capacity
    assert run.refused <= first.refused + 0.01 * (run.answered.total() - first.answered.total())


@pytest.mark.parametrize("says_too_many", [False, True])
@pytest.mark.parametrize(("since", "until"), [(0.3, 40), (1, 23), (3, 50), (20, 45), (20, 75)])
def test_an_endpoint_that_was_away_for_a_while_has_not_used_up_anything(
    since: float, until: float, says_too_many: bool
) -> None:
    limit = Down(since, until, says_too_many)
    run = Run(limit, about(0.5), seconds=240, controller=Controller(max_rollouts=100)).play()
    assert run.rate(120, 240) >= 0.9 * 200


def test_where_it_was_away_for_a_minute_by_chance_it_finds_out_in_some_minutes() -> None:
    limit = Down(3, 58, says_too_many=True)
    run = Run(limit, about(0.5), seconds=500, controller=Controller(max_rollouts=100)).play()
    assert run.rate(440, 500) >= 0.9 * 200


def test_what_another_worker_had_sent_before_is_no_try_of_an_endpoint_that_takes_nothing() -> None:
    controller, now = Controller(), 0.0
    for _ in range(50):
        now += 0.2
        for number in (1, 2):
            seen = Seen(sent=4, answered=4, seconds=[1.0] * 4, open_requests=0, most_open=[20], sent_at=now)
            controller.seen(number, seen, now)
        controller.decide(40, Host(), now)
    for _ in range(2):
        now += 0.15
        refusal = Seen(sent=1, refused=1, too_many=1, refused_since=now - 0.01, sent_at=now - 0.01)
        controller.seen(1, refusal, now)
        controller.decide(40, Host(), now)
    controller.seen(2, Seen(sent=3, refused=1, too_many=1, refused_since=now - 0.5, sent_at=now - 0.4), now + 0.01)
    controller.seen(2, Seen(refused=2, too_many=2, refused_since=now - 0.4, sent_at=now - 0.4), now + 0.02)
    for _ in range(5):
        now += 0.2
        pace = controller.decide(40, Host(), now)
        assert pace.requests == 1, "one may be tried, and none was"
        assert pace.per_second == inf
    controller.seen(2, Seen(sent=1, open_requests=1, sent_at=now), now + 0.01)
    assert controller.decide(40, Host(), now + 0.01).requests == 1
    assert controller.decide(40, Host(), now + 0.5).requests > 1


def test_a_minute_that_gives_more_than_it_did_is_found_out() -> None:
    few, many = Sliding(60, 600), Sliding(60, 3000)

    class Rising:
        def takes(self, now: float, open_requests: int) -> bool:
            return (few if now < 120 else many).takes(now, open_requests)

        def retry_after(self, _now: float) -> float:
            return 0.0

    run = Run(Rising(), about(0.5), seconds=1200).play()
    assert run.rate(61, 120) <= 10
    assert run.rate(900, 1200) >= 0.8 * 50


def test_one_refusal_that_took_long_says_nothing_of_the_others() -> None:
    quick = Run(OpenAtOnce(lambda now: 60 if now < 20 else 15), about(1.0)).play()
    run = Run(OpenAtOnce(lambda now: 60 if now < 20 else 15), about(1.0))
    run._lately.refused(0.7)
    run.play()
    assert run.rate(0, 60) >= 0.95 * quick.rate(0, 60)


@pytest.mark.parametrize(("seconds", "requests", "used"), [(10, 300, 0.75), (60, 600, 0.9)])
def test_an_endpoint_that_has_given_all_for_now_is_tried_with_little_and_used_again_at_once(
    seconds: int, requests: int, used: float
) -> None:
    run = Run(Window(seconds, requests), about(1.0), seconds=300).play()
    assert run.rate(0, 300) >= used * requests / seconds
    assert run.refused_share < 0.12
    patient = Run(Window(seconds, requests, says_when=True), about(1.0), seconds=300).play()
    assert patient.rate(0, 300) >= 0.9 * requests / seconds
    assert patient.refused_share < 0.03


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("share", "wait_seconds"), [(0.03, 0.0), (0.1, 0.0), (0.2, 0.0), (0.1, 1.0)])
def test_refusals_that_have_nothing_to_do_with_how_much_is_asked_do_not_stop_it(
    share: float, wait_seconds: float, seed: int
) -> None:
    limit = Chance(share, OpenAtOnce(lambda _: 10_000), wait_seconds, Random(seed))
    run = Run(limit, about(0.5), seconds=300, random=Random(seed), controller=Controller(max_rollouts=100)).play()
    assert run.rate(180, 300) > 20


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("share", "used"), [(0.01, 0.95), (0.03, 0.55), (0.1, 0.8)])
def test_a_server_that_stumbles_now_and_then_is_used_all_the_same(share: float, used: float, seed: int) -> None:
    limit = Chance(share, OpenAtOnce(lambda _: 10_000), random=Random(seed))
    controller = Controller(max_rollouts=100)
    run = Run(limit, about(1.0), fails=True, random=Random(seed + 10), controller=controller, seconds=120).play()
    assert run.rate(30, 60) >= used * 100
    assert run.rate(60, 120) >= 0.85 * 100


@pytest.mark.parametrize("most", [15, 40, 150])
def test_a_limit_that_is_told_by_errors_is_found(most: int) -> None:
    run = Run(OpenAtOnce(lambda _: most), about(1.0), fails=True).play()
    assert run.rate(0, 60) >= 0.88 * most
    assert run.refused_share < 0.1


@pytest.mark.parametrize("seed", range(3))
def test_a_limit_behind_such_refusals_is_still_found(seed: int) -> None:
    limit = Chance(0.1, OpenAtOnce(lambda _: 40), random=Random(seed))
    run = Run(limit, about(0.5), seconds=300, random=Random(seed)).play()
    assert run.rate(180, 300) > 0.3 * 80
    assert run.refused_share < 0.1 + 0.08


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("most", [1, 8, 100])
@pytest.mark.parametrize("seconds", [3.0, 30.0])
def test_after_ten_minutes_without_an_endpoint_it_goes_on_as_before(most: int, seconds: float, fails: bool) -> None:
    controller = Controller(max_rollouts=most)
    run = Run(Down(200, 800), about(seconds), seconds=1200, fails=fails, controller=controller).play()
    assert run.rate(900, 1200) >= (0.75 if fails else 0.85) * most / seconds


@pytest.mark.parametrize("wait_seconds", [0.0, 10.0])
@pytest.mark.parametrize(
    ("most", "seconds"), [(1, 2.3), (8, 2.3), (1, 30.0), (3, 30.0), (100, 30.0), (1, 90.0), (8, 90.0)]
)
def test_one_refusal_costs_next_to_nothing(most: int, seconds: float, wait_seconds: float) -> None:
    """Also where so few requests are made that they say nothing of a rate."""
    controller = Controller(max_rollouts=most)
    run = Run(Once(900, wait_seconds), about(seconds), seconds=2100, controller=controller).play()
    assert run.refused == 1
    assert run.rate(1100, 2100) >= 0.8 * most / seconds


def test_without_limits_it_grows_as_long_as_that_brings_answers() -> None:
    run = Run(OpenAtOnce(lambda _: 10_000), about(1.0), seconds=30).play()
    assert run.rate(20, 30) > 900


@pytest.mark.parametrize(("each", "free", "most"), [(0.03, 10, 200), (0.1, 1, 70), (0.1, 4, 70), (0.01, 5, 70)])
def test_an_endpoint_that_only_slows_down_is_not_flooded(each: float, free: int, most: int) -> None:
    """It works on so many at a time without delay, and gives 1 / each answers a second, whatever it is sent."""
    opened = [0]

    def seconds(_: Random) -> float:
        opened.append(run._accepted)
        return max(run._accepted, free) * each

    run = Run(OpenAtOnce(lambda _: 10_000), seconds, seconds=60)
    run.play()
    assert max(opened) <= most
    assert run.pace.requests <= max(4 * free, 22)
    assert run.rate(20, 60) >= 0.95 / each


@pytest.mark.parametrize(
    ("host", "why"), [(Host(free_memory=0.1), "little memory is left"), (Host(load=20), "this machine is busy")]
)
def test_a_machine_that_is_short_of_something_gets_no_more(host: Host, why: str) -> None:
    run = Run(OpenAtOnce(lambda _: 10_000), about(1.0), seconds=20, host=host).play()
    assert run.pace.requests == START_REQUESTS
    assert run.pace.why == why


def test_without_memory_rollouts_become_fewer() -> None:
    controller = Controller()
    assert controller.decide(50, Host(free_memory=0.01), 0.0).rollouts == 49
    assert controller.decide(1, Host(free_memory=0.01), 1.0).rollouts == 1


def test_a_wait_that_is_asked_for_holds_for_all() -> None:
    controller = Controller()
    controller.seen(1, Seen(sent=1, refused=1, refused_since=9.9, wait_seconds=30), 10.0)
    pace = controller.decide(8, Host(), 10.0)
    assert pace.not_before == 40.0
    assert pace.why == "waits 30 s as the endpoint asks"
    controller.seen(2, Seen(sent=1, refused=1, refused_since=9.9, wait_seconds=1e9), 10.0)
    assert controller.decide(8, Host(), 10.0).not_before == 130.0


def test_errors_by_chance_do_not_make_a_refusal_beside_them_look_like_an_end() -> None:
    controller = Controller()
    now = 0.0

    def told(open_requests: int, sent: int, failed: int = 0, refused: int = 0) -> float:
        nonlocal now
        now += 0.2
        seen = Seen(
            sent=sent,
            answered=sent - failed - refused,
            refused=refused,
            failed=failed,
            refused_since=now - 0.01,
            sent_at=now - 0.01,
            seconds=(1.0,) * 4,
            open_requests=open_requests,
            most_open=[open_requests],
        )
        controller.seen(1, seen, now)
        return controller.decide(100, Host(), now).requests

    for _ in range(40):
        told(100, 20)
    for _ in range(30):
        told(60, 12, failed=1)
    assert told(60, 12, failed=1, refused=1) > 30
    assert told(60, 12) > 30


def test_refusals_of_what_was_sent_before_a_cut_are_old_news() -> None:
    controller = Controller()
    controller.seen(1, Seen(sent=50, refused=1, refused_since=10.0, sent_at=10.05, most_open=[40]), 10.1)
    first = controller.decide(50, Host(), 10.1)
    controller.seen(1, Seen(sent=20, refused=20, refused_since=10.15, sent_at=10.28, most_open=[20]), 10.3)
    assert controller.decide(50, Host(), 10.3).per_second >= first.per_second
    controller.seen(1, Seen(sent=3, refused=1, refused_since=10.35, sent_at=10.36, most_open=[5]), 10.4)
    assert controller.decide(50, Host(), 10.4).per_second < first.per_second


@pytest.mark.parametrize("cut_since", [False, True])
@pytest.mark.parametrize("refused", [1, 40])
def test_refusals_that_are_told_late_are_not_taken_for_answers(refused: int, *, cut_since: bool) -> None:
    """They belong to requests that an earlier report has told of, and may have been sent before the last cut."""
    controller, now = Controller(), 100.0
    controller.seen(1, Seen(sent=40, open_requests=40), now)
    controller.decide(50, Host(), now)
    if cut_since:
        controller.seen(2, Seen(sent=1, refused=1, refused_since=now), now + 0.1)
        controller.decide(50, Host(), now + 0.1)
    late = Seen(refused=refused, refused_since=now + 0.05, open_requests=40 - refused)
    controller.seen(1, late, now + 0.2)
    controller.decide(50, Host(), now + 0.2)
    assert controller._accepted.since(0) == 40 - refused


def test_one_refusal_while_hardly_anything_is_asked_is_not_blamed_on_how_much_is() -> None:
    """A prompt that an endpoint always answers with 500, while the other rollouts run tools; two in a row are."""
    run = Run(OpenAtOnce(lambda _: 40), about(1.0), seconds=60).play()
    controller, now = run.controller, 60.2
    before = run.pace
    controller.seen(0, Seen(sent=5, answered=40, open_requests=5, most_open=[5]), now)
    controller.decide(40, Host(), now)
    for refusals, passed in ((1, 3.0), (2, 1.0)):
        now += passed
        controller.seen(0, Seen(sent=5, answered=4, refused=1, refused_since=now - 0.1, most_open=[5]), now)
        pace = controller.decide(40, Host(), now)
        assert (pace.requests >= before.requests) == (refusals == 1)


def test_the_first_pace_is_modest() -> None:
    pace = Controller().decide(0, Host(), 5.0)
    assert (pace.rollouts, pace.requests, pace.per_second, pace.why) == (START_REQUESTS, START_REQUESTS, inf, "")
    assert Controller(max_rollouts=2).decide(0, Host(), 5.0).rollouts == 2


def test_what_was_open_beside_a_refusal_counts_although_it_is_told_later() -> None:
    """The limit is 40, and neither worker has had an answer since it was told to have more than that open."""
    controller, now = Controller(), 0.0
    requests = START_REQUESTS
    while requests < 40:
        now, before = now + 1.1, requests
        half = round(requests / 2)
        for number in (1, 2):
            seen = Seen(sent=half, answered=half, seconds=[1.0] * half, open_requests=half, most_open=[half])
            controller.seen(number, seen, now)
        requests = controller.decide(2 * half, Host(), now).requests
    one_half = round(before / 2)
    controller.seen(
        1, Seen(sent=9, refused=1, refused_since=now + 0.2, open_requests=20, most_open=[one_half]), now + 0.2
    )
    assert controller.decide(42, Host(), now + 0.2).requests < before
    controller.seen(1, Seen(sent=1, answered=1, open_requests=20, most_open=[20]), now + 0.4)
    controller.seen(2, Seen(sent=9, refused=1, refused_since=now + 0.2, open_requests=20, most_open=[21]), now + 0.4)
    assert 36 < controller.decide(42, Host(), now + 0.4).requests < 40
