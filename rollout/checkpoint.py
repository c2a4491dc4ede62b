"""checkpoint.json: how far a run is, for readers and dashboards. Nothing depends on it but the history of its legs.

It can always be made again from the batch files, except for ``legs`` (one entry an invocation: when, with what, which
batches) and for the numbers of batches whose files are gone. A checkpoint that is missing, broken or another run's is
told and left out of account.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rollout.amounts import MAX_LEG_SECONDS, amount, is_count
from rollout.batch_files import BATCH_NUMBERS, highest_number
from rollout.files import IrregularFileError, explained, open_to_read
from rollout.jsonl import JsonObject
from rollout.resume import Match
from rollout.row_index import RowIndex
from rollout.rows import Outcome

FORMAT = 1
PROBABILITIES = "probabilities"  # in ``config`` beside the flags: the distribution's, for a file's may change
_LEG_CONFIG = ("model", "distribution", "seed")
_BATCH_DIGITS = 15  # of numbers that are believed: the next batch's must fit as well
_FREE_SECONDS = 1.0  # what saving may cost before it is rationed: small runs save after every batch
_MAX_SHARE = 0.05  # of the wall time, beyond that


@dataclass
class BatchStats:
    """Counts of one batch; ``processed`` are all rows, whatever their outcome."""

    processed: int = 0
    skipped: int = 0
    failed: int = 0
    discarded_no_reasoning: int = 0

    def count(self, outcome: Outcome) -> None:
        """Count one row."""
        self.processed += 1
        self.failed += outcome == "failed"
        self.discarded_no_reasoning += outcome == "discarded"


@dataclass
class Past:
    """What an earlier checkpoint tells that the batch files do not."""

    config: JsonObject = field(default_factory=dict)
    dataset: JsonObject = field(default_factory=dict)
    legs: list[JsonObject] = field(default_factory=list)
    batch_stats: dict[int, BatchStats] = field(default_factory=dict)
    warning: str = ""  # why it tells nothing, although there is a file


def load_past(path: Path, run_name: str) -> Past:
    """Read a checkpoint, ours or the original's, believing only what has the right type. Raises RunDirError."""
    try:
        with explained(f"read {path}"):
            if not path.exists():
                missing = f"{path} is missing; the run goes on from its batch files"
                return Past(warning=missing if highest_number(path.parent) >= 0 else "")
            with open_to_read(path) as file:
                saved = json.loads(file.read())
    except IrregularFileError:
        return Past(warning=f"{path} is not a regular file; the run goes on from its batch files")
    except (ValueError, RecursionError):
        return Past(warning=f"{path} is damaged; the run goes on from its batch files")
    if not isinstance(saved, dict) or saved.get("run_name") != run_name:
        return Past(warning=f"{path} belongs to another run; the run goes on from its batch files")
    return Past(
        config=_object(saved.get("config")),
        dataset=_object(saved.get("dataset")),
        legs=[known for leg in _list(saved.get("legs")) if (known := _leg(_object(leg)))],
        batch_stats=_batch_stats(_object(saved.get("batch_stats"))),
    )


@dataclass(frozen=True)
class DatasetFacts:
    """The dataset as the checkpoint names it."""

    path: str
    sha256: str
    samples: int


