from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout.budget import Budget, Spending, row_spending
from rollout.config import RunConfig


def budget(past: Spending, pending: int, **limits: Any) -> Budget:
    return Budget(RunConfig(dataset_file=Path("d"), batch_size=1, run_name="r", **limits), past, pending)


def test_without_a_bound_there_is_nothing_to_tell() -> None:
    free = budget(Spending(1e9, 10**12, 1e9), 5)
    assert (free.met(), free.words()) == ("", "")


def test_it_tells_where_it_stands_and_where_it_will_end() -> None:
    money = budget(Spending(cost_usd=1.2), 10, max_cost_usd=10)
    assert money.words() == "$1.20 of $10.00"
    for _ in range(2):
        money.record(0.75, 100, done=True)
    money.record(0.5, 100, done=False)
    money.seen(Spending(cost_usd=2.5), running=3)
    assert money.words() == "$3.70 of $10.00, about $11.20 in all"
    assert money.met() == ""
    money.seen(Spending(cost_usd=8.9), running=3)
    assert money.met() == "the budget is used up: $10.10 of $10.00; a larger --max_cost_usd lets the run go on"


def test_each_bound_in_its_own_words() -> None:
    bounds = budget(Spending(0.5, 1_000_000, 1800), 4, max_cost_usd=2, max_total_tokens=5_000_000, max_hours=2)
    bounds.record(0.25, 500_000, done=True)
    bounds.seen(Spending(0.25, 500_000, 900), running=2)
    assert bounds.words() == (
        "$0.75 of $2.00, about $1.50 in all, 1,500,000 of 5,000,000 tokens, about 3,000,000 in all, "
        "0.8 of 2.0 hours, about 1.0 in all"
    )


def test_small_budgets_are_told_with_their_decimals() -> None:
    assert budget(Spending(0.001), 1, max_cost_usd=0.002).words() == "$0.001000 of $0.002000"
    assert budget(Spending(seconds=18), 1, max_hours=0.01).words() == "0.0050 of 0.0100 hours"


def test_bounds_of_what_the_endpoint_does_not_tell_bound_nothing() -> None:
    told = budget(Spending(), 2, max_cost_usd=1, max_total_tokens=100)
    assert told.bounds_nothing() == "", "nothing is known yet"
    told.record(0.1, 10, done=True)
    assert told.bounds_nothing() == ""
    free = budget(Spending(), 2, max_cost_usd=1)
    free.record(0.0, 10, done=True)
    assert free.bounds_nothing().endswith("so --max_cost_usd bounds nothing; --max_total_tokens does")
    silent = budget(Spending(), 2, max_cost_usd=1)
    silent.record(0.0, 0, done=True)
    assert silent.bounds_nothing().endswith("so --max_cost_usd bounds nothing; --max_hours does")
    uncounted = budget(Spending(), 2, max_total_tokens=1)
    uncounted.record(0.1, 0, done=True)
    assert uncounted.bounds_nothing().endswith("took, so --max_total_tokens bounds nothing; --max_hours does")


def test_what_is_left_of_a_budget_met_before_is_nothing() -> None:
    assert budget(Spending(tokens=100), 1, max_total_tokens=100).met()
    assert not budget(Spending(tokens=99), 1, max_total_tokens=100).met()


@pytest.mark.parametrize(
    ("row", "spent"),
    [
        ({}, (0.0, 0)),
        ({"metadata": "x"}, (0.0, 0)),
        ({"metadata": {"cost_usd": "1", "usage": []}}, (0.0, 0)),
        ({"metadata": {"cost_usd": float("nan"), "usage": {"prompt_tokens": 3}}}, (0.0, 3)),
        ({"metadata": {"cost_usd": 2, "usage": {"prompt_tokens": 3, "completion_tokens": 4}}}, (2, 7)),
    ],
)
def test_rows_of_any_writer(row: dict[str, Any], spent: tuple[float, int]) -> None:
    assert row_spending(row) == spent
