"""Runs each prompt of a JSONL file through a tool-calling agent and saves the trajectories: the command, and its API.

    python batch_runner.py --dataset_file=data/prompts.jsonl --batch_size=10 --run_name=my_first_run

    report = BatchRunner(RunConfig(dataset_file=..., batch_size=10, run_name="my_first_run")).run()

The stages, each taking the last one's value: flags → config → plan (the door) → run folder and what it already holds →
rows → trajectories and statistics → report → exit code. Nothing is written, started or sent before the door is passed.
Nothing imports this file: worker processes start from rollout/spawner.py, which the command forks before its run.
"""

from __future__ import annotations

import gc

from rollout.interrupt import (
    EXIT_INTERRUPTED,
    Interrupt,
    catch_signals,
    ignore_signals,
    interrupted_line,
    resume_command,
)
from rollout.secrecy import known_secrets, wipe_proc, without_secrets

if __name__ == "__main__":  # before the slow imports: a signal during them is told, a key is not shown meanwhile
    catch_signals(Interrupt(), unwind=False)
    wipe_proc()
    gc.disable()  # saves a tenth of the imports; main() switches it on again

import os
import platform
import shlex
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

import fire

from endpoints.launch import EndpointError, check_endpoint, listens_here, start_endpoint
from rollout.checkpoint import PROBABILITIES, DatasetFacts, Past
from rollout.config import RunConfig
from rollout.console import Console, fill_closed_streams
from rollout.controller import Controller
from rollout.extras import ExtrasError
from rollout.filters import drop_reason
from rollout.flags import UsageError, checked_words, help_text, switch, to_config, words_of
from rollout.join import JoinError, check_target, join, joined_config, joined_probabilities, locked_sources
from rollout.keys import PLACEHOLDER_KEY, api_key_for, host_of, missing_key
from rollout.leftovers import clean, sweep
from rollout.leg import Leg
from rollout.menu import distributions_text
from rollout.merge import TRAJECTORIES, MergeRules
from rollout.original_rows import complete_row
from rollout.pacer import Pacer
from rollout.pool import Pool
from rollout.preflight import Plan, PreflightError, prepare
from rollout.report import EXIT_DONE, EXIT_INCOMPLETE, RunReport, render
from rollout.resume import Match, match_rows
from rollout.row_index import RowIndex
from rollout.run_dir import STATISTICS, RunDir, RunDirError, check_run
from rollout.samples import Dataset, DatasetError
from rollout.spawner import GC_ALLOCATIONS, LocalSpawner, StartSpawner, allow_open_files, forked_early
from rollout.statistics import RunFacts, RunStatistics
from rollout.wire import Frame
from sandboxes import keys as sandbox_keys
from sandboxes import max_sandboxes, places
from sandboxes.base import SandboxError
from toolsets import DistributionError

__all__ = ["BatchRunner", "RunConfig", "RunReport", "main"]
EXIT_BAD_USAGE = 2
AUTO_PER_WORKER = 256  # rollouts in flight per worker at most, when how many is left to the program
Work: TypeAlias = "Callable[[Leg, array[int]], None]"  # runs what is pending
# What is wrong with the input, and what goes wrong with a run that was right to start.
_BAD_INPUT = (UsageError, DatasetError, DistributionError, ExtrasError, PreflightError, EndpointError, JoinError)
_BAD_LUCK = (RunDirError, SandboxError)


