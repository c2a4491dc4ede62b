"""What a pool says to workers that it does not start itself: the test is at the other end of their sockets."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rollout.controller import Controller
from rollout.jobs import Job, Outcome
from rollout.pacer import Pacer
from rollout.pool import Pool
from rollout.samples import Sample
from rollout.wire import Frame, FrameBuffer

HOST = {"free_memory": 1.0, "load": 0.0}


@dataclass
class Elsewhere:
    """A spawner; what it is asked for is its ``sockets``, by number."""

    sockets: dict[int, socket.socket] = field(default_factory=dict)
    heard: dict[int, FrameBuffer] = field(default_factory=dict)
    killed: list[int] = field(default_factory=list)
    pipe: tuple[int, int] = field(default_factory=os.pipe)

    def fileno(self) -> int:
        return self.pipe[0]

    def spawn(self, number: int, worker_socket: socket.socket) -> None:
        self.sockets[number] = worker_socket.dup()
        self.sockets[number].setblocking(False)
        self.heard[number] = FrameBuffer()

    def kill(self, pid: int) -> bool:
        self.killed.append(pid)
        return True

    def close(self) -> None:
        for each in self.sockets.values():
            each.close()
        for end in self.pipe:
            os.close(end)

    def say(self, number: int, **header: Any) -> None:
        self.sockets[number].sendall(Frame(header).encode())

    def finish(self, number: int, index: int) -> None:
        """Send a rollout's row, and say that its sandbox is gone."""
        self.say(number, **row(index))
        self.say(number, type="closed")

    def ping(self, number: int, ahead_seconds: float = 0.0, **host: float) -> None:
        now = time.monotonic() - ahead_seconds
        self.say(number, type="ping", pid=number, now=now, host={**HOST, **host})

    def was_told(self, number: int, kind: str) -> list[dict[str, Any]]:
        """The headers of a kind that are new."""
        try:
            data = self.sockets[number].recv(1 << 20)
        except BlockingIOError:
            return []
        return [frame.header for frame in self.heard[number].feed(data) if frame.header["type"] == kind]


@contextmanager
def pool_of(workers: int, jobs: int, pacer: Pacer | None = None) -> Iterator[tuple[Elsewhere, Iterator[list[Outcome]]]]:
    spawner = Elsewhere()
    samples = [Sample(index, f"question {index}") for index in range(jobs)]
    pool = Pool(
        Frame({"type": "settings"}),
        num_workers=workers,
        per_worker=2,
        on_log=lambda _line: None,
        pacer=pacer or Pacer(Controller()),
        start_spawner=lambda _log_file: spawner,
    )
    with pool:
        yield spawner, pool.results(iter([Job(sample, 1) for sample in samples]))


def indices(runs: list[dict[str, Any]]) -> list[int]:
    return [run["sample"]["index"] for run in runs]


def row(index: int) -> dict[str, Any]:
    return {"type": "row", "index": index, "summary": {}}


def test_a_worker_that_waits_for_a_place_holds_no_job() -> None:
    with pool_of(workers=2, jobs=3) as (spawner, results):
        next(results)
        assert list(spawner.sockets) == [1, 2]
        spawner.ping(1)
        spawner.say(2, type="waits")
        next(results)
        next(results)
        assert indices(spawner.was_told(1, "run")) == [0, 2]
        assert spawner.was_told(2, "run") == []
        spawner.finish(1, 0)
        assert [outcome.job.sample.index for outcome in next(results)] == [0]
        next(results)
        assert indices(spawner.was_told(1, "run")) == [1]
        spawner.ping(2)
        spawner.finish(1, 1)
        spawner.finish(1, 2)
        rest = [outcome.job.sample.index for group in results for outcome in group]
        assert sorted(rest) == [1, 2]
        assert list(spawner.sockets) == [1, 2]


def test_the_next_rollout_begins_while_the_sandbox_of_the_last_one_is_closed() -> None:
    with pool_of(workers=1, jobs=5) as (spawner, results):
        next(results)
        spawner.ping(1)
        next(results)
        assert indices(spawner.was_told(1, "run")) == [0, 1]
        spawner.say(1, **row(0))
        spawner.say(1, **row(1))
        assert sum(len(next(results)) for _ in range(2)) == 2
        assert spawner.was_told(1, "run") == []  # as many close as may run: there are enough sandboxes
        spawner.say(1, type="closed")
        next(results)
        next(results)
        assert indices(spawner.was_told(1, "run")) == [2, 3]
        spawner.say(1, type="closed")
        for index in (2, 3):
            spawner.finish(1, index)
        next(results)
        next(results)
        assert indices(spawner.was_told(1, "run")) == [4]
        spawner.say(1, **row(4))
        assert len(next(results)) == 1
        assert next(results) == []  # all rows are here, and yet it is not over
        spawner.say(1, type="closed")
        assert list(results) in ([], [[]])


def test_a_worker_that_got_its_place_late_works_like_any_other() -> None:
    with pool_of(workers=2, jobs=4) as (spawner, results):
        next(results)
        spawner.say(1, type="waits")
        spawner.say(2, type="waits")
        next(results)
        spawner.ping(2)
        done: list[int] = []
        for _ in range(2):
            next(results)
            next(results)
            given = indices(spawner.was_told(2, "run"))
            assert len(given) == 2
            for index in given:
                spawner.finish(2, index)
            done += given
        assert sum(len(group) for group in results) == 2
        assert sorted(done) == [0, 1, 2, 3]
        assert list(spawner.sockets) == [1, 2]


def test_what_died_with_its_machine_is_tried_once_more_alone() -> None:
    with pool_of(workers=1, jobs=2) as (spawner, results):
        next(results)
        spawner.ping(1)
        next(results)
        spawner.sockets[1].close()
        next(results)
        next(results)
        assert list(spawner.sockets) == [1, 2, 3]
        for number in (2, 3):
            spawner.ping(number)
        next(results)
        next(results)
        assert sorted(indices(spawner.was_told(2, "run") + spawner.was_told(3, "run"))) == [0, 1]
        for number in (2, 3):
            spawner.sockets[number].close()
        failures = [outcome.failure for group in results for outcome in group]
        assert [failure.kind for failure in failures if failure] == ["worker_died"] * 2


def test_times_are_told_by_the_clock_of_whoever_hears_them() -> None:
    pacer = Pacer(Controller())
    ahead = 1000.0
    with pool_of(workers=1, jobs=2, pacer=pacer) as (spawner, results):
        next(results)
        spawner.ping(1, ahead_seconds=ahead)
        next(results)
        there = time.monotonic() - ahead
        seen = {"sent": 1, "refused": 1, "refused_since": there, "wait_seconds": 30.0}
        spawner.say(1, type="seen", seen=seen)
        for _ in range(4):
            next(results)
        paces = [told["pace"] for told in spawner.was_told(1, "pace")]
        assert 20 < paces[-1]["not_before"] - there < 35
        spawner.finish(1, 0)
        spawner.finish(1, 1)
        assert sum(len(group) for group in results) == 2


def test_the_machine_that_is_worst_off_counts() -> None:
    pacer = Pacer(Controller())
    with pool_of(workers=1, jobs=1, pacer=pacer) as (spawner, results):
        next(results)
        spawner.ping(1, free_memory=0.1)
        for _ in range(8):
            next(results)
        assert "little memory is left" in pacer.words
        spawner.finish(1, 0)
        assert sum(len(group) for group in results) == 1
