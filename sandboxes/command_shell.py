"""What runs a sandbox's commands through a resident shell, wherever that lives: how commands are killed and given up.

How the resident is reached, and how its files and streams get there, is the business of the subclasses.
"""

from __future__ import annotations

import asyncio
import signal
from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from sandboxes import shell
from sandboxes.base import SandboxError
from sandboxes.output import Collector

START_SECONDS = 30.0  # for the resident's first answer; a busy machine is slow
ANSWER_SECONDS = 5.0  # for the end of a command that was killed, and for an answer of a resident that seems gone
STDIN_SECONDS = 10.0  # how long a write waits for a process that does not read
LOST_EXIT_CODE = 128 + signal.SIGKILL  # of a command whose watcher is gone: what its shell would have said
LOST_SECONDS = 1.0  # after the resident's death, for the first sign of a command that was just handed to it


class Job(ABC):
    """One command, from before its start until its shell has ended and its output is in."""

    def __init__(self) -> None:
        self.frames = shell.Frames()
        self.started = asyncio.Event()  # its pid is known, or never will be
        self.ended = asyncio.Event()
        self.kill_wanted = False

    @property
    def exit_code(self) -> int:
        """The command's exit code, once it has ended."""
        return LOST_EXIT_CODE if self.frames.exit_code is None else self.frames.exit_code

    @property
    def lost(self) -> bool:
        """Whether it ended without a word."""
        return self.ended.is_set() and self.frames.exit_code is None

    @abstractmethod
    def finish(self) -> None:
        """Take what it wrote so far and call it ended; what its children write later is thrown away."""

    @abstractmethod
    def release(self) -> None:
        """Finish, and listen no more."""

    @abstractmethod
    def connect_stdin(self) -> None:
        """Take note that the command has started to read its stdin."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Write to the command's stdin. Raises SandboxFileError when that is closed or not read."""

    @abstractmethod
    def close_stdin(self) -> None:
        """End the command's stdin."""


class Resident(Protocol):
    """The hand on a resident shell."""

    alive: bool

    def send(self, line: str) -> None:
        """Tell it something. To a dead one nothing is told: what waits for it hears of its death."""

    async def answers(self, seconds: float) -> bool:
        """Ask whether it lives."""

    def put_down(self) -> None:
        """End it, as far as that is possible from here, and let go of it."""

    def let_go(self) -> None:
        """Close the connection, at which it ends by itself."""


JobT = TypeVar("JobT", bound=Job)
ResidentT = TypeVar("ResidentT", bound=Resident)


class CommandShell(ABC, Generic[JobT, ResidentT]):
    """A resident shell and its jobs."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: set[JobT] = set()
        self._resident: ResidentT | None = None
        self._starting = asyncio.Lock()
        self._closed = False

    @abstractmethod
    async def run(
        self, command: bytes, state: bytes, collector: Collector, *, stdin: bool = False, keep: bool = False
    ) -> JobT:
        """Start a command in what the shell text ``state`` restores.

        ``stdin``: with a stdin to write to; ``keep``: ask for its variables and folder at its end. Raises SandboxError.
        """

    @abstractmethod
    async def start_resident(self) -> ResidentT:
        """Start a resident shell, or another one. Raises SandboxError when it cannot, or has died for good."""

    async def ensure_alive(self) -> None:
        """Start the resident when it does not run. Raises SandboxError when it cannot, or has died for good."""
        async with self._starting:
            if self._closed:
                raise SandboxError("the sandbox is closed")
            if not self._resident or not self._resident.alive:
                self._resident = await self.start_resident()

    def want_killed(self, job: JobT) -> None:
        """Have a command killed, with its group and all that descends from it, as soon as its pid is known."""
        job.kill_wanted = True
        if job.frames.pid and not job.ended.is_set():
            self.send(f"kill {job.frames.pid} {job.frames.parent}")

    async def kill(self, job: JobT) -> None:
        """Have a command killed and wait until it is gone. Raises SandboxError when the sandbox is."""
        self.want_killed(job)
        try:
            if await _ends(job):
                return
            if self._resident and not await self._resident.answers(ANSWER_SECONDS):
                self._resident.put_down()  # stopped, or out of processes: its successor, if there may be one, can do it
                await self.ensure_alive()
            self.want_killed(job)
            await _ends(job)
        finally:
            job.finish()

    async def confirm_alive(self) -> None:
        """Find out whether a command was lost alone or with the sandbox. Raises SandboxError in the second case."""
        if self._resident and not await self._resident.answers(ANSWER_SECONDS):
            self._resident.put_down()  # were it only let go of, it would end the sandbox once it wakes up
        await self.ensure_alive()

    def close(self) -> None:
        """Let go of everything, at which the resident ends; commands that run end as lost."""
        self.close_commands()
        if self._resident:
            self._resident.let_go()

    def close_commands(self) -> None:
        """Let go of the commands that run, and take no other."""
        self._closed = True
        for job in list(self._jobs):
            job.release()

    def send(self, line: str) -> None:
        """Tell the resident something."""
        if self._resident:
            self._resident.send(line)

    def job_started(self, job: JobT) -> None:
        """Kill at last what was to be killed before it had a pid."""
        if job.kill_wanted:
            self.want_killed(job)

    def on_death(self) -> None:
        """Take note of the resident's death. Commands go on; only who was not started yet never will be."""
        for job in self._jobs:
            if not job.started.is_set():
                self._loop.call_later(LOST_SECONDS, give_up, job)


def give_up(job: Job) -> None:
    """Call a command lost that was never heard of."""
    if not job.started.is_set():
        job.release()


async def _ends(job: Job) -> bool:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await job.ended.wait()
    except TimeoutError:
        return False
