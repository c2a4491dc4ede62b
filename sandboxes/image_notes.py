"""How the processes of one machine agree on who fetches an image: a lock for each, and a note of what went wrong.

And how the one that fetches it tells of it, from the thread where that is done.

A failure is left for those who waited, and for those who come later in the same run. Processes that started after a
failure try again.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from sandboxes import folders, processes
from sandboxes.base import Tell


@dataclass(frozen=True)
class Notes:
    """What is noted about one image, by whoever holds its lock."""

    file: IO[str]

    def complaint(self) -> str:
        """Return what was noted since this process began, "" when nothing was."""
        self.file.seek(0)
        try:
            note = json.load(self.file)
        except ValueError:  # nothing, or torn
            return ""
        me = processes.process(os.getpid())
        began = (me.start_ticks + 1) / os.sysconf("SC_CLK_TCK") if me else _seconds_since_boot()  # the next whole tick
        return str(note["complaint"]) if began <= note["at"] <= _seconds_since_boot() else ""

    def leave(self, complaint: str) -> None:
        """Note why the image cannot be had."""
        self.file.seek(0)
        self.file.truncate()
        json.dump({"at": _seconds_since_boot(), "complaint": complaint}, self.file)


def from_a_thread(tell: Tell) -> Tell:
    """Return what tells the running event loop from another thread; nothing is told once that loop has gone."""
    loop = asyncio.get_running_loop()

    def tell_loop(line: str) -> None:
        with suppress(RuntimeError):  # it is closed: the run is over
            loop.call_soon_threadsafe(tell, line)

    return tell_loop


@contextmanager
def locked(where: str, image: str) -> Iterator[Notes]:
    """Keep other processes from looking after the same image of the same place meanwhile. Blocks. SandboxError."""
    key = hashlib.sha256(f"{where}\0{image}".encode(errors="surrogatepass")).hexdigest()
    folder = folders.base() / "images"
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / key).open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # gone with the file, however the process ends
        yield Notes(file)


def _seconds_since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
