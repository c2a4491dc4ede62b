"""What a pool says to workers that it does not start itself: the test is at the other end of their sockets."""

from __future__ import annotations

import errno
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollout import pool as pool_module
from rollout.controller import Controller
from rollout.jobs import Job, Outcome
from rollout.pacer import Pacer
from rollout.pool import Pool, PoolError
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
    refusal: OSError | None = None  # that meets who asks for a worker
    stuck: bool = False  # and forks nothing
    dead: bool = False
    released: bool = False
    closed: bool = False

    def fileno(self) -> int:
        return self.pipe[0]

    def spawn(self, number: int, worker_socket: socket.socket) -> None:
        if self.refusal:
            raise self.refusal
        self.sockets[number] = worker_socket.dup()
        self.sockets[number].setblocking(False)
        self.heard[number] = FrameBuffer()

    def kill(self, pid: int) -> bool:
        self.killed.append(pid)
        return not self.stuck

    def release(self) -> None:
        self.released = True

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        os.close(self.pipe[0])
        if not self.dead:
            os.close(self.pipe[1])
            for each in self.sockets.values():
                each.close()

    def die(self) -> None:
        """Be gone; the workers live on."""
        self.dead = True
        os.close(self.pipe[1])

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
def pool_of(
    workers: int, jobs: int, *spawners: Elsewhere | OSError, **more: Any
) -> Iterator[tuple[Elsewhere, Iterator[list[Outcome]]]]:
    """A pool's first spawner, and its results. Who wants another spawner meets the next one; the last one for good."""
    first, *others = spawners or (Elsewhere(),)
    assert isinstance(first, Elsewhere)
    left = [first, *others]

    def start(_log_file: object) -> Elsewhere:
        spawner = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(spawner, OSError):
            raise spawner
        return spawner

    samples = [Sample(index, f"question {index}") for index in range(jobs)]
    settings: dict[str, Any] = {
        "num_workers": workers,
        "per_worker": 2,
        "on_log": lambda _line: None,
        "pacer": Pacer(Controller()),
        "start_spawner": start,
    }
    with Pool(Frame({"type": "settings"}), **{**settings, **more}) as pool:
        yield first, pool.results(iter([Job(sample, 1) for sample in samples]))


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


def test_what_died_with_its_machine_is_tried_once_more_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.pool.SOLOS", 1)
    with pool_of(workers=1, jobs=2) as (spawner, results):
        next(results)
        spawner.ping(1)
        next(results)
        spawner.sockets[1].close()
        failures = []
        for number in (2, 3):
            while number not in spawner.sockets:
                failures += next(results)
            spawner.ping(number)
            next(results)
            next(results)
            assert len(indices(spawner.was_told(number, "run"))) == 1
            spawner.sockets[number].close()
        failures += [outcome for group in results for outcome in group]
    assert sorted(done(failures)) == [0, 1]
    assert [outcome.failure.kind for outcome in failures if outcome.failure] == ["worker_died"] * 2


def test_few_of_those_that_died_with_their_worker_are_tried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.pool.SOLOS", 1)  # fewer than there are workers
    with pool_of(2, 16, per_worker=6, pacer=None) as (spawner, results):
        next(results)
        spawner.ping(1)
        spawner.ping(2)
        next(results)
        lost = indices(spawner.was_told(1, "run"))
        assert len(lost) == 6
        spawner.sockets[1].close()
        next(results)
        next(results)
        assert list(spawner.sockets) == [1, 2, 3, 4, 5]  # two of them, before what has not begun
        for number in (3, 4, 5):
            spawner.ping(number)
        next(results)
        next(results)
        assert [len(indices(spawner.was_told(number, "run"))) for number in (3, 4, 5)] == [1, 1, 4]
        for number in (3, 4):
            (index,) = lost[number - 3 : number - 2]
            spawner.finish(number, index)
        came = [*done(next(results)), *done(next(results))]
        assert sorted(came) == lost[:2]
        assert list(spawner.sockets) == [1, 2, 3, 4, 5, 6, 7]


