"""Where a worker's requests wait for their turn, and where what they meet with is noted for the controller.

Until the first pace is set everything goes through at once. A refusal closes the gate for a moment, before the
controller of all workers has had its say: what is on its way already is refused as well.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Self

from rollout.controller import MAX_WAIT_SECONDS, Seen
from rollout.levels import Levels
from rollout.wall import had_turn_at_once, waiting_for_turn

_BRAKE_SECONDS = 0.1
_FIRST_RAMP_SECONDS = 0.25  # in which the first places are taken up
_RAMP_SECONDS = 0.2  # more places
_SLOW_RAMP_SECONDS = 0.3  # after a refusal
_AS_GOOD_AS_ANY = 1e3  # requests a second, of one gate
_BURST_SECONDS = 0.02  # of the allowed rate may be saved up
_LATE = 1.5  # times as long as refusals took of late; later than that hardly one comes
_FORGETS = 0.9  # with each refusal: one that took long says little of the others
_MAX_REFUSAL_SECONDS = 5.0
_MOST_SECONDS = 256  # answer times of one report


class GateClosedError(Exception):
    """No request is sent any more: what the run may spend is spent."""


@dataclass
class Passage:
    """One request, from its turn to its answer. Whoever sends it says how that was."""

    sent_at: float
    left: Callable[[Passage], None]  # called at the block's end
    answered: bool = False
    refused: bool = False  # too many, or overloaded
    too_many: bool = False  # the former, and said so
    failed: bool = False  # which may mean the same
    wait_seconds: float = 0.0  # that was asked for, whatever the answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.left(self)


@dataclass
class Places:
    """How many requests may be open. New places are taken up one after another: when they are too many, few find out.

    Times are monotonic seconds.
    """

    _most: float = inf
    _first: float = inf  # how many of them may be taken when the ramp begins
    _at: float = -inf  # when it begins
    _ramp_seconds: float = _RAMP_SECONDS
    _power: int = 1  # of the share of that time: 2 begins slowly

    def allow(self, most: float, now: float) -> None:
        """Set how many there are; one more than there were may be taken at once."""
        if now >= self._at:
            if self._most == inf:
                self._first, self._ramp_seconds = 1, _FIRST_RAMP_SECONDS
            else:
                ended = now >= self._at + self._ramp_seconds or self._first >= self._most
                self._first = self.at(now) + 1
                self._ramp_seconds = _RAMP_SECONDS if ended else self._ramp_seconds
                self._power = 1
            self._at = now
        self._first = min(self._first, most)
        self._most = most

    def refused(self, still_open: int, now: float) -> None:
        """Take none for a moment, and then slowly."""
        self._first, self._at, self._ramp_seconds = still_open + 1, now + _BRAKE_SECONDS, _SLOW_RAMP_SECONDS
        self._power = 2

    def left(self, still_open: int, now: float) -> None:
        """Take note of a request that is over: what became free after a refusal is not taken up at once either."""
        if now < self._at:
            self._first = min(self._first, still_open + 1)

    def at(self, now: float) -> float:
        """Return how many may be open at this time."""
        if now < self._at:
            return 0
        if now >= self._at + self._ramp_seconds or self._first >= self._most or self._most == inf:
            return self._most
        share = (now - self._at) / self._ramp_seconds
        return self._first + (self._most - self._first) * share**self._power

    def when(self, wanted: float) -> float:
        """Return the time from which so many may be open; infinite when never."""
        if wanted > self._most:
            return inf
        if wanted <= self._first or self._first >= self._most:
            return self._at
        share = (wanted - self._first) / (self._most - self._first)
        return float(self._at + share ** (1 / self._power) * self._ramp_seconds)


class Lately:
    """Requests that were sent so lately that a refusal may still come. Times are monotonic seconds."""

    def __init__(self) -> None:
        """Expect none."""
        self._seconds = 0.0  # in which refusals come
        self._open: deque[float] = deque()  # when they were sent

    def sent(self, at: float) -> None:
        """Take note of a request."""
        self._open.append(at)
        self._forget(at)

    def over(self, sent_at: float) -> None:
        """Take note that one is answered, or refused."""
        if self._open and sent_at >= self._open[0]:
            self._open.remove(sent_at)

    def refused(self, seconds: float) -> None:
        """Take note of how long a refusal took."""
        self._seconds = min(max(_LATE * seconds, _FORGETS * self._seconds), _MAX_REFUSAL_SECONDS)

    def unsettled(self, now: float) -> tuple[float, ...]:
        """Return when they were sent."""
        self._forget(now)
        return tuple(self._open)

    def _forget(self, now: float) -> None:
        while self._open and self._open[0] < now - self._seconds:
            self._open.popleft()


@dataclass
class Gate:
    """See the module. Belongs to one event loop; ``on_refusal`` is called when there is something to tell at once."""

    on_refusal: Callable[[], None] = lambda: None
    _places: Places = field(default_factory=Places)
    _lately: Lately = field(default_factory=Lately)
    _per_second: float = inf
    _not_before: float = -inf
    _saved: float = 1.0  # requests that may be sent now
    _saved_at: float = field(default_factory=time.monotonic)
    _open: int = 0
    _levels: Levels = field(default_factory=Levels)
    _queue: deque[asyncio.Future[None]] = field(default_factory=deque)
    _pausing: int = 0
    _timer: asyncio.TimerHandle | None = None
    _sent: int = 0
    _sent_at: float = 0.0
    _answered: int = 0
    _refused: int = 0
    _too_many: int = 0
    _failed: int = 0
    _refused_since: float = 0.0
    _wait_seconds: float = 0.0
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_SECONDS))
    _sandbox_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_SECONDS))
    _closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def enter(self) -> Passage:
        """Wait for a turn; ``with`` it, send a request and read its answer. Raises GateClosedError."""
        if not self.closed and not self._queue and self._take():
            had_turn_at_once()
        else:
            with waiting_for_turn():
                await self._turn()
        self._sent_at = time.monotonic()
        self._lately.sent(self._sent_at)
        return Passage(self._sent_at, self._left)

    def pace(self, requests: float, per_second: float, not_before: float) -> None:
        """Set how many requests may be open, how many may be sent a second, and when the next one may be sent."""
        self._save()
        self._places.allow(requests, time.monotonic())
        if self._per_second > _AS_GOOD_AS_ANY >= per_second:
            self._saved = 0.0  # many gates must not send one each when all together may send next to none
        self._per_second, self._not_before = per_second, max(self._not_before, not_before)
        self._open_next()

    def sandbox_started(self, seconds: float) -> None:
        """Note how long a sandbox took to start."""
        self._sandbox_seconds.append(seconds)

    @property
    def closed(self) -> bool:
        """Whether nobody is let through any more."""
        return self._closed.is_set()

    def close(self) -> None:
        """Let nobody through any more, those who wait neither; what is on its way is answered."""
        self._closed.set()
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_exception(GateClosedError)

    async def pause(self, seconds: float) -> None:
        """Wait before another try, for no longer than there is any use in one."""
        self._pausing += 1
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), seconds)
        finally:
            self._pausing -= 1

    def report(self) -> Seen:
        """Return what was met with since the last report."""
        now = time.monotonic()
        unsettled = self._lately.unsettled(now)
        seen = Seen(
            sent=self._sent,
            answered=self._answered,
            refused=self._refused,
            too_many=self._too_many,
            failed=self._failed,
            refused_since=self._refused_since,
            wait_seconds=self._wait_seconds,
            seconds=tuple(round(seconds, 4) for seconds in self._seconds),
            open_requests=self._open,
            most_open=self._levels.told(now, doubtful=unsettled if self._refused else ()),
            told_at=now,
            waiting_requests=len(self._queue),
            pausing_requests=self._pausing,
            sent_at=self._sent_at,
            unsettled=unsettled,
            sandbox_seconds=tuple(round(seconds, 4) for seconds in self._sandbox_seconds),
        )
        self._sent = self._answered = self._refused = self._too_many = self._failed = 0
        self._refused_since = self._wait_seconds = 0.0
        self._seconds.clear()
        self._sandbox_seconds.clear()
        return seen

    async def _turn(self) -> None:
        if self.closed:
            raise GateClosedError
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        self._open_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had got its turn already
                self._open -= 1
                self._levels.open(self._open, time.monotonic())
                self._open_next()
            raise

    def _take(self) -> bool:
        """Take a turn if there is one now."""
        now = time.monotonic()
        if self._open + 1 > self._places.at(now) or now < self._not_before:
            return False
        if self._per_second < inf:
            self._save()
            if self._saved < 1:
                return False
            self._saved -= 1
        self._open += 1
        self._levels.open(self._open, now)
        self._sent += 1
        return True

    def _save(self) -> None:
        now = time.monotonic()
        most = max(1.0, self._per_second * _BURST_SECONDS)
        passed, self._saved_at = now - self._saved_at, now
        self._saved = min(self._saved + passed * self._per_second, most) if self._per_second < inf else 1.0

    def _open_next(self) -> None:
        """Let through who may go, and look again when the next one may."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        while self._queue:
            if self._queue[0].done():  # its task was cancelled
                self._queue.popleft()
            elif self._take():
                self._queue.popleft().set_result(None)
            else:
                break
        if self._queue and (delay := self._delay()) < inf:
            self._timer = asyncio.get_running_loop().call_later(delay, self._open_next)

    def _delay(self) -> float:
        """Return when time alone may open the gate; infinite when a request has to leave first."""
        self._save()
        now = time.monotonic()
        wait = max(self._places.when(self._open + 1), self._not_before) - now
        if self._per_second < inf:
            wait = max(wait, (1 - self._saved) / max(self._per_second, 1e-6))
        return max(wait, 0.001)

    def _left(self, passage: Passage) -> None:
        self._note(passage, time.monotonic())
        self._open_next()

    def _note(self, passage: Passage, now: float) -> None:
        self._open -= 1
        if passage.refused or passage.failed:
            self._levels.refused(passage.sent_at, self._open, now)
        else:
            self._levels.open(self._open, now)
        self._lately.over(passage.sent_at)
        self._places.left(self._open, now)
        self._wait_seconds = max(self._wait_seconds, passage.wait_seconds)
        if passage.wait_seconds:
            self._not_before = max(self._not_before, now + min(passage.wait_seconds, MAX_WAIT_SECONDS))
        if passage.answered:
            self._answered += 1
            self._seconds.append(now - passage.sent_at)
        if passage.refused or passage.failed:
            self._refused_since = max(self._refused_since, passage.sent_at)
        self._too_many += passage.too_many
        self._failed += passage.failed
        if not passage.refused:
            if self._failed == passage.failed == 1:
                self.on_refusal()
            return
        self._lately.refused(now - passage.sent_at)
        self._places.refused(self._open, now)
        self._refused += 1
        if self._refused == 1:
            self.on_refusal()
