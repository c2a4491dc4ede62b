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
    wait_until,
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
    replies = [terminal(f"echo {KEY}"), answer(f"it is {KEY}", delay_seconds=1)]
    with (
        ScriptedEndpoint(replies) as endpoint,
        ending(place.start(endpoint.base_url, api_key=KEY, verbose=True)) as process,
    ):
        wait_until(lambda: endpoint.requests, "the run has begun")
        (place.run_dir() / "statistics.json").mkdir()
        ended = place.ended(process)
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
        "import rollout.rows\n"
        "def fails(*_): raise ZeroDivisionError('broken')\n"
        "import rollout.session\nrollout.session.build_row = fails\n"
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
    closed = {"0<&- 1>&- 2>&-": 0, "2>&-": 0, ">/dev/full": 1, "2>/dev/full": 0}
    with ScriptedEndpoint([terminal("echo 1"), answer("1")]) as endpoint:
        started = []
        for number, how in enumerate(closed):
            command = shlex.join(place.command(endpoint.base_url, {"verbose": "true", "run_name": f"r{number}"}))
            started.append(place.start_command(["sh", "-c", f"exec {command} {how}"]))
        ends = [place.ended(process) for process in started]
    assert [ended.code for ended in ends] == list(closed.values())
    assert ends[2].stderr.endswith("error: cannot write to standard output: No space left on device\n")
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


@pytest.mark.parametrize("flag", ["--help", "--list_distributions"])
def test_what_was_asked_for_and_cannot_be_written_is_no_success(place: Workplace, flag: str) -> None:
    command = shlex.join(place.words(flag))
    full = place.ended(place.start_command(["sh", "-c", f"exec {command} >/dev/full"]))
    assert (full.code, full.stderr) == (1, "error: cannot write to standard output: No space left on device\n")
    cut = place.ended(place.start_command(["bash", "-c", f"set -o pipefail; {command} | head -1"]))
    assert (cut.code, cut.stdout.count("\n"), cut.stderr) == (0, 1, "")


def test_a_time_out_tells_what_the_rollout_last_met_with(place: Workplace) -> None:
    place.dataset(["slow"])
    refused = reply(status=429, error="slow down", headers={"Retry-After": "30"}, times=None)
    with ScriptedEndpoint([refused]) as endpoint:
        ended = place.run(endpoint.base_url, timeout_seconds=1)
    (row,) = place.rows()
    assert row["error"]["kind"] == "timeout"
    assert row["error"]["message"].startswith("the rollout took longer than --timeout_seconds=1; last: HTTP 429: slow")
    assert "last: HTTP 429" in " ".join(ended.stdout.split())


def test_a_limit_that_one_rollout_met_does_not_fail_those_that_were_never_sent(place: Workplace) -> None:
    place.dataset(["first", *(f"later {number}" for number in range(4))])
    refused = reply(status=429, error="slow down", headers={"Retry-After": "3"}, prompt="first")
    replies = [refused, answer("1", prompt="first"), answer("1")]
    with ScriptedEndpoint(replies) as endpoint:
        ended = place.run(endpoint.base_url, timeout_seconds=2, concurrency=1)
    assert ended.code == 1
    assert {row["prompt_index"]: row.get("failed", False) for row in place.rows()} == {
        0: True,
        **dict.fromkeys(range(1, 5), False),
    }


def test_a_call_without_a_name_can_be_read_of(place: Workplace) -> None:
    place.dataset(["nameless"])
    with ScriptedEndpoint([call("", {}), answer("1")]) as endpoint:
        ended = place.run(endpoint.base_url, verbose=True)
    assert "  (no name): 1 row\n" in ended.stdout
    assert "unknown tool: (no name)" in ended.stdout
    assert "[B0:P0] -> (no name) {}" in ended.stderr


def test_a_dataset_that_changes_under_the_run_ends_it_in_good_order(place: Workplace) -> None:
    prompts = [f"question {number}" for number in range(5)]
    path = place.dataset(prompts)
    with (
        ScriptedEndpoint([answer("1", delay_seconds=1)]) as endpoint,
        ending(place.start(endpoint.base_url, concurrency=1)) as process,
    ):
        wait_until(lambda: endpoint.requests, "the first one is asked")
        path.write_bytes(path.read_bytes().replace(b"question 2", b"question 9"))
        ended = place.ended(process)
    assert ended.code == 1
    changed = "prompts.jsonl was changed while the run was reading it (sample 2 is another now)"
    assert f"error: nothing more is begun: {changed}\n" in ended.stderr
    assert f"stopped early: {changed}" in " ".join(ended.stdout.split())
    assert ended.last_line.startswith("3 not run of 5 samples; resume with: ")
    assert len(place.trajectories()) == 2
    with ScriptedEndpoint([answer("1")]) as endpoint:
        assert place.ended(place.start_command(resume_command_of(ended, endpoint))).code == 0
        assert prompts_of(endpoint) == ["question 9", "question 3", "question 4"]


def resume_command_of(ended: Ended, endpoint: ScriptedEndpoint) -> list[str]:
    words = shlex.split(ended.last_line.partition("resume with: ")[2])
    return [f"--base_url={endpoint.base_url}" if word.startswith("--base_url") else word for word in words]
