"""A sandbox that is a container, whatever engine runs it."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace

from sandboxes import shell
from sandboxes.base import DEFAULT_OUTPUT_CHARS, ExecResult, SandboxFileError
from sandboxes.container_job import LaneJob
from sandboxes.container_shell import ContainerResident, ContainerShell, escaped
from sandboxes.output import Raw
from sandboxes.shell_sandbox import COMPLAINT_BYTES, FILE_SECONDS, Inside, ShellSandbox

SMALL_BYTES = 1 << 16  # of file content as shell text; what is larger needs a lane of its own
KILLED = 128 + signal.SIGKILL
KILLED_WORD_CHARS = 200  # before the end of the output, where shells say of a command that it was killed
OUT_OF_MEMORY = "[a process was killed because the sandbox ran out of memory]"
# How many processes were killed for that so far: under the second version of control groups, and under the first.
_COUNT_KILLS = "cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null"


class ContainerSandbox(ShellSandbox[LaneJob, ContainerResident]):
    """See the Sandbox protocol."""

    def __init__(
        self, kind: str, container_shell: ContainerShell, inside: Inside, remove: Callable[[], Awaitable[object]]
    ) -> None:
        """Take an open shell, and what removes its container."""
        super().__init__(kind, container_shell, inside)
        self._remove = remove
        self._closing: asyncio.Future[object] | None = None
        self._kills = 0  # for want of memory, that are known

    async def exec(
        self,
        command: str,
        *,
        timeout_seconds: float,
        cwd: str = "",
        max_output_chars: int = DEFAULT_OUTPUT_CHARS,
    ) -> ExecResult:
        """See the protocol. When a command was killed for want of memory the end of its output says so."""
        result = await super().exec(
            command, timeout_seconds=timeout_seconds, cwd=cwd, max_output_chars=max_output_chars
        )
        was_killed = result.exit_code == KILLED or "Killed" in result.output[-KILLED_WORD_CHARS:]
        if not was_killed or not await self._lacked_memory():
            return result
        return replace(result, output=f"{result.output.rstrip()}\n{OUT_OF_MEMORY}\n".lstrip())

    async def write_file(self, path: str, data: bytes) -> None:
        """See the protocol. Small content is part of the command, other content its stdin."""
        write = shell.write_command(self._file_path(path), "-")
        word = _word(data[:SMALL_BYTES])
        small = len(data) <= SMALL_BYTES and len(word) <= SMALL_BYTES
        command = f"printf %b '{word}' | (\n{write})" if small else write
        output = Raw(COMPLAINT_BYTES)
        job = await self._shell.run(shell.encode(command), self._plain, output, stdin=not small)
        complete = small or await self._sent(job, data)
        await self._file_done(job, path, output)
        if not complete:
            raise SandboxFileError(f"{path}: its content did not get through")

    async def close(self) -> None:
        """See the protocol. What was begun is carried to its end even when the caller is cancelled meanwhile."""
        if self._closing is None:
            self._shell.close()
            self._closing = asyncio.ensure_future(self._remove())
        await asyncio.shield(self._closing)

    async def _lacked_memory(self) -> bool:
        """Tell whether a process was killed for want of memory since this was asked last."""
        output = Raw(COMPLAINT_BYTES)
        job = await self._shell.run(shell.encode(_COUNT_KILLS), self._plain, output)
        await self._finish(job, FILE_SECONDS)
        known, self._kills = self._kills, sum(map(int, re.findall(rb"^oom_kill (\d+)$", output.data, re.MULTILINE)))
        return self._kills > known

    async def _sent(self, job: LaneJob, data: bytes) -> bool:
        """Send a file's content; tell whether all of it was taken. Where not, the command says why."""
        try:
            async with asyncio.timeout(FILE_SECONDS):
                await self._or_kill(job, job.pour(data))
        except (SandboxFileError, TimeoutError):
            return False
        job.close_stdin()
        return True


def _word(data: bytes) -> str:
    """Return any bytes as the inside of a quoted shell word that ``printf %b`` turns back."""
    return re.sub(rb"['\x80-\xff]", lambda byte: b"\\0%03o" % byte[0][0], escaped(data)).decode("ascii")
