"""Signals, once and twice, at any moment: exit 130 within ten seconds, and the command that goes on from there."""

from __future__ import annotations

import os
import pty
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from endpoints.scripted import ScriptedEndpoint
from tests.faults.processes import assert_gone, below_me, sandboxes
from tests.faults.recorded import all_but_merged, checkpoint_is_true
from tests.program import (
    Ended,
    Workplace,
    answer,
    ending,
    prompts_of,
    results,
    terminal,
    wait_until,
)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SECONDS = 10.0  # from the first signal to the end
STUBBORN = "trap '' TERM INT HUP; sleep 600"
HUNDREDS = 320  # sandboxes, each with a command that runs


def interrupted(place: Workplace, process: subprocess.Popen[str], *numbers: signal.Signals, pause: float = 0) -> Ended:
    """Send the signals and see how the program ends."""
    started = time.monotonic()
    for number in numbers:
        process.send_signal(number)
        time.sleep(pause)
    ended = place.ended(process, SECONDS)
    assert time.monotonic() - started < SECONDS
    assert ended.code == 130, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended


def resume_command(ended: Ended) -> list[str]:
    """The command that the program's last line names."""
    last = (ended.stdout or ended.stderr).rstrip().rpartition("\n")[2]
    command = shlex.split(last.partition("resume with: ")[2])
    assert command[-1] == "--resume", last
    return command


def finish(place: Workplace, command: list[str]) -> None:
    """Run the command that was named; the run must end well."""
    ended = place.ended(place.start_command(command))
    assert ended.code == 0, ended.stderr


@pytest.mark.parametrize("number", [SIGNALS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in SIGNALS[1:])])
def test_a_signal_while_rollouts_run(place: Workplace, number: signal.Signals) -> None:
    prompts = [f"quick {each}" for each in range(5)] + ["slow"] * 3
    place.dataset(prompts)
    stubborn = terminal(STUBBORN, prompt="slow", times=3)  # each of them once, and never again
    replies = [answer("1", prompt="quick"), stubborn, answer("1", prompt="slow")]
    with ScriptedEndpoint(replies) as endpoint:
        with ending(place.start(endpoint.base_url, batch_size=3, concurrency=4)) as process:
            wait_until(lambda: len(sandboxes(place)) == 3, "the slow ones run")
            wait_until(lambda: len(place.rows()) == 5, "the quick ones are done")
            ended = interrupted(place, process, number)
        assert not sandboxes(place)
        assert checkpoint_is_true(place)
        assert len(place.trajectories()) == 5
        assert ended.last_line.startswith("Interrupted: 3 interrupted of 8 samples; resume with: ")
        assert {row["error"]["kind"] for row in place.rows() if row.get("failed")} == {"interrupted"}
        before = len(endpoint.requests)
        finish(place, resume_command(ended))
        assert prompts_of(endpoint)[before:] == ["slow"] * 3


@pytest.mark.parametrize("pause", [0.0, 0.3])
@pytest.mark.slow
def test_two_signals_in_a_row(place: Workplace, pause: float) -> None:
    place.dataset(["one", "two"])
    with ScriptedEndpoint([terminal(STUBBORN)]) as endpoint:
        with ending(place.start(endpoint.base_url)) as process:
            wait_until(lambda: len(sandboxes(place)) == 2, "both run")
            ended = interrupted(place, process, signal.SIGINT, signal.SIGTERM, pause=pause)
        resume_command(ended)
        assert_gone(below_me)
        wait_until(lambda: not sandboxes(place), "the sandboxes are gone", 5)
        assert checkpoint_is_true(place)
    with ScriptedEndpoint([answer("1")]) as endpoint:
        assert place.run(endpoint.base_url, resume=True).code == 0


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether the program has come so far as to catch the signal: before that, Python itself is starting."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("delay_seconds", [0.0, 0.6])
@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)])
@pytest.mark.slow
def test_a_signal_during_the_start(place: Workplace, delay_seconds: float, numbers: tuple[signal.Signals, ...]) -> None:
    place.fresh = True
    place.dataset(["one"])
    with ScriptedEndpoint([answer("1", delay_seconds=600), answer("1")]) as endpoint:
        with ending(place.start(endpoint.base_url)) as process:
            wait_until(lambda: catches(process.pid, signal.SIGTERM), "it listens")
            time.sleep(delay_seconds)
            ended = interrupted(place, process, *numbers)
        command = resume_command(ended)
        assert not (place.run_dir() / "trajectories.jsonl").exists() or not place.trajectories()
    assert_gone(below_me)
    with ScriptedEndpoint([answer("1")]) as endpoint:
        here = [word if not word.startswith("--base_url") else f"--base_url={endpoint.base_url}" for word in command]
        finish(place, here)
    assert len(place.trajectories()) == 1


@pytest.mark.parametrize("number", SIGNALS[:2])
def test_a_signal_while_the_users_tools_are_loaded(place: Workplace, number: signal.Signals) -> None:
    place.dataset(["a"])
    tools = place.path / "mine.py"
    tools.write_text("import pathlib, time\npathlib.Path('loading').touch()\ntime.sleep(60)\n", encoding="utf-8")
    with ending(place.start("http://127.0.0.1:9/v1", tools_file=tools, api_key="k")) as process:
        wait_until((place.path / "loading").exists, "the file is loaded")
        ended = interrupted(place, process, number)
    assert resume_command(ended)


