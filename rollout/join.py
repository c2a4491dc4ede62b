"""Run folders of one dataset, its shards for the most part, become one new run folder.

Everything is checked before anything is written: that the runs are of the same dataset, model, distribution and seed,
and that no sample has been done twice, unless its rows are alike. Sources are locked meanwhile and never changed. Their
batch files are copied as they are, under new numbers; a row that two sources have alike is taken once, and failures of
samples that other sources have too go in front, where they undo nothing. The new folder is there as a whole or not at
all; it is a run like any other then: its merge, statistics and resume are not this file's business.
"""

from __future__ import annotations

import json
import os
import shutil
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from rollout.batch_files import batch_name
from rollout.checkpoint import PROBABILITIES, Past, load_past
from rollout.config import RunConfig, is_shard, shard_samples
from rollout.files import IrregularFileError, RunDirError, explained, open_to_read, replaced, sync_folder
from rollout.jsonl import JsonObject
from rollout.merge import RowReader
from rollout.resume import match_rows
from rollout.row_index import RowIndex
from rollout.row_scan import scan_rows
from rollout.run_dir import CHECKPOINT, DATA, check_run
from rollout.run_lock import RunLock
from rollout.samples import Dataset

MUST_AGREE = ("model", "distribution", "seed", "max_samples")
_NOT_TAKEN_OVER = ("run_name", "resume", "shard", "merge", "max_cost_usd", "max_total_tokens", "max_hours")
_COPIED, _LEFT_OUT, _IN_FRONT = range(3)  # what becomes of a row
_BUFFER_BYTES = 1 << 20


class JoinError(ValueError):
    """These runs cannot be joined; one line that says why, and what to do."""


@dataclass
class Source:
    """One of the runs that are joined."""

    folder: Path
    past: Past
    shard: str | None  # of the dataset; None when it was the whole of it
    rows: RowIndex = field(default_factory=RowIndex)
    fates: bytearray = field(default_factory=bytearray)  # of each row

    @classmethod
    def find(cls, name: str, data: Path = DATA) -> Self:
        """Return the run of this name in ``data/``, or in this folder. Raises JoinError."""
        if not name:
            raise JoinError("--merge names no run: give run names or folders, comma-separated")
        folder = Path(name) if "/" in name else data / name
        if not folder.is_dir():
            raise JoinError(f"--merge: there is no run folder {folder}")
        try:
            past = load_past(folder / CHECKPOINT, str(_saved(folder).get("run_name")))
        except RunDirError as error:
            raise JoinError(f"--merge: {error}") from None
        if not isinstance(past.dataset.get("sha256"), str):
            raise JoinError(f"--merge: {folder / CHECKPOINT} tells no dataset; go on with that run once, to mend it")
        shard = past.config.get("shard")
        if shard is not None and not (isinstance(shard, str) and is_shard(shard)):
            raise JoinError(f"--merge: {folder / CHECKPOINT} names a bad shard")
        return cls(folder, past, shard)


def _saved(folder: Path) -> JsonObject:
    with suppress(OSError, IrregularFileError, ValueError, RecursionError):
        with open_to_read(folder / CHECKPOINT) as file:
            saved = json.loads(file.read())
        return saved if isinstance(saved, dict) else {}
    return {}


def recorded_flags(names: str) -> dict[str, str]:
    """Return the required flags that need not be typed: they are what the first run was begun with.

    Raises JoinError.
    """
    first = Source.find(next(filter(None, map(str.strip, names.split(","))), ""))
    flags = {"dataset_file": first.past.dataset.get("path"), "batch_size": first.past.config.get("batch_size")}
    return {name: str(value) for name, value in flags.items() if value is not None}


