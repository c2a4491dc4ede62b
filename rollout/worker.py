"""A worker process: many rollouts at once in one event loop, each ending as one row sent to the parent.

The row is sent as soon as there is one, for it is paid for; then the rollout's sandbox is closed, and the parent told.
A worker writes no file of the run. It ends when its socket closes, that is, with the parent or when it is not needed
any more, and takes every rollout and sandbox with it. A fault of the program in one rollout is recorded as that
rollout's failure, with its traceback in the run's log; the others go on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rollout.budget import Spending
from rollout.controller import Seen
from rollout.gate import Gate
from rollout.host import look
from rollout.messages import Failure
from rollout.rows import Row, encode_row_without
from rollout.samples import Sample
from rollout.session import Session, Stage
from rollout.wire import READ_BYTES, Frame, FrameBuffer

PING_SECONDS = 5.0
_BEGUN_TOGETHER = 4  # in one turn of the loop; were it hundreds, all their requests would leave as late as the last
TELL_SECONDS = 0.2  # between two reports of what requests met with
CLOSING_SECONDS = 120.0  # that a sandbox is waited for when its rollout is over; a container engine can be slow
_CLOSE_SECONDS = 3.0  # what cancelled rollouts get to remove their sandboxes
_END_SECONDS = 4  # after that the process is ended from outside: by the spawner, or by the kernel where that is gone

Prepare: TypeAlias = "Callable[[dict[str, Any]], dict[str, Any]]"


@dataclass
class Worker:
    """The parent's socket, the rollouts that run, and those that are closing."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    stage: Stage | None = None
    running: set[asyncio.Task[None]] = field(default_factory=set)
    closing: set[asyncio.Task[None]] = field(default_factory=set)
    sessions: set[Session] = field(default_factory=set)
    prepare: Prepare = dict  # the settings for the machine it runs on
    gate: Gate = field(default_factory=Gate)
    _begun: int = 0
    _told: Seen = field(default_factory=Seen)
    _spent: Spending = field(default_factory=Spending)  # by rollouts that are over
    _told_spent: Spending = field(default_factory=Spending)

    async def serve(self) -> None:
        """Work until the socket closes."""
        self.gate.on_refusal = self._tell
        pinging = asyncio.create_task(self._ping())
        telling = asyncio.create_task(self._keep_telling())
        buffer = FrameBuffer()
        while data := await self._read():
            for frame in buffer.feed(data):
                await self._obey(frame)
        signal.alarm(_END_SECONDS)
        pinging.cancel()
        telling.cancel()
        await self._cancel_all()
        if self.stage:
            await self.stage.close()

    async def _read(self) -> bytes:
        try:
            return await self.reader.read(READ_BYTES)
        except OSError:  # the parent, or its machine, is gone
            return b""

    async def _obey(self, frame: Frame) -> None:
        match frame.header["type"]:
            case "settings":
                self.stage = Stage.from_settings(self.prepare(frame.header), self.log, self.gate)
            case "run":
                sample = Sample(**frame.header["sample"])
                task = asyncio.create_task(self._rollout(sample, frame.header["batch_num"]))
                self.running.add(task)
                task.add_done_callback(self._ended)
                self._begun += 1
                if self._begun % _BEGUN_TOGETHER == 0:
                    await asyncio.sleep(0)
            case "pace":
                self.gate.pace(**frame.header["pace"])
            case "finish":
                self.gate.close()
            case "stop":
                await self._cancel_all()

    async def _rollout(self, sample: Sample, batch_num: int) -> None:
        assert self.stage is not None  # noqa: S101 - settings are the first frame
        session = Session(sample, batch_num, self.stage)
        self.sessions.add(session)
        await self._run(session)
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - this one
        while task.cancelling():  # its row says so, and that was all: what is closed now has a time limit of its own
            task.uncancel()
        self.running.discard(task)
        self.closing.add(task)
        await self._close(session)

    async def _run(self, session: Session) -> None:
        """Run the rollout and send its row, whatever happens."""
        try:
            row = await session.run()
            if self.gate.closed and not session.asked:
                self._send(Frame({"type": "unrun", "index": session.sample.index}))
            else:
                self._send_row(session, row)
        except asyncio.CancelledError:
            self._send_row(session, session.failed(Failure("interrupted", "the run was interrupted")))
        except MemoryError:
            raise  # who has none left need not be the one that took it: all are tried again, each alone
        except Exception as error:  # noqa: BLE001 - one of the few places that record whatever goes wrong
            self.log("trace", f"prompt {session.sample.index}: {traceback.format_exc()}")
            self._send_row(session, session.failed(Failure("internal", f"{type(error).__name__}: {error}")))
        finally:
            self.sessions.discard(session)

    async def _close(self, session: Session) -> None:
        """Close the sandbox, and say when that is over. The row is sent: what goes wrong now does not touch it."""
        name = f"the sandbox of prompt {session.sample.index}"
        try:
            async with asyncio.timeout(CLOSING_SECONDS):
                await session.close()
        except TimeoutError:
            self.log("warning", f"{name} is not gone after {CLOSING_SECONDS:.0f} s; --clean removes what stays of it")
        except Exception:  # noqa: BLE001 - one of the few places that record whatever goes wrong
            self.log("trace", f"{name}: {traceback.format_exc()}")
        finally:
            self._send(Frame({"type": "closed"}))

    def _send_row(self, session: Session, row: Row) -> None:
        self.sessions.discard(session)
        self._spent += session.spent
        self._tell_spent()
        header = {"type": "row", "index": session.sample.index, "summary": session.summary(row)}
        self._send(Frame(header, encode_row_without(session.stage.secrets, row)))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End the process when a rollout gave no row: that is how the parent hears of it."""
        self.running.discard(task)
        self.closing.discard(task)
        if not task.cancelled() and (error := task.exception()):
            try:
                traceback.print_exception(error)
                sys.stderr.flush()
            finally:
                os._exit(1)

    def log(self, level: str, text: str) -> None:
        """Hand a line to the parent, which is the only one that prints."""
        self._send(Frame({"type": "log", "level": level, "text": text}))

    def _send(self, frame: Frame) -> None:
        if not self.writer.is_closing():
            self.writer.write(frame.encode())

    async def _keep_telling(self) -> None:
        while True:
            await asyncio.sleep(TELL_SECONDS)
            self._tell()

    def _tell(self) -> None:
        """Tell the parent what requests met with, unless that is nothing new."""
        seen = self.gate.report()
        if not seen.says_the_same(self._told):
            self._told = seen
            self._send(Frame({"type": "seen", "seen": vars(seen)}))
        self._tell_spent()

    def _tell_spent(self) -> None:
        """Tell the parent what this worker has spent in all, where that is bounded."""
        if self.stage is None or not self.stage.config.bounds_spending:
            return
        spent = sum((session.spent for session in self.sessions), self._spent)
        if spent != self._told_spent:
            self._told_spent = spent
            self._send(Frame({"type": "spent", "spent": vars(spent)}))

    async def _ping(self) -> None:
        while True:
            ping = {"type": "ping", "pid": os.getpid(), "now": time.monotonic(), "host": vars(look())}
            self._send(Frame(ping))
            await asyncio.sleep(PING_SECONDS)

    async def _cancel_all(self) -> None:
        await asyncio.sleep(0)  # all have begun then: a task that is cancelled before that ends without a row
        for task in self.running:
            task.cancel()
        if tasks := self.running | self.closing:
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)


async def _serve(connection: socket.socket, prepare: Prepare) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    await Worker(reader, writer, prepare=prepare).serve()
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


def warm_up() -> None:
    """Import what every rollout needs; done once, in the process that workers are forked from."""
    Stage.warm_up()


def main(connection: socket.socket, prepare: Prepare = dict) -> None:
    """Be a worker on this socket until it closes; ``prepare`` makes the settings right for another machine."""
    asyncio.run(_serve(connection, prepare))