def test_those_that_died_with_their_worker_wait_until_one_more_rollout_may_run() -> None:
    class Full(Pacer):
        def allows(self, rollouts: int) -> bool:
            return rollouts < most

    most = 4
    with pool_of(2, 4, pacer=Full(Controller())) as (spawner, results):
        next(results)
        spawner.ping(1)
        spawner.ping(2)
        next(results)
        most = 2  # as where memory is short
        spawner.sockets[1].close()
        for _ in range(4):
            next(results)
        assert list(spawner.sockets) == [1, 2]
        (index, _) = indices(spawner.was_told(2, "run"))
        spawner.finish(2, index)
        next(results)
        next(results)
        assert list(spawner.sockets) == [1, 2, 3]


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


def test_who_has_not_spoken_is_held_up_by_no_clock_and_told_again_when_it_has() -> None:
    pacer = Pacer(Controller(_not_before=time.monotonic() + 30))
    ahead = 1000.0
    with pool_of(workers=1, jobs=1, pacer=pacer) as (spawner, results):
        for _ in range(4):
            next(results)
        assert [told["pace"]["not_before"] for told in spawner.was_told(1, "pace")] == [0.0]
        spawner.ping(1, ahead_seconds=ahead)
        next(results)
        next(results)
        (told,) = spawner.was_told(1, "pace")
        assert 20 < told["pace"]["not_before"] - (time.monotonic() - ahead) < 35
        spawner.finish(1, 0)
        assert sum(len(group) for group in results) == 1


def test_the_machine_that_is_worst_off_counts() -> None:
    pacer = Pacer(Controller())
    with pool_of(workers=1, jobs=1, pacer=pacer) as (spawner, results):
        next(results)
        spawner.ping(1, free_memory=0.1)
        for _ in range(8):
            next(results)
        assert "little memory is left" in pacer.words(1)
        spawner.finish(1, 0)
        assert sum(len(group) for group in results) == 1


def done(group: list[Outcome]) -> list[int]:
    return [outcome.job.sample.index for outcome in group]


def until_error(results: Iterator[list[Outcome]]) -> tuple[list[int], str]:
    """What still comes, and the PoolError after it."""
    came: list[int] = []
    try:
        for group in results:
            came += done(group)
    except PoolError as error:
        return came, str(error)
    raise AssertionError(came)


@pytest.fixture
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_RETRY_SECONDS", 0.0)


NO_ROOM = OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))


@pytest.mark.parametrize("refusal", [NO_ROOM, OSError(errno.ETOOMANYREFS, "Too many references")])
def test_a_worker_that_is_refused_costs_the_others_nothing(refusal: OSError) -> None:
    told: list[str] = []
    with pool_of(2, 3, on_log=lambda line: told.append(line["text"])) as (spawner, results):
        next(results)
        spawner.ping(1)
        spawner.ping(2)
        next(results)
        spawner.refusal = refusal
        spawner.sockets[2].close()
        next(results)
        next(results)
        spawner.finish(1, 0)
        spawner.finish(1, 2)
        came = [*done(next(results)), *done(next(results))]
        assert sorted(came) == [0, 2]
        assert len([text for text in told if str(refusal.strerror) in text]) == 1
        assert not spawner.closed
        while not (again := indices(spawner.was_told(1, "run"))[-1:]) or again != [1]:
            next(results)  # worker 1 has nothing else to do now
        spawner.finish(1, 1)
        assert [index for group in results for index in done(group)] == [1]