@contextmanager
def locked_sources(config: RunConfig) -> Iterator[list[Source]]:
    """Give the runs that ``config.merge`` names, while no other process can have them. Raises JoinError."""
    if config.resume or config.shard:
        flag = "resume" if config.resume else "shard"
        raise JoinError(f"--merge makes a new run of all that is there: leave --{flag} out")
    sources = [Source.find(name) for name in config.merge]
    folders = [source.folder.resolve() for source in sources]
    if twice := [source.folder for source in sources if folders.count(source.folder.resolve()) > 1]:
        raise JoinError(f"--merge names {twice[0]} twice")
    with ExitStack() as stack:
        try:
            for source in sources:
                if os.access(source.folder, os.W_OK):
                    stack.callback(RunLock.acquire(source.folder).release)
                elif RunLock.held(source.folder):  # nobody runs it from where it cannot be written to
                    raise JoinError(f"--merge: another process is running this run in {source.folder}")
        except RunDirError as error:
            raise JoinError(f"--merge: {error}") from None
        yield sources


def joined_config(config: RunConfig, sources: Sequence[Source]) -> RunConfig:
    """Return the config with what it leaves open: as the sources have it, which agree on all that rows depend on.

    What is given explicitly holds, whatever the sources had. Raises JoinError.
    """
    given = {name: getattr(config, name) for name in config.model_fields_set}
    found: dict[str, Any] = {}
    for name in RunConfig.model_fields:
        if name in given or name in _NOT_TAKEN_OVER:
            continue
        had = [(source, source.past.config[name]) for source in sources if name in source.past.config]
        found |= {name: had[0][1]} if had else {}
        for source, value in had if name in MUST_AGREE else ():
            if value != found[name]:
                told = f"{name} was {found[name]} in {had[0][0].folder} and {value} in {source.folder}"
                raise JoinError(f"--merge: {told}; pass --{name} to join them all the same")
    if "distribution" not in given:
        _refuse_other_probabilities(sources)
    try:
        return RunConfig.model_validate({**found, **given})
    except ValidationError as error:
        raise JoinError(f"--merge: {sources[0].folder / CHECKPOINT} has a bad config: {error.errors()[0]}") from None


def joined_probabilities(sources: Sequence[Source]) -> Mapping[str, float]:
    """Return the distribution's probabilities, as those that tell them had them; {} when they differ."""
    had = [probabilities for _, probabilities in _probabilities(sources)]
    return had[0] if had and had.count(had[0]) == len(had) else {}


def _probabilities(sources: Sequence[Source]) -> list[tuple[Source, Any]]:
    told = [(source, source.past.config.get(PROBABILITIES)) for source in sources]
    return [(source, saved) for source, saved in told if isinstance(saved, dict) and saved]


def _refuse_other_probabilities(sources: Sequence[Source]) -> None:
    """Raise JoinError when a distribution of the same name was not the same: a file may have been changed between."""
    had = _probabilities(sources)
    for source, probabilities in had:
        if probabilities != had[0][1]:
            told = f"the distribution's probabilities were not the same in {had[0][0].folder} and {source.folder}"
            raise JoinError(f"--merge: {told}; pass --distribution to join them all the same")


def check_target(run_name: str, data: Path = DATA) -> Path:
    """Return the folder that is to be made. Raises JoinError when it is there already, or cannot be."""
    try:
        folder = check_run(run_name, resume=False, data=data)
    except RunDirError as error:
        raise JoinError(str(error)) from None
    if folder.exists() and any(folder.iterdir()):
        raise JoinError(f"{folder} exists already: --merge makes a new run, choose another run_name")
    return folder


def join(run_name: str, dataset: Dataset, sources: Sequence[Source], data: Path = DATA) -> None:
    """Make ``data/<run_name>/`` of the sources' rows. Raises JoinError before anything is written; RunDirError."""
    target = check_target(run_name, data)
    for source in sources:
        if source.past.dataset["sha256"] != dataset.sha256:
            raise JoinError(f"--merge: {source.folder} was made from another dataset than {dataset.path} is today")
    for source in sources:
        source.rows = scan_rows(source.folder)
    _decide(sources, len(dataset))
    _refuse_done_twice(sources, dataset)
    hidden = data / f".{run_name}.joining"
    with explained(f"make {hidden}"):
        shutil.rmtree(hidden, ignore_errors=True)  # what a killed process left
        hidden.mkdir(parents=True)
        try:
            legs = _copy_all(sources, hidden)
            with replaced(hidden / CHECKPOINT) as file:
                file.write(json.dumps({"format": 1, "run_name": run_name, "legs": legs}, allow_nan=False).encode())
            hidden.replace(target)
            sync_folder(data)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


