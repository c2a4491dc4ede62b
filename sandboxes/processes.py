"""The host's processes, read from /proc: who is alive, and who belongs to a sandbox.

A sandbox's processes are known by their session, and by the environment they were started with, whose HOME or TMPDIR
names the sandbox's folder: that finds daemons, which have sessions of their own. A daemon that also cleared its
environment is not found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

MARKERS = (b"HOME=", b"TMPDIR=")
residents: set[int] = set()  # children that somebody waits for; orphans are told from them
KILL_SECONDS = 3.0
_KILL_PAUSE_SECONDS = 0.001  # between looks at what dies
_PR_SET_CHILD_SUBREAPER = 36
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
    if not fields or int(fields[6]) & _KERNEL_THREAD or (fields[0] in b"ZX" and not _has_threads(pid)):
        return None
    return Process(pid, int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]), uid)


def _has_threads(pid: int) -> bool:
    """Tell whether threads live on, which they can when the first one of a process has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1  # noqa: PTH208 (names are all)
    except OSError:
        return False


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


def adopt_orphans() -> None:
    """Become the parent of what descendants leave behind: it is found among our children then, and can be reaped."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_all(folder: Path, leaders: Collection[int]) -> None:
    """Kill what belongs to the sandbox of ``folder``, its sessions included but not their leaders; returns when all is.

    The leaders are children of ours that are not waited for yet. Call ``adopt_orphans`` before the first one starts.
    """
    sessions = set(leaders)
    deadline = time.monotonic() + KILL_SECONDS
    while found := [pid for pid in _belonging(folder, sessions, leaders) if process(pid)]:
        for pid in found:
            kill(pid)
        if time.monotonic() > deadline:  # it hangs in the kernel
            return
        time.sleep(_KILL_PAUSE_SECONDS)
    reap_orphans()


def _belonging(folder: Path, sessions: set[int], leaders: Collection[int]) -> Iterator[int]:
    orphans = [pid for pid in _candidates() if pid not in leaders and _belongs(pid, folder, sessions)]
    for top in orphans + [pid for leader in leaders for pid in children(leader) or []]:
        yield from _tree(top)


def reap_orphans() -> None:
    """Take what has ended out of the process table, of other sandboxes too."""
    for pid in _candidates():
        _reap(pid)


def no_orphan_lives() -> bool:
    """Reap the orphans that have ended; tell whether there is no other, of any sandbox. Quick, and never waits."""
    ours = children(os.getpid())
    return ours is not None and all(_reap(pid) for pid in ours if pid not in residents)


def _reap(pid: int) -> bool:
    """Take an ended orphan out of the process table; what the program itself waits for is of its own session.

    Tells whether there is no such orphan any more, and never was.
    """
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        return os.getsid(pid) == os.getsid(0) or os.waitpid(pid, os.WNOHANG)[0] == pid
    return True


def _candidates() -> list[int]:
    """Return the orphans that have come to us; every process where the kernel does not tell children."""
    ours = children(os.getpid())
    return _pids() if ours is None else [pid for pid in ours if pid not in residents]


def _tree(top: int) -> list[int]:
    tree = [top]
    for pid in tree:  # it grows meanwhile
        tree += children(pid) or []
    return tree


def children(pid: int) -> list[int] | None:
    """Return the children of all threads of a process; None where the kernel does not tell (CONFIG_PROC_CHILDREN)."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 (names are all)
    except OSError:
        return []
    if not os.path.exists(f"/proc/{pid}/task/{pid}/children") and pid == os.getpid():  # noqa: PTH110 (called often)
        return None
    return [int(child) for task in tasks for child in _read(f"/proc/{pid}/task/{task}/children")[0].split()]


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
    """Kill one process; one that has just gone is no error, nor one that has become another user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
