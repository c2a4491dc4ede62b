"""What answers cost that could not be read: they are paid for all the same, and count for the rollout they were for.

Endpoints say so when it happens, however the request, or the rollout, ends after that. Who counts belongs, as the wall
time does, to the task that the rollout runs in, and to those begun in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rollout.messages import Usage

Count = Callable[[Usage, float], None]  # tokens, dollars
_COUNT: ContextVar[Count | None] = ContextVar("count", default=None)


@contextmanager
def counting_waste(count: Count) -> Iterator[None]:
    """Have it counted what requests of the block cost in vain."""
    token = _COUNT.set(count)
    try:
        yield
    finally:
        _COUNT.reset(token)


def wasted(usage: Usage, cost_usd: float) -> None:
    """Say what a try cost that gave no answer."""
    if count := _COUNT.get():
        count(usage, cost_usd)
