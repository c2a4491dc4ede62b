"""How many requests were open at once, stretch of time by stretch of time: by each worker, and by all together.

The most that each worker had open of late, added up, is more than ever was open at once. So each tells what it had open
in every stretch, and what falls into the same one is added. A request that is refused was never taken: it is taken out
again of the stretches that it was waited for in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

STRETCH_SECONDS = 0.02
_KEPT = 32  # stretches


@dataclass(frozen=True)
class Told:
    """The most that one worker had open in each of the latest stretches; the last one began before ``at``."""

    most: Sequence[int]
    at: float

    def within(self, stretch: int) -> int:
        """Return the most of a stretch; of one that is yet to be told of the latest one's, of one too long ago none."""
        back = max(_stretch(self.at) - stretch, 0) + 1
        return self.most[-back] if back <= len(self.most) else 0


class Levels:
    """One worker's. Times are monotonic seconds."""

    def __init__(self) -> None:
        """Begin with nothing open."""
        self._open = 0
        self._most: deque[int] = deque([0], maxlen=_KEPT)
        self._stretch = 0  # of the last one

    def open(self, count: int, now: float) -> None:
        """So many are open from now on."""
        self._reach(now)
        self._open = count
        self._most[-1] = max(self._most[-1], count)

    def refused(self, sent_at: float, still_open: int, now: float) -> None:
        """One that was sent then is not taken; so many are open now."""
        self._reach(now)
        self._open = still_open
        for back in self._since(sent_at):
            self._most[-back] -= 1

    def told(self, now: float, doubtful: Iterable[float] = ()) -> list[int]:
        """Return the most that were open in each of the latest stretches, the last one that of ``now``.

        Those that were sent at ``doubtful`` times are not counted: they may yet be refused.
        """
        self._reach(now)
        told = list(self._most)
        for sent_at in doubtful:
            for back in self._since(sent_at):
                told[-back] -= 1
        return told

    def _since(self, sent_at: float) -> range:
        """Return the stretches that something was open in, counted from the end."""
        return range(1, min(self._stretch - _stretch(sent_at) + 1, len(self._most)) + 1)

    def _reach(self, now: float) -> None:
        stretch = _stretch(now)
        for _ in range(min(stretch - self._stretch, _KEPT)):
            self._most.append(self._open)
        self._stretch = max(stretch, self._stretch)


def most_together(workers: Iterable[Told], since: float, until: float) -> int:
    """Return the most that all workers had open at once, as far as they have told."""
    told = list(workers)
    stretches = range(_stretch(since), _stretch(until) + 1)
    return max((sum(each.within(stretch) for each in told) for stretch in stretches), default=0)


def _stretch(at: float) -> int:
    return int(at / STRETCH_SECONDS)
