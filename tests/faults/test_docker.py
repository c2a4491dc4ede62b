"""Runs whose sandboxes are containers: killed, robbed of a container, short of memory, short of places."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from endpoints.scripted import ScriptedEndpoint
from sandboxes.docker_owners import MACHINE, OWNER_PID, RUN, labels
from tests import engines
from tests.faults.processes import GONE_SECONDS, below, workers
from tests.program import Json, Workplace, answer, ending, results, terminal, wait_until
from tests.sandboxes.containers import SPEC, api, use

pytestmark = pytest.mark.docker
FLAGS: Json = {"sandbox": "docker"}
LONG = "echo begun >/tmp/begun; sleep 600"


@pytest.fixture(params=["docker"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, place: Workplace) -> Iterator[str]:
    use(request.param, monkeypatch)
    place.env |= {"DOCKER_HOST": engines.HOSTS[request.param], "TERMINAL_DOCKER_IMAGE": engines.BUSYBOX}
    place.env["TERMINAL_DOCKER_NETWORK"] = "false"  # containers start sooner so
    yield str(request.param)
    for container in of_run(place, request.param):
        with api(request.param) as client:
            client.remove_container(container["Id"], force=True)


def run_name(place: Workplace) -> str:
    return f"r-{place.path.name}"[:60]


def of_run(place: Workplace, engine: str, status: str = "") -> list[dict[str, Any]]:
    """The containers of the place's run."""
    filters = {"label": f"{RUN}={run_name(place)}", **({"status": status} if status else {})}
    with api(engine) as client:
        found: list[dict[str, Any]] = client.containers(all=True, filters=filters)
    return found


def wait_for_containers(place: Workplace, engine: str, number: int) -> list[dict[str, Any]]:
    """Wait until so many of them run a command."""

    def busy() -> int:
        return sum("sleep 600" in running_in(engine, container) for container in of_run(place, engine, "running"))

    wait_until(lambda: busy() >= number, "commands run in containers")
    return of_run(place, engine)


def test_of_a_killed_program_they_go_by_themselves(place: Workplace, engine: str) -> None:
    place.dataset(["one", "two", "three"])
    with ScriptedEndpoint([terminal(LONG)]) as endpoint:
        flags = {**FLAGS, "run_name": run_name(place), "num_workers": 2}
        with ending(place.start(endpoint.base_url, **flags)) as process:
            found = wait_for_containers(place, engine, 3)
            pids = {str(worker.pid) for worker in workers()}
            assert {container["Labels"][OWNER_PID] for container in found} <= pids
            process.kill()
            process.communicate()
        wait_until(lambda: not of_run(place, engine), "all containers are gone", GONE_SECONDS)


def test_when_everything_is_killed_at_once_the_next_start_leaves_none(place: Workplace, engine: str) -> None:
    """The next start is of a run that uses no containers at all."""
    place.dataset([f"sample {number}" for number in range(6)])
    with ScriptedEndpoint([terminal(LONG)]) as endpoint:
        flags = {**FLAGS, "run_name": run_name(place), "num_workers": 2}
        with ending(place.start(endpoint.base_url, **flags)) as process:
            wait_until(lambda: len(of_run(place, engine)) >= 2, "containers are being made")
            doomed = below(process.pid)
            process.send_signal(signal.SIGSTOP)
            for each in doomed:
                each.kill(signal.SIGSTOP)  # so that none can clean up after another
            left = dict(of_run(place, engine)[0]["Labels"])
            process.kill()
            for each in doomed:
                each.kill()
            process.communicate()
        with api(engine) as client:  # as one that was made, and whose owner died before it was started
            client.create_container(engines.BUSYBOX, ["true"], labels=left)
        assert of_run(place, engine)
        with ScriptedEndpoint([answer("1")]) as other:
            ended = place.run(other.base_url, run_name="other", sandbox="local")
        assert "sandboxes that a dead run had left behind" in ended.stderr
        wait_until(lambda: not of_run(place, engine), "all containers are gone", GONE_SECONDS)
    assert not list((place.path / "tmp").glob("batch-runner-*/engines/*"))


def test_clean_removes_what_is_dead_and_nothing_else(place: Workplace, engine: str) -> None:
    mine = {**labels(SPEC), RUN: run_name(place)}
    dead = {**mine, OWNER_PID: "999999999"}
    made = {"living": mine, "dead": dead, "elsewhere": {**dead, MACHINE: "another"}, "stranger": {RUN: mine[RUN]}}
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    folder = place.path / "tmp" / f"batch-runner-{os.getuid()}" / f"999999999-1-{namespace}-1"
    folder.mkdir(parents=True)
    folder.parent.chmod(0o700)
    with api(engine) as client:
        ids = {
            name: client.create_container(engines.BUSYBOX, ["true"], labels=each)["Id"] for name, each in made.items()
        }
    ended = place.run_words("--clean")
    left = {container["Id"] for container in of_run(place, engine)}
    assert {name for name, made_id in ids.items() if made_id in left} == {"living", "elsewhere", "stranger"}
    assert ended.code == 0
    assert (
        f"removed container {ids['dead'][:12]} (run {run_name(place)}, rollout {SPEC.rollout_id}, owner 999999999)"
        in ended.stdout
    )
    assert f"removed folder {folder}" in ended.stdout
    assert not folder.exists()
    assert "nothing was left behind" in place.run_words("--clean").stdout
    assert not (place.path / "data").exists()


