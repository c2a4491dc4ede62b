"""How much the run asks of the endpoint and of this machine: one controller for all workers. Pure but for its clock.

It is told what every request met with, and says how many rollouts may run, how many requests may be open, and how many
may be sent a second. It starts modestly and grows fast while answers come as quickly as before. The first refusal
(429, or a server that is overloaded) shows where the limit is: from then on it stays just below, feels for more with
small steps, and takes them faster the longer nobody minds, for limits change. Open requests and requests a second are
bounded side by side, because an endpoint may limit either and does not say which; a limit of tokens shows as one of
requests. Where refusals come at always the same number of open requests, that is the limit, and the rate is free again.
An endpoint that takes nothing at all (what it gives a minute is used up) is tried with one request, and less and less
often; what it took before is not forgotten. A wait that the endpoint asks for holds for all workers at once.

Rising answer times without more answers mean that something is saturated, there or here: then it stops growing, too.
So it does while this machine is short of memory or busy beyond reason, or sandboxes take much longer to start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from statistics import median

START_REQUESTS = 8.0
MAX_ROLLOUTS = 1024
MAX_WAIT_SECONDS = 120.0  # of what an endpoint asks for
_RATE_SECONDS = 5.0  # over which requests are counted: long enough for what an endpoint saved up not to count much
_HEARD_SECONDS = 0.1  # after which all workers, busy ones too, send no more than the last cut allows
_SOON_SECONDS = 1.0  # a refusal so soon after a cut means that the limit is far below
_TELLING_SPREAD = 0.7  # the bound that was met at always the same place is the true one, the other is left alone
_TELLING_TIMES = 3
_SAME_PLACE = 0.1  # of spread is none
_LEAST_RATE = 0.05
_MAX_PAUSE_SECONDS = 4.0
_PROBE_SECONDS = 0.3  # in which a refusal comes, if one comes
_FEW = 4  # open requests
_OPEN_SECONDS = 5.0  # as many open requests as were taken so recently are not what an endpoint minds
_START_FACTOR = 1.75  # of growth while no limit is known
_MIN_STEP_SECONDS = 0.5
_RESTLESS_SECONDS = 15.0  # after what was taken has fallen at once
_FIRST_CUT, _LATER_CUT = 0.85, 0.97
_WORST = 0.5  # of a bound may be left by a cut, whatever was measured
_NEAR = 0.99  # of where the limit was seen: up to there growth is quick
_QUICK = 0.7  # of what is missing, each second
_CREEP = 0.008  # of growth a second beyond
_CREEP_GROWTH = 2.0  # of that, with every second that nobody minds
# Answers a second; where fewer come, it creeps in proportion, for each refusal weighs more among them. At a limit of a
# rate more are refused each time, for it is seen late: first goes what was saved up.
_OPEN_CREEP_ANSWERS, _RATE_CREEP_ANSWERS = 20.0, 60.0
_BOLD_CREEP = 0.03
_UNSURE_CREEP = 0.1
_SURE_ANSWERS = 20  # fewer before the first refusal say next to nothing of where the limit is
_MAX_CREEP = 0.5
_USED = 0.85  # of a bound must be in use for it to be raised
_SLOWER = 2.0  # times the best answer time: growth must be worth it from here on
_MUCH_SLOWER = 4.0
_WORTH = 1.1  # times as many answers as before a step of growth
_SLACK_SECONDS = 0.05  # answer times below are as good as none
_TELLING_SECONDS = 0.2  # between two reports of a worker
_LATENCIES = 64
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
    refused_since: float = 0.0  # when the latest of those requests was sent (monotonic seconds)
    wait_seconds: float = 0.0  # the longest that was asked for, from now on
    seconds: Sequence[float] = ()  # of answered requests
    open_requests: int = 0  # now
    most_open: int = 0  # that were not refused
    waiting_requests: int = 0  # now, for their turn
    sandbox_seconds: Sequence[float] = ()  # that sandboxes took to start


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


class _Bound:
    """A value just below a limit that is only seen when it is met."""

    def __init__(self, value: float, floor: float, creep_answers: float) -> None:
        self.value = value
        self.known = False  # whether the limit was ever met
        self._floor = floor
        self._creep_answers = creep_answers
        self._limit = inf
        self._creep = _CREEP

    def cut(self, measured: float, *, again: bool, unsure: bool = False, restless: bool = False) -> None:
        """Go below where ``measured`` was, and further when a refusal came just before: ``again``.

        ``unsure``: it was measured in next to nothing, and may be far below the limit. ``restless``: the limit has
        moved, or another one, and where it is now is soon to be known.
        """
        least = self._floor if self.value == inf else max(self.value * _WORST, self._floor)
        limit = min(self.value, max(measured, least))
        factor = _LATER_CUT if self.known and not again else _FIRST_CUT
        self.value = max(limit * factor, self._floor)
        # Cuts that follow each other at once may have gone too far: what was measured is no limit to be wary of.
        unsure = unsure and not self.known
        self.known, self._limit = True, self.value if again else limit
        self._creep = _BOLD_CREEP if again or restless else _CREEP
        if unsure:
            self._limit, self._creep = self.value, _UNSURE_CREEP

    def at_least(self, taken: float) -> None:
        """So many were taken after all: the limit cannot be below."""
        if taken > self._limit:
            self.value, self._limit = max(self.value, taken * _LATER_CUT), taken

    def found(self, limit: float) -> None:
        """Take a limit that is certain, wherever it was thought to be."""
        self.value = max(limit * _LATER_CUT, self._floor)
        self.known, self._limit, self._creep = True, limit, _CREEP

    def grow(self, seconds: float, answers: float) -> None:
        """Nobody minded, though all of it was used: so many requests in these seconds."""
        missing = _NEAR * self._limit - self.value
        if missing > 0:
            self.value += max(missing * min(_QUICK * seconds, 1.0), 0.002 * self.value * seconds)
        else:
            if self._creep < _BOLD_CREEP:
                seconds = min(seconds, answers / self._creep_answers)
            self.value *= 1 + min(self._creep * seconds, 0.25)
            self._creep = min(self._creep * (1 + _CREEP_GROWTH * seconds), _MAX_CREEP)


def _unbounded() -> _Bound:
    return _Bound(inf, _LEAST_RATE, _RATE_CREEP_ANSWERS)


@dataclass
class Controller:
    """See the module. Times are monotonic seconds, the same clock for all processes of a machine."""

    max_rollouts: int = MAX_ROLLOUTS
    _requests: _Bound = field(default_factory=lambda: _Bound(START_REQUESTS, 1.0, _OPEN_CREEP_ANSWERS))
    _rate: _Bound = field(default_factory=_unbounded)
    _answers: deque[tuple[float, int]] = field(default_factory=deque)
    _accepted: deque[tuple[float, int]] = field(default_factory=deque)  # sent and not refused
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENCIES))
    _sandbox_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENCIES))
    _best_seconds: float = inf
    _best_sandbox_seconds: float = inf
    _taken: deque[tuple[float, int]] = field(default_factory=deque)  # open requests at most, that were not refused
    _open: dict[int, Seen] = field(default_factory=dict)  # the latest of each worker
    _met: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=_TELLING_TIMES)
    )  # open, a second, at refusals
    _met_at: float = -inf  # the latest of them
    _fell_at: float = -inf  # when refusals followed each other though less and less was asked
    _found: float = inf  # open requests at which refusals came again and again
    _refused: bool = False
    _cut_at: float = -inf
    _pause_seconds: float = 0.0  # between two looks at an endpoint that takes nothing
    _not_before: float = -inf
    _decided_at: float | None = None
    _ceiling: float = inf  # of open requests, after an endpoint took none
    _stepped_at: float = -inf
    _rate_before_step: float = 0.0
    _busy_share: float = 1.0  # of rollouts that wait for an answer
    _why: str = ""

    def seen(self, worker: int, seen: Seen, now: float) -> None:
        """Take a worker's report."""
        self._open[worker] = seen
        self._answers.append((now, seen.answered))
        refused = seen.refused if seen.refused_since > self._cut_at else 0  # what was sent before is not counted since
        self._accepted.append((now, seen.sent - refused))
        self._seconds.extend(seen.seconds)
        self._sandbox_seconds.extend(seen.sandbox_seconds)
        if seen.refused and seen.refused_since > self._cut_at + _HEARD_SECONDS:
            self._refused = True
        if seen.wait_seconds:
            self._not_before = max(self._not_before, now + min(seen.wait_seconds, MAX_WAIT_SECONDS))

    def gone(self, worker: int) -> None:
        """Forget a worker that is no more."""
        self._open.pop(worker, None)

    def decide(self, rollouts: int, host: Host, now: float) -> Pace:
        """Say what may be done now that so many rollouts run. To be asked a few times a second."""
        passed = 0.0 if self._decided_at is None else min(now - self._decided_at, 1.0)
        self._decided_at = now
        open_requests = sum(seen.open_requests for seen in self._open.values())
        self._taken.append((now, self._most_open()))
        while self._taken[0][0] < now - _OPEN_SECONDS:
            self._taken.popleft()
        if self._refused:
            self._refused = False
            self._cut(now)
        else:
            if now - self._met_at < _PROBE_SECONDS:
                self._hear_more()
            if now >= self._not_before:
                self._grow(host, passed, now)
        if rollouts:
            busy = (open_requests + sum(seen.waiting_requests for seen in self._open.values())) / rollouts
            self._busy_share += (min(busy, 1.0) - self._busy_share) * min(passed, 1.0) * 0.2
        requests = min(self._requests.value, self._reopened(open_requests, now))
        return Pace(self._rollouts(rollouts, host), requests, self._rate.value, self._not_before, self._told(now))

    def _hear_more(self) -> None:
        """Take note of what was taken beside the latest refusal: only now all workers have told."""
        beside = sum(seen.most_open - seen.refused for seen in self._open.values())
        if not self._rate.known and self._found == inf:
            self._requests.at_least(beside)
        most_open, per_second = self._met[-1]
        self._met[-1] = max(most_open, beside), per_second

    def _reopened(self, open_requests: int, now: float) -> float:
        """Return how many requests may be open at an endpoint that took none a moment ago: one tells as much as all."""
        if not self._pause_seconds:
            return inf
        if now < self._not_before + _PROBE_SECONDS:
            self._ceiling = open_requests + 1.0
        elif self._ceiling < self._requests.value:
            self._ceiling = _START_FACTOR * self._ceiling + 1
        return self._ceiling

    def _cut(self, now: float) -> None:
        if now - self._cut_at < _SOON_SECONDS + self._pause_seconds and self._accepted_since(self._cut_at) <= 0:
            self._pause_seconds = min(max(2 * self._pause_seconds, _HEARD_SECONDS), _MAX_PAUSE_SECONDS)
            self._not_before = max(self._not_before, now + self._pause_seconds)
            self._cut_at = now
            self._why = "the endpoint takes nothing now"
            return
        self._pause_seconds = 0.0
        again = now - self._cut_at < _SOON_SECONDS
        since = max(now - _RATE_SECONDS, self._cut_at) if self._rate.known else now - 2 * _SOON_SECONDS
        per_second = _per_second(self._accepted, since, now)
        unsure = self._accepted_since(since) < _SURE_ANSWERS
        most_open = self._most_open()
        taken_before = most_open < _USED * max(most for _, most in self._taken)
        self._met.append((most_open, per_second))
        self._met_at = now
        open_spread, rate_spread = (_spread(values) for values in zip(*self._met, strict=True))
        open_tells = len(self._met) == _TELLING_TIMES and most_open >= _FEW and open_spread <= _SAME_PLACE < rate_spread
        where_it_was_found = not again and abs(most_open / self._found - 1) <= _SAME_PLACE
        cuts_open = not taken_before and open_spread <= rate_spread / _TELLING_SPREAD
        if open_tells or where_it_was_found:
            self._rate = _unbounded()
            self._found = min(met for met, _ in self._met) if open_spread <= _SAME_PLACE else most_open
            self._requests.found(self._found)
            self._taken = deque([(now, most_open)])  # what was taken before the limit fell says nothing any more
        elif cuts_open:
            self._requests.cut(most_open, again=again, unsure=unsure)
        # Open requests bound the rate as well, so they are cut first, unless they are too few to be cut by a little.
        few = most_open < _FEW
        needed = self._rate.known or again or taken_before or few
        rate_tells = needed and (few or rate_spread <= open_spread / _TELLING_SPREAD)
        if not (open_tells or where_it_was_found) and (rate_tells or not cuts_open):
            if again and taken_before and not few:
                self._fell_at = now
            restless = now - self._fell_at < _RESTLESS_SECONDS
            self._rate.cut(per_second, again=again, unsure=unsure, restless=restless)
            self._found = inf
        self._cut_at = now
        self._why = "the endpoint's limit"

    def _grow(self, host: Host, passed: float, now: float) -> None:
        if reason := self._host_problem(host) or self._saturated(now):
            self._why = reason
            return
        most_open = self._most_open()
        if self._requests.known:
            per_second = _per_second(self._accepted, now - _SOON_SECONDS, now)
            if most_open >= min(_USED * self._requests.value, self._requests.value - 1):
                self._requests.grow(passed, per_second * passed)
            if per_second >= _USED * self._rate.value:
                self._rate.grow(passed, per_second * passed)
        elif most_open < _USED * self._requests.value * self._busy_share:
            return
        elif now - self._stepped_at >= max(_MIN_STEP_SECONDS, self._typical_seconds()):
            self._rate_before_step = _per_second(self._answers, now - 2 * _SOON_SECONDS, now)
            self._stepped_at = now
            self._requests.value = min(self._requests.value * _START_FACTOR, float(self.max_rollouts))
            self._why = ""

    def _accepted_since(self, since: float) -> int:
        return sum(count for at, count in self._accepted if at > since)

    def _most_open(self) -> int:
        return sum(seen.most_open for seen in self._open.values())

    def _typical_seconds(self) -> float:
        return median(self._seconds) if self._seconds else 0.0

    def _saturated(self, now: float) -> str:
        """Say whether answers take longer and longer without becoming more."""
        if len(self._seconds) < _LATENCIES // 4:
            return ""
        typical = self._typical_seconds()
        self._best_seconds = min(self._best_seconds, typical)
        best = max(self._best_seconds, _SLACK_SECONDS)
        if (
            typical <= _SLOWER * best
            or _per_second(self._answers, now - 2 * _SOON_SECONDS, now) > _WORTH * self._rate_before_step
        ):
            return ""
        if typical > _MUCH_SLOWER * best and now - self._cut_at > typical:
            self._requests.cut(self._requests.value, again=False)
            self._cut_at = now
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


def _per_second(counts: deque[tuple[float, int]], since: float, now: float) -> float:
    """Return the rate of what was counted after ``since``; what is older than anybody asks for is forgotten."""
    while counts and counts[0][0] < now - _RATE_SECONDS:
        counts.popleft()
    since = max(since, counts[0][0] - _TELLING_SECONDS) if counts else since
    return sum(count for at, count in counts if at > since) / max(now - since, _TELLING_SECONDS)


def _spread(values: Sequence[float]) -> float:
    """Return how far values differ, relative to the largest."""
    if len(values) < _TELLING_TIMES or not max(values):
        return 0.0
    return (max(values) - min(values)) / max(values)