def _decide(sources: Sequence[Source], count: int) -> None:
    """Decide what becomes of each row, by those whose prompt_index more than one source has."""
    first_seen_in = array("H", [0]) * count
    several = bytearray(count)
    for number, source in enumerate(sources, 1):
        source.fates = bytearray(len(source.rows))
        for index in source.rows.indices:
            if 0 <= index < count and number != (first := first_seen_in[index]):
                several[index] |= first > 0
                first_seen_in[index] = first or number
    source_of: dict[bytes, int] = {}  # by digest of the row
    for number, source in enumerate(sources):
        with RowReader(source.folder, source.rows) as reader:
            for row, index in enumerate(source.rows.indices):
                if 0 <= index < count and several[index]:
                    digest = sha256(reader.line(row)).digest()
                    if source_of.setdefault(digest, number) != number:
                        source.fates[row] = _LEFT_OUT
                    elif source.rows.failed(row):
                        source.fates[row] = _IN_FRONT


def _refuse_done_twice(sources: Sequence[Source], dataset: Dataset) -> None:
    """Raise JoinError when two sources have different rows of a sample that are no failures."""
    done_in = array("H", [0]) * len(dataset)
    for number, source in enumerate(sources, 1):
        match = match_rows(dataset.keys, source.rows, shard_samples(source.shard, len(dataset)))
        for index in match.done_indices():
            if not done_in[index]:
                done_in[index] = number
            elif source.fates[match.final_rows[index]] != _LEFT_OUT:
                folders = f"{sources[done_in[index] - 1].folder} and in {source.folder}"
                raise JoinError(f"--merge: sample {index} is done in {folders}, and not alike; leave one of them out")


def _copy_all(sources: Sequence[Source], target: Path) -> list[JsonObject]:
    """Copy all rows, and return the legs of all sources, each with its run and with the batches' new numbers."""
    next_number = 0
    if any(_IN_FRONT in source.fates for source in sources):
        with replaced(target / batch_name(next_number)) as file:
            for source in sources:
                file.writelines(_lines(source, range(len(source.rows)), _IN_FRONT))
        next_number += 1
    legs: list[JsonObject] = []
    for source in sources:
        renumbered: dict[Any, int] = {}
        for batch_num in dict.fromkeys(source.rows.batches):
            renumbered[batch_num] = next_number
            _copy_batch(source, batch_num, target / batch_name(next_number))
            next_number += 1
        legs += [_leg(source, leg, renumbered) for leg in source.past.legs]
    return legs


def _leg(source: Source, leg: JsonObject, renumbered: Mapping[Any, int]) -> JsonObject:
    batches = {name: renumbered.get(leg.get(name)) for name in ("first_batch", "last_batch")}
    return {**leg, "run": source.folder.name, **batches}


def _copy_batch(source: Source, batch_num: int, target: Path) -> None:
    batches = source.rows.batches
    rows = range(bisect_left(batches, batch_num), bisect_right(batches, batch_num))
    with replaced(target) as file:
        if any(source.fates[rows.start : rows.stop]):
            file.writelines(_lines(source, rows, _COPIED))
        else:
            with open_to_read(source.folder / batch_name(batch_num)) as original:
                shutil.copyfileobj(original, file, _BUFFER_BYTES)


def _lines(source: Source, rows: range, fate: int) -> Iterator[bytes]:
    """Yield the rows with this fate, with their newlines."""
    with RowReader(source.folder, source.rows) as reader:
        for row in rows:
            if source.fates[row] == fate:
                yield reader.line(row) + b"\n"
