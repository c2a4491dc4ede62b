"""Who may have pages of the worker's browser open: so many rollouts at once, while others wait in line.

A rollout that does nothing with its pages for a while gives them up for one that waits, the longest idle first, and
after some minutes in any case. What is given up counts as taken until the pages are closed.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from tools.own_time import in_line

IDLE_SECONDS = 30.0  # after which pages are given up for others that wait
MAX_IDLE_SECONDS = 300.0  # and in any case: they take memory
WAIT_SECONDS = 60.0  # for a turn: pages that nobody uses when the wait begins are given up within it


class Holder(Protocol):
    """Whoever has a place."""

    def idle_seconds(self) -> float:
        """Return for how long nothing was done with the pages; 0.0 while something is."""

    def give_up(self) -> None:
        """Begin to close the pages; the place is left at once."""


class Places:
    """The places of one browser, on one event loop."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._held: set[Holder] = set()
        self._leaving = 0  # whose pages are being closed
        self._waiting: dict[Holder, asyncio.Future[None]] = {}  # first come, first served
        self._timer: asyncio.TimerHandle | None = None

    @property
    def free(self) -> int:
        """How many nobody has."""
        return self._number - len(self._held) - self._leaving

    async def take(self, holder: Holder) -> None:
        """Wait in line for a place. Raises TimeoutError."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting[holder] = turn
        self._look()
        try:
            with in_line():
                async with asyncio.timeout(WAIT_SECONDS):
                    await turn
        except (asyncio.CancelledError, TimeoutError):
            self._waiting.pop(holder, None)
            self._held.discard(holder)  # it may have got its turn in the same moment
            self._look()
            raise

    def leave(self, holder: Holder) -> None:
        """Give a place back for when its pages are closed, which ``closed`` is to tell."""
        self._held.remove(holder)
        self._leaving += 1

    def closed(self) -> None:
        """Say that the pages of one who left are closed."""
        self._leaving -= 1
        self._look()

    def stop(self) -> None:
        """Have nobody give up anything any more."""
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Let in who may come in, have given up what is idle for too long, and look again when more will be."""
        self.stop()
        self._waiting = {holder: turn for holder, turn in self._waiting.items() if not turn.done()}
        while self._waiting and self.free > 0:
            holder = next(iter(self._waiting))
            self._held.add(holder)
            self._waiting.pop(holder).set_result(None)
        wanted = len(self._waiting) - self._leaving
        for holder in sorted(self._held, key=lambda held: held.idle_seconds(), reverse=True):
            left_seconds = (IDLE_SECONDS if wanted > 0 else MAX_IDLE_SECONDS) - holder.idle_seconds()
            if left_seconds > 0:
                self._timer = asyncio.get_running_loop().call_later(left_seconds, self._look)
                break
            holder.give_up()
            wanted -= 1
