"""What a run's files hold after a fault, and runs that are made without running them."""

from __future__ import annotations

import json

from endpoints.scripted import ScriptedEndpoint
from tests.program import Workplace, answer, prompt_of


def whole_rows(place: Workplace) -> list[str]:
    """The prompts of all lines that are rows; only the last line of a file may be cut."""
    found = []
    for path in place.run_dir().glob("batch_*.jsonl"):
        lines = path.read_bytes().splitlines(keepends=True)
        found += [prompt_of(json.loads(line)) for line in lines if line.endswith(b"\n")]
        assert all(line.endswith(b"\n") for line in lines[:-1])
    return found


def outcomes(place: Workplace) -> dict[str, str]:
    """How each prompt ended; there must be one row each."""
    ends = {prompt_of(row): row["error"]["kind"] if row.get("failed") else "done" for row in place.rows()}
    assert len(ends) == len(place.rows())
    return ends


def checkpoint_is_true(place: Workplace) -> bool:
    """Whether the checkpoint names just the samples that are done."""
    done = sorted(row["prompt_index"] for row in place.rows() if not row.get("failed"))
    return bool(place.json("checkpoint.json")["completed_prompts"] == done)


def all_but_merged(place: Workplace, rows: int) -> None:
    """Make a run of which only the merge is left to do, which takes a while."""
    place.dataset([f"question {number}" for number in range(rows)])
    with ScriptedEndpoint([answer("1")]) as endpoint:
        assert place.run(endpoint.base_url, max_samples=1).code == 0
    (row,) = place.rows()
    row["conversations"][-1]["value"] += "." * 20_000
    with (place.run_dir() / "batch_1.jsonl").open("wb") as file:
        for number in range(1, rows):
            row["prompt_index"] = number
            row["conversations"][1]["value"] = f"question {number}"
            file.write(json.dumps(row).encode() + b"\n")
    (place.run_dir() / "trajectories.jsonl").unlink()