@pytest.mark.usefixtures("_no_patience")
def test_what_runs_is_finished_though_no_other_spawner_can_be_had() -> None:
    told: list[str] = []
    with pool_of(1, 4, Elsewhere(), NO_ROOM, on_log=lambda line: told.append(line["text"])) as (spawner, results):
        next(results)
        spawner.ping(1)
        next(results)
        spawner.finish(1, 0)
        spawner.die()  # in the same moment
        assert done(next(results)) == [0]
        next(results)
        spawner.finish(1, 1)
        assert done(next(results)) == [1]
        next(results)
        spawner.finish(1, 2)
        assert done(next(results)) == [2]
        spawner.say(1, type="log", text="last words")
        spawner.sockets[1].close()
        came, error = until_error(results)
    assert came == []
    assert error.startswith("no worker process can be started (No buffer space available)")
    assert "last words" in told


@pytest.mark.usefixtures("_no_patience")
def test_rows_are_handed_out_before_the_run_ends_for_want_of_workers() -> None:
    with pool_of(2, 4, Elsewhere(), NO_ROOM) as (spawner, results):
        next(results)
        spawner.ping(1)
        next(results)
        spawner.say(1, **row(0))
        spawner.sockets[1].close()
        spawner.sockets[2].close()
        spawner.die()
        came, error = until_error(results)
    assert came == [0]
    assert error.startswith("no worker process can be started (No buffer space available)")
    assert spawner.closed


def test_what_has_arrived_is_handed_out_before_a_run_ends_that_can_come_to_nothing() -> None:
    deaths: list[str] = []
    with pool_of(1, 2, watch=lambda: "".join(deaths)) as (spawner, results):
        next(results)
        spawner.ping(1)
        next(results)
        deaths.append("the endpoint's process has died")
        spawner.say(1, **row(0))
        assert until_error(results) == ([0], *deaths)


@pytest.mark.usefixtures("_no_patience")
def test_descriptors_are_left_for_the_files_of_the_run() -> None:
    told: list[str] = []
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pool_of(100, 100, pacer=None, on_log=lambda line: told.append(line["text"])) as (spawner, results):
        held = len(list(Path("/proc/self/fd").iterdir()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (held + 120, before[1]))
        try:
            next(results)
            spare = [os.dup(0) for _ in range(64)]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for each in spare:
            os.close(each)
        assert 0 < len(spawner.sockets) < 40
        assert "Too many open files" in told[0]


@pytest.mark.usefixtures("_no_patience")
def test_a_spawner_that_is_stuck_is_asked_no_more_and_its_workers_work_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "START_SECONDS", 2.5)
    stuck, other, too_many = Elsewhere(stuck=True), Elsewhere(), OSError("a third one is not wanted")
    with pool_of(3, 4, stuck, other, too_many, pacer=None) as (_, results):
        next(results)
        assert list(stuck.sockets) == [1, 2, 3]
        stuck.ping(1)
        while not other.sockets:
            stuck.ping(1)
            assert next(results) == []
        assert not stuck.released
        assert list(other.sockets) == [4, 5]
        other.ping(4)
        other.ping(5)
        next(results)
        next(results)
        given = {number: indices(other.was_told(number, "run")) for number in (4, 5)}
        assert sorted(given.values()) == [[1], [2]]
        stuck.finish(1, 0)
        stuck.finish(1, 3)
        for number, (index,) in given.items():
            other.finish(number, index)
        assert sorted(index for group in results for index in done(group)) == [0, 1, 2, 3]
    assert stuck.closed
    assert other.closed


def test_spawners_are_all_released_before_the_end_of_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "START_SECONDS", 0.0)
    spawners = [Elsewhere(stuck=True) for _ in range(3)]
    order: list[str] = []
    for spawner in spawners:
        monkeypatch.setattr(spawner, "release", lambda: order.append("release"))
        monkeypatch.setattr(spawner, "close", lambda: order.append("close"))
    monkeypatch.setattr(pool_module, "_RETRY_SECONDS", 0.0)
    with pool_of(1, 1, *spawners) as (_, results):
        while not spawners[-1].sockets:
            next(results)
    assert order == ["release"] * 3 + ["close"] * 3
    for spawner in spawners:
        Elsewhere.close(spawner)
