"""A sandbox whose commands a resident shell runs, wherever that lives.

It keeps the variables and the folder that commands left behind, and hands them to the next one. Everything a tool asks
for is done by a command inside, so that paths, links and permissions mean what they mean there. How a file's new
content gets inside, and how the sandbox ends, is the business of the subclasses.
"""

from __future__ import annotations

import asyncio
import posixpath
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic

from sandboxes import shell
from sandboxes.base import (
    BACKGROUND_BUFFER_CHARS,
    DEFAULT_OUTPUT_CHARS,
    BackgroundStatus,
    CommandRefused,
    ExecResult,
    SandboxFileError,
)
from sandboxes.command_shell import CommandShell, JobT, ResidentT
from sandboxes.output import Collector, HeadAndTail, Newest, Raw

ABANDONED_SECONDS = 1.0  # that a command runs on without a caller, in a sandbox that is not closed
FILE_SECONDS = 60.0  # for reading or writing one file
TIMED_OUT = 124
COMPLAINT_BYTES = 4096


@dataclass(frozen=True)
class Inside:
    """What the inside of a sandbox looks like to its commands."""

    variables: dict[str, str]  # at first; HOME among them
    workspace: str  # first working folder
    # command, cwd, shell text that sets its variables → reason, "" for none
    refuse: Callable[[str, str, bytes], str] = field(default=lambda _command, _cwd, _variables: "")
    reads_commands: Callable[[str], bool] = field(
        default=lambda _command: False
    )  # what is written to it may be refused


class ShellSandbox(ABC, Generic[JobT, ResidentT]):
    """See the Sandbox protocol."""

    def __init__(self, kind: str, command_shell: CommandShell[JobT, ResidentT], inside: Inside) -> None:
        self.kind = kind
        self._shell = command_shell
        self._inside = inside
        self._variables = self._plain = shell.exports(inside.variables)
        self._cwd = inside.workspace

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
        job = await self._start(command, collector, self._variables, cwd=cwd, keep=True)
        result = await self._result(job, collector, timeout_seconds)
        self._remember(job, own_cwd=bool(cwd))
        return result

    async def exec_plain(
        self, command: str, *, timeout_seconds: float, max_output_chars: int = DEFAULT_OUTPUT_CHARS
    ) -> ExecResult:
        """See the protocol. Raises CommandRefused too."""
        collector = HeadAndTail(max_output_chars)
        job = await self._start(command, collector, self._plain)
        return await self._result(job, collector, timeout_seconds)

    async def _result(self, job: JobT, collector: HeadAndTail, timeout_seconds: float) -> ExecResult:
        timed_out = await self._finish(job, timeout_seconds)
        return ExecResult(
            output=collector.text(),
            exit_code=TIMED_OUT if timed_out else job.exit_code,
            timed_out=timed_out,
            omitted_chars=collector.omitted_chars,
            total_chars=collector.total_chars,
        )

    async def start(self, command: str, *, cwd: str = "") -> ShellProcess[JobT, ResidentT]:
        """See the protocol. Raises CommandRefused too."""
        output = Newest(BACKGROUND_BUFFER_CHARS)
        where = self._absolute(cwd)
        job = await self._start(command, output, self._variables, cwd=cwd, stdin=True)
        await self._or_kill(job, job.started.wait())
        job.connect_stdin()
        process = ShellProcess(self._shell, job, output, command, where)
        if self._inside.reads_commands(command):
            variables = self._variables
            process.refuse = lambda text: self._inside.refuse(text, where, variables)
        return process

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """See the protocol."""
        content = Raw(max(max_bytes, COMPLAINT_BYTES))
        job = await self._shell.run(
            shell.encode(shell.read_command(self._file_path(path), max_bytes)), self._plain, content
        )
        await self._file_done(job, path, content)
        return bytes(content.data)

    @abstractmethod
    async def write_file(self, path: str, data: bytes) -> None:
        """See the protocol."""

    @abstractmethod
    async def close(self) -> None:
        """See the protocol."""

    async def _start(  # noqa: PLR0913 - one argument of each kind
        self,
        command: str,
        collector: Collector,
        variables: bytes,
        *,
        cwd: str = "",
        keep: bool = False,
        stdin: bool = False,
    ) -> JobT:
        if reason := self._inside.refuse(command, self._absolute(cwd), variables):
            raise CommandRefused(reason)
        state = shell.state(variables, self._cwd, (self._inside.workspace, "/"))
        if cwd:
            state += shell.enter(self._absolute(cwd))
        return await self._shell.run(shell.encode(command), state, collector, stdin=stdin, keep=keep)

    async def _finish(self, job: JobT, timeout_seconds: float) -> bool:
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

    async def _or_kill(self, job: JobT, wait: Awaitable[object]) -> None:
        """Wait; a command whose caller goes away meanwhile is killed.

        Not at once: mostly the sandbox is closed next, which ends all in it. Hundreds of resident shells that look for
        what to kill would keep the processors from those who close them.
        """
        try:
            await wait
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(ABANDONED_SECONDS, self._shell.want_killed, job)
            raise

    def _remember(self, job: JobT, *, own_cwd: bool) -> None:
        if job.frames.variables is not None:
            self._variables = job.frames.variables
        if job.frames.folder is not None and not own_cwd:
            self._cwd = shell.decode_name(job.frames.folder)

    async def _file_done(self, job: JobT, path: str, output: Raw) -> None:
        """Wait for the command that reads or writes a file."""
        if await self._finish(job, FILE_SECONDS):
            raise SandboxFileError(f"{path}: it took longer than {FILE_SECONDS:.0f} s")
        if job.exit_code:
            reason = output.data.decode("utf-8", "replace").strip()
            raise SandboxFileError(f"{path}: {reason or f'exit code {job.exit_code}'}")

    def _file_path(self, path: str) -> str:
        if not path or "\0" in path:
            raise SandboxFileError("a path is needed, and it cannot hold NUL")
        return self._absolute(path)

    def _absolute(self, path: str) -> str:
        if path == "~" or path.startswith("~/"):
            path = self._inside.variables["HOME"] + path[1:]
        return posixpath.join(self._cwd, path) if path else self._cwd


class ShellProcess(Generic[JobT, ResidentT]):
    """See the BackgroundProcess protocol."""

    def __init__(
        self, command_shell: CommandShell[JobT, ResidentT], job: JobT, output: Newest, command: str, cwd: str
    ) -> None:
        self.command = command
        self.cwd = cwd
        self.pid = job.frames.pid
        self.started_at = time.time()
        self._shell = command_shell
        self._job = job
        self._output = output
        self.refuse: Callable[[str], str] = lambda _text: ""  # text for its stdin → reason, "" for none

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
        """See the protocol. Raises CommandRefused too."""
        if reason := self.refuse(data.decode("utf-8", "replace")):
            raise CommandRefused(reason)
        await self._job.write(data)

    async def close_stdin(self) -> None:
        """See the protocol."""
        self._job.close_stdin()

    async def kill(self) -> None:
        """See the protocol."""
        if not self._job.ended.is_set():
            await self._shell.kill(self._job)
