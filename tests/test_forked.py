"""A program that is forked is what a new interpreter would be, as far as tests look."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from endpoints.scripted import ScriptedEndpoint
from tests.forked import Forked
from tests.program import Workplace, answer, ending, wait_until


@pytest.mark.parametrize("words", [["--help"], ["--list_distributions"], ["--no_such_flag=1"], []])
def test_it_says_and_ends_as_one_that_was_started(place: Workplace, words: list[str]) -> None:
    forked = place.run_words(*words)
    place.fresh = True
    assert forked == place.run_words(*words)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_it_has_a_command_and_dies_of_signals(place: Workplace, number: signal.Signals) -> None:
    place.dataset(["one"])
    with ScriptedEndpoint([answer("1", delay_seconds=60)]) as endpoint:
        command = place.command(endpoint.base_url, {})
        with ending(place.start_command(command)) as process:
            assert isinstance(process, Forked)
            wait_until(lambda: endpoint.requests, "it works")
            assert Path(f"/proc/{process.pid}/cmdline").read_text(encoding="utf-8").rstrip("\0").split("\0") == command
            assert Path(f"/proc/{process.pid}/cwd").resolve() == place.path.resolve()
            process.send_signal(number)
            process.communicate(timeout=20)
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130)
