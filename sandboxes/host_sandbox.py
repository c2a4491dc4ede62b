"""A sandbox whose commands run on this machine: what ``local`` and ``bubblewrap`` have in common."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from sandboxes import processes, shell
from sandboxes.base import SandboxError
from sandboxes.folders import Folder
from sandboxes.host_job import Job
from sandboxes.host_shell import END_SECONDS, HostShell
from sandboxes.output import Raw
from sandboxes.resident import Resident, end
from sandboxes.shell_sandbox import COMPLAINT_BYTES, Inside, ShellSandbox

SMALL_BYTES = 1 << 20  # larger data is written to disk in a thread


@dataclass(frozen=True)
class Plan:
    """How one kind of sandbox is built in a folder of the host, and what its inside looks like."""

    kind: str
    folder: Folder
    inside: Inside
    channel: str  # the folder's channel, as seen inside
    launch: Callable[[], subprocess.Popen[bytes]]  # starts the resident shell
    destroy: Callable[[list[subprocess.Popen[bytes]]], None]  # ends what runs, given what was launched; in a thread
    restartable: bool  # the sandbox outlives its resident shell, which is none of what ``destroy`` ends


class HostSandbox(ShellSandbox[Job, Resident]):
    """See the Sandbox protocol."""

    def __init__(self, plan: Plan) -> None:
        """Prepare it in the plan's folder. Raises OSError."""
        self._plan = plan
        self._host_shell = HostShell(plan.launch, plan.folder.channel, plan.channel, restartable=plan.restartable)
        super().__init__(plan.kind, self._host_shell, plan.inside)
        self._closing: asyncio.Future[None] | None = None

    async def open(self) -> None:
        """Start it. Raises SandboxError, with nothing left behind."""
        opened = False
        try:
            await self._shell.ensure_alive()
            opened = True
        finally:
            if not opened:
                await self.close()

    async def write_file(self, path: str, data: bytes) -> None:
        """See the protocol. The content gets inside as a file of the channel folder."""
        target = self._file_path(path)
        staged = self._plan.folder.channel / f"data-{time.monotonic_ns()}"
        try:
            if len(data) > SMALL_BYTES:
                await asyncio.to_thread(staged.write_bytes, data)
            else:
                staged.write_bytes(data)
            command = shell.write_command(target, f"{self._plan.channel}/{staged.name}")
            output = Raw(COMPLAINT_BYTES)
            job = await self._shell.run(shell.encode(command), self._plain, output)
            await self._file_done(job, path, output)
        except OSError as error:
            raise SandboxError(f"the sandbox's folder cannot be used: {error}") from error
        finally:
            staged.unlink(missing_ok=True)

    async def close(self) -> None:
        """See the protocol. What was begun is carried to its end even when the caller is cancelled meanwhile."""
        if self._closing is None:
            self._shell.close_commands()
            self._closing = asyncio.ensure_future(self._end())
        await asyncio.shield(self._closing)

    async def _end(self) -> None:
        """Destroy it; here where that is quick, for a thread fights for the interpreter at every call of the system.

        A resident that can be replaced goes last: should this process die before, it finds its stdin closed and ends
        the sandbox itself. That is left to it only then, for it costs more than from here.
        """
        ended = [True]
        if not self._plan.restartable:
            self._shell.close()
            ended = [await end(process, END_SECONDS) for process in self._host_shell.processes]
        try:
            is_quick = all(ended) and self._host_shell.runs_nothing and processes.no_orphan_lives()
            if not (is_quick and self._destroy_if_small()):
                await asyncio.to_thread(self._destroy)
        finally:
            if self._plan.restartable:
                await self._host_shell.put_down()

    def _destroy_if_small(self) -> bool:
        self._plan.destroy(self._host_shell.processes)
        return self._plan.folder.remove_if_small()

    def _destroy(self) -> None:
        self._plan.destroy(self._host_shell.processes)
        self._plan.folder.remove()
