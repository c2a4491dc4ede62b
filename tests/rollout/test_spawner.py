"""The process that workers are forked from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from endpoints.scripted import ScriptedEndpoint
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
    place.env["SOME_SERVICE_API_KEY"] = "not-for-workers"
    with (
        ScriptedEndpoint([answer("1", delay_seconds=1)]) as endpoint,
        ending(place.start(endpoint.base_url)) as process,
    ):
        (worker,) = wait_for_workers(1)
        for pid in (spawner(process.pid).pid, worker.pid):
            assert b"not-for-workers" not in Path(f"/proc/{pid}/environ").read_bytes()
        assert place.ended(process).code == 0


def _open(pid: int) -> list[str]:
    return [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
