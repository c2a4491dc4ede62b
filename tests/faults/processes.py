"""What a run's processes are, seen from outside: who they are, and whether they are gone."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.program import Workplace, wait_until

GONE_SECONDS = 5.0  # no process of a dead run lives longer
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Process:
    """A living process."""

    pid: int
    parent: int
    command: str
    name: str = ""

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    @property
    def alive(self) -> bool:
        return _read(self.pid) is not None


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Be the parent of whatever dead runs leave behind, so that ``below_me`` finds it."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def below(pid: int) -> list[Process]:
    """All living processes that descend from this one."""
    table = [process for process in map(_read, _pids()) if process]
    known = {pid}
    found: list[Process] = []
    while fresh := [process for process in table if process.parent in known and process.pid not in known]:
        found += fresh
        known |= {process.pid for process in fresh}
    return found


def below_me() -> list[Process]:
    """All that runs, but for servers that other tests share."""
    return [process for process in below(os.getpid()) if " -m tests." not in process.command]


def spawner(program: int) -> Process:
    """The process that forks the workers of this program."""
    (found,) = [each for each in below(program) if each.parent == program and each.name == "rollout.spawner"]
    return found


def spawners() -> list[Process]:
    """The spawners of all programs that run, and of those that are dead."""
    return [process for process in below_me() if process.name == "rollout.spawner"]


def workers() -> list[Process]:
    """The workers of all programs that run, and of those that are dead."""
    return [process for process in below_me() if process.name == "rollout.worker"]


def assert_gone(processes: Callable[[], list[Process]], within_seconds: float = GONE_SECONDS) -> None:
    """Watch all of them go."""
    deadline = time.monotonic() + within_seconds
    while left := processes():
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.2)  # to look costs a core tens of milliseconds where hundreds live


def wait_for_workers(number: int, seconds: float = 30) -> list[Process]:
    wait_until(lambda: len(workers()) >= number, f"{number} workers run", seconds)
    return workers()


def sandboxes(place: Workplace) -> list[Path]:
    """The folders of sandboxes that are there."""
    return list((place.path / "tmp").glob("batch-runner-*/*"))


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def private_kib(pid: int) -> int:
    """Memory that this process alone holds."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_"))


def _pids() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())


def _read(pid: int) -> Process | None:
    try:
        head, _, rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None
    fields, name = rest.split(), head.partition(b" (")[2].decode(errors="replace")
    return None if fields[0] in b"ZX" else Process(pid, int(fields[1]), command, name)
