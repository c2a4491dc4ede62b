from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from batch_runner import BatchRunner, RunConfig, RunReport
from endpoints.scripted import ScriptedEndpoint
from rollout.flags import UsageError
from rollout.interrupt import Interrupt
from rollout.preflight import PreflightError
from rollout.samples import DatasetError
from tests.program import ROOT, Workplace, answer, nap, processes_with, prompts_of, reply, terminal, wait_until
from toolsets import DistributionError


@pytest.fixture(autouse=True)
def _here(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The API works in the current folder."""
    monkeypatch.chdir(place.path)
    for name in ("OPENAI_API_KEY", "OPENROUTER_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def config(base_url: str, **more: Any) -> RunConfig:
    values = {
        "dataset_file": "prompts.jsonl",
        "batch_size": 2,
        "run_name": "r",
        "distribution": "terminal_only",
        "model": "scripted",
        "sandbox": "local",
        "num_workers": 1,
    }
    return RunConfig.model_validate({**values, "base_url": base_url, **more})


def test_a_run_gives_a_report_and_prints_nothing(place: Workplace, capfd: pytest.CaptureFixture[str]) -> None:
    place.dataset(["first", "second", {"prompt": None}, "third"])
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    replies = [reply(prompt="third", status=400, error="not this"), terminal("echo hi"), answer("4")]
    with ScriptedEndpoint(replies) as endpoint:
        report = BatchRunner(config(endpoint.base_url, verbose=True)).run()
        assert len(endpoint.requests) == 5
    assert isinstance(report, RunReport)
    assert (report.exit_code, report.failed, report.not_run, report.samples) == (1, 1, 0, 3)
    assert (report.statistics.kept, report.skipped_lines, report.interrupted) == (2, 1, False)
    assert report.statistics.failures == {"bad_request": 1}
    assert report.run_dir == Path("data/r")
    assert [path.name for path in report.files] == ["trajectories.jsonl", "statistics.json"]
    assert report.resume_command == "the same RunConfig with resume=True"

    with ScriptedEndpoint([answer("4")]) as endpoint:
        report = BatchRunner(config(endpoint.base_url, resume=True)).run()
        assert prompts_of(endpoint) == ["third"]
    assert (report.exit_code, report.statistics.kept) == (0, 3)
    assert [row["prompt_index"] for row in place.trajectories()] == [0, 1, 2]
    assert capfd.readouterr() == ("", "")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"dataset_file": "none.jsonl"}, DatasetError),
        ({"distribution": "reserch"}, DistributionError),
        ({"run_name": "../r"}, UsageError),
        ({"base_url": "nowhere"}, UsageError),
        ({"sandbox": "docker", "dataset_file": "none.jsonl"}, (DatasetError, PreflightError)),
    ],
)
def test_what_is_wrong_is_raised_before_anything_is_written(
    place: Workplace, capfd: pytest.CaptureFixture[str], change: dict[str, Any], error: type[Exception]
) -> None:
    place.dataset(["first"])
    with pytest.raises(error) as raised:
        BatchRunner(config(**{"base_url": "http://127.0.0.1:9/v1", **change})).run()
    assert "\n" not in str(raised.value)
    assert [path.name for path in place.path.iterdir()] == ["prompts.jsonl"]
    assert capfd.readouterr() == ("", "")


def test_a_config_is_closed_and_frozen() -> None:
    with pytest.raises(ValidationError):
        config("http://127.0.0.1:9/v1", batch_sise=3)
    made = config("http://127.0.0.1:9/v1", api_key="sk-secret-secret")
    with pytest.raises(ValidationError):
        made.seed = 3
    assert "sk-secret" not in repr(made)


def test_a_run_can_be_stopped_from_another_thread(place: Workplace, capfd: pytest.CaptureFixture[str]) -> None:
    command = nap(1401)
    place.dataset(["first", "second", "third"])
    interrupt = Interrupt()
    replies = [reply(prompt="first", reasoning="hm", content="4"), terminal(command)]
    with ScriptedEndpoint(replies) as endpoint:

        def stop() -> None:
            wait_until(lambda: processes_with(command), "the command runs")
            interrupt.request()

        stopping = threading.Thread(target=stop)
        stopping.start()
        report = BatchRunner(config(endpoint.base_url, concurrency=1), interrupt=interrupt).run()
        stopping.join()
    assert (report.exit_code, report.interrupted, report.not_run, report.failed) == (130, True, 1, 1)
    assert not processes_with(command)
    assert [row["prompt_index"] for row in place.trajectories()] == [0]
    assert capfd.readouterr() == ("", "")


SCRIPT = """
from batch_runner import BatchRunner, RunConfig
report = BatchRunner(RunConfig(dataset_file="prompts.jsonl", batch_size=1, run_name="r", distribution="terminal_only",
                               model="m", base_url={base_url!r}, sandbox="local", num_workers=2)).run()
print(report.exit_code, report.statistics.kept)
"""


def test_a_plain_script_needs_no_guard(place: Workplace) -> None:
    place.dataset(["first", "second", "third"])
    place.env = {"PYTHONPATH": str(ROOT)}
    with ScriptedEndpoint([terminal("echo hi"), answer("4")]) as endpoint:
        (place.path / "script.py").write_text(SCRIPT.format(base_url=endpoint.base_url), encoding="utf-8")
        ended = place.ended(place.start_command([sys.executable, "script.py"]))
        assert len(endpoint.requests) == 6
    assert (ended.code, ended.stdout, ended.stderr) == (0, "0 3\n", "")
