"""The resident shell of a sandbox on this machine, and the commands it runs, each with FIFOs of its own.

The FIFOs are made and opened here before the resident is told of them, in a folder that sandboxed commands cannot
write to where the backend isolates at all. Descriptors: two per idle sandbox, two more per running command, and one
for each finished command whose children still hold its output, of which the newest ``MAX_LINGERING`` are kept.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
from collections import deque
from collections.abc import Callable
from pathlib import Path

from sandboxes import shell
from sandboxes.base import SandboxError
from sandboxes.fifo import FifoReader, overwrite
from sandboxes.host_job import Job
from sandboxes.output import Collector
from sandboxes.resident import Resident

START_SECONDS = 30.0  # for the resident's first answer; a busy machine is slow
ANSWER_SECONDS = 5.0  # for the end of a command that was killed, and for an answer of a resident that seems gone
LOST_SECONDS = 1.0  # after the resident's death, for the first sign of a command that was just handed to it
MAX_LINGERING = 32  # the children behind older ones get SIGPIPE when they write


class HostShell:
    """A resident shell and its jobs."""

    def __init__(
        self, launch: Callable[[], subprocess.Popen[bytes]], channel: Path, inner_channel: str, *, restartable: bool
    ) -> None:
        """Take what starts the resident, and the channel folder as it is seen here and inside.

        ``restartable``: a resident that was killed is replaced without a word, for it was not the sandbox itself.
        Raises OSError.
        """
        self.processes: list[subprocess.Popen[bytes]] = []  # all that were launched, none of them waited for
        self._launch = launch
        self._channel = channel
        self._inner_channel = inner_channel
        self._restartable = restartable
        self._loop = asyncio.get_running_loop()
        self._new_slots = itertools.count(1)
        self._free_slots: list[int] = []
        self._jobs: set[Job] = set()
        self._lingering: deque[FifoReader] = deque()
        self._resident: Resident | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        (channel / "resident").write_text(shell.RESIDENT)
        (channel / "save").write_text(shell.save(inner_channel))

    async def ensure_alive(self) -> None:
        """Start the resident when it does not run. Raises SandboxError when it cannot, or has died for good."""
        async with self._starting:
            if self._closed:
                raise SandboxError("the sandbox is closed")
            if self._resident and self._resident.alive:
                return
            if self._resident and not self._restartable:
                raise SandboxError("the sandbox has died")
            process = self._launch()
            self.processes.append(process)
            resident = self._resident = Resident(process, self._on_death)
            started = await resident.answers(START_SECONDS)
            complaint = resident.complaint()
            if not started:
                resident.let_go()
                raise SandboxError(f"the sandbox did not start: {complaint or 'no answer'}")

    async def run(
        self, command: bytes, state: bytes, collector: Collector, *, stdin: bool = False, keep: bool = False
    ) -> Job:
        """Start a command in what the shell text ``state`` restores.

        ``stdin``: with a stdin to write to; ``keep``: ask for its variables and folder at its end. Raises SandboxError.
        """
        await self.ensure_alive()
        slot = self._free_slots.pop() if self._free_slots else next(self._new_slots)
        try:
            overwrite(self._channel / f"{slot}.cmd", command)
            overwrite(self._channel / f"{slot}.state", shell.begin(self._inner_channel, slot, state, keep=keep))
            job = Job(self._channel, slot, collector, self)
            self._jobs.add(job)
            if stdin:
                job.open_stdin()
        except OSError as error:
            raise SandboxError(f"the sandbox's folder cannot be used: {error}") from error
        source = f"{self._inner_channel}/{slot}.in" if stdin else "/dev/null"
        self._send(f"run {slot} {source} {'keep' if keep else 'drop'}")
        return job

    def want_killed(self, job: Job) -> None:
        """Have a command killed, with its group and all that descends from it, as soon as its pid is known."""
        job.kill_wanted = True
        if job.frames.pid and not job.ended.is_set():
            self._send(f"kill {job.frames.pid} {job.frames.parent}")

    async def kill(self, job: Job) -> None:
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
            self._resident.let_go()
        await self.ensure_alive()

    def close(self) -> None:
        """Let go of everything, at which the resident ends; commands that run end as lost."""
        self._closed = True
        for job in list(self._jobs):
            job.release()
        while self._lingering:
            self._lingering.popleft().close()
        if self._resident:
            self._resident.let_go()

    def job_started(self, job: Job) -> None:
        """Kill at last what was to be killed before it had a pid."""
        if job.kill_wanted:
            self.want_killed(job)

    def job_ended(self, job: Job) -> None:
        """Keep an eye on the output that its children still hold."""
        self._lingering = deque(reader for reader in self._lingering if reader.is_open)
        if job.output.is_open:
            self._lingering.append(job.output)
        if len(self._lingering) > MAX_LINGERING:
            self._lingering.popleft().close()

    def job_released(self, job: Job) -> None:
        """Let another command have its files."""
        self._jobs.discard(job)
        if job.slot_is_free:
            self._free_slots.append(job.slot)

    def _send(self, line: str) -> None:
        if self._resident:
            self._resident.send(line)

    def _on_death(self) -> None:
        """Commands go on without the resident; only who was not started yet never will be."""
        for job in self._jobs:
            if not job.started.is_set():
                self._loop.call_later(LOST_SECONDS, _give_up, job)


def _give_up(job: Job) -> None:
    if not job.started.is_set():
        job.release()


async def _ends(job: Job) -> bool:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await job.ended.wait()
    except TimeoutError:
        return False
