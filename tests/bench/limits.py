"""Limits of an endpoint that it tells nobody: what it refuses, and how much of what it could do it was asked to do.

Written as ``at_once:40``, ``a_second:80``, ``in_any_second:80``, ``tokens_a_minute:120000`` or
``tokens_in_any_minute:120000``; with ``;10:20`` behind it, the limit is 20 from the tenth second on. What is not used
of the second and the fourth is saved up for a second; the third and the fifth look back a second, or a minute.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

REQUEST_TOKENS = 1020  # as the endpoint counts one request
KINDS = ("at_once", "a_second", "in_any_second", "tokens_a_minute", "tokens_in_any_minute")
_SAVED_SECONDS = 1.0


@dataclass
class Limit:
    """One limit from the first request on. Times are monotonic seconds."""

    kind: str
    steps: list[tuple[float, float]]  # from which second on, how much
    refused: int = 0
    accepted: int = 0
    used: float = 0.0  # request-seconds of a limit at once, requests of a rate
    _first: float = 0.0
    _last: float = 0.0
    _open: int = 0
    _saved: float = inf
    _at: float = 0.0
    _times: deque[float] = field(default_factory=deque)

    @classmethod
    def read(cls, text: str) -> Limit:
        """Raise ValueError for what is not written as above."""
        first, *changes = text.split(";")
        kind, _, amount = first.partition(":")
        if kind not in KINDS:
            raise ValueError(f"{kind}: no limit; there are {', '.join(KINDS)}")
        steps = [(0.0, float(amount))]
        for change in changes:
            second, _, amount = change.partition(":")
            steps.append((float(second), float(amount)))
        return cls(kind, steps)

    def take(self, now: float, seconds: float) -> bool:
        """Take a request that will be answered after so many seconds, or refuse it."""
        self._first = self._first or now
        self._last = now
        takes = {"at_once": self._takes_one_more, "in_any_second": self._takes_in_a_window}
        takes["tokens_in_any_minute"] = self._takes_in_a_window
        if not takes.get(self.kind, self._takes_from_what_is_saved)(now):
            self.refused += 1
            return False
        self.accepted += 1
        self.used += seconds if self.kind == "at_once" else 1
        return True

    @property
    def reached(self) -> float:
        """Return the share of what was possible, from the first request to the last one that came."""
        possible = 0.0
        ends = [second for second, _ in self.steps[1:]] + [inf]
        for (start, amount), end in zip(self.steps, ends, strict=True):
            possible += self._rate(amount) * max(min(end, self._last - self._first) - start, 0.0)
        return self.used / possible if possible else 0.0

    @property
    def refused_share(self) -> float:
        return self.refused / (self.refused + self.accepted) if self.refused else 0.0

    def ended(self) -> None:
        """A request that was taken has its answer, or nobody waits for it any more."""
        self._open -= 1

    def _takes_one_more(self, now: float) -> bool:
        if self._open >= self._amount(now):
            return False
        self._open += 1
        return True

    def _takes_from_what_is_saved(self, now: float) -> bool:
        rate = self._rate(self._amount(now))
        self._saved = min(self._saved + (now - self._at) * rate, rate * _SAVED_SECONDS)
        self._at = now
        if self._saved < 1:
            return False
        self._saved -= 1
        return True

    def _takes_in_a_window(self, now: float) -> bool:
        seconds = 60.0 if self._is_of_tokens else 1.0
        while self._times and self._times[0] <= now - seconds:
            self._times.popleft()
        if len(self._times) + 1 > self._rate(self._amount(now)) * seconds:
            return False
        self._times.append(now)
        return True

    @property
    def _is_of_tokens(self) -> bool:
        return self.kind.startswith("tokens")

    def _amount(self, now: float) -> float:
        return [amount for second, amount in self.steps if second <= now - self._first][-1]

    def _rate(self, amount: float) -> float:
        return amount / 60 / REQUEST_TOKENS if self._is_of_tokens else amount
