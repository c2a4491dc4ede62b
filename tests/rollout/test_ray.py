"""The same workers on a Ray cluster: a real one of three nodes on this machine, of which one is killed in the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from endpoints.scripted import ScriptedEndpoint
from tests.faults.processes import Process, assert_gone, below
from tests.faults.recorded import checkpoint_is_true, outcomes
from tests.program import (
    ROOT,
    Workplace,
    answer,
    descendants,
    ending,
    nap,
    processes_with,
    prompts_of,
    terminal,
    wait_until,
)

pytest.importorskip("ray", reason="needs the package ray: pip install -e '.[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
TASK = "batch runner's worker"  # in the name of a process that Ray has for one
KEY = "sk-ray-0123456789abcdef0123456789abcdef"
MINUTES_2 = 120


@dataclass(frozen=True)
class Nodes:
    address: str
    raylets: list[int]
    folder: Path

    def run(self, place: Workplace, endpoint: ScriptedEndpoint, **flags: Any) -> subprocess.Popen[str]:
        ray = {"executor": "ray", "ray_address": self.address, "num_workers": 3}
        return place.start(endpoint.base_url, **{**ray, **flags})


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    words = [sys.executable, "-m", "tests.rollout.ray_nodes"]
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        (Path(folder) / "nodes.log").open("wb") as log,
        subprocess.Popen(
            [*words, folder],
            cwd=ROOT,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as process,
    ):
        assert process.stdin
        assert process.stdout
        try:
            line = process.stdout.readline()
            assert line, (Path(folder) / "nodes.log").read_text(errors="replace")[-3000:]
            said = json.loads(line)
            yield Nodes(said["address"], said["raylets"], Path(folder))
        finally:
            everyone = [process.pid, *descendants(process.pid)]
            process.stdin.close()
            try:
                process.wait(30)
            finally:
                for pid in everyone:
                    Process(pid, 0, "").kill()


def timeless(row: Any) -> Any:
    metadata = {**row["metadata"], "timestamp": "", "duration_seconds": 0}
    return {**row, "metadata": metadata}


def test_a_run_leaves_the_same_rows_and_no_key_anywhere(place: Workplace, nodes: Nodes) -> None:
    prompts = [f"question {number}" for number in range(12)]
    place.dataset(prompts)
    place.env["OPENAI_API_KEY"] = KEY
    with ScriptedEndpoint([terminal("sleep 0.3; echo 42"), answer("42")]) as endpoint:
        with ending(nodes.run(place, endpoint, run_name="ray", concurrency=2)) as process:
            wait_until(lambda: endpoint.requests, "a worker asks")
            children = [pid for parent in (process.pid, *nodes.raylets) for pid in descendants(parent)]
            everywhere = {pid: told(pid) for pid in children}
            ended = place.ended(process, MINUTES_2)
        assert {request.headers["authorization"] for request in endpoint.requests} == {f"Bearer {KEY}"}
        assert place.run(endpoint.base_url, run_name="local", num_workers=3).code == 0
    assert ended.code == 0, ended.stderr
    assert not [line for line in ended.stderr.splitlines() if line.startswith(("error", "warning"))]
    rows = [[timeless(row) for row in place.trajectories(name)] for name in ("ray", "local")]
    assert rows[0] == rows[1]
    assert any("ray::" in text for text in everywhere.values())
    assert not [pid for pid, text in everywhere.items() if KEY in text]
    logs = [path for path in nodes.folder.rglob("*") if path.is_file()]
    assert len(logs) > 10
    assert not [path for path in logs if KEY.encode() in path.read_bytes()]


def told(pid: int) -> str:
    """What the kernel shows of a process."""
    try:
        return "".join(Path(f"/proc/{pid}/{name}").read_bytes().decode("latin-1") for name in ("environ", "cmdline"))
    except OSError:
        return ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_driver_that_ends_takes_everything_along_and_is_resumed_anywhere(
    place: Workplace, nodes: Nodes, number: signal.Signals
) -> None:
    command = nap(600)
    place.dataset(["quick", *(f"slow {each}" for each in range(3))])
    replies = [answer("1", prompt="quick"), terminal(command, prompt="slow")]
    with ScriptedEndpoint(replies) as endpoint, ending(nodes.run(place, endpoint)) as process:
        wait_until(lambda: len(processes_with(command)) >= 3, "the commands run")
        wait_until(place.rows, "the first one is done")
        process.send_signal(number)
        began = time.monotonic()
        ended = place.ended(process, 10)
        assert_gone(lambda: [Process(pid, 0, "") for text in (command, TASK) for pid in processes_with(text)])
    assert ended.code == (130 if number == signal.SIGINT else -9)
    assert time.monotonic() - began < 10
    with ScriptedEndpoint([answer("2")]) as endpoint:
        resumed = place.run(endpoint.base_url, resume=True)
        assert sorted(prompts_of(endpoint)) == ["slow 0", "slow 1", "slow 2"]
    assert resumed.code == 0, resumed.stderr
    assert len(place.trajectories()) == 4
    assert checkpoint_is_true(place)


def test_a_node_that_is_killed_costs_its_rollouts_a_second_try_and_nothing_else(place: Workplace, nodes: Nodes) -> None:
    """One worker more than there are CPUs: it waits for one, which holds up nobody."""
    prompts = [f"question {number}" for number in range(16)]
    place.dataset(prompts)
    with ScriptedEndpoint([terminal("sleep 2"), answer("1", delay_seconds=1)]) as endpoint:
        with ending(nodes.run(place, endpoint, num_workers=4, concurrency=2)) as process:
            lost = nodes.raylets[-1]
            wait_until(lambda: any(TASK in told(pid) for pid in descendants(lost)), "a worker is on the node")
            wait_until(lambda: len(endpoint.requests) > 12, "all of them work")
            for pid in [lost, *descendants(lost)]:
                Process(pid, 0, "").kill()
            ended = place.ended(process, MINUTES_2)
        asked = Counter(prompts_of(endpoint))
    assert ended.code == 0, ended.stderr
    assert outcomes(place) == dict.fromkeys(prompts, "done")
    assert ended.stderr.count("rollouts in flight") == 1
    assert "waiting for a free CPU of the cluster" in ended.stderr
    again = [prompt for prompt in prompts if asked[prompt] > 2]
    assert 1 <= len(again) <= 2
    assert checkpoint_is_true(place)


def test_an_instance_of_our_own_ends_with_a_program_that_is_killed(place: Workplace) -> None:
    command = nap(600)
    place.dataset(["one"])
    place.env["OPENAI_API_KEY"] = KEY
    with ScriptedEndpoint([terminal(command)]) as endpoint:
        with ending(place.start(endpoint.base_url, executor="ray")) as process:
            wait_until(lambda: processes_with(command) or process.poll() is not None, "the command runs", MINUTES_2)
            assert process.poll() is None, process.communicate()
            everyone = below(process.pid)
            assert any("gcs_server" in each.command for each in everyone)
            assert not [each for each in everyone if KEY in told(each.pid)]
            process.kill()
            process.communicate()
        assert_gone(lambda: [each for each in everyone if each.alive])
        assert not processes_with(command)


def test_what_is_wrong_is_told_at_the_door(place: Workplace) -> None:
    place.dataset(["one"])
    cases: dict[str, dict[str, Any]] = {
        "error: --ray_address=127.0.0.1:1 needs --executor=ray": {"ray_address": "127.0.0.1:1"},
        "error: --executor=slurm is not known; choose from 'local', 'ray'": {"executor": "slurm"},
        "error: Ray at 127.0.0.1:1: Connection refused": {"executor": "ray", "ray_address": "127.0.0.1:1"},
        "error: ray://x:1 is no host:port of a Ray cluster's head; Ray Client addresses will not do": {
            "executor": "ray",
            "ray_address": "ray://x:1",
        },
    }
    for told_line, flags in cases.items():
        ended = place.run("http://127.0.0.1:9/v1", **flags)
        assert (ended.code, ended.stdout, ended.stderr) == (2, "", f"{told_line}\n")
    assert not place.run_dir().exists()


def test_strangers_are_let_go_without_an_answer_and_hold_up_nobody() -> None:
    from rollout.ray_driver import _Driver, _Link  # noqa: PLC0415 - where there is Ray

    async def scene() -> None:
        ours, pool = socket.socketpair()
        control, _parent = socket.socketpair()
        driver = _Driver(control, "127.0.0.1", share=1)
        with pool, control, _parent:
            link = _Link(*await asyncio.open_connection(sock=ours))
            driver.expected.add(link)
            async with await asyncio.start_server(driver._greet, "127.0.0.1", 0) as server:
                where = server.sockets[0].getsockname()
                silent = await asyncio.open_connection(*where)
                assert await answered(where, b"?" * 32) == b""
                assert await answered(where, b"GET / HTTP/1.0\r\n\r\n", ends=True) == b""
                pool.sendall(b"settings")
                outward = asyncio.create_task(link.outward())
                reader, writer = await asyncio.open_connection(*where)
                writer.write(link.secret + b"ping")
                assert await asyncio.wait_for(reader.readexactly(8), 5) == b"settings"
                assert await asyncio.to_thread(pool.recv, 100) == b"ping"
                assert await answered(where, link.secret) == b""
                for each in (writer, silent[1]):
                    each.close()
                    await each.wait_closed()
                await asyncio.wait_for(link.over.wait(), 5)
                link.close()
                await asyncio.wait_for(outward, 5)

    asyncio.run(scene())


async def answered(where: tuple[str, int], said: bytes, *, ends: bool = False) -> bytes:
    reader, writer = await asyncio.open_connection(*where)
    writer.write(said)
    if ends:
        writer.write_eof()
    try:
        return await asyncio.wait_for(reader.read(), 5)
    finally:
        writer.close()
        await writer.wait_closed()
