"""What the program tells of what went wrong: in the report, in the run's log, line by line, and on odd terminals."""

from __future__ import annotations

import os
import pty
import re
import shlex
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from endpoints.scripted import ScriptedEndpoint
from rollout.console import PLAIN_PROGRESS_SECONDS, Progress
from tests.program import (
    Ended,
    Workplace,
    answer,
    call,
    ending,
    prompts_of,
    reply,
    terminal,
)

KEY = "sk-or-v1-5e1a9c77d0b34f2a8899aabbccddeeff"
FAILING = [
    answer("1", prompt="good"),
    reply(status=400, error=f"no such thing, {KEY}", prompt="refused"),
    reply(status=413, error="too large", prompt="refused too"),
    answer("late", delay_seconds=60, prompt="late"),
]


def test_failures_are_told_by_kind_with_an_example_and_the_command_to_retry_just_them(place: Workplace) -> None:
    place.env["OPENAI_API_KEY"] = KEY
    place.dataset(["good 1", "refused 1", "refused 2", "late 1", "good 2"])
    with ScriptedEndpoint(FAILING) as endpoint:
        ended = place.run(endpoint.base_url, timeout_seconds=2)
        assert ended.code == 1
        told = " ".join(ended.stdout.split())
        assert "failed 3" in told
        assert "bad_request 2 HTTP 400" in told
        assert "timeout 1 the rollout took longer than --timeout_seconds=2" in told
        assert ended.last_line.startswith("3 failed of 5 samples; resume with: ")
        statistics = place.json("statistics.json")["failures"]
        assert {kind: failure["count"] for kind, failure in statistics.items()} == {"bad_request": 2, "timeout": 1}
        before = len(endpoint.requests)
        (retry,) = [line for line in ended.stdout.splitlines() if "retry just these: " in line]
        assert place.ended(place.start_command(shlex.split(retry.partition(": ")[2]))).code == 1
        assert sorted(set(prompts_of(endpoint)[before:])) == ["late 1", "refused 1", "refused 2"]
    assert_no_secret(place, ended)


def assert_no_secret(place: Workplace, *ends: Ended) -> None:
    for path in place.run_dir().iterdir():
        assert KEY not in path.read_text(errors="replace"), path
    assert not [ended for ended in ends if KEY in ended.stdout + ended.stderr]


@pytest.mark.slow
def test_the_log_holds_versions_and_tracebacks_without_a_secret(place: Workplace) -> None:
    place.dataset(["one"])
    (place.run_dir() / "statistics.json").mkdir(parents=True)
    with ScriptedEndpoint([terminal(f"echo {KEY}"), answer(f"it is {KEY}")]) as endpoint:
        ended = place.run(endpoint.base_url, api_key=KEY, verbose=True)
    assert ended.code == 1
    assert "Traceback" not in ended.stdout + ended.stderr
    log = (place.run_dir() / "run.log").read_text()
    assert f"Python {sys.version.split()[0]}" in log
    assert re.search(r"openai \d+\.\d+", log)
    assert "Traceback (most recent call last)" in log
    assert "RunDirError: cannot write data/r/statistics.json" in log
    assert KEY not in log + ended.stderr + ended.stdout
    assert KEY not in (place.run_dir() / "run.log").read_text()
    assert "--api_key" not in ended.stderr


@pytest.mark.slow
def test_a_fault_of_the_program_is_one_line_and_a_traceback_in_the_log(place: Workplace) -> None:
    """An installation that is broken in a worker: a module that cannot be used there."""
    place.dataset(["one", "two"])
    broken = place.path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import sys\nif 'rollout.spawner' in str(sys.orig_argv):\n"
        "    import rollout.rows\n"
        "    def fails(*_): raise ZeroDivisionError('broken')\n"
        "    import rollout.session\n    rollout.session.build_row = fails\n"
    )
    place.env["PYTHONPATH"] = os.pathsep.join([str(broken), str(Path(__file__).resolve().parents[2])])
    with ScriptedEndpoint([answer("1")]) as endpoint:
        ended = place.run(endpoint.base_url)
    assert ended.code == 1
    assert {row["error"]["kind"] for row in place.rows()} == {"worker_died"}
    assert "Traceback" not in ended.stdout + ended.stderr
    assert "ZeroDivisionError: broken" in (place.run_dir() / "run.log").read_text()


