from __future__ import annotations

import threading
import time

import pytest

from rollout import full_disk
from rollout.files import DiskFullError, RunDirError
from rollout.full_disk import save_when_there_is_room
from rollout.interrupt import Interrupt

FULL = "cannot write data/r/batch_0.jsonl: No space left on device"


class Disk:
    """It has no room for so many tries."""

    def __init__(self, full_tries: float = float("inf")) -> None:
        self.full_tries = full_tries
        self.tries = 0

    def save(self) -> None:
        self.tries += 1
        if self.tries <= self.full_tries:
            raise DiskFullError(FULL)


def told(disk: Disk, interrupt: Interrupt | None = None) -> list[str]:
    """What is told until it is saved, or it is given up."""
    lines: list[str] = []

    def tell(level: str, text: str) -> None:
        lines.append(f"{level}: {text}")

    try:
        save_when_there_is_room(disk.save, tell, interrupt or Interrupt())
    except DiskFullError as error:
        lines.append(str(error))
    return lines


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_disk, "_FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(full_disk, "_MAX_PAUSE_SECONDS", 0.05)


def test_where_there_is_room_nothing_is_told() -> None:
    disk = Disk(0)
    assert told(disk) == []
    assert disk.tries == 1


def test_what_is_wrong_and_what_to_do_is_told_once_and_that_it_is_mended() -> None:
    disk = Disk(7)
    first, second = told(disk)
    assert first.startswith(f"error: {FULL}: free some space, and the run goes on; it waits for 10 minutes")
    assert second == "info: there is room on the disk again, and the run goes on"
    assert disk.tries == 8


def test_the_wait_is_bounded_and_not_a_busy_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_disk, "WAIT_SECONDS", 0.4)
    disk = Disk()
    started = time.monotonic()
    assert told(disk)[1:] == [FULL]
    assert 0.4 <= time.monotonic() - started < 4
    assert disk.tries < 20


def test_an_interrupt_ends_the_wait_at_once_after_a_last_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_disk, "_FIRST_PAUSE_SECONDS", 60.0)
    monkeypatch.setattr(full_disk, "_MAX_PAUSE_SECONDS", 60.0)
    disk, interrupt = Disk(), Interrupt()
    threading.Timer(0.2, interrupt.request).start()
    started = time.monotonic()
    assert told(disk, interrupt)[1:] == [FULL]
    assert time.monotonic() - started < 4
    assert disk.tries == 2


def test_who_is_interrupted_already_does_not_wait() -> None:
    interrupt = Interrupt()
    interrupt.request()
    assert told(Disk(), interrupt) == [FULL]


def test_what_waiting_does_not_mend_is_not_waited_for() -> None:
    def refuse() -> None:
        raise RunDirError("cannot write data/r/batch_0.jsonl: Read-only file system")

    with pytest.raises(RunDirError, match="Read-only"):
        save_when_there_is_room(refuse, lambda _level, _text: None, Interrupt())
