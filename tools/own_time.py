"""The time that work takes of its own: what it waits in a line of ours counts against no limit of the work.

Hundreds of rollouts share a rate, a browser, a few readers of pages; a turn may be minutes away, and that is nobody's
fault. Whoever makes others wait says so without being handed their clocks: a clock belongs to the task that it was made
in and to those begun in it, and stands still while any of these waits. What bounds such waits is the rollout's wall
time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


def _nothing() -> None:
    pass


@dataclass
class OwnTime:
    """A clock that can stand still. Only what passes between two looks at it means something."""

    now: Callable[[], float] = time.monotonic
    left_out: float = 0.0  # seconds that it stood still, in waits that are over
    changed: Callable[[], None] = _nothing  # called when it stops and when it goes on
    _waits: int = 0
    _stopped_at: float = 0.0

    def __call__(self) -> float:
        """Return what it shows."""
        return (self._stopped_at if self.stands else self.now()) - self.left_out

    @property
    def stands(self) -> bool:
        """Whether it stands still."""
        return self._waits > 0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let it stand still; blocks may overlap."""
        self._waits += 1
        if self._waits == 1:
            self._stopped_at = self.now()
            self.changed()
        try:
            yield
        finally:
            self._waits -= 1
            if not self.stands:
                self.left_out += self.now() - self._stopped_at
                self.changed()


_CLOCKS: ContextVar[tuple[OwnTime, ...]] = ContextVar("clocks", default=())


@contextmanager
def own_time() -> Iterator[OwnTime]:
    """Give a clock that stands still while the block, or a task begun in it, waits in line."""
    clock = OwnTime()
    token = _CLOCKS.set((*_CLOCKS.get(), clock))
    try:
        yield clock
    finally:
        _CLOCKS.reset(token)


async def wait_by(clock: OwnTime, seconds: float, task: asyncio.Future[Any]) -> None:
    """Wait until a task is done, or so much time has passed by that clock; either way it goes on as it is.

    What ``asyncio.wait`` under ``timeout_by`` does, without its generators: it is done for each call of a tool.
    """
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    timer: asyncio.TimerHandle | None = None

    def end(_: object = None) -> None:
        if not over.done():
            over.set_result(None)

    def reset() -> None:
        nonlocal timer
        if timer:
            timer.cancel()
        timer = None if clock.stands else loop.call_at(ends_at + clock.left_out, end)

    ends_at = loop.time() + seconds - clock.left_out
    clock.changed = reset
    reset()
    task.add_done_callback(end)
    try:
        await over
    finally:
        task.remove_done_callback(end)
        clock.changed = _nothing  # a task that was left behind may be waiting still
        if timer:
            timer.cancel()


@asynccontextmanager
async def timeout_by(clock: OwnTime, seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Do what ``asyncio.timeout`` does, by that clock."""
    end = asyncio.get_running_loop().time() + seconds - clock.left_out
    async with asyncio.timeout_at(end + clock.left_out) as timer:

        def reset() -> None:
            if not timer.expired():
                timer.reschedule(None if clock.stands else end + clock.left_out)

        clock.changed = reset
        try:
            yield timer
        finally:
            clock.changed = _nothing  # a task that was left behind may be waiting still


@asynccontextmanager
async def own_timeout(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Do what ``asyncio.timeout`` does, but for the time that the block, or a task begun in it, waits in line."""
    with own_time() as clock:
        async with timeout_by(clock, seconds) as timer:
            yield timer


@contextmanager
def in_line() -> Iterator[None]:
    """Say that the block waits for a turn that is ours to give."""
    with ExitStack() as stops:
        for clock in _CLOCKS.get():
            stops.enter_context(clock.stopped())
        yield


@asynccontextmanager
async def turn(places: asyncio.Semaphore) -> AsyncIterator[None]:
    """Wait in line for one of the places, and have it meanwhile."""
    with in_line():
        await places.acquire()
    try:
        yield
    finally:
        places.release()
