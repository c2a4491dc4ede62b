"""Datasets, rows and batch files for tests, as small as they can be."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollout.content import Keys, content_key
from rollout.row_index import RowIndex
from rollout.run_dir import RunDir

Row = dict[str, Any]


def a_row(index: int | None, prompt: str, *, image: str = "", cwd: str = "", **more: Any) -> Row:
    row: Row = {} if index is None else {"prompt_index": index}
    return {
        **row,
        "conversations": [{"from": "system", "value": "tools"}, {"from": "human", "value": prompt}],
        "metadata": {"batch_num": 0, "image": image, "cwd": cwd},
        "completed": True,
        "partial": False,
        **more,
    }


def a_failure(index: int | None, prompt: str) -> Row:
    error = {"kind": "server", "message": "boom"}
    row = a_row(index, prompt, completed=False, conversations=[], failed=True, error=error)
    return {**row, "prompt": prompt}


def an_original_row(index: int, prompt: str, **more: Any) -> Row:
    return a_row(index, prompt, **more) | {"metadata": {"batch_num": 0, "timestamp": "2026-01-01", "model": "m"}}


def line(row: Row) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode()


def write_batch(folder: Path, batch_num: int, rows: Iterable[Row | bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"batch_{batch_num}.jsonl"
    path.write_bytes(b"".join(row if isinstance(row, bytes) else line(row) + b"\n" for row in rows))
    return path


def write_dataset(path: Path, prompts: Iterable[Any]) -> Path:
    path.write_bytes(b"".join(line({"prompt": prompt}) + b"\n" for prompt in prompts))
    return path


def index_of(rows: Iterable[Row]) -> RowIndex:
    index = RowIndex()
    for number, row in enumerate(rows):
        index.add((0, number, 1), row)
    return index


def keys_of(samples: Iterable[str | tuple[str, str, str]]) -> Keys:
    keys = Keys()
    for sample in samples:
        keys.append(content_key(*((sample, "", "") if isinstance(sample, str) else sample)))
    return keys


def open_run(folder: Path, *, resume: bool = False, run_name: str = "r") -> RunDir:
    return RunDir.open(run_name, resume=resume, data=folder)