def test_rollouts_without_their_container_are_failed_ones(place: Workplace, engine: str) -> None:
    place.dataset(["lost one", "lost two", "kept"])
    kept = [terminal("sleep 1; echo fine", prompt="kept"), answer("1", prompt="kept")]
    lost = [terminal(LONG, prompt="lost"), terminal("echo never", prompt="lost")]
    flags = {**FLAGS, "run_name": run_name(place)}
    with ScriptedEndpoint([*kept, *lost]) as endpoint:
        with ending(place.start(endpoint.base_url, **flags)) as process:
            wait_for_containers(place, engine, 2)
            removed, killed = [each["Id"] for each in of_run(place, engine) if "sleep 600" in running_in(engine, each)]
            with api(engine) as client:
                client.remove_container(removed, force=True)
                client.kill(killed)
            assert place.ended(process).code == 1
        asked = [request.body for request in endpoint.requests if "lost" in str(request.body)]
        assert len(asked) == 2, "nothing more is paid for"
    rows = {row.get("prompt", "kept"): row for row in place.rows(run_name(place))}
    assert [rows[prompt]["error"]["kind"] for prompt in ("lost one", "lost two")] == ["sandbox", "sandbox"]
    assert results(rows["kept"])[0]["output"] == "fine\n"
    with ScriptedEndpoint([terminal("echo again"), answer("2")]) as endpoint:
        assert place.run(endpoint.base_url, resume=True, **flags).code == 0
        assert len(endpoint.requests) == 4, "only the lost ones are asked again"
    assert not of_run(place, engine)


def running_in(engine: str, container: dict[str, Any]) -> str:
    with api(engine) as client:
        return str(client.top(container["Id"]))


def test_memory_that_a_command_has_used_up_is_told_and_the_rollout_goes_on(place: Workplace, engine: str) -> None:
    place.dataset(["hungry"])
    place.env["TERMINAL_CONTAINER_MEMORY"] = "64"
    script = [terminal("cd /usr; tail /dev/zero"), terminal("pwd"), answer("1")]
    with ScriptedEndpoint(script) as endpoint:
        assert place.run(endpoint.base_url, run_name=run_name(place), **FLAGS).code == 0
    (row,) = place.rows(run_name(place))
    hungry, after = results(row)
    assert hungry["exit_code"] == 137
    assert "ran out of memory" in hungry["output"]
    assert after["output"] in ("/usr\n", "/\n")
    assert row["completed"]
    assert engine


def test_containers_start_while_the_model_thinks(place: Workplace, engine: str) -> None:
    """One that is not needed in the end is gone, too."""
    place.dataset(["think", "no tools"])
    think = [terminal("echo hello", delay_seconds=(2.0, 2.0), prompt="think"), answer("1", prompt="think")]
    with ScriptedEndpoint([*think, answer("1", delay_seconds=(0.2, 0.2), prompt="no tools")]) as endpoint:
        flags = {**FLAGS, "run_name": run_name(place)}
        with ending(place.start(endpoint.base_url, **flags)) as process:
            wait_until(lambda: endpoint.requests, "the model is asked")
            asked_at = time.monotonic()
            wait_until(lambda: of_run(place, engine, "running"), "a container runs")
            assert time.monotonic() - asked_at < 2, "before the model has answered"
            assert place.ended(process).code == 0
    assert not of_run(place, engine)


def test_no_more_containers_at_once_than_there_are_places(place: Workplace, engine: str) -> None:
    """Over all workers; a worker that is killed gives its places back; who waits loses nothing but time."""
    prompts = [f"sample {number}" for number in range(6)]
    place.dataset(prompts)
    place.env["TERMINAL_MAX_CONTAINERS"] = "2"
    most = 0
    with ScriptedEndpoint([terminal("sleep 0.5; echo fine"), answer("1")]) as endpoint:
        flags = {**FLAGS, "run_name": run_name(place), "num_workers": 3, "concurrency": 2, "timeout_seconds": 60}
        with ending(place.start(endpoint.base_url, **flags)) as process:
            wait_until(lambda: of_run(place, engine, "running"), "the first container runs")
            owner = int(of_run(place, engine)[0]["Labels"][OWNER_PID])
            os.kill(owner, signal.SIGKILL)
            while process.poll() is None:
                most = max(most, len(of_run(place, engine, "running")))
            ended = place.ended(process)
    assert ended.code == 0, ended.stderr
    assert most <= 3, "two, and one whose owner has just died"
    assert [results(row)[0]["output"] for row in place.rows(run_name(place))] == ["fine\n"] * 6
