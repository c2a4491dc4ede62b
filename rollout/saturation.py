"""Whether answers take longer and longer without becoming more: then something is saturated, there or here.

It knows the answer times of late and the best they ever were, and what the last step of growth has led to. What is
called open are requests at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from rollout.recent import Recent

_FIRST_TIMES, _MOST_TIMES = 16, 64  # answer times that tell, and that are remembered
_SLACK_SECONDS = 0.05  # answer times below are as good as none
_HARDLY_SLOWER = 1.5  # times the best answer time
_SLOWER = 2.0  # growth must be worth it from here on
_MUCH_SLOWER = 4.0
_FORGET_SECONDS = 300.0  # in which the best answer time doubles, for it may have been luck
_WORTH = 1.1  # times as many answers as before a step of growth
_FEWER = 0.8  # times as many as before less was asked because they took long: that was no saturation
_RATE_SECONDS = 2.0  # over which answers a second are counted
_MIN_STEP_SECONDS = 0.5
_UNTOLD_STEP_SECONDS = 0.5  # where answers take longer, steps come nevertheless,
_UNTOLD = 4.0  # until so many times as many may be open as answers have told of
_PART = 0.25  # of what was open before a step, answered since, tells what it has led to
_LARGE_PART, _LEAST_TIMES = 0.5, 4  # the same, and no fewer, tell of the best answer time: the quickest come first


@dataclass
class _Step:
    """The last step of growth, or back."""

    at: float = -inf
    allowed: float = 0.0  # open, since
    most_open: int = 1  # before
    per_second: float = 0.0  # answers before
    is_back: bool = False


class Saturation:
    """See the module. Times are monotonic seconds."""

    def __init__(self, allowed: float) -> None:
        """So many requests may be open at first."""
        self._step = _Step(allowed=allowed)
        self._began_at = inf
        self._told = allowed  # open, that answers have told of
        self._answered = Recent(_RATE_SECONDS)
        self._seconds: deque[float] = deque(maxlen=_MOST_TIMES)
        self._seconds_since: deque[float] = deque(maxlen=_MOST_TIMES)  # of what was sent since the last step
        self._best_seconds = inf
        self._best_open = 0  # then

    @property
    def typical_seconds(self) -> float:
        """The middle one of the answer times of late; 0 before the first."""
        return median(self._seconds) if self._seconds else 0.0

    @property
    def allowed_at_step(self) -> float:
        """How many were allowed to be open by the last step."""
        return self._step.allowed

    @property
    def hardly_slower(self) -> bool:
        """Whether answers come about as quickly as they ever did."""
        return self.typical_seconds <= _HARDLY_SLOWER * self._best_seconds

    def took(self, seconds: Sequence[float], now: float) -> None:
        """Take answer times, of answers that have just come."""
        self._seconds.extend(seconds)
        self._seconds_since.extend(each for each in seconds if now - each >= self._step.at)

    def answered(self, count: int, now: float) -> None:
        """Take how many answers came since this was last called."""
        self._answered.add(count, now)

    def step(self, allowed: float, most_open: int, now: float, *, is_back: bool = False) -> None:
        """Take note that so many may be open from now on; at most so many were."""
        self._step = _Step(now, allowed, most_open, self._per_second(now), is_back=is_back)
        self._told = min(self._told, allowed) if is_back else self._told
        self._seconds_since.clear()

    def may_step(self, most_open: int, now: float) -> bool:
        """Tell whether the last step was worth it: what was sent since is answered as quickly, or more of it is.

        Before any of that is answered, tell whether it is time for one that goes not far beyond what was.
        """
        self._began_at = min(self._began_at, now)
        told = len(self._seconds_since) >= min(self._step.most_open * _PART, _MOST_TIMES)
        if not told:
            is_time = now >= max(self._step.at, self._began_at) + _UNTOLD_STEP_SECONDS
            return is_time and self.hardly_slower and self._step.allowed < _UNTOLD * self._told
        if now < self._step.at + _MIN_STEP_SECONDS:
            return False
        quick = median(self._seconds_since or [0.0]) <= _HARDLY_SLOWER * self._best_seconds
        if not quick and self._per_second(now) <= _WORTH * self._step.per_second:
            return False
        if len(self._seconds_since) >= min(max(self._step.most_open * _LARGE_PART, _LEAST_TIMES), _MOST_TIMES):
            self._note_best(most_open)
        self._told = self._step.allowed
        return True

    def is_met(self, most_open: int, passed: float, now: float) -> bool:
        """Tell whether more would only make answers slower. To be asked all the time, ``passed`` seconds apart."""
        if len(self._seconds) < _FIRST_TIMES:
            return False
        typical = self.typical_seconds
        if most_open <= self._best_open:
            self._best_seconds *= 2 ** (passed / _FORGET_SECONDS)
        self._note_best(most_open)
        return typical > _SLOWER * self._best and self._per_second(now) <= _WORTH * self._step.per_second

    def enough(self, most_open: int, now: float) -> float | None:
        """Return how many open ones give as many answers in twice the best time, when they take far longer than that.

        None when they do not; or when fewer were asked for already, and it only cost answers: then the best was luck.
        """
        typical, per_second = self.typical_seconds, self._per_second(now)
        if typical <= _MUCH_SLOWER * self._best:
            return None
        if self._step.is_back and per_second < _FEWER * self._step.per_second:
            self._best_seconds, self._best_open = typical, most_open
            return None
        return _SLOWER * self._best * per_second

    def _note_best(self, most_open: int) -> None:
        typical = self.typical_seconds
        if 0 < typical < self._best_seconds:
            self._best_seconds, self._best_open = typical, most_open

    @property
    def _best(self) -> float:
        return max(self._best_seconds, _SLACK_SECONDS)

    def _per_second(self, now: float) -> float:
        return self._answered.per_second(_RATE_SECONDS, now)
