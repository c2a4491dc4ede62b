from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.amounts import MAX_AMOUNT, amount, count, is_count
from rollout.budget import row_spending
from rollout.replies import read_reply
from rollout.statistics import RunFacts, RunStatistics
from tests.rollout.test_statistics import row

ABSURD: list[Any] = [10**401, -1, -(10**401), math.inf, -math.inf, math.nan, 1e308, MAX_AMOUNT + 1, True]
NO_NUMBERS: list[Any] = [*ABSURD, "x", "7", None, [], {}]
FACTS = RunFacts("r", "d", 1, 1, 1, "m", "2026-01-01T00:00:00+00:00", 0.0)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**401), 10**401) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_what_cannot_be_true_counts_as_nothing(value: Any) -> None:
    assert (amount(value), count(value), is_count(value)) == (0.0, 0, False)


@pytest.mark.parametrize("value", [0, 1, 2.5, 0.0, MAX_AMOUNT])
def test_numbers_are_as_they_were(value: float) -> None:
    assert amount(value) == value
    assert count(value) == int(value)
    assert amount(value, 2) == (value if value <= 2 else 0)


@given(anything)
def test_whatever_it_is_a_number_comes_out_that_is_finite_and_fits(value: Any) -> None:
    assert 0 <= amount(value) <= MAX_AMOUNT
    assert type(count(value)) is int
    assert not is_count(value) or count(value) == value


@given(anything, anything, anything, anything)
def test_statistics_of_any_numbers_are_strict_json(calls: Any, cost: Any, seconds: Any, tokens: Any) -> None:
    usage = {"prompt_tokens": tokens, "completion_tokens": tokens, "reasoning_tokens": tokens, "cached_tokens": tokens}
    stats = {"terminal": {"count": tokens, "success": calls, "failure": cost}}
    odd = row(api_calls=calls, tool_stats=stats, prompt_index=calls)
    odd["metadata"] = {"cost_usd": cost, "duration_seconds": seconds, "usage": usage}
    statistics = RunStatistics()
    for _ in range(3):
        statistics.add(odd, final=True)
    json.dumps(statistics.to_json(FACTS), allow_nan=False)
    spent, in_all = row_spending(odd)
    assert spent == amount(cost)
    assert in_all == 2 * count(tokens)


def answered(usage: Any) -> bytes:
    return json.dumps({"choices": [{"message": {"content": "1"}}], "usage": usage}).encode()


@pytest.mark.parametrize("cost", [1e308, "1e308", 10**401, 2e6, -1, math.inf, "nan", True, [1]])
def test_a_cost_that_no_answer_has_is_none(cost: Any) -> None:
    assert read_reply(answered({"cost": cost})).cost_usd == 0.0


@pytest.mark.parametrize("tokens", [10**401, 1e18, 10**13, -5, math.inf, "x"])
def test_more_tokens_than_any_answer_has_are_none(tokens: Any) -> None:
    assert read_reply(answered({"prompt_tokens": tokens})).usage.prompt_tokens == 0


def test_a_high_bill_is_believed() -> None:
    reply = read_reply(answered({"cost": 1e6, "prompt_tokens": 10**12}))
    assert (reply.cost_usd, reply.usage.prompt_tokens) == (1e6, 10**12)
