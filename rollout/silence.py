"""An endpoint that takes nothing for now: when it is tried again, with how much, and what its silence tells of a rate.

It is tried with one request, less and less often; when that is taken, quickly with more. An endpoint that says that it
was asked too much (429) though next to nothing is open has given all that it gives in a stretch of time, a minute say:
what it took from the first request of that stretch on, by the time until it takes some again, is the rate it bears.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from rollout.recent import LEAST_SECONDS

_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.1, 4.0  # between two tries
_PROBE_SECONDS = 0.3  # in which a refusal comes, if one comes
_GROWTH = 2.0  # in each LEAST_SECONDS, of open requests, once one was taken
_SOON_SECONDS = 1.0  # or as long as an answer takes, if that is longer
_FEW = 4  # open requests; fewer say nothing of how many may be
_NEXT_TO_NOTHING = 0.1  # times as many open requests as were taken
_NOTED_LATE_SECONDS = 2 * LEAST_SECONDS  # at most: that a stretch has begun, and that one was taken again
_STRETCHES = (1.0, 5.0, 10.0, 15.0, 30.0, 60.0)  # seconds that endpoints go by; other silences have other reasons


@dataclass(frozen=True)
class Sent:
    """When requests were sent: the latest, and those that may still be refused."""

    latest: float
    unsettled: Sequence[float] = ()


class Silence:
    """See the module. Times are monotonic seconds."""

    def __init__(self) -> None:
        """Begin before the first request."""
        self.until = -inf  # nothing is sent before
        self._pause_seconds = 0.0
        self._since = -inf
        self._most_open = 0.0  # that were taken before
        self._refused_at = -inf
        self._probed_at = -inf
        self._ceiling = inf
        self._is_pending = False  # a refusal of the try may still come
        self._is_used_up = False
        self._stretch_began = inf
        self._taken = 0  # in this stretch

    @property
    def is_met(self) -> bool:
        """Whether it took nothing when it was last asked for less; until then it is not known how much it takes."""
        return self._pause_seconds > 0

    def took(self, count: int, now: float) -> None:
        """So many requests were taken."""
        self._taken += count
        if count > 0:
            self._stretch_began = min(self._stretch_began, now)

    def meet(self, open_requests: float, before: float, now: float, *, is_limit: bool) -> None:
        """Take a refusal when none was taken since the one before; so many are open, so many were ``before``.

        ``is_limit``: it said that too much was asked, not only that nothing can be done.
        """
        if not self.is_met:
            self._since, self._most_open, self._is_used_up = now, before, False
        self._is_used_up |= is_limit and open_requests <= _NEXT_TO_NOTHING * self._most_open
        self._refused_at, self._probed_at = now, inf
        self._pause_seconds = min(max(2 * self._pause_seconds, _FIRST_PAUSE_SECONDS), _MAX_PAUSE_SECONDS)
        self.until = now + self._pause_seconds

    def end(self) -> None:
        """Take note that it is known again how much is taken."""
        self._pause_seconds = 0.0

    def places(self, open_requests: int, enough: float, passed: float, now: float, *, sent: Sent) -> float:
        """Return how many requests may be open: one tells as much as all. ``enough``: as many as may be at all."""
        if not self.is_met:
            return inf
        self._is_pending = any(self.until <= at <= self._probed_at + _NOTED_LATE_SECONDS for at in sent.unsettled)
        if now < self.until or sent.latest < self.until:
            self._probed_at = now
            self._ceiling = open_requests + 1.0
        elif not self._is_over(now):
            self._ceiling = min(self._ceiling, open_requests)
        elif self._ceiling < enough:
            self._ceiling = (self._ceiling + 1) * _GROWTH ** (passed / LEAST_SECONDS)
        else:
            self.end()
        return self._ceiling

    def rate(self, now: float) -> tuple[float, float]:
        """Return the rate that a silence told of, when it is just over, and the seconds it goes by; else zeros."""
        if not self.is_met or not self._is_over(now) or self._stretch_began > self._refused_at:
            return 0.0, 0.0
        least = self._refused_at - self._stretch_began
        most = self._probed_at - self._stretch_began + _NOTED_LATE_SECONDS
        seconds = next((each for each in _STRETCHES if least <= each <= most), 0.0)
        found = self._taken / seconds if self._is_used_up and seconds else 0.0
        self._stretch_began, self._taken = now, 0
        return (found, seconds) if found else (0.0, 0.0)

    def drained(self, answer_seconds: float, enough: float, now: float) -> float:
        """Return how many may be open where it takes more as soon as open ones are answered; 0 where it does not."""
        soon = now - self._since < 2 * max(answer_seconds, _SOON_SECONDS)
        is_so = soon and self.is_met and self._is_over(now) and not self._is_used_up
        return self._ceiling if is_so and _FEW <= self._ceiling < enough else 0.0

    def _is_over(self, now: float) -> bool:
        return now >= self._probed_at + _PROBE_SECONDS and not self._is_pending
