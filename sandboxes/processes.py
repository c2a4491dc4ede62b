"""The host's processes, read from /proc: who is alive, and who belongs to a sandbox.

A sandbox's processes are known by their session, by their parents, and by the environment they were born with, whose
HOME or TMPDIR names the sandbox's folder: the last finds daemons that left session and parents behind. A process that
also cleared its environment is not found.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MARKERS = (b"HOME=", b"TMPDIR=")


@dataclass(frozen=True)
class Process:
    """One line of the process table."""

    pid: int
    parent: int
    group: int
    session: int
    start_ticks: int  # since boot: tells a process from a later one with the same pid


def process(pid: int) -> Process | None:
    """Look one up; None when it is gone, or a zombie."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = line.rpartition(b") ")[2].split()  # the name before it may hold anything
    if fields[0] in b"ZX":
        return None
    return Process(pid, int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def own_processes() -> Iterator[Process]:
    """Yield every living process of this user but the caller."""
    uid, me = os.getuid(), os.getpid()
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdigit()]
    for pid in sorted(pids):
        try:
            mine = pid != me and Path(f"/proc/{pid}").stat().st_uid == uid
        except OSError:
            continue
        if mine and (found := process(pid)):
            yield found


def marked_folder(pid: int) -> str:
    """Return the parent of the HOME or TMPDIR a process was started with, "" when it has neither."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return ""
    for entry in environ.split(b"\0"):
        if entry.startswith(MARKERS):
            return os.path.dirname(os.fsdecode(entry.partition(b"=")[2]))  # noqa: PTH120 (any bytes, no path of ours)
    return ""


def kill_all(folder: Path, session: int) -> None:
    """Kill what belongs to the sandbox of ``folder`` and to ``session``; returns when nothing more is found."""
    killed: set[int] = {session}
    while True:
        fresh = [item.pid for item in own_processes() if item.pid not in killed and _belongs(item, folder, killed)]
        if not fresh:
            return
        for pid in fresh:
            kill(pid)
        killed.update(fresh)


def _belongs(item: Process, folder: Path, known: set[int]) -> bool:
    return not known.isdisjoint((item.parent, item.group, item.session)) or marked_folder(item.pid) == str(folder)


def kill(pid: int) -> None:
    """Kill one process; a process that has just gone is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
