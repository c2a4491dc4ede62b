"""Turns at this machine's processors, for what the sandboxes of this process do that is short: start, and run commands.

Begun by hundreds of rollouts at the same moment, such work is done for all of them at the same late moment, and what
they do next comes as one burst again. In turn it is done for most of them by half that time. Work that turns out long
gives its turn back, so that nobody waits for a command that sleeps. Sandboxes end without a turn: when a run is
interrupted, all of them have to be gone within seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

AT_ONCE = 4  # more would be in each other's way: a process has a processor or two
SHORT_SECONDS = 0.05  # many times what it takes to start a shell, or to run a command that only prints something

_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class Turn:
    """A turn that was got; it lasts until it is given back, and no longer than what is short."""

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns = turns
        self._timer = asyncio.get_running_loop().call_later(SHORT_SECONDS, self._end)
        self._lasts = True

    def give_back(self) -> None:
        """Let the next one have it. More than once is no error."""
        self._timer.cancel()
        self._end()

    def _end(self) -> None:
        if self._lasts:
            self._lasts = False
            self._turns.release()


async def take() -> Turn:
    """Wait for a turn; first come, first served."""
    loop = asyncio.get_running_loop()
    turns = _turns.get(loop) or _turns.setdefault(loop, asyncio.Semaphore(AT_ONCE))
    await turns.acquire()
    return Turn(turns)


@asynccontextmanager
async def taken() -> AsyncIterator[None]:
    """Have a turn meanwhile."""
    turn = await take()
    try:
        yield
    finally:
        turn.give_back()
