"""How a signal ends the program, from its first imports to its last line. Light to import: it is needed first.

While rollouts run, the pool hears of the first SIGINT, SIGTERM or SIGHUP and winds down; at other times it comes as a
KeyboardInterrupt, which leaves no half-made file. The second one ends the process at once: rows are written whole, and
workers and endpoints end with their parent. The program is never slower than ten seconds about it: when it takes too
long, an alarm stands in for the impatient user's second signal.
"""

from __future__ import annotations

import os
import select
import shlex  # not when it is needed: a signal may come in the middle of another import
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

EXIT_INTERRUPTED = 130
PATIENCE_SECONDS = 7  # from the first signal to the one that the alarm stands in for
_LAST_SECONDS = 1  # from the second one on, where it does not end the process by itself
_HEARD = 2  # signals that a listening pool acts on; the next one finds it stuck
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Whether somebody asked the run to stop, and how often (``count``)."""

    def __init__(self) -> None:
        self.count = 0
        self.wake: Callable[[], None] | None = None  # set while a pool listens

    @property
    def listening(self) -> bool:
        """Whether a pool will see the request by itself."""
        return self.wake is not None

    def request(self) -> None:
        """Ask once more: the first time to stop cleanly, the second to stop at once. Safe in a signal handler."""
        self.count += 1
        if self.wake:
            self.wake()


def catch_signals(interrupt: Interrupt, *, unwind: bool) -> None:
    """Let signals end the program from now on; ``unwind``: somebody catches a KeyboardInterrupt and tells of it."""

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        interrupt.request()
        signal.alarm(PATIENCE_SECONDS if interrupt.count == 1 else _LAST_SECONDS)
        if interrupt.listening and interrupt.count <= _HEARD:
            return
        if unwind and interrupt.count == 1:
            raise KeyboardInterrupt
        _leave()

    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
            signal.signal(number, on_signal)
    signal.signal(signal.SIGALRM, on_signal)


def ignore_signals() -> None:
    """Let nothing disturb what is left to do: to end, with an exit code that is known."""
    for number in (*_SIGNALS, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


def resume_command(words: Sequence[str]) -> str:
    """Return the command that goes on with the run of this command line: as it was typed, but without an API key.

    What joins runs is not gone on with, but done again.
    """
    kept: list[str] = []
    value_follows = False
    for word in words:
        if word.startswith("--"):
            name, equals, _ = word.partition("=")
            left_out = name.replace("-", "_") in ("__api_key", "__resume")
            value_follows = left_out and not equals
        else:
            left_out, value_follows = value_follows, False
        if not left_out:
            kept.append(word)
    joins = any(word.partition("=")[0] == "--merge" for word in words)
    return shlex.join(kept if joins else [*kept, "--resume"])


def interrupted_line(command: str) -> str:
    """Return what is said where no report can be made any more."""
    return f"interrupted; resume with: {command}"


def _leave() -> None:
    """End the process here and now."""
    line = f"{interrupted_line(resume_command(sys.orig_argv))}\n"
    with suppress(OSError, ValueError):  # stderr may be gone, or nobody reads it
        if select.select([], [2], [], 0)[1]:
            os.write(2, line.encode(errors="backslashreplace"))
    os._exit(EXIT_INTERRUPTED)