@pytest.mark.slow
def test_verbose_follows_rollouts_call_by_call(place: Workplace) -> None:
    place.dataset(["one", "two", "three"])
    command = "echo " + "a" * 300
    with ScriptedEndpoint([terminal(command), call("read_file", {"path": "none"}), answer("1")]) as endpoint:
        ended = place.run(endpoint.base_url, verbose=True, log_prefix_chars=40)
    assert ended.code == 0
    lines = ended.stderr.splitlines()
    for number in range(3):
        mine = [line for line in lines if line.startswith(f"[B{number // 2}:P{number}] ")]
        whats = [re.sub(r"^\[\S+ (\S+ \S+) .*", r"\1", line) for line in mine]
        assert whats == ["-> terminal", "<- terminal", "-> read_file", "<- read_file"]
        previews = [line.split(" ", 3)[3] for line in mine]
        assert all(len(preview) <= 41 for preview in previews)
        assert previews[0].startswith('{"command": "echo aaaa') or previews[0].startswith('{"command":"echo aaaa')


def test_without_a_terminal_progress_is_a_line_every_so_often(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress.start(20)
    progress.advance(1, "2 in flight")
    assert capsys.readouterr().err == ""
    progress.told -= PLAIN_PROGRESS_SECONDS
    progress.advance(2, "3 in flight, 1 failed")
    progress.advance(1, "2 in flight, 1 failed")
    progress.close()
    assert capsys.readouterr().err == "3/20 prompts after 0.0 min: 3 in flight, 1 failed\n"


@pytest.mark.slow
def test_on_a_terminal_log_lines_stand_above_the_bar(place: Workplace) -> None:
    place.dataset([f"question {number}" for number in range(4)])
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (25, 100))
    with ScriptedEndpoint([terminal("echo 1"), answer("1")]) as endpoint:
        command = place.command(endpoint.base_url, {"verbose": "true"})
        with ending(place.start_command(command, stderr=theirs)) as process:
            os.close(theirs)
            shown = b"".join(read_all(ours)).decode()
            assert place.ended(process).code == 0
    os.close(ours)
    assert "4/4" in shown
    seen = [line.rsplit("\r", 1)[-1].removeprefix("\x1b[A") for line in shown.split("\r\n")]
    calls = [line for line in seen if "[B" in line]
    assert len(calls) == 8
    assert all(re.match(r"\[B\d:P\d\] (->|<-) terminal ", line) for line in calls), seen


def read_all(handle: int) -> Iterator[bytes]:
    while True:
        try:
            data = os.read(handle, 65_536)
        except OSError:  # the other side is closed
            return
        if not data:
            return
        yield data


@pytest.mark.slow
def test_streams_that_are_closed_or_full_disturb_nothing(place: Workplace) -> None:
    place.dataset(["one", "two"])
    closed = ["0<&- 1>&- 2>&-", "2>&-", ">/dev/full", "2>/dev/full"]
    with ScriptedEndpoint([terminal("echo 1"), answer("1")]) as endpoint:
        started = []
        for number, how in enumerate(closed):
            command = shlex.join(place.command(endpoint.base_url, {"verbose": "true", "run_name": f"r{number}"}))
            started.append(place.start_command(["sh", "-c", f"exec {command} {how}"]))
        assert [place.ended(process).code for process in started] == [0] * len(closed)
    for number, how in enumerate(closed):
        assert len(place.trajectories(f"r{number}")) == len(place.rows(f"r{number}")) == 2, how
        for path in place.run_dir(f"r{number}").glob("*.json*"):
            assert b"[B0" not in path.read_bytes(), f"{how}: words went into {path}"


@pytest.mark.slow
def test_readers_that_go_away_disturb_nothing(place: Workplace) -> None:
    place.dataset([f"question {number}" for number in range(4)])
    with ScriptedEndpoint([terminal("echo 1"), answer("1")]) as endpoint:
        command = place.command(endpoint.base_url, {"verbose": "true", "concurrency": 1})
        with ending(place.start_command(command)) as process:
            assert process.stderr
            assert process.stdout
            process.stderr.readline()
            process.stderr.close()
            process.stdout.close()
            assert process.wait(60) == 0
    assert len(place.trajectories()) == 4
