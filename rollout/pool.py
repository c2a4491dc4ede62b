"""The worker processes: who runs what, what comes back, and what happens when one dies.

The pool hands jobs to workers as places become free, whatever batch they belong to, and gives back outcomes in groups,
as they arrive. It promises that every job it took comes back exactly once, unless it was interrupted or told to finish:
as a row, or as ``worker_died`` after its second worker is gone too. It writes no file and prints nothing.

A worker that dies takes all its rollouts with it, though at most one of them is to blame. So each is tried again in a
process of its own: what kills a worker twice then fails alone, and its neighbours do not notice. They come before
what has not begun, but few of them at once, for what killed the worker may have been want of memory.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from math import inf
from typing import IO, Any, Self

from rollout.budget import Spending
from rollout.controller import Host, Seen
from rollout.interrupt import Interrupt
from rollout.jobs import Job, Jobs, Outcome
from rollout.messages import Failure
from rollout.pacer import PACE_SECONDS, Pacer
from rollout.spawner import LocalSpawner, Spawner, StartSpawner
from rollout.wire import READ_BYTES, Frame, FrameBuffer

SILENCE_SECONDS = 30.0  # a worker that says nothing for so long is stuck; it says something every few seconds
START_SECONDS = 180.0  # the same for its first word: importing on a machine that is short of everything
STOP_SECONDS = 4.0  # what cancelled rollouts get to clean up before their worker is killed
_MAX_PAUSE_SECONDS = 2.0  # between two looks at the workers, when nothing keeps this process from looking
SOLOS = 16  # workers of one rollout each, at once: a dead worker may have left hundreds of rollouts, of minutes each
_MAX_FAILURES = 10  # attempts in a row to start workers, of which none comes to a worker that says a word
_RETRY_SECONDS = 1.0  # from one of them to the next
_MAX_UNBORN = 128  # workers that are asked for and have not spoken yet: no spawner has room for any number
_LAST_LOOK_SECONDS = 1.0  # at what workers have said when the run cannot go on
_SPARE_DESCRIPTORS = 80  # that workers leave to others: rows are written whatever cannot be started


class PoolError(Exception):
    """The rollouts cannot go on: none runs and no worker can be had, or what they all need is gone."""


@dataclass
class _Worker:
    number: int
    socket: socket.socket
    spawner: Spawner  # where it comes from
    solo: bool
    attempt: int = 0  # workers that are asked for together are one attempt: what fails for one fails for all
    jobs: dict[int, Job] = field(default_factory=dict)  # by sample index
    closing: int = 0  # rollouts whose rows are here, and whose sandboxes are not gone yet
    buffer: FrameBuffer = field(default_factory=FrameBuffer)
    unsent: bytearray = field(default_factory=bytearray)
    pid: int = 0
    spoke: bool = False
    waits: bool = False  # for a place to run in, or did before it spoke
    ahead_seconds: float = inf  # of this process's clock to the worker's, which may run on another machine
    silent_seconds: float = 0.0  # of the time that the parent was awake and listening

    @property
    def load(self) -> int:
        """Of the places it has; rollouts that close have places of their own, for they take another kind of time."""
        return max(len(self.jobs), self.closing)

    @property
    def is_idle(self) -> bool:
        return self.spoke and not self.load

    def fileno(self) -> int:
        return self.socket.fileno()


@dataclass
class Pool:
    """``num_workers`` processes with up to ``per_worker`` rollouts in flight each. Use as a context manager."""

    settings: Frame  # the first frame every worker gets: all it needs to know of the run
    num_workers: int
    per_worker: int  # rollouts in flight at most, whatever the controller says
    on_log: Callable[[dict[str, Any]], None]  # a worker's log line: {"level", "text"}
    interrupt: Interrupt = field(default_factory=Interrupt)
    pacer: Pacer | None = None  # says how many rollouts and requests there may be in all; None: any number
    watch: Callable[[], str] = str  # asked every second: why nothing can come of it any more; "" while something can
    log_file: IO[bytes] | int = subprocess.DEVNULL  # where dying workers' last words go
    start_spawner: StartSpawner = LocalSpawner.start
    stopped: bool = False  # set by stop(): nothing more is dispatched
    refused_requests: int = 0  # answered with 429 or 5xx until now, as far as workers have told
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _pending: Jobs = field(default_factory=lambda: Jobs(iter(())))
    _suspects: deque[Job] = field(default_factory=deque)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _spawner: Spawner | None = None  # that is asked for workers; none as long as none is wanted
    _spawners: list[Spawner] = field(default_factory=list)  # all that live, with those that are asked no more
    _numbers: int = 0
    _attempts: int = 0
    _failed_attempt: int = 0
    _failures: int = 0  # failed attempts in a row
    _problem: str = ""  # of the last one
    _retry_at: float = -inf
    _listened_at: float = field(default_factory=time.monotonic)
    _spent: dict[int, Spending] = field(default_factory=dict)  # by worker number, of dead ones too

    def __enter__(self) -> Self:
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self.interrupt.wake = self._wake
        return self

    def __exit__(self, *_: object) -> None:
        self.interrupt.wake = None
        for worker in list(self._workers.values()):
            self._forget(worker)
        self._selector.close()
        for spawner in self._spawners:
            spawner.release()
        for spawner in self._spawners:
            spawner.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _wake(self) -> None:
        with suppress(OSError):
            os.write(self._wake_writer, b"!")

    def stop(self) -> None:
        """Dispatch nothing more; what runs is finished."""
        self.stopped = True

    def finish_turns(self) -> None:
        """Dispatch nothing more; what runs ends after its turn, and what has no answer yet is not run."""
        self.stop()
        for worker in self._workers.values():
            self._send(worker, Frame({"type": "finish"}))

    @property
    def spent(self) -> Spending:
        """What rollouts have cost until now, running ones included; told only where the run bounds it."""
        return sum(self._spent.values(), Spending())

    @property
    def in_flight(self) -> int:
        """Rollouts that run now."""
        return sum(len(worker.jobs) for worker in self._workers.values())

    @property
    def _is_busy(self) -> bool:
        return any(worker.load for worker in self._workers.values())

    def results(self, jobs: Iterator[Job]) -> Iterator[list[Outcome]]:
        """Run the jobs; yield groups of outcomes as they come, and an empty one every so often while none comes.

        Ends when all are done, or after ``stop()`` or an interrupt when nothing runs any more. Raises PoolError, once
        all that has come is handed out.
        """
        self._pending = Jobs(jobs)
        while not self.interrupt.count:
            if self._has_work and (reason := self.watch() or self._hopeless):
                yield from self._arrived()
                if self._has_work:
                    raise PoolError(reason)
            self._tell_pace()
            if not self.stopped:
                self._attempts += 1
                self._dispatch_suspects()
                self._dispatch()
            if not self._has_work and not self._is_busy:
                return
            yield self._wait(timeout_seconds=PACE_SECONDS if self.pacer else 1.0)
        yield from self._cancel_all()

    @property
    def _has_work(self) -> bool:
        """Whether rollouts run, or will; not when only sandboxes are still closed."""
        return self.in_flight > 0 or (not self.stopped and bool(self._pending or self._suspects))

    @property
    def _hopeless(self) -> str:
        """Why no worker can be had, once none is left; "" while there is hope."""
        return self._problem if self._failures >= _MAX_FAILURES and not self._workers else ""

    @property
    def _may_spawn(self) -> bool:
        """Not while one waits for a place, nor right after a failure, nor when it failed again and again."""
        unborn = [worker for worker in self._workers.values() if not worker.spoke]
        if len(unborn) >= _MAX_UNBORN or any(worker.waits for worker in unborn):
            return False
        return self._failures < _MAX_FAILURES and time.monotonic() >= self._retry_at

    @property
    def _has_room(self) -> bool:
        """Whether one more rollout may run."""
        return self.pacer is None or self.pacer.allows(self.in_flight)

    def _dispatch(self) -> None:
        crew = [worker for worker in self._workers.values() if not worker.solo and (worker.spoke or not worker.waits)]
        most = self.pacer.workers(self.num_workers) if self.pacer else self.num_workers
        crew = sorted(crew, key=lambda each: each.load, reverse=True)[:most]  # where those are few, the others drain
        while self._pending and self._has_room:
            worker = min(crew, key=lambda each: each.load, default=None)
            wants_more = worker is None or (worker.load and len(crew) < most)
            if wants_more and self._may_spawn and (newborn := self._spawn(solo=False)):
                worker = newborn
                crew.append(newborn)
            if worker is None or worker.load >= self.per_worker:
                break
            self._give(worker, next(self._pending))

    def _dispatch_suspects(self) -> None:
        """Give each a worker that has nothing else to do, and never will, a few at a time."""
        idle = [worker for worker in self._workers.values() if worker.is_idle]
        solos = sum(worker.solo for worker in self._workers.values())
        most = max(self.num_workers, SOLOS)
        while self._suspects and solos < most and self._has_room and (idle or self._may_spawn):
            worker = idle.pop() if idle else self._spawn(solo=True)
            if worker is None:
                break
            worker.solo = True
            self._give(worker, self._suspects.popleft())
            solos += 1

    def _give(self, worker: _Worker, job: Job) -> None:
        worker.jobs[job.sample.index] = job
        if worker.spoke:  # else it is sent with the others when it does
            self._send_job(worker, job)

    def _send_job(self, worker: _Worker, job: Job) -> None:
        self._send(worker, Frame({"type": "run", "batch_num": job.batch_num, "sample": vars(job.sample)}))

    def _send(self, worker: _Worker, frame: Frame) -> None:
        worker.unsent += frame.encode()
        self._flush(worker)

    def _flush(self, worker: _Worker) -> None:
        with suppress(OSError):  # a closed socket is seen when it is read; where there is no room it is sent later
            sent = worker.socket.send(worker.unsent)
            del worker.unsent[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.unsent else 0)
        self._selector.modify(worker, events, worker)

    def _wait(self, timeout_seconds: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for key, events in self._selector.select(timeout_seconds):
            if isinstance(key.data, _Worker):
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ:
                    outcomes += self._read(key.data)
            elif key.data:
                self._lose_spawner(key.data)  # it says nothing: it is gone
            else:
                with suppress(BlockingIOError):
                    os.read(self._wake_reader, 4096)
        return outcomes + self._bury_silent()

    def _arrived(self) -> Iterator[list[Outcome]]:
        """Hand out what has come and is not read yet, as far as that can be read in a moment."""
        deadline = time.monotonic() + _LAST_LOOK_SECONDS
        while self._selector.select(0) and time.monotonic() < deadline:
            yield self._wait(timeout_seconds=0)

    def _read(self, worker: _Worker) -> list[Outcome]:
        try:
            data = worker.socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError:
            data = b""
        if not data:
            return self._bury(worker)
        worker.silent_seconds = 0.0
        outcomes = []
        for frame in worker.buffer.feed(data):
            if frame.header["type"] == "row":
                job = worker.jobs.pop(frame.header["index"])
                worker.closing += 1
                outcomes.append(Outcome(job, frame.payload, frame.header["summary"]))
            else:
                self._hear(worker, frame)
        if worker.solo and worker.is_idle:
            self._forget(worker)
        return outcomes

    def _hear(self, worker: _Worker, frame: Frame) -> None:
        match frame.header["type"]:
            case "ping":
                self._hear_ping(worker, frame.header)
            case "waits":
                self._take_back(worker)
                worker.waits, worker.solo = True, False
            case "seen":
                self._hear_seen(worker, Seen(**frame.header["seen"]))
            case "spent":
                self._spent[worker.number] = Spending(**frame.header["spent"])
            case "unrun":
                worker.jobs.pop(frame.header["index"])
                worker.closing += 1
            case "closed":
                worker.closing -= 1
            case "log":
                self.on_log(frame.header)

    def _hear_ping(self, worker: _Worker, header: dict[str, Any]) -> None:
        worker.pid = header["pid"]
        worker.ahead_seconds = min(worker.ahead_seconds, time.monotonic() - header["now"])
        if self.pacer:
            self.pacer.told(worker.number, Host(**header["host"]))
        if not worker.spoke:
            worker.spoke, self._failures = True, 0
            if self.pacer:
                self.pacer.spoke(worker.number)
            for job in worker.jobs.values():
                self._send_job(worker, job)

    def _hear_seen(self, worker: _Worker, seen: Seen) -> None:
        self.refused_requests += seen.refused + seen.failed
        if self.pacer and worker.spoke:  # only then it is known by which clock
            self.pacer.seen(worker.number, seen.by_clock_of_parent(worker.ahead_seconds))

    def _bury(self, worker: _Worker) -> list[Outcome]:
        self._forget(worker)
        if not worker.spoke:
            self._take_back(worker)
            self._start_failed(worker.attempt, "workers die while they start, again and again; the run's log says why")
            return []
        if not worker.jobs:
            return []
        names = f"worker {worker.number} (pid {worker.pid})"
        self._warn(f"{names} died with {len(worker.jobs)} rollouts in flight")
        if not worker.solo:
            self._suspects.extend(worker.jobs.values())
            return []
        failure = Failure("worker_died", f"the worker process died twice while running this sample ({names})")
        return [Outcome(job, failure=failure) for job in worker.jobs.values()]

    def _take_back(self, worker: _Worker) -> None:
        """Take back what a worker that has not spoken was given, and never saw."""
        (self._suspects if worker.solo else self._pending.returned).extend(worker.jobs.values())
        worker.jobs.clear()

    def _start_failed(self, attempt: int, problem: str) -> None:
        """Count attempts that came to no worker; what is wrong with one worker of an attempt is wrong with all."""
        if attempt <= self._failed_attempt:
            return
        self._failed_attempt = attempt
        self._failures += 1
        self._problem = problem
        self._retry_at = time.monotonic() + _RETRY_SECONDS
        if self._failures == _MAX_FAILURES and any(worker.spoke for worker in self._workers.values()):
            self._warn(f"no more workers can be started; the run goes on with {len(self._workers)}")

    def _warn(self, text: str) -> None:
        self.on_log({"level": "warning", "text": text})

    def _spawn(self, *, solo: bool) -> _Worker | None:
        """Ask for one more worker; None when the system refuses, which is told and tried again a little later."""
        try:
            worker = self._ask_for_worker(solo=solo)
        except OSError as error:
            reason = error.strerror or error
            if not self._failures:
                self._warn(f"no worker process can be started now ({reason}); what runs goes on, and it is tried again")
            problem = f"no worker process can be started ({reason}); is --num_workers too high?"
            self._start_failed(self._attempts, problem)
            return None
        self._workers[worker.number] = worker
        self._send(worker, self.settings)
        return worker

    def _ask_for_worker(self, *, solo: bool) -> _Worker:
        """Have a worker in the making. Raises OSError when there will be none."""
        spawner = self._ready_spawner()
        self._numbers += 1
        ours, theirs = self._sockets()
        with theirs, ExitStack() as on_error:
            on_error.callback(ours.close)
            ours.setblocking(False)
            spawner.spawn(self._numbers, theirs)
            worker = _Worker(self._numbers, ours, spawner, solo, self._attempts)
            self._selector.register(worker, selectors.EVENT_READ, worker)
            on_error.pop_all()
        return worker

    def _sockets(self) -> tuple[socket.socket, socket.socket]:
        """Make both ends of a worker's socket, where others then still have what they need. Raises OSError."""
        with ExitStack() as spare:
            for _ in range(_SPARE_DESCRIPTORS):
                spare.callback(os.close, os.dup(self._wake_reader))
            return socket.socketpair()

    def _ready_spawner(self) -> Spawner:
        """Have the spawner, or another one where it is gone or stuck. Raises OSError."""
        if self._spawner is None:
            spawner = self.start_spawner(self.log_file)
            self._spawners.append(spawner)
            self._selector.register(spawner, selectors.EVENT_READ, spawner)
            self._spawner = spawner
        return self._spawner

    def _lose_spawner(self, spawner: Spawner) -> None:
        self._ask_no_more(spawner)
        self._spawners.remove(spawner)
        self._selector.unregister(spawner)
        spawner.close()

    def _ask_no_more(self, spawner: Spawner) -> None:
        """Take the next worker from another spawner; those that come from this one are its care until they end."""
        if spawner is self._spawner:
            self._spawner = None

    def _tell_pace(self) -> None:
        if self.pacer:
            rollouts = {worker.number: len(worker.jobs) for worker in self._workers.values()}
            for number, share in self.pacer.news(rollouts).items():
                worker = self._workers[number]
                # By its own clock; what is not known yet must not hold it up for as long as that is behind.
                not_before = max(share["not_before"] - worker.ahead_seconds, 0.0) if worker.spoke else 0.0
                pace = {**share, "not_before": not_before}
                self._send(worker, Frame({"type": "pace", "pace": pace}))

    def _forget(self, worker: _Worker) -> None:
        if self.pacer:
            self.pacer.gone(worker.number)
        if self._workers.pop(worker.number, None):
            self._selector.unregister(worker)
            worker.socket.close()
        if worker.spoke:
            self._failures = 0  # another may start in the room that it leaves

    def _bury_silent(self) -> list[Outcome]:
        """Kill workers that are stuck; time in which this process was stopped itself says nothing about them."""
        now = time.monotonic()
        passed, self._listened_at = min(now - self._listened_at, _MAX_PAUSE_SECONDS), now
        outcomes = []
        for worker in list(self._workers.values()):
            worker.silent_seconds += passed
            if worker.silent_seconds > (SILENCE_SECONDS if worker.spoke else START_SECONDS):
                problem = "found no place to run in" if worker.waits and not worker.spoke else "is stuck; it is killed"
                self._warn(f"worker {worker.number} {problem}")
                if not worker.spawner.kill(worker.pid):
                    self._ask_no_more(worker.spawner)
                outcomes += self._bury(worker)
        return outcomes

    def _cancel_all(self) -> Iterator[list[Outcome]]:
        """Let running rollouts clean up for a few seconds; kill what is left, at once on a second interrupt."""
        for worker in list(self._workers.values()):
            if not worker.spoke:
                self._take_back(worker)
            self._send(worker, Frame({"type": "stop"}))
        deadline = time.monotonic() + STOP_SECONDS
        while self._is_busy and self.interrupt.count == 1 and time.monotonic() < deadline:
            yield self._wait(timeout_seconds=0.2)
        for worker in list(self._workers.values()):
            if worker.load:
                worker.spawner.kill(worker.pid)
