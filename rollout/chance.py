"""Whether refusals have anything to do with how much is asked.

Some endpoints refuse a share of all requests, whatever comes: to ask for less does not help, and goes on for ever. That
shows when far less is asked than before and as much of it is refused. Then this share is taken as given and more is
asked for again, on trial: when more than that is refused, there is a limit after all.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from rollout.recent import Recent

_FORGET_SECONDS = 600.0  # in which the most that was taken becomes half
_FAR_BELOW = 0.5  # of that
_SETTLE_SECONDS = 2.0  # a limit that has fallen is found in
_FAR_SECONDS = 2.5  # times that
_FAR_REQUESTS, _FAR_REFUSALS = 20, 3  # at least
_LEAST_SHARE, _MOST_SHARE = 0.025, 1 / 3  # refused; less comes from feeling for a limit, more from meeting one
_MARGIN = 1.5  # what was measured in so few
_MEMORY = 300.0  # requests, of the share that is refused
_SECOND = 1.0  # in which what is refused is compared with what is expected
_DEVIATIONS = 2.5  # above that (of a Poisson distribution) is no chance any more
_STRAY = 1  # refusal more: of few requests that happens, and it costs little
_TRIAL_SECONDS = 10.0
_END_SECONDS = 3.0  # of a trial; by then more must be taken than before it
_WORTH = 1.2  # times as much
_REST_SECONDS = 60.0  # after a trial that failed; each that fails doubles it


class Chance:
    """See the module. Times are monotonic seconds."""

    def __init__(self, far_below: float = _FAR_BELOW, settle_seconds: float = _SETTLE_SECONDS) -> None:
        """``far_below`` so much of the most that was asked, what is refused tells of chance, after so many seconds."""
        self._far_below = far_below
        self._settle_seconds = settle_seconds
        self._is_far = False
        self._most: list[float] = []  # of what was asked and taken
        self._believed = 0.0  # the share that is taken as given; 0: none
        self._share = 0.0  # of requests that were refused of late
        self._requests = Recent(_SECOND)
        self._refusals = Recent(_SECOND)
        self._far_since = 0.0
        self._far_requests = 0
        self._far_refusals = 0
        self._taken = self._taken_before = 0.0  # now, and before the trial; whatever comes first in what is taken
        self._trial_ends = 0.0
        self._rests_until = 0.0
        self._rest_seconds = _REST_SECONDS

    def saw(self, accepted: int, refused: int, taken: Sequence[float], seconds: float, now: float) -> None:
        """Take what happened in the last seconds, and how much is taken now: requests a second, open ones, or both."""
        requests = max(accepted + refused, 0)
        self._requests.add(requests, now)
        self._refusals.add(refused, now)
        memory = max(1 - requests / _MEMORY, 0.0)
        self._share = self._share * memory + refused / _MEMORY
        kept = 0.5 ** (seconds / _FORGET_SECONDS)
        self._most = [max(most * kept, now_taken) for most, now_taken in zip(self._most or taken, taken, strict=True)]
        far = (now_taken <= self._far_below * most for most, now_taken in zip(self._most, taken, strict=True))
        self._is_far = all(far)
        self._taken = taken[0]
        if not self._is_far:
            self._far_since, self._far_requests, self._far_refusals = now, 0, 0
        elif now >= self._far_since + self._settle_seconds:
            self._far_requests += requests
            self._far_refusals += refused

    def may_be(self, now: float) -> bool:
        """Tell whether it is yet to be seen what refusals mean, where far less is asked for than before."""
        few = max(_MOST_SHARE * self._far_requests, _FAR_REFUSALS - 1)
        return now >= self._rests_until and self._is_far and self._far_refusals <= few

    def is_suspected(self, now: float) -> bool:
        """Tell whether far less is asked for than before, and yet a share of it is refused."""
        return (
            now >= self._rests_until
            and now - self._far_since >= _FAR_SECONDS * self._settle_seconds
            and self._far_requests >= _FAR_REQUESTS
            and self._far_refusals >= _FAR_REFUSALS
            and _LEAST_SHARE <= self._far_refusals / self._far_requests <= _MOST_SHARE
        )

    def try_(self, now: float) -> None:
        """Take that share as given."""
        self._believed = self._share = _MARGIN * self._far_refusals / self._far_requests
        self._far_since, self._far_requests, self._far_refusals = now, 0, 0
        self._taken_before = self._taken
        self._trial_ends = self._rests_until = now + _TRIAL_SECONDS

    def is_tried(self, now: float) -> bool:
        """Tell whether more is asked for on trial."""
        return self._believed > 0 and now < self._trial_ends

    def explains(self, now: float) -> bool:
        """Tell whether no more is refused than is to be expected, and to ask for more was of use."""
        is_ending = self._trial_ends - _END_SECONDS <= now < self._trial_ends
        if not self._believed or (is_ending and self._taken < _WORTH * self._taken_before):
            return False
        expected = min(self._believed, _MARGIN * self._share) * self._requests.since(now - _SECOND)
        return self._refusals.since(now - _SECOND) <= expected + _DEVIATIONS * sqrt(expected) + _STRAY

    def fail(self, now: float) -> None:
        """There is a limit after all."""
        self._believed = 0.0
        self._rests_until = now + self._rest_seconds
        self._rest_seconds *= 2
