"""Rows become counts, counts add up, and counts become ``statistics.json``.

Fed with every row of the batch files it covers the whole run, all legs of it. Memory: 8 bytes a rollout for its seconds
(quantiles are exact), 8 for each filtered row, and of the rows' text one example message per kind of failure. Rows of
the original runner, which lack many keys, are counted with what they have.

What counts where: tokens and cost of every row, those of attempts that were repeated included; outcomes, failures and
drawn toolsets of each sample's last row; turns and seconds where that gave a result; tools and reasoning where it was
not discarded either, as in the original.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from math import ceil
from statistics import median
from typing import Any

from rollout.amounts import amount, count
from rollout.filters import NO_REASONING, UNKNOWN_TOOL, other_tools, reasoning_turns
from rollout.messages import Usage
from rollout.rows import DISCARDED, ERROR, Outcome, outcome, saved_tool_stats

FORMAT = 1
OUTCOMES: tuple[Outcome, ...] = ("completed", "not_completed", "partial", "discarded", "failed")
_MESSAGE_CHARS = 500  # of a failure's example
_NAME_CHARS = 64  # of a tool's name that a model made up
_PROMPTS_NAMED = 100  # of those whose rows were filtered
_USAGE_NAMES = tuple(item.name for item in fields(Usage))


@dataclass(frozen=True)
class RunFacts:
    """What ``statistics.json`` says besides the counts."""

    run_name: str
    distribution: str
    total_prompts: int
    total_batches: int
    batch_size: int
    model: str
    completed_at: str  # ISO 8601 with offset
    duration_seconds: float  # of all legs
    legs: Sequence[Mapping[str, Any]] = ()  # one JSON object per leg of the run


@dataclass
class ToolCounts:
    """One tool's calls; ``count`` is what was called, the others what is known of the results."""

    count: int = 0
    success: int = 0
    failure: int = 0

    @property
    def success_rate(self) -> float:
        """Percent of the results, 2 decimals; 0.0 when there are none."""
        return percent(self.success, self.success + self.failure)

    @property
    def failure_rate(self) -> float:
        """Percent of the results, 2 decimals; 0.0 when there are none."""
        return percent(self.failure, self.success + self.failure)


