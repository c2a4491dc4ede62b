"""What was counted in the last few seconds."""

from __future__ import annotations

from collections import deque

LEAST_SECONDS = 0.2  # a rate is taken over; counts come about as often


class Recent:
    """Counts with the times they were told at, in monotonic seconds and in their order."""

    def __init__(self, seconds: float) -> None:
        """Remember what was told in the last ``seconds``, and the count before."""
        self._seconds = seconds
        self._counts: deque[tuple[float, int]] = deque()

    def add(self, count: int, now: float) -> None:
        """Take a count of what happened since the last one."""
        self._counts.append((now, count))
        while len(self._counts) > 1 and self._counts[1][0] < now - self._seconds:
            self._counts.popleft()

    def since(self, at: float) -> int:
        """Return how many were told after a time."""
        return sum(count for when, count in self._counts if when > at)

    def per_second(self, seconds: float, now: float) -> float:
        """Return the rate over the last seconds, or the few more that the first count in them is about."""
        at = now - seconds
        begun = max((when for when, _ in self._counts if when <= at), default=None)
        if begun is None:
            begun = max(at, self._counts[0][0] - LEAST_SECONDS) if self._counts else at
        return self.since(begun) / max(now - begun, LEAST_SECONDS)
