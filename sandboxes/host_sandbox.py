"""A sandbox whose commands run on this machine: what ``local`` and ``bubblewrap`` have in common.

It keeps the variables and the folder that commands left behind, and hands them to the next one. Everything a tool asks
for is done by a command inside, so that paths, links and permissions mean what they mean there.
"""

from __future__ import annotations

import asyncio
import posixpath
import subprocess
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from sandboxes import folders, shell
from sandboxes.base import (
    BACKGROUND_BUFFER_CHARS,
    DEFAULT_OUTPUT_CHARS,
    BackgroundStatus,
    CommandRefused,
    ExecResult,
    SandboxError,
    SandboxFileError,
)
from sandboxes.folders import Folder
from sandboxes.host_job import Job
from sandboxes.host_shell import HostShell
from sandboxes.output import Collector, HeadAndTail, Newest, Raw

FILE_SECONDS = 60.0  # for reading or writing one file
TIMED_OUT = 124
_SMALL_BYTES = 1 << 20  # larger data is written to disk in a thread


@dataclass(frozen=True)
class Plan:
    """How one kind of sandbox is built in a folder of the host, and what its inside looks like."""

    kind: str
    folder: Folder
    launch: Callable[[], subprocess.Popen[bytes]]  # starts the resident shell
    destroy: Callable[[list[subprocess.Popen[bytes]]], None]  # ends what was launched; runs in a thread
    environment: dict[str, str]  # HOME among it
    workspace: str  # first working folder, inside
    channel: str  # the folder's channel, inside
    restartable: bool  # the sandbox outlives its resident shell
    refuse: Callable[[str, str], str] = field(default=lambda _command, _cwd: "")  # command, cwd → reason, "" for none


