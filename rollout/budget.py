"""What a run may spend, over all its legs: where it stands, where it will end at this rate, whether the bound is met.

Money and tokens are those of every request, auxiliary models' and failed attempts' too; tokens are prompt and
completion. Hours are wall time of the run's legs. Pure: whoever runs rollouts tells it what they cost, as they go on
(``seen``) and when they end (``record``); what to do at the bound is theirs as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout.amounts import amount, count
from rollout.config import RunConfig

_SECONDS_AN_HOUR = 3600
_CENTS = 0.1  # budgets below are told with more decimals


@dataclass(frozen=True)
class Spending:
    """What was spent."""

    cost_usd: float = 0.0
    tokens: int = 0
    seconds: float = 0.0  # wall time of legs, not of rollouts

    def __add__(self, other: Spending) -> Spending:
        return Spending(self.cost_usd + other.cost_usd, self.tokens + other.tokens, self.seconds + other.seconds)


@dataclass(frozen=True)
class _Bound:
    """One kind of budget."""

    flag: str
    spent: Callable[[Spending], float]  # in the flag's unit
    told: Callable[[float, float, float | None], str]  # spent, limit, expected in all


def _told_money(spent: float, limit: float, in_all: float | None) -> str:
    decimals = 2 if limit >= _CENTS else 6
    about = "" if in_all is None else f", about ${in_all:,.{decimals}f} in all"
    return f"${spent:,.{decimals}f} of ${limit:,.{decimals}f}{about}"


def _told_tokens(spent: float, limit: float, in_all: float | None) -> str:
    about = "" if in_all is None else f", about {in_all:,.0f} in all"
    return f"{spent:,.0f} of {limit:,.0f} tokens{about}"


def _told_hours(spent: float, limit: float, in_all: float | None) -> str:
    decimals = 1 if limit >= 1 else 4
    about = "" if in_all is None else f", about {in_all:,.{decimals}f} in all"
    return f"{spent:,.{decimals}f} of {limit:,.{decimals}f} hours{about}"


_BOUNDS = (
    _Bound("max_cost_usd", lambda spending: spending.cost_usd, _told_money),
    _Bound("max_total_tokens", lambda spending: spending.tokens, _told_tokens),
    _Bound("max_hours", lambda spending: spending.seconds / _SECONDS_AN_HOUR, _told_hours),
)


@dataclass
class Budget:
    """The bounds of a run, and what it has spent; bounds that are not set bound nothing."""

    config: RunConfig
    past: Spending = field(default_factory=Spending)  # by earlier legs
    pending: int = 0  # samples that were left for this one
    _ended: Spending = field(default_factory=Spending)  # by rollouts of this leg that are over
    _now: Spending = field(default_factory=Spending)  # by this leg until now, running rollouts included
    _done: float = 0.0  # of the pending samples
    _under_way: float = 0.0  # the same, running ones counted as half done

    def record(self, cost_usd: float, tokens: int, *, done: bool) -> None:
        """Count a rollout that is over; ``done``: it will not be run again."""
        self._ended += Spending(cost_usd, tokens)
        self._done += done

    def seen(self, spent: Spending, running: int) -> None:
        """Take note of what this leg has spent, running rollouts included."""
        self._now = spent
        self._under_way = self._done + running / 2

    def met(self) -> str:
        """Return which bound is met, and what was spent; "" while none is."""
        for bound, limit in self._limits():
            spent = bound.spent(self.past + self._now)
            if spent >= limit:
                told = bound.told(spent, limit, None)
                return f"the budget is used up: {told}; a larger --{bound.flag} lets the run go on"
        return ""

    def words(self) -> str:
        """Return how it stands, and where it will end when the rest is like what is done; "" without any bound."""
        return ", ".join(
            bound.told(bound.spent(self.past + self._now), limit, self._in_all(bound))
            for bound, limit in self._limits()
        )

    def bounds_nothing(self) -> str:
        """Return which bound has no effect, since the endpoint does not tell what it is about; "" when all have."""
        if not self._done:
            return ""
        if self.config.max_total_tokens and not self._ended.tokens:
            return "the endpoint does not say what it took, so --max_total_tokens bounds nothing; --max_hours does"
        if self.config.max_cost_usd and not self._ended.cost_usd:
            other = "max_total_tokens" if self._ended.tokens else "max_hours"
            return f"the endpoint does not say what requests cost, so --max_cost_usd bounds nothing; --{other} does"
        return ""

    def _in_all(self, bound: _Bound) -> float | None:
        """Return what all will have cost; None while that cannot be known."""
        if not self._done:
            return None
        ended = bound.spent(self._ended) / self._done
        going_on = bound.spent(Spending(seconds=self._now.seconds)) / max(self._under_way, self._done)
        return max(
            bound.spent(self.past) + self.pending * (ended + going_on),
            bound.spent(self.past + self._now),
        )

    def _limits(self) -> list[tuple[_Bound, float]]:
        limits = [(bound, getattr(self.config, bound.flag)) for bound in _BOUNDS]
        return [(bound, limit) for bound, limit in limits if limit is not None]


def row_spending(row: Mapping[str, Any]) -> tuple[float, int]:
    """Return the cost in dollars and the tokens of a row, whoever wrote it."""
    metadata = row.get("metadata")
    if not isinstance(metadata, dict):
        return 0.0, 0
    usage = metadata.get("usage")
    tokens = [usage.get("prompt_tokens"), usage.get("completion_tokens")] if isinstance(usage, dict) else []
    return amount(metadata.get("cost_usd")), sum(map(count, tokens))
