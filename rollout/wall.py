"""The wall time of one rollout, and what it was about when that was over.

The clock stands still while the rollout's first request waits for its turn: nothing has been asked by then, and a limit
that other rollouts met must not fail this one. The gate and the endpoints say what goes on without being handed the
clock: it belongs to the task that the rollout runs in, and to those begun in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


class OvertimeError(Exception):
    """The wall time is over. The text goes on a sentence that says so: what was last met with; "" when nothing was."""


@dataclass
class _Wall:
    clock: asyncio.Timeout
    asked: bool = False  # whether the first request has come to the gate
    waits: bool = False  # whether a request has not got its turn
    trouble: str = ""  # that the latest try met with; "" when it was answered

    def told(self) -> str:
        last = [f"last: {self.trouble}"] if self.trouble else []
        waiting = ["a request was waiting for its turn at the endpoint's limit"] if self.waits else []
        return "".join(f"; {what}" for what in last + waiting)


_WALL: ContextVar[_Wall | None] = ContextVar("wall", default=None)


@asynccontextmanager
async def wall_time(seconds: float) -> AsyncIterator[None]:
    """Let the block take so long at most. Raises OvertimeError."""
    wall = _Wall(asyncio.timeout(seconds))
    token = _WALL.set(wall)
    try:
        async with wall.clock:
            yield
    except TimeoutError:
        if not wall.clock.expired():
            raise
        raise OvertimeError(wall.told()) from None
    finally:
        _WALL.reset(token)


@contextmanager
def waiting_for_turn() -> Iterator[None]:
    """Say that the block waits for a request's turn."""
    wall = _WALL.get()
    if wall is None:
        yield
        return
    first, wall.asked, wall.waits = not wall.asked, True, True
    now, end = asyncio.get_running_loop().time, wall.clock.when()
    stopped_at = now()
    if first:
        wall.clock.reschedule(None)
    yield
    wall.waits = False  # it is not so when the wait is cut off: then that is what there is to tell
    if first and end is not None:
        wall.clock.reschedule(end + now() - stopped_at)


def met_with(trouble: str) -> None:
    """Say what the latest try of a request met with; "" when it was answered."""
    if wall := _WALL.get():
        wall.trouble = trouble
