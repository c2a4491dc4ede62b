"""Workers die, get stuck, run out of memory: the run goes on, and only who is to blame pays for it."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from endpoints.scripted import ScriptedEndpoint
from rollout.pool import SILENCE_SECONDS
from tests.faults.processes import (
    Process,
    below,
    private_kib,
    sandboxes,
    spawner,
    spawners,
    wait_for_workers,
    workers,
)
from tests.faults.recorded import outcomes
from tests.program import ROOT, Workplace, answer, ending, prompts_of, terminal, wait_until

DEATHS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
CGROUPS = Path("/sys/fs/cgroup")
MIB = 1 << 20


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """Do this over and over in a thread."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(0.01):
            work()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class WorkerOf:
    """Kills the worker that asks for a prompt's answer, each time it does."""

    def __init__(self, endpoint: ScriptedEndpoint, prompt: str, number: signal.Signals) -> None:
        self.endpoint = endpoint
        self.prompt = prompt
        self.number = number
        self.killed = 0

    def __call__(self) -> None:
        if prompts_of(self.endpoint).count(self.prompt) > self.killed:
            if self.killed:
                time.sleep(1.5)  # those that were tried again beside it are over then
            self.killed += 1
            oldest = min(workers(), key=lambda process: process.pid)  # one worker at first, then one for it alone
            oldest.kill(self.number)


@pytest.mark.parametrize("number", [DEATHS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in DEATHS[1:])])
def test_a_sample_that_kills_its_worker_is_tried_once_more_and_then_fails_alone(
    place: Workplace, number: signal.Signals
) -> None:
    prompts = [f"good {each}" for each in range(6)]
    place.env["A_TOKEN"] = secret = "tok-" * 4
    place.dataset([*prompts[:3], {"prompt": "deadly", "note": secret}, *prompts[3:]])
    replies = [answer("late", prompt="deadly", delay_seconds=30), answer("1", prompt="good", delay_seconds=0.5)]
    with ScriptedEndpoint(replies) as endpoint, ending(place.start(endpoint.base_url, concurrency=4)) as process:
        killer = WorkerOf(endpoint, "deadly", number)
        with meanwhile(killer):
            ended = place.ended(process)
        asked = Counter(prompts_of(endpoint))
    assert killer.killed == asked["deadly"] == 2
    assert max(asked[prompt] for prompt in prompts) <= 2
    assert (ended.code, "worker_died" in ended.stdout) == (1, True)
    assert outcomes(place) == {**dict.fromkeys(prompts, "done"), "deadly": "worker_died"}
    assert ended.last_line.startswith("1 failed of 7 samples; resume with: ")
    assert place.json("statistics.json")["failures"]["worker_died"]["count"] == 1
    assert not [row for row in place.rows() if secret in str(row)]


@pytest.mark.slow
def test_a_rollout_is_safe_before_its_sandbox_is_gone(place: Workplace) -> None:
    """A worker that dies while it clears up has nothing to lose, and no sample is to blame."""
    place.dataset(["one"])
    many = "mkdir many; cd many; seq 60000 | xargs touch"  # to remove them takes long enough
    with (
        ScriptedEndpoint([terminal(many), answer("1")]) as endpoint,
        ending(place.start(endpoint.base_url, concurrency=1)) as process,
    ):
        wait_until(lambda: sandboxes(place), "it is there")
        wait_until(place.rows, "the row is there")
        assert sandboxes(place)
        (worker,) = workers()
        worker.kill()
        ended = place.ended(process)
    assert (ended.code, len(endpoint.requests)) == (0, 2), ended.stderr
    assert outcomes(place) == {"one": "done"}
    wait_until(lambda: not sandboxes(place), "what is left of it is gone")


@pytest.mark.slow
def test_workers_that_are_killed_at_random_lose_nothing(place: Workplace) -> None:
    dice = random.Random(3)
    prompts = [f"question {number:03}" for number in range(100)]
    place.dataset(prompts)
    deaths = 0

    def kill_one() -> None:
        nonlocal deaths
        time.sleep(dice.uniform(0.2, 1.0))
        if alive := workers():
            dice.choice([*alive, *spawners()]).kill(dice.choice(DEATHS))
            deaths += 1

    replies = [terminal("echo $((6 * 7))", delay_seconds=(0.0, 0.4)), answer("42", delay_seconds=(0.0, 0.4))]
    with (
        ScriptedEndpoint(replies) as endpoint,
        ending(place.start(endpoint.base_url, num_workers=3, concurrency=3, batch_size=10)) as process,
        meanwhile(kill_one),
    ):
        ended = place.ended(process, 120)
    assert deaths > 3, ended
    ends = outcomes(place)
    assert sorted(ends) == prompts
    assert set(ends.values()) <= {"done", "worker_died"}
    assert ended.code == (1 if "worker_died" in ends.values() else 0)
    assert len(place.trajectories()) == Counter(ends.values())["done"]
    wait_until(lambda: not sandboxes(place), "the sandboxes of dead workers are gone", 5)


