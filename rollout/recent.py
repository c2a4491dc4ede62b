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
        return self._since(at)[0]

    def per_second(self, seconds: float, now: float) -> float:
        """Return the rate over the last seconds, or the few more that the first count in them is about."""
        count, begun = self._since(now - seconds)
        return count / max(now - begun, LEAST_SECONDS)

    def _since(self, at: float) -> tuple[int, float]:
        """Return the count after a time, and from when on that was counted."""
        total, first = 0, at + LEAST_SECONDS
        for when, count in reversed(self._counts):
            if when <= at:
                return total, when
            total, first = total + count, when
        return total, max(at, first - LEAST_SECONDS)
