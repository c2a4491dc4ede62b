"""The resident shell of a sandbox on this machine, and the commands it runs, each with FIFOs of its own.

The FIFOs are made and opened here before the resident is told of them, in a folder that sandboxed commands cannot
write to where the backend isolates at all. Descriptors: two per idle sandbox, two more per running command, and one
for each finished command whose children still hold its output, of which the newest ``MAX_LINGERING`` are kept.
"""

from __future__ import annotations

import itertools
import subprocess
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from sandboxes import processes, shell, turns
from sandboxes.base import SandboxError
from sandboxes.command_shell import START_SECONDS, CommandShell
from sandboxes.fifo import FifoReader, overwrite
from sandboxes.host_job import Job
from sandboxes.output import Collector
from sandboxes.resident import Resident, end, wait

END_SECONDS = 5.0  # for the end of a resident shell that was let go of, or killed
MAX_LINGERING = 32  # the children behind older ones get SIGPIPE when they write


class HostShell(CommandShell[Job, Resident]):
    """A resident shell and its jobs."""

    def __init__(
        self, launch: Callable[[], subprocess.Popen[bytes]], channel: Path, inner_channel: str, *, restartable: bool
    ) -> None:
        """Take what starts the resident, and the channel folder as it is seen here and inside.

        ``restartable``: a resident that was killed is replaced without a word, for it was not the sandbox itself.
        Raises OSError.
        """
        super().__init__()
        self.processes: list[subprocess.Popen[bytes]] = []  # all that were launched, none of them waited for
        self._launch = launch
        self._channel = channel
        self._inner_channel = inner_channel
        self._restartable = restartable
        self._new_slots = itertools.count(1)
        self._free_slots: list[int] = []
        self._lingering: deque[FifoReader] = deque()
        self._turns: dict[Job, turns.Turn] = {}
        (channel / "save").write_text(shell.save(inner_channel))

    async def start_resident(self) -> Resident:
        """Launch a resident shell. Raises SandboxError when it does not start, or was the sandbox itself and died."""
        if self.processes and not self._restartable:
            raise SandboxError("the sandbox has died")
        process = self._launch()
        self.processes.append(process)
        resident = self._resident = Resident(process, self.on_death)
        started = False
        try:
            started = await resident.answers(START_SECONDS)
        finally:
            complaint = resident.complaint()
            if not started:
                resident.let_go()
        if not started:
            raise SandboxError(f"the sandbox did not start: {complaint or 'no answer'}")
        return resident

    async def run(
        self, command: bytes, state: bytes, collector: Collector, *, stdin: bool = False, keep: bool = False
    ) -> Job:
        """See CommandShell."""
        turn = await turns.take()
        with ExitStack() as on_error:
            on_error.callback(turn.give_back)
            await self.ensure_alive()
            job = self._begin(command, state, collector, stdin=stdin, keep=keep)
            self._turns[job] = turn
            on_error.pop_all()
        return job

    def _begin(self, command: bytes, state: bytes, collector: Collector, *, stdin: bool, keep: bool) -> Job:
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
        self.send(f"run {slot} {source} {'keep' if keep else 'drop'}")
        return job

    def close_commands(self) -> None:
        """Let go of the commands that run, and take no other."""
        super().close_commands()
        while self._lingering:
            self._lingering.popleft().close()

    async def put_down(self) -> None:
        """Kill what was launched."""
        if self._resident:
            self._resident.put_down()
        for process in self.processes:
            processes.kill(process.pid)
            if await end(process, END_SECONDS):
                wait(process)

    @property
    def runs_nothing(self) -> bool:
        """Whether no resident has a child that lives. Quick, and never waits."""
        return not any(
            processes.process(child) for resident in self.processes for child in processes.children(resident.pid) or ()
        )

    def job_ended(self, job: Job) -> None:
        """Let another one have its turn, and keep an eye on the output that its children still hold."""
        if turn := self._turns.pop(job, None):
            turn.give_back()
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
