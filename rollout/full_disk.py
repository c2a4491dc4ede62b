"""What is done while the disk is full: rows are paid for, and room is often made within minutes.

The wait blocks whoever saves, so nothing more is begun meanwhile, and rows that are made meanwhile stay with workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rollout.files import DiskFullError
from rollout.interrupt import Interrupt

WAIT_SECONDS = 600.0  # for room; then the run ends
_FIRST_PAUSE_SECONDS = 0.2  # between two tries; doubled after each
_MAX_PAUSE_SECONDS = 5.0
_LOOK_SECONDS = 0.1  # between two looks for an interrupt
_MINUTE = 60


def save_when_there_is_room(save: Callable[[], None], tell: Callable[[str, str], None], interrupt: Interrupt) -> None:
    """Call ``save`` until the disk has room for it, or an interrupt ends the wait, or there has been none for too long.

    Raises DiskFullError, and whatever else ``save`` raises.
    """
    try:
        save()
    except DiskFullError as error:
        if interrupt.count:
            raise
        wait = f"it waits for {WAIT_SECONDS / _MINUTE:g} minutes, with rows in memory and nothing more begun"
        tell("error", f"{error}: free some space, and the run goes on; {wait}")
        _keep_trying(save, interrupt)
        tell("info", "there is room on the disk again, and the run goes on")


def _keep_trying(save: Callable[[], None], interrupt: Interrupt) -> None:
    end = time.monotonic() + WAIT_SECONDS
    pause = _FIRST_PAUSE_SECONDS
    while True:
        _pause(min(pause, end - time.monotonic()), interrupt)
        try:
            save()
        except DiskFullError:
            if interrupt.count or time.monotonic() >= end:
                raise
        else:
            return
        pause = min(2 * pause, _MAX_PAUSE_SECONDS)


def _pause(seconds: float, interrupt: Interrupt) -> None:
    end = time.monotonic() + seconds
    while not interrupt.count and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _LOOK_SECONDS))
