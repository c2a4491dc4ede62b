"""How much may be asked of something whose limit only shows when it is met.

While the limit is unknown the bound grows as TCP's window does in its slow start. Once it was met, it moves as the
window of CUBIC does (RFC 9438): back to where the limit was, quickly first and then slower and slower, and beyond it
slowly first and then faster and faster, for limits change.
"""

from __future__ import annotations

from collections import deque
from math import inf

START_FACTOR = 2.0  # of one step of slow start
_DEPTH = 0.03  # of the first cut; each one that follows soon goes twice as deep
_WORST = 0.5  # of a bound may go at once, whatever was measured
_STEEPNESS = 0.005  # per cubic second: a seventh more after three seconds, twice as much after six
_GONE = (
    1.06  # times the limit is beyond it, where it shows at once; where it shows late (what was saved up goes first),
)
_LONG_GONE = 1.5  # times it
_NOTED_SECONDS = 10.0
_CHEAP_SECONDS = 0.12  # that a refusal costs, where to feel for more may be as quick as said above
_MOST_PATIENCE = 40.0  # times as slowly
_TELLING_ANSWERS, _TELLING_SECONDS = 10, 1.0  # fewer since the last cut say nothing of where the limit is


class Bound:
    """See the module. Whatever unit is asked for: ``value`` is the bound. Times are monotonic seconds."""

    def __init__(self, value: float, floor: float, near: float, probe_answers: float, slowest: float = 0.1) -> None:
        """Never go below ``floor``; rest at the share ``near`` of where the limit was met.

        Beyond it, growth is as fast as the module says when there are ``probe_answers`` a second, and slower in
        proportion when there are fewer, but for ``slowest`` times as fast: each refusal weighs more among them.
        """
        self.value = value
        self._floor = floor
        self._near = near
        self._probe_answers = probe_answers
        self._slowest = slowest
        self._limit = inf  # where it rests
        self._rest = inf  # the same, however unsure
        self._age = 0.0  # seconds since it was there again; negative before
        self._depth = 0.0
        self._cut_at = -inf
        self._allowed = 0.0  # since the last cut
        self._used = 0.0
        self._seconds = 1.0  # of the window of time that it is known from
        self._patience = 1.0
        self._times_met = 0  # since it was last unknown
        self._taken: deque[tuple[float, float]] = deque()

    @property
    def known(self) -> bool:
        """Whether it is known where the limit is. It may be lower than it was, and yet not known: see ``unsure``."""
        return self._limit < inf

    @property
    def is_told(self) -> bool:
        """Whether the limit is one that was found otherwise; see ``set``."""
        return self._seconds > 1

    @property
    def is_least(self) -> bool:
        """Whether it is as low as it can be, but for what does not make another whole one."""
        return self.value < 1.5 * self._floor

    @property
    def was_cut(self) -> bool:
        """Whether it was cut since ``settle``."""
        return self._depth > 0

    @property
    def has_regrown(self) -> bool:
        """Whether it is back where it rests; what is refused there says that this is too high."""
        return self.value >= 0.99 * self._rest

    @property
    def was_met_once(self) -> bool:
        """Whether nothing but one refusal says that it is there; what was found otherwise is surer than that."""
        return self._times_met == 1 and not self.is_told

    def is_far_beyond(self, taken: float) -> bool:
        """Tell whether so much more is taken than where the limit was that it must be elsewhere, or nowhere."""
        return taken > _GONE * self._limit

    @property
    def measured(self) -> float:
        """Where the limit is, from what was used of what was allowed since the last cut (see ``use``)."""
        return self.value * self._used / self._allowed if self._allowed else self.value

    def use(self, used: float, seconds: float) -> None:
        """Of what the bound, as a rate, allowed in these seconds, so much was used."""
        if self.known:
            self._allowed += self.value * seconds
            self._used += used

    def is_measured(self, now: float) -> bool:
        """Tell whether ``measured`` is more than a guess."""
        return self._used >= _TELLING_ANSWERS and now - self._cut_at >= _TELLING_SECONDS

    def took(self, taken: float, now: float) -> None:
        """Note that so much was taken at one time, and nothing refused."""
        self._taken.append((now, taken))
        while self._taken[0][0] < now - _NOTED_SECONDS:
            self._taken.popleft()

    @property
    def most(self) -> float:
        """The most that was taken of late."""
        return max((taken for _, taken in self._taken), default=0.0)

    def nearness(self, taken: float) -> float:
        """Return the share that this is of the most that was taken of late."""
        return taken / self.most if self.most else 1.0

    def settle(self) -> None:
        """Let the next cut be a slight one again."""
        self._depth = 0.0

    def cut(self, limit: float, now: float, *, lost_seconds: float | None = None, unsure: bool = False) -> None:
        """Go below a limit that was met.

        ``lost_seconds``: what that has cost; the more, the more seldom it is felt for more. None: as seldom as before.
        ``unsure``: so little was asked yet that it may be far above; look for it again from below.
        """
        if lost_seconds is not None:
            patience = min(lost_seconds / _CHEAP_SECONDS, _MOST_PATIENCE)
            self._patience = max(min(patience, 2 * self._patience if self.known else patience / 4), 1.0)
        self._depth = min(2 * self._depth or _DEPTH, _WORST)
        least = self._floor if unsure or self.value == inf else max(self.value * _WORST, self._floor)
        rest = max(min(self.value, max(limit, least)) * self._near, self._floor)
        self.value = max(rest * (1 - self._depth), self._floor)
        self._times_met += 1
        unsure &= rest != self._rest  # nobody meets the same limit twice by chance
        self._rest = rest
        if self.known or not unsure:
            self._limit = rest
            self._age = -((max(1 - self.value / rest, 0.0) / _STEEPNESS) ** (1 / 3))
        self._begin_to_measure(rest, now)

    def set(self, limit: float, seconds: float, now: float) -> None:
        """Take a limit that was found otherwise. It goes by a window of so many seconds: to go beyond shows as late."""
        self.value = self._limit = self._rest = max(limit * self._near, self._floor)
        self._age = self._depth = 0.0
        self._seconds = max(seconds, 1.0)
        self._begin_to_measure(self.value, now)

    def at_least(self, taken: float) -> None:
        """So much was taken after all: the limit cannot be below."""
        if self.known and taken * self._near > self._limit:
            self._limit = self._rest = taken * self._near
            self.value = max(self.value, self._limit * (1 - _DEPTH))

    def lower(self, value: float) -> None:
        """Take a bound that holds for another reason, where it is the lower one."""
        self.value = min(self.value, value)

    def forget(self) -> None:
        """Take the limit for unknown again."""
        self._limit = self._rest = inf
        self._times_met = 0
        self._seconds = 1.0

    def grow(self, seconds: float, per_second: float) -> None:
        """Nobody minded, though all of it was used, with so many answers a second."""
        if not self.known:
            self.start(seconds)
            return
        if self._age >= 0:
            seconds *= min(max(per_second / self._probe_answers, self._slowest), 1 / self._patience, 1 / self._seconds)
        self._age += seconds
        self.value = max(self._limit * (1 + _STEEPNESS * self._age**3), self.value)
        if self.value > _LONG_GONE * self._limit:
            self.forget()

    def _begin_to_measure(self, taken: float, now: float) -> None:
        self._taken = deque([(now, taken)])
        self._allowed = self._used = 0.0
        self._cut_at = now

    def start(self, steps: float = 1.0) -> None:
        """Grow as it does while the limit is unknown."""
        self.value *= START_FACTOR**steps
