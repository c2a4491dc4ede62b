"""The wall time of one rollout, and what it was about when that was over.

The clock stands still while the rollout's first request waits for its turn: nothing has been asked by then, and a limit
that other rollouts met must not fail this one. The gate and the endpoints say what goes on without being handed the
clock: it belongs to the task that the rollout runs in, and to those begun in it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field

from tools.own_time import OwnTime, in_line, timeout_by


class OvertimeError(Exception):
    """The wall time is over. The text goes on a sentence that says so: what was last met with; "" when nothing was."""


@dataclass
class _Wall:
    clock: OwnTime = field(default_factory=OwnTime)
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
    wall = _Wall()
    token = _WALL.set(wall)
    try:
        async with timeout_by(wall.clock, seconds) as timer:
            yield
    except TimeoutError:
        if not timer.expired():
            raise
        raise OvertimeError(wall.told()) from None
    finally:
        _WALL.reset(token)


@contextmanager
def waiting_for_turn() -> Iterator[None]:
    """Say that the block waits for a request's turn."""
    wall = _WALL.get() or _Wall()
    first, wall.asked, wall.waits = not wall.asked, True, True
    with in_line(), wall.clock.stopped() if first else nullcontext():
        yield
    wall.waits = False  # it is not so when the wait is cut off: then that is what there is to tell


def had_turn_at_once() -> None:
    """Say that a request waited for none."""
    if wall := _WALL.get():
        wall.asked = True


def met_with(trouble: str) -> None:
    """Say what the latest try of a request met with; "" when it was answered."""
    if wall := _WALL.get():
        wall.trouble = trouble