@dataclass
class RunStatistics:
    """Counts over rows. ``a + b`` is what one would have that saw the rows of both."""

    outcomes: Counter[str] = field(default_factory=Counter)  # keys: OUTCOMES
    discards: Counter[str] = field(default_factory=Counter)  # reason -> rows
    failures: Counter[str] = field(default_factory=Counter)  # kind -> rows
    failure_examples: dict[str, str] = field(default_factory=dict)  # kind -> one message
    filtered_prompts: array[int] = field(default_factory=lambda: array("q"))  # indices of rows the merge drops
    unknown_tools: Counter[str] = field(default_factory=Counter)  # name -> rows that call it
    tools: dict[str, ToolCounts] = field(default_factory=dict)  # only those that were called
    assistant_turns: int = 0
    turns_with_reasoning: int = 0
    turn_counts: Counter[int] = field(default_factory=Counter)  # turns of a rollout -> rollouts
    rollout_seconds: array[float] = field(default_factory=lambda: array("d"))
    toolsets: Counter[str] = field(default_factory=Counter)  # name -> rollouts that drew it
    usage: Usage = field(default_factory=Usage)
    cost_usd: float = 0.0
    api_calls: int = 0

    def add(self, row: Mapping[str, Any], *, final: bool) -> None:
        """Count one row. ``final``: it is the last one of its sample; others were tried again, and only cost."""
        metadata = _mapping(row.get("metadata"))
        self.usage += _usage(_mapping(metadata.get("usage")))
        self.cost_usd += amount(metadata.get("cost_usd"))
        self.api_calls += count(row.get("api_calls"))
        if not final:
            return
        ending = outcome(row)
        self.outcomes[ending] += 1
        self.toolsets.update(str(name) for name in _sequence(row.get("toolsets_used")))
        if ending == "failed":
            self._add_failure(row.get(ERROR))
            return
        turns, with_reasoning = reasoning_turns(row)
        self.turn_counts[turns] += 1
        if "duration_seconds" in metadata:
            self.rollout_seconds.append(amount(metadata["duration_seconds"]))
        if ending == "discarded":
            self.discards[str(row[DISCARDED])] += 1
            return
        self.assistant_turns += turns
        self.turns_with_reasoning += with_reasoning
        self._add_tools(row)

    def __add__(self, other: RunStatistics) -> RunStatistics:
        total = RunStatistics(
            **{
                item.name: getattr(self, item.name) + getattr(other, item.name)
                for item in fields(self)
                if item.name not in ("failure_examples", "tools")
            },
            failure_examples={**other.failure_examples, **self.failure_examples},
        )
        for statistics in (self, other):
            for name, counts in statistics.tools.items():
                _add_counts(total.tools.setdefault(name, ToolCounts()), vars(counts))
        return total

    @property
    def rows(self) -> int:
        """Samples that have a row."""
        return self.outcomes.total()

    @property
    def failed(self) -> int:
        """Samples whose last attempt failed."""
        return self.outcomes["failed"]

    @property
    def filtered(self) -> int:
        """Rows that the merge drops because they call tools no catalogue has."""
        return len(self.filtered_prompts)

    @property
    def kept(self) -> int:
        """Rows of ``trajectories.jsonl``."""
        return self.rows - self.failed - self.outcomes["discarded"] - self.filtered

    @property
    def turns(self) -> int:
        """Turns of all rollouts that gave a result."""
        return sum(turns * rollouts for turns, rollouts in self.turn_counts.items())

    def to_json(self, facts: RunFacts) -> dict[str, Any]:
        """Return what ``statistics.json`` holds."""
        return {
            "format": FORMAT,
            "run_name": facts.run_name,
            "distribution": facts.distribution,
            "total_prompts": facts.total_prompts,
            "total_batches": facts.total_batches,
            "batch_size": facts.batch_size,
            "model": facts.model,
            "completed_at": facts.completed_at,
            "duration_seconds": round(facts.duration_seconds, 2),
            **self._original_counts(),
            "outcomes": {name: self.outcomes[name] for name in OUTCOMES},
            "failures": {
                kind: {"count": count, "example": self.failure_examples[kind]}
                for kind, count in self.failures.most_common()
            },
            "filtered": {
                UNKNOWN_TOOL: {
                    "rows": self.filtered,
                    "tools": dict(self.unknown_tools.most_common()),
                    "prompt_indices": self.filtered_prompts[:_PROMPTS_NAMED].tolist(),
                },
            },
            "tokens": dict(vars(self.usage)),
            "cost_usd": round(self.cost_usd, 6),
            "api_calls": self.api_calls,
            "turns": {"total": self.turns, "median": self.median_turns()},
            "rollout_seconds": {"median": self.median_seconds(), "p95": self.p95_seconds()},
            "toolsets": {
                name: {"drawn": drawn, "percent": percent(drawn, self.rows)}
                for name, drawn in self.toolsets.most_common()
            },
            "legs": [dict(leg) for leg in facts.legs],
        }

    def median_turns(self) -> float:
        """Return the median of turns per rollout; 0.0 when there is none."""
        rollouts = self.turn_counts.total()
        if not rollouts:
            return 0.0
        in_order = (turns for turns, count in sorted(self.turn_counts.items()) for _ in range(count))
        low, *high = islice(in_order, (rollouts - 1) // 2, rollouts // 2 + 1)
        return (low + (high[0] if high else low)) / 2

    def median_seconds(self) -> float:
        """Return the median of seconds per rollout; 0.0 when none is known."""
        return round(median(self.rollout_seconds), 3) if self.rollout_seconds else 0.0

    def p95_seconds(self) -> float:
        """Return the seconds that 95 in 100 rollouts did not exceed; 0.0 when none is known."""
        if not self.rollout_seconds:
            return 0.0
        return round(sorted(self.rollout_seconds)[ceil(0.95 * len(self.rollout_seconds)) - 1], 3)

    def _original_counts(self) -> dict[str, Any]:
        return {
            "tool_statistics": {
                name: {**vars(counts), "success_rate": counts.success_rate, "failure_rate": counts.failure_rate}
                for name, counts in self.tools_by_count()
            },
            "reasoning_statistics": {
                "total_assistant_turns": self.assistant_turns,
                "turns_with_reasoning": self.turns_with_reasoning,
                "turns_without_reasoning": self.assistant_turns - self.turns_with_reasoning,
            },
            "discarded_no_reasoning": self.discards[NO_REASONING],
        }

    def tools_by_count(self) -> list[tuple[str, ToolCounts]]:
        """Return the tools that were called, the most called first."""
        return sorted(self.tools.items(), key=lambda item: (-item[1].count, item[0]))

    def _add_failure(self, error: Any) -> None:
        known = _mapping(error) or {"message": error or ""}  # the original writes plain text
        kind = str(known.get("kind", "internal"))
        self.failures[kind] += 1
        self.failure_examples.setdefault(kind, str(known.get("message", ""))[:_MESSAGE_CHARS])

    def _add_tools(self, row: Mapping[str, Any]) -> None:
        added, unknown = other_tools(row)
        of_added = saved_tool_stats(row, added) if added else {}
        for name, stats in {**of_added, **_mapping(row.get("tool_stats"))}.items():
            if isinstance(stats, dict) and stats.get("count"):
                _add_counts(self.tools.setdefault(name, ToolCounts()), stats)
        if unknown:
            self.filtered_prompts.append(count(row.get("prompt_index")))
            self.unknown_tools.update(list(dict.fromkeys(name[:_NAME_CHARS] for name in unknown)))


def percent(part: int, whole: int) -> float:
    """Return ``part`` of ``whole`` in percent, 2 decimals; 0.0 of nothing."""
    return round(100 * part / whole, 2) if whole else 0.0


def _add_counts(total: ToolCounts, more: Mapping[str, Any]) -> None:
    total.count += count(more.get("count"))
    total.success += count(more.get("success"))
    total.failure += count(more.get("failure"))


def _usage(saved: Mapping[str, Any]) -> Usage:
    return Usage(**{name: count(saved.get(name)) for name in _USAGE_NAMES})


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