@pytest.mark.slow
def test_a_worker_that_dies_in_the_middle_of_a_row_leaves_no_torn_line(place: Workplace) -> None:
    """The row is too long for the socket, and the parent stands still while the worker writes it."""
    place.dataset(["long", "short"])
    replies = [
        answer("x", content_chars=10_000_000, prompt="long", times=2),
        answer("1", prompt="short", delay_seconds=2),
    ]
    with ScriptedEndpoint(replies) as endpoint, ending(place.start(endpoint.base_url)) as process:
        wait_until(lambda: len(endpoint.requests) == 2, "both are asked")
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1)
        (worker,) = workers()
        worker.kill()
        os.kill(process.pid, signal.SIGCONT)
        ended = place.ended(process)
    assert (ended.code, outcomes(place)) == (0, {"long": "done", "short": "done"})
    assert "died with 2 rollouts in flight" in ended.stderr


@pytest.mark.slow
def test_the_spawner_is_replaced_and_its_workers_work_on(place: Workplace) -> None:
    prompts = [f"question {each}" for each in range(6)]
    place.dataset(prompts)
    with ScriptedEndpoint([answer("1", delay_seconds=1.5)]) as endpoint:
        with ending(place.start(endpoint.base_url, concurrency=2)) as process:
            wait_until(lambda: len(endpoint.requests) == 2, "the first two are asked")
            spawner(process.pid).kill()
            wait_until(lambda: len(endpoint.requests) == 4, "the next two are asked")
            (worker,) = workers()
            worker.kill()
            ended = place.ended(process)
        asked = Counter(prompts_of(endpoint))
    assert (ended.code, outcomes(place)) == (0, dict.fromkeys(prompts, "done"))
    assert [asked[prompt] for prompt in prompts] == [1, 1, 2, 2, 1, 1]


@pytest.mark.slow
def test_a_spawner_that_dies_while_it_starts_is_replaced(place: Workplace) -> None:
    place.fresh = True
    place.dataset(["one"])
    with ScriptedEndpoint([answer("1")]) as endpoint, ending(place.start(endpoint.base_url)) as process:
        for _ in range(3):
            wait_until(lambda: killed_spawner(process.pid), "the spawner is there")
        ended = place.ended(process)
    assert (ended.code, outcomes(place)) == (0, {"one": "done"})


