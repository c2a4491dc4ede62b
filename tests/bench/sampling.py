"""Looking again and again at something while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def sampled(look: Callable[[], T], pause_seconds: float) -> Iterator[list[T]]:
    """Collect what ``look`` returns, in a thread, until the block ends."""
    samples: list[T] = []
    over = threading.Event()

    def keep_looking() -> None:
        while not over.wait(pause_seconds):
            samples.append(look())

    thread = threading.Thread(target=keep_looking)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()
