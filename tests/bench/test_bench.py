from __future__ import annotations

import pytest

from tests.bench.__main__ import LEAST, OURS, table
from tests.bench.bench_in_flight import LIGHT_TURNS, commands, fly, ideal_seconds, light_commands
from tests.bench.bench_rollouts import words
from tests.bench.bench_run_dir import Figure


def test_the_ideal_time_is_that_of_places_that_are_never_empty() -> None:
    assert ideal_seconds([2.0] * 8, 4) == 4.0
    assert ideal_seconds([1, 1, 1, 5], 2) == 6
    assert ideal_seconds([5, 1, 1, 1], 2) == 5


def test_another_runners_command_is_filled_in_and_nothing_else_of_it_changes() -> None:
    command = """run --json='{"a": 1}' --to={base_url} --data {dataset} -n {in_flight}"""
    assert words(command, "http://h/v1", 100, 8)[1:] == [
        '--json={"a": 1}',
        "--to=http://h/v1",
        "--data",
        "prompts.jsonl",
        "-n",
        "8",
    ]


def test_the_table_shows_ratios() -> None:
    rows = [("speed", {OURS: 50.0, LEAST: 100.0, "other": 5.0}, "{:.1f}")]
    text = table(rows, [("merge", Figure(150.4, 1.25))], [OURS, LEAST, "other"])
    assert text.splitlines()[0] == "| | this program | the least | other |"
    assert "| speed | 50.0 | 100.0 (2.00 x) | 5.0 (0.10 x) |" in text
    assert "| merge | 150 | 1.25 x |" in text


@pytest.mark.bench
@pytest.mark.parametrize("turns", [0, LIGHT_TURNS])
def test_a_flight_of_the_least(turns: int) -> None:
    measured = light_commands() if turns else commands({})
    flight = fly(measured["floor"], 4, "constant", turns)
    assert 0.5 < flight.efficiency <= 1
    assert 0 < flight.start_seconds < 60
    assert flight.memory_mb > 1