class Checkpoint:
    """The state of a run: what is done, and the leg that is under way."""

    def __init__(self, run_name: str, config: JsonObject, dataset: DatasetFacts, past: Past) -> None:
        self.run_name = run_name
        self.config = config
        self.dataset = dataset
        self.batch_stats = dict(past.batch_stats)
        self._past_legs = past.legs
        self._done = bytearray(dataset.samples)
        self._started_at = _now()
        self._started = time.monotonic()
        self._batches: tuple[int, int] | None = None  # first and last of this leg
        self._recorded = 0
        self.refused_requests = 0  # of this leg
        self._seconds_saving = 0.0

    def take_over(self, rows: RowIndex, match: Match) -> None:
        """Count what the batch files hold already; it replaces what the earlier checkpoint said of these files."""
        self._done[:] = match.done
        counted: dict[int, BatchStats] = {}
        for batch_num, outcome in rows.outcomes():
            if batch_num not in counted:
                counted[batch_num] = BatchStats(skipped=self.batch_stats.get(batch_num, BatchStats()).skipped)
            counted[batch_num].count(outcome)
        self.batch_stats.update(counted)

    def record(self, batch_num: int, index: int, outcome: Outcome) -> None:
        """Count one row that was written in this leg."""
        self.batch_stats.setdefault(batch_num, BatchStats()).count(outcome)
        self._done[index] = outcome != "failed"
        first, last = self._batches or (batch_num, batch_num)
        self._batches = min(first, batch_num), max(last, batch_num)
        self._recorded += 1

    @property
    def seconds(self) -> float:
        """Return how long this leg has taken until now."""
        return time.monotonic() - self._started

    @property
    def past_seconds(self) -> float:
        """Return how long all earlier legs took together."""
        return sum(float(leg.get("duration_seconds", 0.0)) for leg in self._past_legs)

    @property
    def all_seconds(self) -> float:
        """Return how long all legs took together, this one until now."""
        return self.past_seconds + self.seconds

    @property
    def legs(self) -> list[JsonObject]:
        """Return one entry per invocation, the present one last; it ends now."""
        first, last = self._batches or (None, None)
        leg = {
            "started_at": self._started_at,
            "ended_at": _now(),
            "duration_seconds": round(self.seconds, 3),
            **{name: self.config.get(name) for name in _LEG_CONFIG},
            "dataset_sha256": self.dataset.sha256,
            "samples": self.dataset.samples,
            "first_batch": first,
            "last_batch": last,
            "rows": self._recorded,
            "refused_requests": self.refused_requests,
        }
        return [*self._past_legs, leg]

    def to_json(self) -> JsonObject:
        """Return the file's content."""
        return {
            "format": FORMAT,
            "run_name": self.run_name,
            "completed_prompts": [index for index, done in enumerate(self._done) if done],
            "batch_stats": {str(number): vars(stats) for number, stats in sorted(self.batch_stats.items())},
            "config": self.config,
            "dataset": vars(self.dataset),
            "legs": self.legs,
            "last_updated": _now(),
        }

    def affordable(self) -> bool:
        """Tell whether saving now keeps all saving below a twentieth of the leg's time, after a free second."""
        return self._seconds_saving < _FREE_SECONDS + _MAX_SHARE * self.seconds

    def spent(self, seconds: float) -> None:
        """Say how long a save took."""
        self._seconds_saving += seconds


def _now() -> str:
    return datetime.now(UTC).astimezone().isoformat(timespec="milliseconds")


def _object(value: Any) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _leg(saved: JsonObject) -> JsonObject:
    """Return of an entry of ``legs`` what is known by name and has the right type."""
    return {name: saved[name] for name, fits in _LEG_FIELDS.items() if name in saved and fits(saved[name])}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_duration(value: Any) -> bool:
    return amount(value, MAX_LEG_SECONDS) == value and not isinstance(value, bool)


def _is_batch(value: Any) -> bool:
    return value is None or is_count(value)


_LEG_FIELDS: dict[str, Callable[[Any], bool]] = {
    "run": _is_text,  # of which run it was, where runs were joined
    "started_at": _is_text,
    "ended_at": _is_text,
    "duration_seconds": _is_duration,
    "model": _is_text,
    "distribution": _is_text,
    "seed": _is_whole,
    "dataset_sha256": _is_text,
    "samples": is_count,
    "first_batch": _is_batch,
    "last_batch": _is_batch,
    "rows": is_count,
    "refused_requests": is_count,
}


def _batch_stats(saved: JsonObject) -> dict[int, BatchStats]:
    stats = {}
    for name, counts in saved.items():
        if BATCH_NUMBERS.fullmatch(name) and len(name) <= _BATCH_DIGITS and isinstance(counts, dict):
            known = {key: counts[key] for key in vars(BatchStats()) if is_count(counts.get(key))}
            stats[int(name)] = BatchStats(**known)
    return stats
