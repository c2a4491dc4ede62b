"""The host's processes, read from /proc: who is alive, and who belongs to a sandbox.

A sandbox's processes are known by their session, and by the environment they were started with, whose HOME or TMPDIR
names the sandbox's folder: that finds daemons, which have sessions of their own. A daemon that also cleared its
environment is not found.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MARKERS = (b"HOME=", b"TMPDIR=")
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD


@dataclass(frozen=True)
class Process:
    """One line of the process table."""

    pid: int
    parent: int
    group: int
    session: int
    start_ticks: int  # since boot: tells a process from a later one with the same pid
    uid: int


def process(pid: int) -> Process | None:
    """Look one up; None when it is gone, a zombie, or a thread of the kernel."""
    line, uid = _read(f"/proc/{pid}/stat")
    fields = line.rpartition(b") ")[2].split()  # the name before it may hold anything
    if not fields or fields[0] in b"ZX" or int(fields[6]) & _KERNEL_THREAD:
        return None
    return Process(pid, int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]), uid)


def own_processes() -> Iterator[Process]:
    """Yield every living process of this user but the caller."""
    uid, me = os.getuid(), os.getpid()
    for pid in _pids():
        found = process(pid)
        if found and found.uid == uid and pid != me:
            yield found


def marked_folder(pid: int) -> str:
    """Return the parent of the HOME or TMPDIR a process was started with, "" when it has neither."""
    for entry in _read(f"/proc/{pid}/environ")[0].split(b"\0"):
        if entry.startswith(MARKERS):
            return os.path.dirname(os.fsdecode(entry.partition(b"=")[2]))  # noqa: PTH120 (any bytes, no path of ours)
    return ""


def _pids() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 (names are all)


def _read(path: str) -> tuple[bytes, int]:
    """Return a small file's content and owner, nothing when it cannot be read. Called often: no more than needed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b"", -1
    try:
        return os.read(fd, 1 << 18), os.fstat(fd).st_uid
    except OSError:  # it went between the two
        return b"", -1
    finally:
        os.close(fd)


def kill_all(folder: Path, session: int) -> None:
    """Kill what belongs to the sandbox of ``folder`` and to ``session``; returns when nothing more is found."""
    sessions = {session}
    killed: set[int] = set()
    while fresh := [pid for pid in _pids() if pid not in killed and _belongs(pid, folder, sessions)]:
        for pid in fresh:
            kill(pid)
        killed.update(fresh)


def _belongs(pid: int, folder: Path, sessions: set[int]) -> bool:
    try:
        session = os.getsid(pid)  # by far cheaper than to read its files
    except ProcessLookupError:
        return False
    if session not in sessions and marked_folder(pid) != str(folder):
        return False
    if session == pid:
        sessions.add(pid)
    return True


def kill(pid: int) -> None:
    """Kill one process; a process that has just gone is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
