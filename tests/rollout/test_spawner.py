"""The process that workers are forked from."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from endpoints.scripted import ScriptedEndpoint
from rollout.spawner import LocalSpawner
from tests.faults.processes import spawner, wait_for_workers
from tests.program import Workplace, answer, ending

ROOT = Path(__file__).resolve().parents[2]
# Gets a worker to speak; this needs a process without threads.
SPEAKING = """
import os, signal, socket
from pathlib import Path
from rollout.spawner import forked_early

with forked_early() as start:
    (child,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    if %(killed)r:
        os.kill(int(child), signal.SIGKILL)
        os.waitid(os.P_PID, int(child), os.WEXITED | os.WNOWAIT)
    if %(started)r:
        spawner = start()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            spawner.spawn(1, theirs)
            theirs.close()
            ours.settimeout(30)
            assert ours.recv(4)
        spawner.close()
assert not Path(f"/proc/self/task/{os.getpid()}/children").read_text()
"""


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("killed", [True, False])
def test_a_forked_spawner_serves_is_replaced_and_goes(*, killed: bool, started: bool) -> None:
    code = SPEAKING % {"killed": killed, "started": started}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_spawner_that_may_have_no_more_open_files_lives_on() -> None:
    spawner = LocalSpawner.start()
    assert isinstance(spawner.process, subprocess.Popen)
    assert _first_word(spawner)
    before = resource.prlimit(spawner.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(spawner.process.pid, resource.RLIMIT_NOFILE, (3, before[1]))
    assert not _first_word(spawner)
    resource.prlimit(spawner.process.pid, resource.RLIMIT_NOFILE, before)
    assert _first_word(spawner)
    spawner.close()


def test_a_spawner_that_is_stuck_holds_up_nobody() -> None:
    spawner = LocalSpawner.start()
    spawner.process.send_signal(signal.SIGSTOP)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(BlockingIOError):
        _ask_for(10_000, spawner, theirs)
    spawner.process.kill()
    spawner.close()


def test_what_the_program_inherited_is_not_handed_on(place: Workplace) -> None:
    """Whoever waits for the end of a pipe that a shell gave the program waits for the program alone."""
    place.dataset(["one"])
    reader, writer = os.pipe()
    with ScriptedEndpoint([answer("1", delay_seconds=1)]) as endpoint:
        command = place.command(endpoint.base_url, {})
        with ending(place.start_command(command, pass_fds=[writer])) as process:
            (worker,) = wait_for_workers(1)
            pipe = str(Path(f"/proc/self/fd/{writer}").readlink())
            held = {pid: _open(pid) for pid in (process.pid, spawner(process.pid).pid, worker.pid)}
            assert place.ended(process).code == 0
    os.close(reader)
    os.close(writer)
    assert [pipe in each for each in held.values()] == [True, False, False]


def test_secrets_of_the_environment_stay_with_the_program(place: Workplace) -> None:
    place.dataset(["one"])
    place.env |= {"SOME_SERVICE_API_KEY": "not-for-workers", "SOME_PROXY": "http://me:not-for-workers@localhost:1"}
    with (
        ScriptedEndpoint([answer("1", delay_seconds=1)]) as endpoint,
        ending(place.start(endpoint.base_url)) as process,
    ):
        (worker,) = wait_for_workers(1)
        for pid in (spawner(process.pid).pid, worker.pid):
            assert b"not-for-workers" not in Path(f"/proc/{pid}/environ").read_bytes()
        assert place.ended(process).code == 0


def _first_word(spawner: LocalSpawner) -> bytes:
    """What a worker says first; nothing where there is none."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            spawner.spawn(1, theirs)
        ours.settimeout(30)
        return ours.recv(4)


def _ask_for(number: int, spawner: LocalSpawner, worker_socket: socket.socket) -> None:
    for each in range(number):
        spawner.spawn(each, worker_socket)


def _open(pid: int) -> list[str]:
    return [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