class HostSandbox:
    """See the Sandbox protocol."""

    def __init__(self, plan: Plan) -> None:
        self.kind = plan.kind
        self._plan = plan
        self._channel = plan.folder.channel
        self._shell = HostShell(plan.launch, self._channel, plan.channel, restartable=plan.restartable)
        self._variables = shell.exports(plan.environment)
        self._cwd = plan.workspace
        self._closing: asyncio.Future[None] | None = None
        self._plain = self._variables

    async def open(self) -> None:
        """Start it. Raises SandboxError, with nothing left behind."""
        opened = False
        try:
            await self._shell.ensure_alive()
            opened = True
        finally:
            if not opened:
                await self.close()

    async def exec(
        self,
        command: str,
        *,
        timeout_seconds: float,
        cwd: str = "",
        max_output_chars: int = DEFAULT_OUTPUT_CHARS,
    ) -> ExecResult:
        """See the protocol. Raises CommandRefused too."""
        collector = HeadAndTail(max_output_chars)
        job = await self._start(command, collector, cwd=cwd, keep=True)
        timed_out = await self._finish(job, timeout_seconds)
        self._remember(job, own_cwd=bool(cwd))
        return ExecResult(
            output=collector.text(),
            exit_code=TIMED_OUT if timed_out else job.exit_code,
            timed_out=timed_out,
            omitted_chars=collector.omitted_chars,
            total_chars=collector.total_chars,
        )

    async def start(self, command: str, *, cwd: str = "") -> HostProcess:
        """See the protocol. Raises CommandRefused too."""
        output = Newest(BACKGROUND_BUFFER_CHARS)
        where = self._absolute(cwd)
        job = await self._start(command, output, cwd=cwd, stdin=True)
        await self._or_kill(job, job.started.wait())
        job.connect_stdin()
        return HostProcess(self._shell, job, output, command, where)

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """See the protocol."""
        content = Raw(max(max_bytes, 4096))  # room for a complaint
        await self._file_command(path, shell.read_command(self._file_path(path), max_bytes), content)
        return bytes(content.data)

    async def write_file(self, path: str, data: bytes) -> None:
        """See the protocol."""
        target = self._file_path(path)
        staged = self._channel / f"data-{time.monotonic_ns()}"
        try:
            if len(data) > _SMALL_BYTES:
                await asyncio.to_thread(staged.write_bytes, data)
            else:
                staged.write_bytes(data)
            command = shell.write_command(target, f"{self._plan.channel}/{staged.name}")
            await self._file_command(path, command, Raw(4096))
        except OSError as error:
            raise SandboxError(f"the sandbox's folder cannot be used: {error}") from error
        finally:
            staged.unlink(missing_ok=True)

    async def close(self) -> None:
        """See the protocol. What was begun is carried to its end even when the caller is cancelled meanwhile."""
        if self._closing is None:
            self._shell.close()
            self._closing = asyncio.get_running_loop().run_in_executor(None, self._destroy)
        await asyncio.shield(self._closing)

    def _destroy(self) -> None:
        self._plan.destroy(self._shell.processes)
        folders.remove_tree(self._plan.folder.root)

    async def _start(
        self, command: str, collector: Collector, *, cwd: str, keep: bool = False, stdin: bool = False
    ) -> Job:
        if reason := self._plan.refuse(command, self._absolute(cwd)):
            raise CommandRefused(reason)
        state = shell.state(self._variables, self._cwd, (self._plan.workspace, "/"))
        if cwd:
            state += shell.enter(self._absolute(cwd))
        return await self._shell.run(shell.encode(command), state, collector, stdin=stdin, keep=keep)

    async def _finish(self, job: Job, timeout_seconds: float) -> bool:
        """Wait for a command's end, and bring it about when it is time; tell whether that was needed."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._or_kill(job, job.ended.wait())
        except TimeoutError:
            await self._shell.kill(job)
            return True
        if job.lost:
            await self._shell.confirm_alive()
        return False

    async def _or_kill(self, job: Job, wait: Awaitable[object]) -> None:
        """Wait; a command whose caller goes away meanwhile is killed."""
        try:
            await wait
        except asyncio.CancelledError:
            self._shell.want_killed(job)
            raise

    def _remember(self, job: Job, *, own_cwd: bool) -> None:
        if job.frames.variables is not None:
            self._variables = job.frames.variables
        if job.frames.folder is not None and not own_cwd:
            self._cwd = shell.decode_name(job.frames.folder)

    async def _file_command(self, path: str, command: str, collector: Raw) -> None:
        job = await self._shell.run(shell.encode(command), self._plain, collector)
        if await self._finish(job, FILE_SECONDS):
            raise SandboxFileError(f"{path}: it took longer than {FILE_SECONDS:.0f} s")
        if job.exit_code:
            reason = collector.data.decode("utf-8", "replace").strip()
            raise SandboxFileError(f"{path}: {reason or f'exit code {job.exit_code}'}")

    def _file_path(self, path: str) -> str:
        if not path or "\0" in path:
            raise SandboxFileError("a path is needed, and it cannot hold NUL")
        return self._absolute(path)

    def _absolute(self, path: str) -> str:
        if path == "~" or path.startswith("~/"):
            path = self._plan.environment["HOME"] + path[1:]
        return posixpath.join(self._cwd, path) if path else self._cwd


class HostProcess:
    """See the BackgroundProcess protocol."""

    def __init__(self, host_shell: HostShell, job: Job, output: Newest, command: str, cwd: str) -> None:
        self.command = command
        self.cwd = cwd
        self.pid = job.frames.pid
        self.started_at = time.time()
        self._shell = host_shell
        self._job = job
        self._output = output

    def status(self) -> BackgroundStatus:
        """See the protocol."""
        return "exited" if self._job.ended.is_set() else "running"

    def exit_code(self) -> int | None:
        """See the protocol."""
        return self._job.exit_code if self._job.ended.is_set() else None

    def output(self) -> str:
        """See the protocol."""
        return self._output.text()

    async def wait(self, timeout_seconds: float) -> bool:
        """See the protocol."""
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._job.ended.wait()
        except TimeoutError:
            return False

    async def write(self, data: bytes) -> None:
        """See the protocol."""
        await self._job.write(data)

    async def close_stdin(self) -> None:
        """See the protocol."""
        self._job.close_stdin()

    async def kill(self) -> None:
        """See the protocol."""
        if not self._job.ended.is_set():
            await self._shell.kill(self._job)
