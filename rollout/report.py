"""The end of a run in one value, and the text of it that people read on stdout.

Owns the exit code and every word of the report; printing it is the command's job. Plain text for 80 to 100 columns. Its
own words are ASCII; what it quotes (paths, names, messages) is quoted as it is, without control characters.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollout.interrupt import EXIT_INTERRUPTED
from rollout.statistics import OUTCOMES, RunStatistics, percent

EXIT_DONE = 0
EXIT_INCOMPLETE = 1

_WIDTH = 96
_QUOTE_CHARS = 240  # of a failure's example message
_NAMES_SHOWN = 12  # tool names that models made up
_PROMPTS_SHOWN = 10  # of those whose rows were filtered
_MINUTE = 60
_INTERRUPTED = "interrupted"  # a kind of failure
_WORDS = {
    "completed": "",
    "not_completed": "at the turn limit; kept, with a summary",
    "partial": "cut short, kept",
    "discarded": "no reasoning in any turn; done, and not in the trajectories",
    "failed": "not in the trajectories; tried again with --resume",
}


@dataclass(frozen=True)
class RunReport:
    """How a run stands when the program ends."""

    run_name: str
    run_dir: Path
    samples: int  # of the run, after --max_samples and --shard
    not_run: int  # of these, those that have no row yet
    statistics: RunStatistics  # of the whole run, all legs
    duration_seconds: float  # of this leg
    resume_command: str
    interrupted: bool = False
    stopped: str = ""  # why the run stopped handing out samples; "" when it did not
    out_of_budget: bool = False  # that is why it stopped
    cut: int = 0  # rollouts of this leg that ended early, kept, because the budget was used up
    skipped_lines: int = 0  # of the dataset, for holding no sample
    masked_secrets: int = 0  # key-shaped strings in tool results, this leg
    refused_requests: int = 0  # answered with 429 or 5xx, this leg
    warnings: Sequence[str] = ()
    files: Sequence[Path] = field(default_factory=tuple)  # what the run left behind, most wanted first

    @property
    def failed(self) -> int:
        """Samples whose last attempt failed."""
        return self.statistics.failed

    @property
    def interrupted_samples(self) -> int:
        """Of the failed ones, those that an interrupt ended."""
        return self.statistics.failures[_INTERRUPTED]

    @property
    def whole(self) -> bool:
        """Whether every sample is done, and none of them less than it would have been with more to spend."""
        return not (self.failed or self.not_run or self.cut)

    @property
    def exit_code(self) -> int:
        """0 when every sample is done and none was cut short for the budget, else 130 when interrupted, else 1."""
        if self.whole:
            return EXIT_DONE
        return EXIT_INTERRUPTED if self.interrupted else EXIT_INCOMPLETE


def render(report: RunReport) -> str:
    """Return the report as text that ends in a newline; its last line says what is left to do, and how."""
    sections = (
        _head(report),
        _tools(report.statistics),
        _model(report.statistics),
        _filtered(report.statistics),
        _failures(report),
        _list("Warnings", report.warnings),
        _list("Files", [str(path) for path in report.files]),
        _last_line(report),
    )
    return "\n\n".join("\n".join(lines) for section in sections if (lines := list(section))) + "\n"


def _head(report: RunReport) -> Iterator[str]:
    yield f"Run {_plain(report.run_name)}: {_many(report.samples, 'sample')}, {_duration(report.duration_seconds)}"
    if report.stopped:
        yield from _wrapped("  ", f"stopped early: {report.stopped}")
    for name in OUTCOMES:
        if count := report.statistics.outcomes[name]:
            yield _line(name.replace("_", " "), count, _WORDS[name])
    if report.not_run:
        yield _line("not run", report.not_run, "run with --resume")
    yield _line("trajectories", report.statistics.kept, "")
    if report.skipped_lines:
        yield _line("skipped lines", report.skipped_lines, "of the dataset, which hold no usable sample")
    if report.masked_secrets:
        yield _line("masked", report.masked_secrets, "key-shaped strings in tool results")
    if report.refused_requests:
        yield _line("refused requests", report.refused_requests, "answered with 429 or 5xx")


def _tools(statistics: RunStatistics) -> Iterator[str]:
    tools = statistics.tools_by_count()
    if not tools:
        yield "Tools: none was called"
        return
    width = max(len(_plain(name)) for name, _ in tools)
    width = max(width, 20)
    yield f"{'Tools':<{width + 2}} {'calls':>9} {'success':>9} {'failure':>9}"
    for name, counts in tools:
        rates = f"{counts.success_rate:>8.2f}% {counts.failure_rate:>8.2f}%"
        yield f"  {_plain(name):<{width}} {_number(counts.count):>9} {rates}"


def _model(statistics: RunStatistics) -> Iterator[str]:
    turns, thought = statistics.assistant_turns, statistics.turns_with_reasoning
    usage = statistics.usage
    yield f"Reasoning: {_number(thought)} of {_number(turns)} assistant turns ({percent(thought, turns):.2f}%)"
    yield (
        f"Tokens: {_number(usage.prompt_tokens)} prompt ({_number(usage.cached_tokens)} cached), "
        f"{_number(usage.completion_tokens)} completion ({_number(usage.reasoning_tokens)} reasoning)"
    )
    yield f"Cost: ${statistics.cost_usd:,.4f} as told by the endpoint, {_number(statistics.api_calls)} requests"
    if statistics.rollout_seconds:
        median, p95 = _duration(statistics.median_seconds()), _duration(statistics.p95_seconds())
        yield (
            f"Rollouts: {median} median, {p95} at the 95th percentile; "
            f"turns: {statistics.median_turns():g} median, {_number(statistics.turns)} in all"
        )


def _filtered(statistics: RunStatistics) -> Iterator[str]:
    if not statistics.filtered:
        return
    prompts = ", ".join(map(str, statistics.filtered_prompts[:_PROMPTS_SHOWN]))
    more = ", ..." if statistics.filtered > _PROMPTS_SHOWN else ""
    rows_left_out = _many(statistics.filtered, "row")
    yield f"Filtered: {rows_left_out} left out of the trajectories for calling tools that do not exist"
    yield f"  prompt_index {prompts}{more}"
    for name, rows in statistics.unknown_tools.most_common(_NAMES_SHOWN):
        yield f"  {_plain(name) or '(no name)'}: {_many(rows, 'row')}"
    if (names := len(statistics.unknown_tools) - _NAMES_SHOWN) > 0:
        yield f"  and {_number(names)} more names"


def _failures(report: RunReport) -> Iterator[str]:
    if not report.failed:
        return
    yield "Failed"
    for kind, count in report.statistics.failures.most_common():
        example = _plain(report.statistics.failure_examples.get(kind, ""))
        if len(example) > _QUOTE_CHARS:
            example = example[: _QUOTE_CHARS - 3] + "..."
        yield _line(kind, count, "")
        yield from _wrapped(" " * 6, example)
    yield f"  retry {'these' if report.not_run else 'just these'}: {report.resume_command}"


def _list(title: str, items: Sequence[str]) -> Iterator[str]:
    if items:
        yield title
        for item in items:
            yield f"  {_plain(item)}"


def _last_line(report: RunReport) -> Iterator[str]:
    if report.whole:
        yield f"Done: {_many(report.samples, 'sample')}, nothing left to do."
        return
    failed = report.failed - report.interrupted_samples
    left = [f"{_number(failed)} failed"] if failed else []
    left += [f"{_number(report.interrupted_samples)} interrupted"] if report.interrupted_samples else []
    left += [f"{_number(report.not_run)} not run"] if report.not_run else []
    left += [f"{_number(report.cut)} cut short by the budget (kept)"] if report.cut else []
    interrupted = "Interrupted: " if report.interrupted else ""
    how = "resume with" if not report.out_of_budget else "raise the budget's bound and resume with"
    what_to_do = f"{how}: {report.resume_command}" if report.failed or report.not_run else "nothing is left to run"
    yield f"{interrupted}{', '.join(left)} of {_many(report.samples, 'sample')}; {what_to_do}"


def _line(label: str, count: int, words: str) -> str:
    return f"  {_plain(label):<18} {_number(count):>9}  {words}".rstrip()


def _wrapped(indent: str, text: str) -> list[str]:
    return textwrap.wrap(_plain(text), _WIDTH, initial_indent=indent, subsequent_indent=indent)


def _plain(text: str) -> str:
    """One line, nothing in it that moves a terminal's cursor."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


def _number(count: int) -> str:
    return f"{count:,}"


def _many(count: int, noun: str) -> str:
    return f"{_number(count)} {noun}{'' if count == 1 else 's'}"


def _duration(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), _MINUTE)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
