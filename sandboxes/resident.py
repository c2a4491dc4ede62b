"""The process of a resident shell on this machine: its two pipes, its answers, its death."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable
from typing import IO

from sandboxes import processes
from sandboxes.base import SandboxError


def launch(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a program behind three pipes, in a session of its own: no terminal to ask, no Ctrl-C from there.

    Raises SandboxError.
    """
    processes.adopt_orphans()
    try:
        process = subprocess.Popen(
            arguments,
            env=environment,
            cwd="/",
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"{arguments[0]} cannot be started: {error}") from error
    processes.residents.add(process.pid)
    return process


async def end(process: subprocess.Popen[bytes], timeout_seconds: float) -> bool:
    """Wait through the event loop for the end of what ``launch`` started; tell whether it came in time."""
    if process.returncode is not None:
        return True
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    pidfd = os.pidfd_open(process.pid)
    loop.add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(timeout_seconds):
            return await ended.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def wait(process: subprocess.Popen[bytes], timeout_seconds: float | None = None) -> None:
    """Wait for the end of what ``launch`` started. Raises subprocess.TimeoutExpired."""
    process.wait(timeout_seconds)
    processes.residents.discard(process.pid)


class Resident:
    """A resident shell that was just launched. The process is not waited for here: until then its pid stays taken."""

    def __init__(self, process: subprocess.Popen[bytes], on_death: Callable[[], None]) -> None:
        self.alive = True
        self._process = process
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._answers: deque[asyncio.Future[bool]] = deque()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe:
                os.set_blocking(pipe.fileno(), False)
        if process.stdout:
            self._loop.add_reader(process.stdout.fileno(), self._read, process.stdout)

    def send(self, line: str) -> None:
        """Tell it something. To a dead one nothing is told: what waits for it hears of its death."""
        if self.alive and self._process.stdin:
            try:
                self._process.stdin.write(f"{line}\n".encode())
            except OSError:  # it is gone, or stopped with a full pipe
                self.put_down()

    async def answers(self, seconds: float) -> bool:
        """Ask whether it lives."""
        if not self.alive:
            return False
        answer: asyncio.Future[bool] = self._loop.create_future()
        self._answers.append(answer)
        self.send("ping")
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            return False

    def complaint(self) -> str:
        """Return what it wrote on stderr, and read there no more: it writes nothing once it has answered."""
        if not self._process.stderr or self._process.stderr.closed:
            return ""
        text = self._process.stderr.read(4000) or b""
        self._process.stderr.close()
        return text.decode("utf-8", "replace").strip()

    def put_down(self) -> None:
        """Kill the process itself and let go of it."""
        os.kill(self._process.pid, signal.SIGKILL)
        self.let_go()

    def let_go(self) -> None:
        """Close the pipes, at which it ends by itself."""
        if not self.alive:
            return
        self.alive = False
        if self._process.stdout:
            self._loop.remove_reader(self._process.stdout.fileno())
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        while self._answers:
            self._answer(yes=False)
        self._on_death()

    def _read(self, stdout: IO[bytes]) -> None:
        data = stdout.read(4096)
        for _ in range((data or b"").count(b"\n")):
            self._answer(yes=True)
        if data == b"":
            self.let_go()

    def _answer(self, *, yes: bool) -> None:
        answer = self._answers.popleft() if self._answers else None
        if answer and not answer.done():
            answer.set_result(yes)