class BatchRunner:
    """A run, from its config to its report.

    Prints nothing and never exits unless it is given a console that prints. ``interrupt.request()`` from a signal
    handler or another thread stops it cleanly.
    """

    def __init__(
        self,
        config: RunConfig,
        console: Console | None = None,
        interrupt: Interrupt | None = None,
        resume_command: str = "the same RunConfig with resume=True",
        start_spawner: StartSpawner = LocalSpawner.start,
    ) -> None:
        self.config = config
        self.asked_model = config.model  # what --model said; an endpoint of ours may answer as another
        self.console = console or Console(quiet=True)
        self.interrupt = interrupt or Interrupt()
        self.resume_command = resume_command
        self.start_spawner = start_spawner
        self.distribution_name = ""  # where it has been read
        self.probabilities: Mapping[str, float] = {}  # the same
        self.started = time.monotonic()

    def run(self) -> RunReport:
        """Run what is pending, merge, count, report.

        Raises UsageError, DatasetError, DistributionError, ExtrasError, PreflightError, EndpointError or JoinError
        before anything is written; RunDirError when the run's folder cannot be written any more: what is recorded
        stays, and ``resume`` goes on from it. What else ends a run early is ``stopped`` in the report.
        """
        if self.config.merge:
            return self._join()
        plan = prepare(self.config)
        self.distribution_name, self.probabilities = plan.distribution.name, plan.distribution.probabilities
        with plan.dataset:
            if own_model := check_endpoint(self.config.base_url, self.config.model):
                self.config = self.config.model_copy(update={"model": own_model})
            key = self._explicit_key() if own_model else self._api_key(self.config.base_url)
            self.console.secrets = tuple(known_secrets(os.environ, [key, *plan.extras.secrets]))
            if not self.config.resume:  # which may find that nothing is left to ask
                self._check_key()
            self._check_run()
            with self._executor() as start_spawner:
                run_dir = RunDir.open(self.config.run_name, resume=self.config.resume)
                return self._run_in(run_dir, plan.dataset, plan.warnings, partial(self._work, plan, start_spawner))

    @contextmanager
    def _executor(self) -> Iterator[StartSpawner]:
        """Have what starts workers, where the run wants them. Raises PreflightError."""
        if self.config.executor == "local":
            yield self.start_spawner
            return
        from rollout.ray_spawner import ray_cluster  # noqa: PLC0415 - for who asks for it

        workers, base_url = self.config.num_workers, self.config.base_url
        with ray_cluster(self.config.ray_address, workers, loopback=listens_here(base_url)) as cluster:
            yield cluster.start_spawner

    def _join(self) -> RunReport:
        """Make a new run folder of others; then that run is finished as any other is, but for asking anything."""
        check_target(self.config.run_name)
        with locked_sources(self.config) as sources:
            self.config = joined_config(self.config, sources)
            self.probabilities = joined_probabilities(sources)
            with Dataset.open(self.config.dataset_file, self.config.max_samples) as dataset:
                join(self.config.run_name, dataset, sources)
                self.resume_command = self._resume_joined()
                return self._run_in(RunDir.open(self.config.run_name, resume=True), dataset, (), None)

    def _resume_joined(self) -> str:
        """Return the command that runs what the joined runs left over; or, without a command line, what to do."""
        said = shlex.split(self.resume_command)
        program = list(takewhile(lambda word: not word.startswith("--"), said))
        if program == said:
            return "its own RunConfig with resume=True and no merge"
        return resume_command([*program, *words_of(self.config)])

    def _run_in(self, run_dir: RunDir, dataset: Dataset, warnings: Sequence[str], work: Work | None) -> RunReport:
        """Bring the run in this folder to its report. ``work`` runs what is pending; None: that is left pending."""
        with run_dir, self.console.logging_to(run_dir.log_path):
            self.console.log("trace", f"starts: {self._public_config()}; {_versions()}")
            for warning in (*dataset.warnings, *warnings, *run_dir.warnings):
                self.console.log("warning", warning)
            return self._all_stages(run_dir, dataset, work)

    def _all_stages(self, run_dir: RunDir, dataset: Dataset, work: Work | None) -> RunReport:
        samples = self.config.samples_of(len(dataset))
        rows = run_dir.scan()
        for warning in rows.problems.lines():
            self.console.log("warning", warning)
        match = match_rows(dataset.keys, rows, samples)
        if work and self.config.shard and match.orphans:
            what = f"{len(match.orphans)} of its rows answer no sample of today's shard"
            raise UsageError(f"--shard={self.config.shard}: lines of the dataset have moved since then: {what}")
        facts = DatasetFacts(str(self.config.dataset_file), dataset.sha256, len(dataset))
        checkpoint = run_dir.start_checkpoint(self._public_config(), facts, rows, match)
        run_dir.save_checkpoint(checkpoint, at_any_cost=True)
        leg = Leg(self.config, dataset, run_dir, checkpoint, self.console)
        if self.config.resume:
            self._tell_resume(run_dir.past, dataset, match)
        if work and (pending := match.pending()):
            if not leg.affords(pending, rows):
                self.console.log("error", f"nothing is run: {leg.stopped}")
            else:
                work(leg, pending)
            run_dir.scan_own(rows)
            match = match_rows(dataset.keys, rows, samples)
        return self._finish(leg, dataset, rows, match)

    def _work(self, plan: Plan, start_spawner: StartSpawner, leg: Leg, pending: array[int]) -> None:
        """Run the pending samples in worker processes."""
        self._check_key()
        allow_open_files()  # each worker takes one, and each place for a sandbox
        kinds = {plan.sandbox, plan.image_sandbox}
        if swept := sweep(kinds):
            self.console.log("info", f"removed {len(swept)} sandboxes that a dead run had left behind")
        with ExitStack() as stack:
            stack.callback(sweep, kinds)  # after workers that died
            base_url = self.config.base_url
            workers = min(self.config.num_workers, len(pending))
            per_worker, controller = self.config.concurrency or AUTO_PER_WORKER, None
            if self.config.concurrency is None:
                controller = Controller(max_rollouts=AUTO_PER_WORKER * workers)
            tell = partial(self.console.log, "info")
            environ = without_secrets(os.environ)
            endpoint = start_endpoint(base_url, self.asked_model, leg.run_dir.log_path, tell, environ)
            if endpoint:
                stack.callback(endpoint.close)
                base_url = endpoint.base_url
                if endpoint.max_in_flight and self.config.concurrency is None:
                    workers = min(workers, endpoint.max_in_flight)
                    per_worker, controller = endpoint.max_in_flight // workers, None
            settings = Frame(
                {
                    "type": "settings",
                    "config": self.config.model_dump(mode="json", exclude={"api_key"}),
                    "base_url": base_url,
                    "api_key": PLACEHOLDER_KEY if endpoint else self._api_key(base_url),
                    "secrets": self.console.secrets,
                    "distribution": asdict(plan.distribution),
                    "extras": plan.extras.to_json(),
                    "unavailable": plan.unavailable,
                    "missing": plan.missing,
                    "tool_settings": plan.tool_settings,
                    "sandbox": plan.sandbox,
                    "image_sandbox": plan.image_sandbox,
                    "sandbox_keys": sandbox_keys(kinds, os.environ),
                    "places": self._places(kinds, stack) if self.config.executor == "local" else "",
                    "limits": asdict(plan.limits),
                }
            )
            pool = Pool(
                settings,
                num_workers=workers,
                per_worker=per_worker,
                pacer=Pacer(controller) if controller else None,
                on_log=lambda line: self.console.log(line["level"], line["text"]),
                interrupt=self.interrupt,
                watch=endpoint.death if endpoint else str,
                log_file=self.console.log_file or subprocess.DEVNULL,
                start_spawner=start_spawner,
            )
            leg.run(pending, stack.enter_context(pool))

    def _places(self, kinds: set[str], stack: ExitStack) -> str:
        """Bound how many sandboxes run at once, where the machine bears only so many; return where places are had."""
        bound = max_sandboxes(kinds)
        if not bound:
            return ""
        self.console.log("trace", f"at most {bound} sandboxes run at once")
        return str(stack.enter_context(places.offered(bound, places.MADE_AT_ONCE)))

    def _finish(self, leg: Leg, dataset: Dataset, rows: RowIndex, match: Match) -> RunReport:
        """Make trajectories.jsonl and statistics.json anew, from every row of the run."""
        statistics = RunStatistics()
        rules = MergeRules(
            drop_reason=drop_reason,
            count=lambda row, fate: statistics.add(row, final=fate != "superseded"),
            complete=complete_row,
        )
        merged = leg.run_dir.merge(rows, match, rules)
        facts = RunFacts(
            run_name=self.config.run_name,
            distribution=self.distribution_name or Path(self.config.distribution).stem,
            total_prompts=len(match.samples),
            total_batches=-(-len(match.samples) // self.config.batch_size),
            batch_size=self.config.batch_size,
            model=self.config.model,
            completed_at=datetime.now(UTC).astimezone().isoformat(timespec="milliseconds"),
            duration_seconds=leg.checkpoint.all_seconds,
            legs=leg.checkpoint.legs,
        )
        leg.run_dir.write_json(STATISTICS, statistics.to_json(facts), indent=2)
        warnings = [*merged.filtered_rows.lines()]
        if merged.orphans:
            rows_are = "1 row is" if merged.orphans == 1 else f"{merged.orphans} rows are"
            warnings.append(f"{rows_are} of prompts outside today's dataset: kept in the batch files, not merged")
        return RunReport(
            run_name=self.config.run_name,
            run_dir=leg.run_dir.path,
            samples=len(match.samples),
            not_run=match.not_run,
            statistics=statistics,
            duration_seconds=time.monotonic() - self.started,
            resume_command=self.resume_command,
            interrupted=bool(self.interrupt.count),
            stopped=leg.stopped,
            out_of_budget=leg.out_of_budget,
            cut=leg.cut,
            skipped_lines=dataset.skipped,
            masked_secrets=leg.masked,
            refused_requests=leg.checkpoint.refused_requests,
            warnings=warnings,
            files=[leg.run_dir.path / name for name in (TRAJECTORIES, STATISTICS)],
        )

    def _check_run(self) -> None:
        """Raise UsageError when the run's folder must not be used; nothing of the run has begun yet."""
        try:
            check_run(self.config.run_name, resume=self.config.resume)
        except RunDirError as error:
            raise UsageError(str(error)) from None

    def _api_key(self, base_url: str) -> str:
        """Return the key for the endpoint. Raises UsageError."""
        try:
            return api_key_for(host_of(base_url), self._explicit_key(), os.environ)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def _check_key(self) -> None:
        """Raise UsageError when the endpoint is one that refuses whoever has no key."""
        base_url = self.config.base_url
        if "://" in base_url and (problem := missing_key(host_of(base_url), self._api_key(base_url))):
            raise UsageError(problem)

    def _explicit_key(self) -> str:
        return self.config.api_key.get_secret_value() if self.config.api_key else ""

    def _public_config(self) -> dict[str, Any]:
        """Return the config for files: no key, and nothing of what must never be saved."""
        hidden = {"api_key", "ephemeral_system_prompt", "prefill_messages"}
        return {**self.config.model_dump(mode="json", exclude=hidden), PROBABILITIES: dict(self.probabilities)}

    def _tell_resume(self, past: Past, dataset: Dataset, match: Match) -> None:
        pending, samples = len(match.pending()), len(match.samples)
        batches = -(-pending // self.config.batch_size)
        if pending:
            text = f"resume: {samples} samples, {samples - pending} done already, {pending} to run in {batches} batches"
        else:
            text = f"all {samples} samples are done already; nothing is asked again"
        self.console.log("info", text)
        config = self._public_config()
        changes = [
            f"{name} was {past.config[name]}, is {config[name]}"
            for name in ("model", "distribution", "seed", "shard")
            if past.config.get(name, config[name]) != config[name]
        ]
        same_name = past.config.get("distribution") == config["distribution"]
        if same_name and (past.config.get(PROBABILITIES) or config[PROBABILITIES]) != config[PROBABILITIES]:
            changes.append(f"the probabilities of distribution {self.config.distribution} have changed")
        if past.dataset.get("sha256", dataset.sha256) != dataset.sha256:
            changes.append("the dataset has changed")
        if changes:
            text = f"this run was begun otherwise: {'; '.join(changes)}; each row says what made it"
            self.console.log("warning", text)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, prints the report on stdout and everything else on stderr."""
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 20, 20)
    gc.enable()
    resume = resume_command(sys.orig_argv if argv is None else ["python", "batch_runner.py", *argv])
    fill_closed_streams()
    console = Console()
    try:
        return _command(sys.argv[1:] if argv is None else argv, console, resume)
    except _BAD_INPUT as error:
        console.log("error", str(error))
        return EXIT_BAD_USAGE
    except _BAD_LUCK as error:
        console.log("error", f"{error}; resume with: {resume}")
        return EXIT_INCOMPLETE
    except KeyboardInterrupt:
        console.log("warning", interrupted_line(resume))
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - one of the few places that record whatever goes wrong
        text = f"a fault of this program: {type(error).__name__}: {error}"
        console.log("error", f"{text}; resume with: {resume}")
        return EXIT_INCOMPLETE


def _command(argv: list[str], console: Console, resume: str) -> int:
    typed = _read_flags(argv)
    listed = partial(distributions_text, typed)
    for name, text in (("help", help_text), ("list_distributions", listed), ("clean", clean)):
        if switch(name, typed.get(name, "false")):
            return EXIT_DONE if console.answer(text()) else EXIT_INCOMPLETE
    config = to_config(typed)
    console.verbose = config.verbose
    interrupt = Interrupt()
    with forked_early() as start_spawner:
        catch_signals(interrupt, unwind=True)
        try:
            report = BatchRunner(config, console, interrupt, resume, start_spawner).run()
        except _BAD_LUCK as error:
            if not interrupt.count:
                raise
            console.log("error", str(error))
            console.log("warning", interrupted_line(resume))
            return EXIT_INTERRUPTED
    told = console.answer(render(report).rstrip("\n"))
    return report.exit_code or (EXIT_DONE if told else EXIT_INCOMPLETE)


def _versions() -> str:
    """Return what a bug report needs to know of this machine."""
    names = ("openai", "pydantic", "aiohttp", "fire", "docker")
    packages = [f"{name} {version(name)}" for name in names]
    return ", ".join([platform.platform(), f"Python {platform.python_version()}", *packages])


def _read_flags(argv: list[str]) -> dict[str, str]:
    """Return the flags as typed, every value as text. Raises UsageError."""
    words = checked_words(argv)
    typed: dict[str, str] = {}

    def collect(*stray: str, **flags: str) -> None:
        """Take whatever fire read; checked_words has refused what is no flag."""
        if stray:
            raise UsageError(f"unexpected word {stray[0]!r}; every option is written --flag=value")
        typed.update(flags)

    fire.decorators.SetParseFn(str)(collect)  # verbatim: 007 stays 007, 1e3 stays 1e3, a,b stays a,b
    fire.Fire(collect, command=words)
    return typed


if __name__ == "__main__":
    code = main()
    ignore_signals()
    sys.exit(code)
