"""A run against an endpoint with limits, played through in simulated time: what the controller makes of it."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Protocol

from rollout.controller import Controller, Host, Pace, Seen
from rollout.gate import Lately, Places
from rollout.levels import Levels

TELL_SECONDS = 0.2
BURST_SECONDS = 0.02


class Limit(Protocol):
    """What the endpoint minds."""

    def takes(self, _now: float, _open_requests: int, /) -> bool:
        """Take a request, or refuse it."""

    def retry_after(self, _now: float, /) -> float:
        """Return the wait it asks for when it refuses."""


@dataclass
class OpenAtOnce:
    """So many requests at once."""

    most: Callable[[float], int]

    def takes(self, now: float, open_requests: int) -> bool:
        return open_requests < self.most(now)

    def retry_after(self, _now: float) -> float:
        return 0.0


@dataclass
class Bucket:
    """So many a second, what is not used being saved up to ``burst``."""

    rate: Callable[[float], float]
    burst: float
    says_when: bool = False
    saved: float = inf
    at: float = 0.0

    def takes(self, now: float, _open_requests: int) -> bool:
        self.saved = min(self.burst, self.saved + (now - self.at) * self.rate(now))
        self.at = now
        if self.saved < 1:
            return False
        self.saved -= 1
        return True

    def retry_after(self, now: float) -> float:
        return (1 - self.saved) / self.rate(now) if self.says_when else 0.0


@dataclass
class Window:
    """So many in every window of time, and none until the next one begins when they are used up."""

    seconds: float
    requests: int
    says_when: bool = False
    window: int = -1
    taken: int = 0

    def takes(self, now: float, _open_requests: int) -> bool:
        if int(now / self.seconds) != self.window:
            self.window, self.taken = int(now / self.seconds), 0
        self.taken += 1
        return self.taken <= self.requests

    def retry_after(self, now: float) -> float:
        return self.seconds - now % self.seconds if self.says_when else 0.0


@dataclass
class Sliding:
    """So many in any stretch of time that is so long."""

    seconds: float
    requests: int
    times: deque[float] = field(default_factory=deque)

    def takes(self, now: float, _open_requests: int) -> bool:
        while self.times and self.times[0] <= now - self.seconds:
            self.times.popleft()
        if len(self.times) >= self.requests:
            return False
        self.times.append(now)
        return True

    def retry_after(self, _now: float) -> float:
        return 0.0


@dataclass
class Chance:
    """It refuses a share of all requests, whatever comes, and what ``limit`` does not take."""

    share: float
    limit: Limit
    wait_seconds: float = 0.0  # that it asks for
    random: Random = field(default_factory=lambda: Random(7))

    def takes(self, now: float, open_requests: int) -> bool:
        return self.random.random() >= self.share and self.limit.takes(now, open_requests)

    def retry_after(self, _now: float) -> float:
        return self.wait_seconds


@dataclass
class Down:
    """It refuses everything between two moments."""

    since: float
    until: float
    says_too_many: bool = False

    def takes(self, now: float, _open_requests: int) -> bool:
        return not self.since < now < self.until

    def retry_after(self, _now: float) -> float:
        return 0.0


@dataclass
class Once:
    """It refuses one request, the first from a moment on."""

    since: float
    wait_seconds: float  # that it asks for
    refused: bool = False

    def takes(self, now: float, _open_requests: int) -> bool:
        if self.refused or now < self.since:
            return True
        self.refused = True
        return False

    def retry_after(self, _now: float) -> float:
        return self.wait_seconds


@dataclass
class Run:
    """An endless supply of rollouts that do nothing but ask."""

    limit: Limit
    latency: Callable[[Random], float]
    seconds: float = 60.0
    host: Host = field(default_factory=Host)
    controller: Controller = field(default_factory=Controller)
    random: Random = field(default_factory=lambda: Random(1))
    refusal_seconds: float = 0.02
    fails: bool = False  # what it does not take gets a server's error
    answered: Counter[int] = field(default_factory=Counter)  # by second
    refused: int = 0
    pace: Pace = field(default_factory=lambda: Pace(0, 0, inf, 0, ""))
    _events: list[tuple[float, int, str, float]] = field(default_factory=list)
    _number: int = 0
    _running: int = 0
    _waiting: int = 0
    _retrying: int = 0
    _open: int = 0
    _accepted: int = 0
    _sent_at: float = -1.0
    _saved: float = 1.0
    _saved_at: float = 0.0
    _places: Places = field(default_factory=Places)
    _turn_comes: bool = False
    _report: dict[str, float] = field(default_factory=dict)
    _times: deque[float] = field(default_factory=deque)
    _lately: Lately = field(default_factory=Lately)
    _levels: Levels = field(default_factory=Levels)

    def play(self) -> Run:
        self._forget()
        self._at(0.0, "tell")
        while self._events and self._events[0][0] <= self.seconds:
            now, _, what, sent_at = heapq.heappop(self._events)
            getattr(self, f"_on_{what}")(now, sent_at)
            self._send(now)
        return self

    @property
    def refused_share(self) -> float:
        return self.refused / (self.refused + self.answered.total())

    def rate(self, since: int, until: int) -> float:
        """Return the answers a second between two moments."""
        return sum(self.answered[second] for second in range(since, until)) / (until - since)

    @property
    def _says_too_many(self) -> bool:
        return not self.fails and getattr(self.limit, "says_too_many", True)

    def _on_tell(self, now: float, sent_at: float) -> None:
        report, seconds = self._report, tuple(self._times)
        seen = Seen(
            sent=int(report["sent"]),
            answered=int(report["answered"]),
            refused=0 if self.fails else int(report["refused"]),
            too_many=int(report["refused"]) if self._says_too_many else 0,
            failed=int(report["refused"]) if self.fails else 0,
            refused_since=report["since"],
            wait_seconds=report["wait"],
            seconds=seconds,
            open_requests=self._open,
            most_open=self._levels.told(now, doubtful=self._lately.unsettled(now) if report["refused"] else ()),
            told_at=now,
            waiting_requests=self._waiting,
            pausing_requests=self._retrying,
            sent_at=self._sent_at,
            unsettled=self._lately.unsettled(now),
        )
        self._forget()
        self.controller.seen(0, seen, now)
        self.pace = self.controller.decide(self._running, self.host, now)
        self._places.allow(round(self.pace.requests), now)
        started = max(self.pace.rollouts - self._running, 0)
        self._running += started
        self._waiting += started
        if sent_at == 0.0:
            self._at(now + TELL_SECONDS, "tell")

    def _on_answer(self, now: float, sent_at: float) -> None:
        self._open -= 1
        self._levels.open(self._open, now)
        self._lately.over(sent_at)
        self._places.left(self._open, now)
        self._accepted -= 1
        self.answered[int(now)] += 1
        self._report["answered"] += 1
        self._times.append(now - sent_at)
        if self._running > self.pace.rollouts:
            self._running -= 1
        else:
            self._waiting += 1

    def _on_refusal(self, now: float, sent_at: float) -> None:
        self._open -= 1
        self._levels.refused(sent_at, self._open, now)
        self._lately.over(sent_at)
        self._lately.refused(now - sent_at)
        self.refused += 1
        if not self.fails:
            self._places.refused(self._open, now)
        wait = self.limit.retry_after(now)
        report = self._report
        report["refused"] += 1
        report["since"] = max(report["since"], sent_at)
        report["wait"] = max(report["wait"], wait)
        if report["refused"] == 1:
            self._at(now + 0.01, "tell", now)
        self._retrying += 1
        self._at(now + max(wait, self.random.uniform(0.5, 1.0)), "retry")

    def _on_retry(self, _now: float, _sent_at: float) -> None:
        self._retrying -= 1
        self._waiting += 1

    def _on_turn(self, _now: float, _sent_at: float) -> None:
        self._turn_comes = False

    def _send(self, now: float) -> None:
        per_second = self.pace.per_second
        passed, self._saved_at = now - self._saved_at, now
        most = max(1.0, per_second * BURST_SECONDS)
        self._saved = min(self._saved + passed * per_second, most) if per_second < inf else 1e9
        places = self._places.at(now) if now >= self.pace.not_before else 0
        while self._waiting and self._open + 1 <= places and self._saved >= 1:
            self._saved -= 1
            self._waiting -= 1
            self._report["sent"] += 1
            if self.limit.takes(now, self._accepted):
                self._accepted += 1
                self._at(now + self.latency(self.random), "answer", now)
            else:
                self._at(now + self.refusal_seconds, "refusal", now)
            self._open += 1
            self._levels.open(self._open, now)
            self._lately.sent(now)
            self._sent_at = now
        when = max(self._places.when(self._open + 1), self.pace.not_before, now + max(1 - self._saved, 0) / per_second)
        if self._waiting and when < inf and not self._turn_comes:
            self._turn_comes = True
            self._at(max(when, now) + 1e-4, "turn")

    def _forget(self) -> None:
        self._report = {"sent": 0, "answered": 0, "refused": 0, "since": 0.0, "wait": 0.0}
        self._times.clear()

    def _at(self, when: float, what: str, sent_at: float = 0.0) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, what, sent_at))