@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGHUP, signal.SIGINT)])
@pytest.mark.slow
def test_a_signal_during_the_merge(place: Workplace, numbers: tuple[signal.Signals, ...]) -> None:
    all_but_merged(place, 2000)
    half_made = place.run_dir() / ".trajectories.jsonl.tmp"
    with ending(place.start("http://127.0.0.1:9/v1", resume=True)) as process:
        wait_until(half_made.exists, "it merges")
        ended = interrupted(place, process, *numbers)
    command = resume_command(ended)
    assert not (place.run_dir() / "trajectories.jsonl").exists()
    assert len(numbers) > 1 or not half_made.exists()
    assert checkpoint_is_true(place)
    finish(place, command)
    assert len(place.trajectories()) == 2000
    assert not half_made.exists()


@pytest.mark.slow
def test_a_signal_when_all_is_done_changes_nothing(place: Workplace) -> None:
    """Between the last line and the end of the process."""
    place.dataset(["one"])
    with ScriptedEndpoint([answer("1")]) as endpoint, ending(place.start(endpoint.base_url)) as process:
        wait_until((place.run_dir() / "statistics.json").exists, "it ends")
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
        ended = place.ended(process)
    assert ended.code in (0, 130)
    assert "Traceback" not in ended.stderr
    assert ended.code == 130 or ended.last_line.startswith("Done")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_while_hundreds_of_commands_run(place: Workplace, number: signal.Signals) -> None:
    """Their sandboxes end at once: hundreds of shells that look for what to kill would starve the worker."""
    place.dataset([f"question {number}" for number in range(HUNDREDS)])
    with ScriptedEndpoint([terminal("sleep 615", delay_seconds=0.3), answer("1")]) as endpoint:
        flags = {"num_workers": 2, "concurrency": HUNDREDS // 2}
        with ending(place.start(endpoint.base_url, **flags)) as process:
            wait_until(lambda: sum(each.command == "sleep 615 " for each in below_me()) == HUNDREDS, "all run", 120)
            if number == signal.SIGINT:
                interrupted(place, process, number)
                assert len(place.rows()) == HUNDREDS
            else:
                process.kill()
                process.communicate()
    assert_gone(below_me, within_seconds=30)  # they starved for over a minute, and other tests want the cores too
    assert not sandboxes(place)


@pytest.mark.slow
def test_a_signal_when_nobody_reads_what_is_told(place: Workplace) -> None:
    """The program stands still in the middle of a line."""
    place.dataset([f"question {number}" for number in range(40)])
    replies = [terminal("yes | head -c 20000", delay_seconds=0.2), answer("1")]
    with ScriptedEndpoint(replies) as endpoint:
        flags = {"verbose": True, "log_prefix_chars": 20_000}
        with ending(place.start(endpoint.base_url, **flags)) as process:
            wait_until(lambda: len(endpoint.requests) > 4, "it works")
            time.sleep(1.5)
            process.send_signal(signal.SIGINT)
            assert process.wait(SECONDS) == 130
            process.communicate()
    assert_gone(below_me)
    with ScriptedEndpoint([answer("1")]) as endpoint:
        assert place.run(endpoint.base_url, resume=True).code == 0
    assert len(place.trajectories()) == 40


@pytest.mark.slow
def test_what_nohup_ignores_stays_ignored(place: Workplace) -> None:
    place.dataset(["one"])
    with ScriptedEndpoint([answer("1", delay_seconds=1)]) as endpoint:
        command = ["nohup", *place.command(endpoint.base_url, {})]
        with ending(place.start_command(command)) as process:
            wait_until(lambda: endpoint.requests, "it works")
            process.send_signal(signal.SIGHUP)
            assert place.ended(process).code == 0


@pytest.mark.slow
def test_commands_in_a_sandbox_can_catch_signals(place: Workplace) -> None:
    place.dataset(["one"])
    command = """for name in INT TERM HUP PIPE; do sh -c "trap 'echo caught $name' $name; kill -$name \\$\\$"; done"""
    with ScriptedEndpoint([terminal(command), answer("1")]) as endpoint:
        assert place.run(endpoint.base_url).code == 0
    assert results(place.rows()[0])[0]["output"].split("\n") == [
        f"caught {name}" for name in ("INT", "TERM", "HUP", "PIPE")
    ] + [""]


@pytest.mark.slow
def test_a_terminal_that_hangs_up_interrupts_the_run(place: Workplace) -> None:
    place.dataset(["one", "two"])
    ours, theirs = pty.openpty()
    with ScriptedEndpoint([terminal("sleep 600")]) as endpoint:
        command = place.command(endpoint.base_url, {})
        words = ["setsid", "--ctty", "--wait", *command]
        process = subprocess.Popen(
            words, cwd=place.path, env=place.environ(), stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        wait_until(lambda: len(sandboxes(place)) == 2, "it works")
        os.close(ours)
        assert_gone(below_me, SECONDS)
        process.wait()
    assert checkpoint_is_true(place)
    assert [row["error"]["kind"] for row in place.rows()] == ["interrupted", "interrupted"]
    assert place.json("statistics.json")["failures"]["interrupted"]["count"] == 2


@pytest.mark.slow
def test_ctrl_c_at_a_terminal_is_one_signal(place: Workplace) -> None:
    """The kernel sends it to the whole foreground group, which is the parent alone."""
    place.dataset(["one", "two"])
    ours, theirs = pty.openpty()
    with ScriptedEndpoint([terminal("sleep 600")]) as endpoint:
        command = place.command(endpoint.base_url, {})
        with ending(
            place.start_command(["setsid", "--ctty", "--wait", *command], stdin=theirs, stderr=theirs)
        ) as process:
            os.close(theirs)
            wait_until(lambda: len(sandboxes(place)) == 2, "it works")
            os.write(ours, b"\x03")
            assert place.ended(process, SECONDS).code == 130
    os.close(ours)
    assert not sandboxes(place)
    assert checkpoint_is_true(place)