IMPATIENT = """
import sys
import batch_runner, rollout.pool
rollout.pool.START_SECONDS = 6.0
sys.exit(batch_runner.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, signal.SIGINT, signal.SIGKILL])
def test_a_spawner_that_is_stuck_is_replaced_and_its_workers_work_on(place: Workplace, number: int) -> None:
    prompts = ["one", "two"]
    place.dataset(prompts)
    place.env["PYTHONPATH"] = str(ROOT)
    with ScriptedEndpoint([terminal("true", delay_seconds=16), answer("1", delay_seconds=1)]) as endpoint:
        _, _, *words = place.command(endpoint.base_url, {"num_workers": 2, "concurrency": 1})
        with ending(place.start_command([sys.executable, "-c", IMPATIENT, *words])) as process:
            wait_until(lambda: len(endpoint.requests) == 2, "both work")
            spawner(process.pid).kill(signal.SIGSTOP)
            workers()[0].kill()
            wait_until(lambda: len(endpoint.requests) == 3, "the one that was lost is tried again")
            began = time.monotonic()
            if number:
                process.send_signal(number)
            ended = place.ended(process)
        asked = Counter(prompts_of(endpoint))
    if number:
        assert time.monotonic() - began < 10
        assert ended.code == (130 if number == signal.SIGINT else -signal.SIGKILL), ended.stderr
    else:
        assert (ended.code, outcomes(place)) == (0, dict.fromkeys(prompts, "done")), ended.stderr
        assert sorted(asked.values()) == [2, 3]


def killed_spawner(program: int) -> bool:
    with suppress(ValueError):  # there is none at the moment
        spawner(program).kill()
        return True
    return False


@pytest.mark.slow
def test_signals_to_all_processes_stop_the_run_as_one_to_the_parent_does(place: Workplace) -> None:
    """As a service manager does it, or somebody with pkill."""
    place.dataset(["one", "two"])
    with ScriptedEndpoint([terminal("sleep 600")]) as endpoint, ending(place.start(endpoint.base_url)) as process:
        wait_until(lambda: len(sandboxes(place)) == 2, "the sandboxes are made")
        for each in [spawner(process.pid), *workers()]:
            each.kill(signal.SIGTERM)
            each.kill(signal.SIGHUP)
            each.kill(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        ended = place.ended(process)
    assert (ended.code, outcomes(place)) == (130, {"one": "interrupted", "two": "interrupted"})
    assert "died" not in ended.stderr
    assert not sandboxes(place)


@pytest.mark.slow
def test_an_endpoint_of_our_own_that_dies_stops_the_run(place: Workplace) -> None:
    replies = [
        {"prompt": "good", "content": "1", "reasoning": "hm"},
        {"prompt": "late", "content": "1", "delay_seconds": 60},
    ]
    (place.path / "replies.jsonl").write_text("".join(json.dumps(reply) + "\n" for reply in replies))
    place.dataset(["good", "late", "late too"])
    with ending(place.start("scripted:replies.jsonl", batch_size=3)) as process:
        wait_until(lambda: place.run_dir().exists() and place.rows(), "the first one is done")
        (child,) = [each for each in below(process.pid) if "endpoints.scripted" in each.command]
        child.kill()
        ended = place.ended(process, 10)
    died = "the endpoint's process has died (exit code -9)"
    assert ended.code == 1
    assert ended.stderr.splitlines()[-1].startswith(f"error: {died}")
    assert f"stopped early: {died}" in " ".join(ended.stdout.split())
    assert ended.last_line.startswith("2 not run of 3 samples; resume with: ")
    assert outcomes(place) == {"good": "done"}
    assert place.json("checkpoint.json")["completed_prompts"] == [0]
    assert [row["prompt_index"] for row in place.trajectories()] == [0]
    assert place.json("statistics.json")["total_prompts"] == 3


@pytest.mark.slow
def test_silence_is_told_from_standing_still(place: Workplace) -> None:
    """A worker that is stuck is replaced; a program that was paused as a whole finds nobody to blame."""
    place.dataset(["one"])
    with (
        ScriptedEndpoint([answer("1", delay_seconds=38)]) as endpoint,
        ending(place.start(endpoint.base_url, run_name="paused")) as paused,
        ending(place.start(endpoint.base_url, run_name="stuck")) as stuck,
    ):
        wait_until(lambda: len(endpoint.requests) == 2, "both work")
        (worker,) = [each for each in workers() if each in below(stuck.pid)]
        worker.kill(signal.SIGSTOP)
        everyone = [Process(paused.pid, 0, ""), *below(paused.pid)]
        for each in everyone:
            each.kill(signal.SIGSTOP)
        time.sleep(SILENCE_SECONDS + 3)
        for each in everyone:
            each.kill(signal.SIGCONT)
            time.sleep(0.3)
        wait_until(lambda: len(endpoint.requests) == 3, "the stuck one is tried again")
        as_before = place.ended(paused)
        stuck.send_signal(signal.SIGTERM)
        replaced = place.ended(stuck)
        assert len(endpoint.requests) == 3
    assert (as_before.code, "stuck" in as_before.stderr) == (0, False)
    assert (replaced.code, "worker 1 is stuck; it is killed" in replaced.stderr) == (130, True)


@pytest.mark.slow
def test_a_low_limit_of_open_files_is_raised_where_it_may_be(place: Workplace) -> None:
    """A shell's own limit is often 1024, which is used up by some hundred and fifty rollouts."""
    place.dataset([f"question {number}" for number in range(80)])
    with ScriptedEndpoint([terminal("sleep 0.5; echo 1", delay_seconds=0.5), answer("1")]) as endpoint:
        command = place.command(endpoint.base_url, {"concurrency": 80, "batch_size": 80})
        ended = place.ended(place.start_command(["prlimit", "--nofile=256:4096", *command]))
    assert ended.code == 0, ended.stderr


