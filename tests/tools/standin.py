"""A small real sandbox: each command a shell of its own, in one folder. It isolates nothing and keeps no variables."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process

from sandboxes.base import (
    BackgroundProcess,
    BackgroundStatus,
    CommandRefused,
    ExecResult,
    SandboxFileError,
)


def kill_group(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Background:
    def __init__(self, command: str, cwd: str, process: Process) -> None:
        self.command, self.cwd, self.pid, self.started_at = command, cwd, process.pid, time.time()
        self._process, self._text = process, ""
        self._ended = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stdout
        while data := await self._process.stdout.read(65536):
            self._text = (self._text + data.decode(errors="replace"))[-200_000:]
        await self._process.wait()

    def status(self) -> BackgroundStatus:
        return "exited" if self._ended.done() else "running"

    def exit_code(self) -> int | None:
        return self._process.returncode if self._ended.done() else None

    def output(self) -> str:
        return self._text

    async def wait(self, timeout_seconds: float) -> bool:
        await asyncio.wait([self._ended], timeout=timeout_seconds)
        return self._ended.done()

    async def write(self, data: bytes) -> None:
        if self._ended.done():
            raise SandboxFileError("the process has ended")
        assert self._process.stdin
        if self._process.stdin.is_closing():
            raise SandboxFileError("stdin is closed")
        self._process.stdin.write(data)
        await self._process.stdin.drain()

    async def close_stdin(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        await self._process.stdin.wait_closed()

    async def kill(self) -> None:
        kill_group(self._process)
        await self._ended


class StandIn:
    kind = "local"

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._started: list[Background] = []

    async def exec(
        self, command: str, *, timeout_seconds: float, cwd: str = "", max_output_chars: int = 50_000
    ) -> ExecResult:
        if command == "reboot":
            raise CommandRefused("reboot would harm the host")
        process = await asyncio.create_subprocess_exec(
            "sh",
            "-c",
            command,
            cwd=cwd or self.folder,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            start_new_session=True,
        )
        data, timed_out = bytearray(), False
        try:
            async with asyncio.timeout(timeout_seconds):
                assert process.stdout
                while chunk := await process.stdout.read(65536):
                    data += chunk
                await process.wait()
        except TimeoutError:
            timed_out = True
        finally:
            kill_group(process)
            await process.wait()
        code = 124 if timed_out else process.returncode or 0
        return ExecResult(data.decode(errors="replace")[:max_output_chars], code, timed_out)

    async def start(self, command: str, *, cwd: str = "") -> BackgroundProcess:
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", command, cwd=cwd or self.folder, stdin=PIPE, stdout=PIPE, stderr=STDOUT, start_new_session=True
        )
        self._started.append(Background(command, cwd or self.folder, process))
        return self._started[-1]

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        raise SandboxFileError(f"{path}: not here ({max_bytes})")

    async def write_file(self, path: str, data: bytes) -> None:
        raise SandboxFileError(f"{path}: not here ({len(data)})")

    async def close(self) -> None:
        for background in self._started:
            await background.kill()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                await background.close_stdin()
