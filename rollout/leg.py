"""One invocation's share of a run: the pending samples go to the pool, what comes back goes to the run folder.

Every row is durable before it counts as done, for which a full disk is waited for; the checkpoint follows after each
batch, where it can be written. Decides when it is no use to go on: when the endpoint refuses in a way that trying again
cannot mend, when the run's budget is used up, or when the dataset is no longer what it was. What runs then is finished
and recorded. When the pool cannot go on, nothing is left that runs; what has come until then is recorded.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rollout.budget import Budget, Spending
from rollout.checkpoint import Checkpoint
from rollout.config import RunConfig
from rollout.console import Console, Progress
from rollout.full_disk import save_when_there_is_room
from rollout.jobs import Job, Outcome
from rollout.pool import Pool, PoolError
from rollout.row_index import RowIndex
from rollout.rows import NoResult, RowFacts, build_row, encode_row_without, summary
from rollout.run_dir import RunDir, RunDirError
from rollout.samples import Dataset, DatasetError

HOPELESS_KINDS = ("auth", "billing", "model_not_found")
HOPELESS_IN_A_ROW = 3  # so many refused samples, with none answered between, end the dispatch
REASONING_SAMPLE = 20  # when so many rollouts all lack reasoning, the run says so


@dataclass
class Leg:
    """What this invocation does and has seen."""

    config: RunConfig
    dataset: Dataset
    run_dir: RunDir
    checkpoint: Checkpoint
    console: Console
    outcomes: Counter[str] = field(default_factory=Counter)
    cost_usd: float = 0.0
    masked: int = 0
    stopped: str = ""  # why the dispatch ended early, or the rollouts
    out_of_budget: bool = False  # that is why
    cut: int = 0  # rollouts that ended early because the budget was used up
    budget: Budget = field(init=False)
    _hopeless: int = 0
    _budget_met: bool = False
    _told_no_bound: bool = False
    _told_no_parser: bool = False
    _checkpoint_fails: bool = False
    _left_in_batch: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.budget = Budget(self.config)

    def affords(self, pending: array[int], rows: RowIndex) -> bool:
        """Take up the budget where earlier legs and their ``rows`` left it; False when nothing is left of it.

        ``stopped`` then says so.
        """
        seconds = self.checkpoint.past_seconds
        self.budget = Budget(self.config, Spending(rows.cost_usd, rows.tokens, seconds), len(pending))
        self.stopped = self.budget.met()
        self.out_of_budget = bool(self.stopped)
        return not self.stopped

    def run(self, pending: array[int], pool: Pool) -> None:
        """Run the pending samples (indices, ascending) and leave a true checkpoint. Raises RunDirError."""
        progress = self.console.progress = Progress.start(len(pending)) if not self.console.quiet else None
        try:
            for group in pool.results(self._jobs(pending)):
                if group:
                    self._take(group, pool)
                self._mind_budget(pool)
                self.checkpoint.refused_requests = pool.refused_requests
                if progress:
                    progress.advance(len(group), self._words(pool))
        except PoolError as error:
            self.stopped = self.stopped or str(error)
            self.console.log("error", str(error))
        finally:
            if progress:
                progress.close()
            self.console.progress = None
        self.run_dir.sync()
        self._save_checkpoint(at_any_cost=True)

    def _jobs(self, pending: array[int]) -> Iterator[Job]:
        size = self.config.batch_size
        for start in range(0, len(pending), size):
            batch_num = self.run_dir.first_batch + start // size
            indices = pending[start : start + size]
            self._left_in_batch[batch_num] = len(indices)
            for index in indices:
                try:
                    sample = self.dataset[index]
                except DatasetError as error:
                    self.stopped = str(error)
                    self.console.log("error", f"nothing more is begun: {error}")
                    return
                yield Job(sample, batch_num)

    def _take(self, group: list[Outcome], pool: Pool) -> None:
        """Write a group of outcomes: all rows first, one sync for all, then what follows from them."""
        if self.config.verbose:
            self.console.log("trace", f"{len(group)} rows arrived")
        taken = [self._with_row(outcome) for outcome in group]
        for outcome in taken:
            self.run_dir.append(outcome.job.batch_num, outcome.line)
        save_when_there_is_room(self.run_dir.sync, self.console.log, pool.interrupt)
        finished = [outcome.job.batch_num for outcome in taken if self._count(outcome)]
        for batch_num in finished:
            self.run_dir.finish_batch(batch_num)
        if finished:
            self._save_checkpoint()
        if self._hopeless >= HOPELESS_IN_A_ROW and not pool.stopped:
            self.stopped = f"{taken[-1].summary['error_kind']}: {taken[-1].summary['error_message']}"
            refused = f"the endpoint refused {HOPELESS_IN_A_ROW} samples in a row"
            self.console.log("error", f"{refused}, so no more are sent ({self.stopped})")
            pool.stop()

    def _save_checkpoint(self, *, at_any_cost: bool = False) -> None:
        """Save it, if that can be: the rows, which are saved, tell all that it does."""
        try:
            if self.run_dir.save_checkpoint(self.checkpoint, at_any_cost=at_any_cost):
                self._checkpoint_fails = False
        except RunDirError as error:
            if not self._checkpoint_fails:
                self.console.log("warning", f"{error}; the run goes on without, for its rows are saved")
            self._checkpoint_fails = True

    def _mind_budget(self, pool: Pool) -> None:
        """End the run in good order when a bound is met."""
        spent = pool.spent + Spending(seconds=self.checkpoint.seconds)
        self.budget.seen(spent, pool.in_flight)
        met = self.budget.met()
        if met and not self._budget_met:
            self._budget_met = True
            self.out_of_budget = not self.stopped
            self.stopped = self.stopped or met
            self.console.log("warning", f"nothing more is begun, and what runs ends after its turn: {met}")
            pool.finish_turns()

    def _with_row(self, outcome: Outcome) -> Outcome:
        """Return the outcome with a row; the pool has none for a sample whose worker died."""
        if outcome.failure is None:
            return outcome
        facts = RowFacts(
            batch_num=outcome.job.batch_num,
            model=self.config.model,
            sandbox="",
            toolsets_used=(),
            definitions=(),
            timestamp=datetime.now(UTC).astimezone(),
            duration_seconds=0.0,
        )
        row = build_row(outcome.job.sample, NoResult(outcome.failure), facts)
        return Outcome(outcome.job, encode_row_without(self.console.secrets, row), summary(row))

    def _count(self, outcome: Outcome) -> bool:
        """Count one row that is on disk; True when its batch is complete with it."""
        batch_num, known = outcome.job.batch_num, outcome.summary
        self.checkpoint.record(batch_num, outcome.job.sample.index, known["outcome"])
        self.outcomes[known["outcome"]] += 1
        self.cut += known["stop_reason"] == "budget"
        self._count_cost(known)
        self.masked += known.get("masked", 0)
        if known["outcome"] == "failed":
            text = f"[B{batch_num}:P{outcome.job.sample.index}] {known['error_kind']}: {known['error_message']}"
            self.console.log("failed", text)
        if known["error_kind"] in HOPELESS_KINDS:
            self._hopeless += 1
        elif known["error_kind"] != "interrupted":
            self._hopeless = 0
        if known["outcome"] == "partial" and self._all_are_cut_short():
            self.console.log(
                "warning",
                f"each of the first {REASONING_SAMPLE} rollouts was cut short (the last one: {known['stop_reason']}): "
                "they may hold nothing to train on; metadata.stop_reason of their rows says why",
            )
        if known["outcome"] == "discarded" and self._none_reasons():
            self.console.log(
                "warning",
                f"none of the first {REASONING_SAMPLE} rollouts shows any reasoning, so all of them are discarded: "
                "use a model that reasons, or pass --keep_no_reasoning",
            )
        if known["calls_as_text"] and not self._told_no_parser:
            self._told_no_parser = True
            self.console.log(
                "warning",
                f"prompt {outcome.job.sample.index} ends with tool calls that are text, and nothing runs them: "
                "the server does not parse this model's calls (vLLM: --enable-auto-tool-choice --tool-call-parser=...)",
            )
        self._left_in_batch[batch_num] -= 1
        return self._left_in_batch[batch_num] == 0 and self._left_in_batch.pop(batch_num) == 0

    def _none_reasons(self) -> bool:
        """Tell, once, that enough rollouts came to an end, and that none of them shows reasoning."""
        reasoned = self.outcomes["completed"] + self.outcomes["not_completed"]
        return not reasoned and self.outcomes["discarded"] == REASONING_SAMPLE

    def _all_are_cut_short(self) -> bool:
        """Tell, once, that so many rollouts ended as partial, and that none did otherwise."""
        ended = self.outcomes.total() - self.outcomes["failed"]
        return ended == self.outcomes["partial"] == REASONING_SAMPLE

    def _count_cost(self, known: dict[str, Any]) -> None:
        self.cost_usd += known["cost_usd"]
        tokens = known["prompt_tokens"] + known["completion_tokens"]
        self.budget.record(known["cost_usd"], tokens, done=known["outcome"] != "failed")
        if not self._told_no_bound and (untold := self.budget.bounds_nothing()):
            self._told_no_bound = True
            self.console.log("warning", untold)

    def _words(self, pool: Pool) -> str:
        pace = pool.pacer.words(pool.in_flight) if pool.pacer else ""
        words = [f"{pool.in_flight} in flight" + (f" ({pace})" if pace else "")]
        words += [f"{count} {name.replace('_', ' ')}" for name, count in self.outcomes.items() if name != "completed"]
        if pool.refused_requests:
            words.append(f"{pool.refused_requests} requests refused")
        if self.cost_usd and self.config.max_cost_usd is None:
            words.append(f"${self.cost_usd:,.2f}")
        words += filter(None, [self.budget.words()])
        return ", ".join(words)