@pytest.mark.slow
def test_the_limit_is_raised_for_who_has_many_workers(place: Workplace) -> None:
    place.dataset([f"question {number}" for number in range(40)])
    with ScriptedEndpoint([answer("1", delay_seconds=2)]) as endpoint:
        command = place.command(endpoint.base_url, {"num_workers": 40, "concurrency": 1})
        ended = place.ended(place.start_command(["prlimit", "--nofile=50:4096", *command]))
    assert (ended.code, ended.told) == (0, "")


@pytest.mark.slow
def test_a_program_that_may_have_few_workers_runs_with_those(place: Workplace) -> None:
    prompts = [f"question {number}" for number in range(60)]
    place.dataset(prompts)
    with ScriptedEndpoint([answer("1", delay_seconds=2)]) as endpoint:
        flags = {"num_workers": 60, "concurrency": 1, "batch_size": 1}
        ended = place.ended(
            place.start_command(["prlimit", "--nofile=110:110", *place.command(endpoint.base_url, flags)])
        )
        assert len(endpoint.requests) == 60
    assert (ended.code, outcomes(place)) == (0, dict.fromkeys(prompts, "done")), ended.stderr
    assert "warning: no worker process can be started now (Too many open files); what runs goes on" in ended.stderr


@pytest.mark.slow
def test_a_program_that_cannot_start_workers_says_so(place: Workplace) -> None:
    place.dataset([f"question {number}" for number in range(80)])
    broken = place.path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text("import os\nos.register_at_fork(after_in_child=lambda: os._exit(3))\n")
    with ScriptedEndpoint([answer("1", delay_seconds=5)]) as endpoint:
        flags = {"num_workers": 80, "concurrency": 1}
        limited = ["prlimit", "--nofile=40:40", *place.command(endpoint.base_url, flags)]
        too_many = place.ended(place.start_command(limited))
        place.env["PYTHONPATH"] = str(broken)
        stillborn = place.run(endpoint.base_url, run_name="other", **flags)
    for ended, told in ((too_many, "Too many open files"), (stillborn, "workers die while they start")):
        assert (ended.code, told in ended.told.splitlines()[-1]) == (1, True), ended.stderr
        assert ended.told.splitlines()[-1].startswith("error: ")
        assert ended.last_line.startswith("80 not run of 80 samples; resume with: ")


HEAVY = terminal("true", content="x", content_chars=10_000_000, prompt="heavy")  # ten of them: a conversation of 100 MB
LIGHT = answer("1", prompt="light", delay_seconds=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("limited", ["cgroup", "rlimit"])
def test_a_sample_that_takes_all_memory_fails_alone(place: Workplace, tmp_path: Path, limited: str) -> None:
    prompts = [f"light {number}" for number in range(8)]
    place.dataset([*prompts[:4], "heavy", *prompts[4:]])
    with (
        ScriptedEndpoint([HEAVY, LIGHT]) as endpoint,
        ending(place.start(endpoint.base_url, concurrency=3)) as process,
        ExitStack() as stack,
    ):
        (worker,) = wait_for_workers(1)
        if limited == "cgroup":
            stack.enter_context(small_cgroup(process.pid, tmp_path.name))
        else:
            for each in (worker, spawner(process.pid)):
                size = int(Path(f"/proc/{each.pid}/statm").read_text(encoding="ascii").split()[0]) * os.sysconf(
                    "SC_PAGESIZE"
                )
                resource.prlimit(each.pid, resource.RLIMIT_AS, (size + 150 * MIB,) * 2)
        ended = place.ended(process, 100)
    ends = outcomes(place)
    assert ends.pop("heavy") == "worker_died"
    assert ends == dict.fromkeys(prompts, "done")
    assert ended.code == 1
    assert ended.last_line.startswith("1 failed of 9 samples; resume with: ")


@contextmanager
def small_cgroup(program: int, name: str) -> Iterator[None]:
    """Let a program and all its processes have little more memory than they have now."""
    kind = "memory.limit_in_bytes" if (CGROUPS / "memory").is_dir() else "memory.max"
    group = (CGROUPS / "memory" if (CGROUPS / "memory").is_dir() else CGROUPS) / name
    try:
        group.mkdir()
        everyone = [program, *(process.pid for process in below(program))]
        for pid in everyone:
            (group / "cgroup.procs").write_text(str(pid))
        (group / kind).write_text(str(sum(private_kib(pid) for pid in everyone) * 1024 + 150 * MIB))
    except OSError as error:
        pytest.skip(f"a memory cgroup cannot be made here: {error}")
    yield
    wait_until(lambda: not (group / "cgroup.procs").read_text(), "the cgroup is empty")
    group.rmdir()
