"""How much the run asks of the endpoint and of this machine: one controller for all workers. Pure: it is told the time.

It is told what every request met with, and says how many rollouts may run, how many requests may be open, and how many
may be sent a second. It starts modestly and grows fast, a little before the first answers have come and then while they
come as quickly as before. A refusal (429, 503, 529) shows where the limit is: from then on it stays just below and
feels for more (see rollout/bound.py). Errors that servers also stumble into by chance (500, 502, 504) mean the same
when there are more than a few.
Open requests and requests a second are bounded side by side, because an endpoint may limit either and does not say
which; a limit of tokens shows as one of requests. What was refused though more had been taken shortly before was not
refused for that: the bound that is nearest to the most that was taken of late is cut first, and the other one when that
does not help; after a few refusals, the one that they come at the same of each time. Refusals that come whatever is
asked are left alone (see rollout/chance.py).
An endpoint that takes nothing at all is tried with one request, and less and less often; what it took before is not
forgotten, and what it gives a minute is learnt (see rollout/silence.py). A wait that the endpoint asks for holds for
all workers at once; the more it costs, the more seldom more is felt for.

When answers take longer without becoming more (see rollout/saturation.py), it stops growing, and goes back to as many
as give these answers in twice the best time. It stops, too, while this machine is short of memory
or busy beyond reason, or sandboxes take much longer to start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import ceil, inf
from statistics import median

from rollout.bound import Bound
from rollout.chance import Chance
from rollout.levels import Told, most_together
from rollout.recent import LEAST_SECONDS, Recent
from rollout.saturation import Saturation
from rollout.silence import Sent, Silence

START_REQUESTS = 8.0
MAX_ROLLOUTS = 1024
MAX_WAIT_SECONDS = 120.0  # of what an endpoint asks for
_NEAR_OPEN = 0.98  # of as many open requests as were taken
_NEAR_RATE = 0.97  # of a rate that was taken; it is seen later, and less exactly
_PROBE_OPEN, _PROBE_RATE = 22.0, 40.0  # answers a second; see Bound.grow
_SLOWEST_OPEN, _SLOWEST_RATE = 0.02, 0.1  # the same; of few answers a rate is known roughly, and may be too low
_LEAST_RATE = 0.05  # a second; one request in twenty seconds tells that an endpoint is back
_HEARD_SECONDS = 0.1  # after which all workers, busy ones too, send no more than the last cut allows
_SOON_SECONDS = 1.0  # after a cut; nothing taken since then means that nothing is taken now
_LATE = 1.2  # times the wait that was asked for: who tries again adds some
_AGAIN_SECONDS = 2.0  # a refusal so soon after a cut means that the limit is elsewhere
_LONG_WAIT_SECONDS = 5.0  # that an endpoint asks for tells of a rate that is used up
_BESIDE_SECONDS = 0.5  # in which all workers have told what was open when a request was refused
_SAME = 0.97  # times as near to the most that was taken: no nearer than the other bound
_FAR = 0.7  # below so much of what was taken before, a single refusal has another reason
_MET_TIMES = 4  # refusals that are compared
_STEADIER = 0.7  # times as far apart, or less: that is where refusals come
_TOLD = 0.8  # times the rate that was thought to be taken; what a silence tells is as exact
_FEW = 4  # open requests; fewer say little by their share of what was taken before
_RATE_ANSWERS = 10  # that a rate is measured by
_MIN_RATE_SECONDS, _MAX_RATE_SECONDS = 1.0, 5.0
_LONG_SECONDS = 15.0
_FAILING_SECONDS = 10.0
_TELLING_FAILURES, _STUMBLES = 3, 0.05  # in that time at least, and of what was taken; fewer are no sign of too much
_FAR_BELOW_STUMBLES = 0.7  # times as many open requests as were taken: no limit there that there was not here
_FIRST_SECONDS = 0.3  # of a run say little of a rate
_SURE_ANSWERS = 6  # fewer before the first refusal say next to nothing of where the limit is
_SLACK_SECONDS = 0.05  # answer times below are as good as none
_STEP = 1.1  # times what was allowed by the last step; then it is looked at what that has led to
_IN_THE_WAY = 1.3  # times the rate that is used; above it a bound spreads requests that need no spreading
_USED = 0.85  # of a bound must be in use for it to be raised
_SANDBOX_TIMES = 64  # that are remembered
_ROLLOUTS_PER_REQUEST = 4.0  # at most: rollouts also run tools
_LOW_MEMORY, _LITTLE_MEMORY = 0.08, 0.15  # of this machine's, available
_HIGH_LOAD = 8.0  # runnable processes per processor
_SLOW_START_SECONDS = 2.0  # of a sandbox; quicker ones never hold anything up


@dataclass(frozen=True)
class Seen:
    """What one worker met with since it last told."""

    sent: int = 0
    answered: int = 0
    refused: int = 0  # answers that say: too many, or overloaded
    too_many: int = 0  # of these, that say: too many
    failed: int = 0  # answers that may say so: a server's error, which is no refusal above
    refused_since: float = 0.0  # when the latest of these requests was sent (monotonic seconds)
    wait_seconds: float = 0.0  # the longest that was asked for, from now on
    seconds: Sequence[float] = ()  # of answered requests
    open_requests: int = 0  # now
    most_open: Sequence[int] = ()  # that were not refused, in each of the latest stretches (rollout/levels.py)
    told_at: float = 0.0  # the end of these (monotonic seconds)
    waiting_requests: int = 0  # now, for their turn
    pausing_requests: int = 0  # now, before another try
    sent_at: float = 0.0  # when the latest request was sent (monotonic seconds)
    unsettled: Sequence[float] = ()  # when requests were sent that may still be refused
    sandbox_seconds: Sequence[float] = ()  # that sandboxes took to start

    def says_the_same(self, other: Seen) -> bool:
        """Tell whether this is no news after the other one; only when it was told differs."""
        return replace(self, told_at=other.told_at) == other

    def by_clock_of_parent(self, ahead_seconds: float) -> Seen:
        """Return the same, told by a worker whose clock is so far behind the one of the controller."""
        return replace(
            self,
            refused_since=self.refused_since and self.refused_since + ahead_seconds,
            sent_at=self.sent_at and self.sent_at + ahead_seconds,
            unsettled=[at + ahead_seconds for at in self.unsettled],
            told_at=self.told_at + ahead_seconds,
        )


@dataclass(frozen=True)
class Host:
    """How this machine is."""

    free_memory: float = 1.0  # available share of all, 0 to 1
    load: float = 0.0  # runnable processes per processor, over the last minute


@dataclass(frozen=True)
class Pace:
    """What may be done now."""

    rollouts: int
    requests: float  # open at once, all workers together
    per_second: float  # sent, all workers together
    not_before: float  # monotonic seconds: nothing is sent earlier
    why: str  # what holds it, for the progress line; "" while it grows
    is_limit: bool = False  # whether ``requests`` is what the endpoint takes, as far as it is known


def _unbounded() -> Bound:
    return Bound(inf, _LEAST_RATE, _NEAR_RATE, _PROBE_RATE, _SLOWEST_RATE)


@dataclass
class _News:
    """What happened since the last decision."""

    accepted: int = 0  # sent and not refused
    answered: int = 0
    refused: int = 0  # under the bounds that hold now
    too_many: int = 0  # of these
    refused_since: float = -inf  # when the latest that was refused or failed was sent
    failed: int = 0  # the same


@dataclass
class Controller:
    """See the module. Times are monotonic seconds, the same clock for all processes of a machine."""

    max_rollouts: int = MAX_ROLLOUTS
    _requests: Bound = field(default_factory=lambda: Bound(START_REQUESTS, 1.0, _NEAR_OPEN, _PROBE_OPEN, _SLOWEST_OPEN))
    _rate: Bound = field(default_factory=_unbounded)
    _chance: Chance = field(default_factory=Chance)
    _failed: Recent = field(default_factory=lambda: Recent(_FAILING_SECONDS))
    _stumbles: Chance = field(default_factory=lambda: Chance(_FAR_BELOW_STUMBLES, _SOON_SECONDS))  # failures by chance
    _doubted: tuple[Bound, Bound] | None = None  # the two, as they were before refusals were taken for chance
    _accepted: Recent = field(default_factory=lambda: Recent(_LONG_SECONDS))
    _saturation: Saturation = field(default_factory=lambda: Saturation(START_REQUESTS))
    _news: _News = field(default_factory=_News)
    _sandbox_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_SANDBOX_TIMES))
    _best_sandbox_seconds: float = inf
    _open: dict[int, Seen] = field(default_factory=dict)  # the latest of each worker
    _cut_at: float = -inf
    _refused_at: float = -inf  # when a bound was last cut for it
    _refused_since: float = -inf  # when the latest request was sent that it was cut for
    _most_open: int = 0  # at once, since the last decision
    _accepted_since_cut: int = 0
    _held_seconds: float = 0.0  # that the endpoint asked for when it was cut: nothing was sent meanwhile
    _accepted_in_all: int = 0
    _met_at: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_MET_TIMES))  # open, a second
    _silence: Silence = field(default_factory=Silence)
    _rated_until: float = -inf  # by what a silence has told
    _not_before: float = -inf  # as the endpoint asks
    _began_at: float = inf
    _decided_at: float = -inf
    _busy_share: float = 1.0  # of rollouts that wait for an answer
    _why: str = ""

    def seen(self, worker: int, seen: Seen, now: float) -> None:
        """Take a worker's report."""
        self._open[worker] = seen
        accepted = seen.sent - seen.refused - seen.failed  # less than none when refusals come late
        self._news.accepted += accepted
        # What was refused of what was sent before the last cut says nothing of what was sent since.
        if seen.sent_at > self._cut_at:
            self._accepted_since_cut += accepted if seen.refused_since > self._cut_at else max(accepted, 0)
        self._news.answered += seen.answered
        self._saturation.took(seen.seconds, now)
        self._sandbox_seconds.extend(seen.sandbox_seconds)
        if seen.refused_since > self._cut_at + _HEARD_SECONDS:
            self._news.refused += seen.refused
            self._news.refused_since = max(self._news.refused_since, seen.refused_since)
            self._news.too_many += seen.too_many
            self._news.failed += seen.failed
        if seen.wait_seconds:
            self._not_before = max(self._not_before, now + min(seen.wait_seconds, MAX_WAIT_SECONDS))

    def gone(self, worker: int) -> None:
        """Forget a worker that is no more."""
        self._open.pop(worker, None)

    def wanted(self, worker: int) -> int:
        """Return how many requests a worker has open or waiting for their turn; those that pause would not take it."""
        seen = self._open.get(worker, Seen())
        return seen.open_requests + seen.waiting_requests

    def open(self, worker: int) -> int:
        """Return how many requests a worker has open."""
        return self._open.get(worker, Seen()).open_requests

    def decide(self, rollouts: int, host: Host, now: float) -> Pace:
        """Say what may be done now that so many rollouts run. To be asked a few times a second."""
        self._began_at = min(self._began_at, now)
        self._most_open = self._together(max(self._decided_at, now - LEAST_SECONDS), now)
        passed, self._decided_at = min(now - max(self._decided_at, self._began_at), 1.0), now
        news, self._news = self._news, _News()
        self._note(news, passed, now)
        if self._is_too_much(news, now):
            self._cut(news, now)
        else:
            self._requests.took(self._most_open, now)
            self._rate.took(self._per_second(now), now)
            if now - self._refused_at < _BESIDE_SECONDS:  # only now all have told what was open beside the refusal
                self._requests.at_least(self._together(self._refused_since, self._refused_since))
            if now >= max(self._not_before, self._silence.until):
                self._grow(host, passed, now)
        if rollouts:
            waiting = sum(seen.waiting_requests + seen.pausing_requests for seen in self._open.values())
            busy = (self._open_requests + waiting) / rollouts
            self._busy_share += (min(busy, 1.0) - self._busy_share) * passed * 0.2
        self._take_told_rate(now)
        sent = Sent(max((seen.sent_at for seen in self._open.values()), default=0.0), self._unsettled())
        places = self._silence.places(self._open_requests, self._requests.value, passed, now, sent=sent)
        requests = min(self._requests.value, places)
        not_before = max(self._not_before, self._silence.until)
        may_run, is_limit = self._rollouts(rollouts, host), self._requests.known
        return Pace(may_run, requests, self._rate.value, not_before, self._told(now), is_limit)

    def _note(self, news: _News, passed: float, now: float) -> None:
        self._accepted.add(news.accepted, now)
        self._saturation.answered(news.answered, now)
        self._accepted_in_all += news.accepted
        self._silence.took(news.accepted, now)
        self._rate.use(news.accepted, passed)
        most_open = self._most_open
        taken = (self._accepted.per_second(_MAX_RATE_SECONDS, now), most_open)
        self._chance.saw(news.accepted, news.refused, taken, passed, now)
        self._failed.add(news.failed, now)
        self._stumbles.saw(news.accepted, news.failed, (most_open,), passed, now)

    def _is_too_much(self, news: _News, now: float) -> bool:
        """Tell whether what was refused means that too much is asked; more than one trial of that would be none."""
        if news.refused and not self._taken_for_chance(self._chance, now):
            return True
        if not (news.failed and self._fails_often(now)) or self._taken_for_chance(self._stumbles, now):
            return False
        return not self._stumbles.may_be(now)

    def _fails_often(self, now: float) -> bool:
        failed = self._failed.since(now - _FAILING_SECONDS)
        accepted = self._accepted.since(now - _FAILING_SECONDS)
        return failed >= _TELLING_FAILURES and failed > _STUMBLES * accepted

    def _taken_for_chance(self, chance: Chance, now: float) -> bool:
        """Tell whether to leave refusals alone; begin and end the trial of that."""
        if chance.is_suspected(now) and not (self._chance.is_tried(now) or self._stumbles.is_tried(now)):
            self._doubted = deepcopy((self._requests, self._rate))
            chance.try_(now)
            self._requests.forget()
            self._rate = _unbounded()
        elif chance.explains(now):
            return True
        elif self._doubted and chance.is_tried(now):
            chance.fail(now)
            self._requests, self._rate = self._doubted
        else:
            return False
        self._cut_at, self._accepted_since_cut = now, 0  # what is on its way was sent under other bounds
        return True

    def _cut(self, news: _News, now: float) -> None:
        soon = news.refused_since - self._cut_at < _SOON_SECONDS + _LATE * self._held_seconds or self._silence.is_met
        nothing = soon and self._accepted_since_cut <= sum(at > self._cut_at for at in self._unsettled())
        if nothing and not self._is_full:
            self._silence.meet(self._most_open, self._requests.most, now, is_limit=news.too_many > 0)
            self._why = "the endpoint takes nothing now"
        else:
            requests, rate = self._blamed(now, again=now - self._cut_at < _AGAIN_SECONDS)
            drained = self._silence.drained(self._saturation.typical_seconds, self._requests.value, now)
            if drained:
                self._requests.lower(drained)
            if drained or nothing:  # as much is open as may be; the rate has nothing to do with that
                requests, rate = True, False
            unsure = self._accepted_in_all < _SURE_ANSWERS
            lost = self._lost_seconds(now)
            if requests:
                self._requests.cut(self._most_open, now, lost_seconds=lost, unsure=unsure)
            if rate and (limit := self._limit_of_rate(now)):
                self._rate.cut(limit, now, lost_seconds=lost, unsure=unsure)
            self._silence.end()
            self._refused_at, self._refused_since = now, news.refused_since
            self._why = "the endpoint's limit"
        self._cut_at, self._accepted_since_cut = now, 0
        self._held_seconds = max(self._not_before - now, 0.0)

    @property
    def _is_full(self) -> bool:
        """Whether as much is open as was ever taken, so that nothing more is taken until some of it is answered."""
        return not self._silence.is_met and self._settled >= _SAME * self._requests.most > 0

    @property
    def _settled(self) -> int:
        """How many requests are open and will not be refused any more: refusals can take seconds."""
        return self._open_requests - len(self._unsettled())

    def _unsettled(self) -> list[float]:
        return [at for seen in self._open.values() for at in seen.unsettled]

    def _lost_seconds(self, now: float) -> float:
        """Return what the wait that the endpoint asks for costs: what is open goes on meanwhile."""
        wait = max(self._not_before - now, 0.0)
        return wait * min(wait / max(self._saturation.typical_seconds, _SLACK_SECONDS), 1.0)

    def _take_told_rate(self, now: float) -> None:
        """Ask for no more than what a silence tells, from now on."""
        rate, seconds = self._silence.rate(now)
        if 0 < rate < _TOLD * self._rate.value:
            self._rate.set(rate, seconds, now)
            self._rated_until = now + 2 * seconds

    def _blamed(self, now: float, *, again: bool) -> tuple[bool, bool]:
        """Say which bound a refusal is blamed on, open requests or the rate; both when neither alone was it."""
        most_open = self._most_open
        near_open = self._requests.nearness(max(most_open, self._open_requests))
        near_rate = self._rate.nearness(self._per_second(now))
        if not again:
            self._requests.settle()
            self._rate.settle()
            if most_open >= _FEW and max(near_open, near_rate) < _FAR:
                return False, False  # unless the next one follows soon
        if now < self._rated_until:
            return False, True
        used_up = self._not_before > now + _LONG_WAIT_SECONDS
        if used_up or (again and self._requests.was_cut == self._rate.was_cut):
            return True, True
        if again:
            is_open = self._rate.was_cut or self._requests.has_regrown
        elif self._requests.known or self._rate.known:
            self._met_at.append((most_open, self._accepted.per_second(_SOON_SECONDS, now)))
            is_open = self._comes_at_so_many(near_open >= _SAME * near_rate)
        else:
            is_open = True  # fewer open requests are fewer a second as well
        is_open &= not self._requests.is_least
        return is_open, not is_open

    def _comes_at_so_many(self, otherwise: bool) -> bool:
        """Tell whether refusals come at so many open requests rather than at a rate; ``otherwise`` where both might be.

        Where they come is the limit, and always the same; the other one is then what it happens to be.
        """
        if len(self._met_at) < _MET_TIMES - 1:
            return otherwise
        open_requests, rate = (1 - min(met) / max(*met, 1e-9) for met in zip(*self._met_at, strict=True))
        is_clear = min(open_requests, rate) < _STEADIER * max(open_requests, rate)
        return open_requests < rate if is_clear else otherwise

    def _limit_of_rate(self, now: float) -> float:
        """Return where the limit of the rate seems to be; 0 when nothing was taken that tells."""
        if self._rate.known:
            if not self._rate.is_measured(now):
                return self._rate.value
            return max(self._rate.measured, self._accepted.per_second(_SOON_SECONDS, now))
        first = min(max(now - self._began_at, LEAST_SECONDS) / _FIRST_SECONDS, 1.0)
        windows = (_MIN_RATE_SECONDS, _MAX_RATE_SECONDS, _LONG_SECONDS)
        measured = max(0.0, *(self._accepted.per_second(seconds, now) for seconds in windows))
        if self._most_open >= _FEW:
            measured = max(measured, self._rate.most)  # of late: it is not yet sure that the rate is to blame
        return first * measured

    def _per_second(self, now: float) -> float:
        """Return how many requests are taken a second; the fewer they are, the longer it is measured."""
        seconds = min(max(_RATE_ANSWERS / self._rate.value, _MIN_RATE_SECONDS), _MAX_RATE_SECONDS)
        return max(self._accepted.per_second(seconds, now), 0.0)

    def _grow(self, host: Host, passed: float, now: float) -> None:
        if reason := self._host_problem(host) or self._saturated(passed, now):
            self._why = reason
            return
        self._why = "the endpoint's limit" if self._requests.known or self._rate.known else ""
        most_open = self._most_open
        used = most_open >= min(_USED * self._requests.value, self._requests.value - 1)
        per_second = self._accepted.per_second(_SOON_SECONDS, now)
        in_the_way = used and self._rate.value < _IN_THE_WAY * per_second
        if self._is_rate_used(now) or in_the_way:
            self._rate.grow(passed, per_second)
        if self._requests.known:
            if not used:
                return
            self._requests.grow(passed, per_second)
            if self._requests.is_far_beyond(most_open - len(self._unsettled())) and self._saturation.hardly_slower:
                self._requests.forget()
                if self._rate.is_far_beyond(self._rate.value) or self._rate.was_met_once:
                    self._rate.forget()
            if self._requests.value > _STEP * self._saturation.allowed_at_step:
                self._saturation.step(self._requests.value, most_open, now)
        elif most_open >= _USED * self._requests.value * self._busy_share and self._saturation.may_step(most_open, now):
            self._requests.start()
            self._requests.lower(float(self.max_rollouts))
            self._saturation.step(self._requests.value, most_open, now)

    def _is_rate_used(self, now: float) -> bool:
        used = self._per_second(now) if self._rate.is_told else self._accepted.per_second(_SOON_SECONDS, now)
        return used >= _USED * self._rate.value

    @property
    def _open_requests(self) -> int:
        return sum(seen.open_requests for seen in self._open.values())

    def _together(self, since: float, until: float) -> int:
        return most_together([Told(seen.most_open, seen.told_at) for seen in self._open.values()], since, until)

    def _saturated(self, passed: float, now: float) -> str:
        """Say whether answers only take longer, and ask for less when they take far longer."""
        most_open = self._most_open
        if self._is_rate_used(now) or not self._saturation.is_met(most_open, passed, now):
            return ""
        if now - self._cut_at > self._saturation.typical_seconds:  # they come from since then
            enough = self._saturation.enough(most_open, now)
            if enough is not None:
                self._requests.settle()
                self._requests.cut(enough, now)
                self._cut_at, self._accepted_since_cut = now, 0
                self._saturation.step(self._requests.value, most_open, now, is_back=True)
        return "answers take longer"

    def _host_problem(self, host: Host) -> str:
        if host.free_memory < _LITTLE_MEMORY:
            return "little memory is left"
        if host.load > _HIGH_LOAD:
            return "this machine is busy"
        if self._sandbox_seconds:
            typical = median(self._sandbox_seconds)
            self._best_sandbox_seconds = min(self._best_sandbox_seconds, typical)
            if typical > max(3 * self._best_sandbox_seconds, _SLOW_START_SECONDS):
                return "sandboxes start slowly"
        return ""

    def _rollouts(self, running: int, host: Host) -> int:
        """Return how many rollouts may run: enough to keep the open requests up while some run tools."""
        if host.free_memory < _LOW_MEMORY:
            return max(running - 1, 1)
        per_request = min(1 / max(self._busy_share, 0.01), _ROLLOUTS_PER_REQUEST)
        return max(min(ceil(self._requests.value * per_request), self.max_rollouts), 1)

    def _told(self, now: float) -> str:
        if now < self._not_before:
            return f"waits {self._not_before - now:.0f} s as the endpoint asks"
        return self._why
