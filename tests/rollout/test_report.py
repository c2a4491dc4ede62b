from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout.report import RunReport, render
from rollout.statistics import RunStatistics

RESUME = "python batch_runner.py --run_name=demo --resume"


def row(*names: str, index: int = 0, thought: str = "hm", **other: Any) -> dict[str, Any]:
    calls = [{"id": "a", "type": "function", "function": {"name": name, "arguments": "{}"}} for name in names]
    return {
        "prompt_index": index,
        "conversations": [{"from": "gpt", "value": f"<think>\n{thought}\n</think>", "tool_calls": calls}],
        "metadata": {
            "usage": {"prompt_tokens": 1000, "completion_tokens": 10, "cached_tokens": 600, "reasoning_tokens": 4},
            "cost_usd": 0.0125,
            "duration_seconds": 2.0,
        },
        "completed": True,
        "api_calls": 2,
        "tool_stats": {name: {"count": 3, "success": 2, "failure": 1} for name in names},
        **other,
    }


def report(*rows: dict[str, Any], not_run: int = 0, **other: Any) -> RunReport:
    statistics = RunStatistics()
    for each in rows:
        statistics.add(each, final=True)
    return RunReport(
        run_name="demo",
        run_dir=Path("data/demo"),
        samples=len(rows) + not_run,
        not_run=not_run,
        statistics=statistics,
        duration_seconds=83.0,
        resume_command=RESUME,
        **other,
    )


FAILED = row(failed=True, completed=False, error={"kind": "rate_limit", "message": "429: slow down"})


def last_line(of: RunReport) -> str:
    return render(of).splitlines()[-1]


def test_a_run_that_is_done() -> None:
    done = report(row("terminal"), row("terminal", "web_search"), files=(Path("data/demo/trajectories.jsonl"),))
    assert render(done) == (
        """\
Run demo: 2 samples, 1 min 23 s
  completed                  2
  trajectories               2

Tools                      calls   success   failure
  terminal                     6    66.67%    33.33%
  web_search                   3    66.67%    33.33%

Reasoning: 2 of 2 assistant turns (100.00%)
Tokens: 2,000 prompt (1,200 cached), 20 completion (8 reasoning)
Cost: $0.0250 as told by the endpoint, 4 requests
Rollouts: 2.0 s median, 2.0 s at the 95th percentile; turns: 1 median, 2 in all

Files
  data/demo/trajectories.jsonl

Done: 2 samples, nothing left to do.
"""
    )
    assert done.exit_code == 0


def test_failures_are_shown_by_kind_with_an_example_and_how_to_retry() -> None:
    partly = report(row(), FAILED, FAILED)
    text = render(partly)
    assert "rate_limit                 2\n      429: slow down\n" in text
    assert f"retry just these: {RESUME}" in text
    assert last_line(partly) == f"2 failed of 3 samples; resume with: {RESUME}"
    assert partly.exit_code == 1


def test_samples_that_were_not_run_are_left_to_do() -> None:
    stopped = report(row(), FAILED, not_run=8, stopped="the endpoint refuses the key (401)")
    assert "  stopped early: the endpoint refuses the key (401)\n" in render(stopped)
    assert last_line(stopped) == f"1 failed, 8 not run of 10 samples; resume with: {RESUME}"
    assert (stopped.exit_code, stopped.failed) == (1, 1)


def test_what_the_budget_cut_short_is_told_with_what_can_be_done_about_it() -> None:
    cut: dict[str, Any] = {"stopped": "the budget is used up", "out_of_budget": True, "cut": 1}
    bounded = report(row(), not_run=2, **cut)
    left = "2 not run, 1 cut short by the budget (kept) of 3 samples"
    assert last_line(bounded) == f"{left}; raise the budget's bound and resume with: {RESUME}"
    all_begun = report(row(), **cut)
    assert last_line(all_begun) == "1 cut short by the budget (kept) of 1 sample; nothing is left to run"
    assert all_begun.exit_code == 1


def test_an_interrupted_run() -> None:
    interrupted = report(row(), not_run=1, interrupted=True)
    assert last_line(interrupted) == f"Interrupted: 1 not run of 2 samples; resume with: {RESUME}"
    assert interrupted.exit_code == 130
    cut = row(failed=True, completed=False, error={"kind": "interrupted", "message": "the run was interrupted"})
    both = report(FAILED, cut, cut, interrupted=True)
    assert last_line(both) == f"Interrupted: 1 failed, 2 interrupted of 3 samples; resume with: {RESUME}"


def test_refused_requests_are_counted() -> None:
    assert "\n  refused requests       1,200  answered with 429 or 5xx\n" in render(
        report(row(), refused_requests=1200)
    )
    assert "refused" not in render(report(row()))


def test_discarded_and_filtered_rows_are_visible() -> None:
    text = render(report(row("foo_bar", index=7), row(thought="", discarded="no_reasoning"), row()))
    assert "  discarded                  1  no reasoning in any turn" in text
    assert "Filtered: 1 row left out of the trajectories for calling tools that do not exist" in text
    assert "  prompt_index 7\n  foo_bar: 1 row\n" in text
    assert "  trajectories               1\n" in text


def test_long_lists_of_what_was_filtered_are_cut() -> None:
    text = render(report(*(row(f"made_up_{number}", index=number) for number in range(40))))
    assert "  prompt_index 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...\n" in text
    assert "  and 28 more names\n" in text


def test_warnings_skipped_lines_and_masked_secrets_are_told() -> None:
    text = render(report(row(), warnings=("no sandbox isolates this machine",), skipped_lines=2, masked_secrets=3))
    assert "Warnings\n  no sandbox isolates this machine\n" in text
    assert "skipped lines              2" in text
    assert "masked                     3" in text


def test_a_run_with_no_row_at_all() -> None:
    nothing = report(not_run=3)
    assert "Tools: none was called" in render(nothing)
    assert last_line(nothing) == f"3 not run of 3 samples; resume with: {RESUME}"


def test_its_own_words_are_ascii_and_fit_a_terminal() -> None:
    texts = [report(FAILED, row("terminal", "foo_bar"), row(discarded="no_reasoning"), not_run=6, stopped="x " * 200)]
    texts += [replace(texts[0], interrupted=True, resume_command="x"), report(row(completed=False, partial=True))]
    for text in map(render, texts):
        assert text.isascii()
        assert max(map(len, text.splitlines())) <= 100


def test_what_is_quoted_stays_on_its_line_and_moves_no_cursor() -> None:
    error = {"kind": "server", "message": "\x1b[2J\nhé\r\n" + "word " * 500}
    lines = render(report(row(failed=True, error=error))).splitlines()
    (quoted,) = [line for line in lines if "hé" in line]
    assert quoted.startswith("      ?[2J hé word")
    assert len(lines) < 30


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (60, "1 min 00 s"), (3599, "59 min 59 s"), (7325, "2 h 02 min")],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert f"1 sample, {text}\n" in render(replace(report(row()), duration_seconds=seconds))
