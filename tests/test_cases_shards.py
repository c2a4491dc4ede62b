"""A dataset in shards, on machines that know nothing of each other, and their folders joined into one run."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from batch_runner import BatchRunner, RunConfig, RunReport, main
from endpoints.scripted import ScriptedEndpoint
from rollout.files import RunDirError
from rollout.join import JoinError
from rollout.run_lock import RunLock
from tests.program import Workplace, answer, prompt_of, prompts_of, terminal
from tests.rollout import nfs_locks
from tests.rollout.run_files import Row, a_failure, a_row, write_batch

SEVEN = [f"sample number {number}." for number in range(7)]
CONFIG = {
    "model": "m",
    "distribution": "default",
    "seed": 0,
    "max_samples": None,
    "batch_size": 2,
    "base_url": "http://h/v1",
}


@pytest.fixture
def here(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """A folder with a dataset; what is started in this process works in it."""
    monkeypatch.chdir(place.path)
    place.dataset(SEVEN)
    return place


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def test_shards_are_run_resumed_and_joined(here: Workplace) -> None:
    before: dict[str, dict[str, bytes]] = {}
    with ScriptedEndpoint([terminal("echo hi"), answer("done")]) as endpoint:
        first = here.run(endpoint.base_url, run_name="a", shard="1/2", max_total_tokens=1, concurrency=1)
        assert first.code == 1
        assert "of 4 samples; raise the budget's bound and resume with: " in first.last_line
        assert "--shard=1/2" in first.last_line
        resumed = here.run(endpoint.base_url, run_name="a", shard="1/2", resume="true")
        assert resumed.code == 0
        assert "of 4 samples" not in resumed.last_line
        assert sorted({row["prompt_index"] for row in here.rows("a")}) == [0, 2, 4, 6]
        assert here.json("statistics.json", "a")["total_prompts"] == 4
        assert here.json("statistics.json", "a")["total_batches"] == 2
        assert here.json("checkpoint.json", "a")["completed_prompts"] == [0, 2, 4, 6]
        assert here.run(endpoint.base_url, run_name="b", shard="2/2").code == 0
        assert [prompt_of(row) for row in here.trajectories("b")] == SEVEN[1::2]
        before = {name: content_of(here.run_dir(name)) for name in "ab"}
        asked = len(endpoint.requests)

        joined = here.run_words("--merge=a,b", "--run_name=all")
        assert (joined.code, joined.stderr) == (0, ""), joined
        assert len(endpoint.requests) == asked
    assert joined.last_line == "Done: 7 samples, nothing left to do."
    assert [prompt_of(row) for row in here.trajectories("all")] == SEVEN
    assert {name: content_of(here.run_dir(name)) for name in "ab"} == before
    total = here.json("statistics.json", "all")
    parts = [here.json("statistics.json", name) for name in "ab"]
    assert total["total_prompts"] == 7
    for what in ("api_calls", "cost_usd"):
        assert total[what] == pytest.approx(sum(part[what] for part in parts))
    assert [leg.get("run") for leg in total["legs"]] == ["a", "a", "b", None]
    legs = [leg for name in "ab" for leg in here.json("checkpoint.json", name)["legs"]]
    assert total["duration_seconds"] >= sum(leg["duration_seconds"] for leg in legs)
    assert json.loads((here.run_dir("all") / "checkpoint.json").read_bytes())["completed_prompts"] == [*range(7)]


@pytest.mark.usefixtures("here")
def test_a_shard_is_of_the_first_samples_when_only_they_are_wanted() -> None:
    with ScriptedEndpoint([answer("done")]) as endpoint:
        report = BatchRunner(
            RunConfig(
                dataset_file=Path("prompts.jsonl"),
                batch_size=9,
                run_name="a",
                distribution="terminal_only",
                base_url=endpoint.base_url,
                sandbox="local",
                num_workers=1,
                max_samples=5,
                shard="2/3",
            )
        ).run()
        assert sorted(prompts_of(endpoint)) == [SEVEN[1], SEVEN[4]]
    assert (report.samples, report.exit_code) == (2, 0)


def run_of(
    place: Workplace, name: str, *batches: list[Row | bytes], dataset: str = "prompts.jsonl", **config: Any
) -> None:
    """A run folder as a machine elsewhere left it."""
    folder = place.run_dir(name)
    folder.mkdir(parents=True)
    for number, rows in enumerate(batches):
        write_batch(folder, 3 * number + 1, rows)
    digest = sha256((place.path / dataset).read_bytes()).hexdigest()
    leg = {"duration_seconds": 10.0, "first_batch": 1, "last_batch": 3 * len(batches) - 2, "rows": 1}
    saved = {
        "format": 1,
        "run_name": name,
        "config": {**CONFIG, "run_name": name, **config},
        "dataset": {"path": dataset, "sha256": digest, "samples": 7},
        "legs": [leg],
    }
    (folder / "checkpoint.json").write_text(json.dumps(saved), encoding="utf-8")


def done(index: int, text: str = "x") -> Row:
    return a_row(index, SEVEN[index], text=text)


def join(*runs: str, **config: Any) -> RunReport:
    values = {"dataset_file": "prompts.jsonl", "batch_size": 2, "run_name": "all", "merge": runs}
    return BatchRunner(RunConfig.model_validate({**values, **config})).run()


def told(*words: str, capfd: pytest.CaptureFixture[str]) -> str:
    """What the command says to a mistake, in one line, with nothing made."""
    assert main(["--run_name=all", *words]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1), err
    assert not any(path.name in ("all", ".all.joining") for path in Path("data").iterdir())
    return err


def test_what_no_run_has_done_is_left_to_do(here: Workplace, capfd: pytest.CaptureFixture[str]) -> None:
    run_of(here, "a", [done(0), done(2)], [done(4), a_failure(6, SEVEN[6])], shard="1/2")
    run_of(here, "b", [done(1), b'{"prompt_index": 3, "conv'], shard="2/2")
    assert main(["--merge=a, data/b", "--run_name=all"]) == 1
    out, _ = capfd.readouterr()
    *_, last = out.rstrip().split("\n")
    assert last.startswith("1 failed, 2 not run of 7 samples; resume with: ")
    for word in ("--dataset_file=prompts.jsonl", "--batch_size=2", "--run_name=all", "--model=m", "--resume"):
        assert word in last
    assert "--merge" not in last
    assert "--shard" not in last
    assert [row["prompt_index"] for row in here.trajectories("all")] == [0, 1, 2, 4]
    names = sorted(path.name for path in here.run_dir("all").glob("batch_*"))
    assert names == ["batch_0.jsonl", "batch_1.jsonl", "batch_2.jsonl"]
    legs = here.json("checkpoint.json", "all")["legs"]
    assert [(leg["first_batch"], leg["last_batch"]) for leg in legs] == [(0, 1), (2, 2), (None, None)]


def test_a_row_that_both_have_counts_once_and_failures_undo_nothing(here: Workplace) -> None:
    spent = {"batch_num": 0, "image": "", "cwd": "", "cost_usd": 1.0}
    failure, shared = a_failure(1, SEVEN[1]), done(0)
    later = {**a_failure(2, SEVEN[2]), "metadata": spent}
    run_of(here, "a", [shared | {"metadata": spent}, failure], [done(2)])
    run_of(here, "b", [shared | {"metadata": spent}, failure, later], [done(1), done(3)])
    report = join("a", "b")
    assert (report.failed, report.not_run) == (0, 3)
    assert [row["prompt_index"] for row in here.trajectories("all")] == [0, 1, 2, 3]
    assert here.json("statistics.json", "all")["cost_usd"] == 2.0, "what was paid once is counted once"
    assert len(here.rows("all")) == 6


def test_the_order_of_the_runs_does_not_matter(here: Workplace) -> None:
    run_of(here, "a", [done(0), a_failure(1, SEVEN[1])])
    run_of(here, "b", [a_failure(0, SEVEN[0]), done(1)])
    assert join("a", "b", run_name="ab").statistics.outcomes == join("b", "a", run_name="ba").statistics.outcomes
    assert here.trajectories("ab") == here.trajectories("ba")
    assert [prompt_of(row) for row in here.trajectories("ab")] == SEVEN[:2]


def test_runs_that_do_not_belong_together(here: Workplace, capfd: pytest.CaptureFixture[str]) -> None:
    here.dataset(["other"], "other.jsonl")
    run_of(here, "a", [done(0)])
    run_of(here, "same", [done(0, "otherwise")])
    run_of(here, "b", [done(1)], model="n", seed=5)
    run_of(here, "c", [done(1)], dataset="other.jsonl")
    assert "sample 0 is done in data/a and in data/same, and not alike" in told("--merge=a,same", capfd=capfd)
    differs = told("--merge=a,b", capfd=capfd)
    assert "model was m in data/a and n in data/b; pass --model to join them all the same" in differs
    assert "seed was 0 in data/a" in told("--merge=a,b", "--model=m", capfd=capfd)
    assert "data/c was made from another dataset than prompts.jsonl is today" in told("--merge=a,c", capfd=capfd)
    run_of(here, "d", [done(2)], probabilities={"terminal": 50})
    run_of(here, "e", [done(3)], probabilities={"terminal": 60})
    differs = told("--merge=a,d,e", capfd=capfd)
    assert "the distribution's probabilities were not the same in data/d and data/e; pass --distribution" in differs
    report = join("a", "b", model="m", seed=0)
    assert (report.statistics.kept, report.exit_code) == (2, 1)
    assert join("a", "d", "e", run_name="mixed", distribution="terminal_only").statistics.kept == 3


def test_mistakes_of_joining(here: Workplace, capfd: pytest.CaptureFixture[str]) -> None:
    run_of(here, "a", [done(0)])
    run_of(here, "b", [done(1)], shard="5")
    assert "there is no run folder data/x" in told("--merge=a,x", capfd=capfd)
    assert "--merge names no run: give run names or folders" in told("--merge=,", capfd=capfd)
    assert "--merge names data/a twice" in told("--merge=a,data/a", capfd=capfd)
    assert "leave --resume out" in told("--merge=a", "--resume", capfd=capfd)
    assert "leave --shard out" in told("--merge=a", "--shard=1/2", capfd=capfd)
    assert "names a bad shard" in told("--merge=a,b", capfd=capfd)
    assert "cannot read dataset none.jsonl" in told("--merge=a", "--dataset_file=none.jsonl", capfd=capfd)
    assert main(["--merge=a"]) == 2
    assert "--run_name is required" in capfd.readouterr().err
    (here.run_dir("b") / "checkpoint.json").unlink()
    assert "tells no dataset; go on with that run once" in told("--merge=a,b", capfd=capfd)
    here.run_dir("all").mkdir()
    (here.run_dir("all") / "run.log").touch()
    with pytest.raises(JoinError, match="exists already"):
        join("a")


def test_a_run_that_is_under_way_is_left_alone(here: Workplace, capfd: pytest.CaptureFixture[str]) -> None:
    run_of(here, "a", [done(0)])
    lock = RunLock.acquire(here.run_dir("a"))
    assert f"another process (pid {os.getpid()}) is running this run in data/a" in told("--merge=a", capfd=capfd)
    lock.release()


@pytest.mark.parametrize("flock", [fcntl.flock, nfs_locks.flock])
def test_a_run_on_a_read_only_mount_is_joined(
    here: Workplace, monkeypatch: pytest.MonkeyPatch, flock: Callable[[int, int], None]
) -> None:
    monkeypatch.setattr(fcntl, "flock", flock)
    run_of(here, "a", [done(0), done(2)], shard="1/2")
    folder = here.run_dir("a")
    (folder / ".lock").touch()
    if subprocess.run(["mount", "--bind", folder, folder], capture_output=True, check=False).returncode:
        pytest.skip("mounting takes root")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        assert main(["--merge=a", "--run_name=all"]) == 1
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
    assert [row["prompt_index"] for row in here.trajectories("all")] == [0, 2]


def test_a_join_that_is_cut_off_leaves_nothing_and_is_done_again(
    here: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(here, "a", [done(0)], [done(1)])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", full)
        with pytest.raises(RunDirError, match="No space left on device"):
            join("a")
    assert [path.name for path in Path("data").iterdir()] == ["a"]
    (Path("data") / ".all.joining").mkdir()
    assert join("a").statistics.kept == 2


def test_lines_that_move_between_shards_are_not_paid_for_again(here: Workplace) -> None:
    with ScriptedEndpoint([answer("done")]) as endpoint:
        assert here.run(endpoint.base_url, run_name="a", shard="1/2").code == 0
        asked = len(endpoint.requests)
        here.dataset(["a new line", *SEVEN])
        moved = here.run(endpoint.base_url, run_name="a", shard="1/2", resume="true")
        here.dataset([*SEVEN, "a new line at the end", "and another"])
        longer = here.run(endpoint.base_url, run_name="a", shard="1/2", resume="true")
    assert moved.code == 2
    assert "lines of the dataset have moved" in moved.stderr
    assert longer.code == 0
    assert len(endpoint.requests) == asked + 1
