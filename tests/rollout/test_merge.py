from __future__ import annotations

import json
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.files import RunDirError
from rollout.jsonl import JsonObject
from rollout.merge import Fate, MergeReport, MergeRules, merge_rows
from rollout.resume import match_rows
from rollout.row_scan import scan_rows
from tests.rollout.run_files import Row, a_failure, a_row, an_original_row, keys_of, line, write_batch


@dataclass
class Seen:
    """What the merge showed to whoever counts."""

    fates: list[tuple[int, Fate]] = field(default_factory=list)

    def count(self, row: JsonObject, fate: Fate) -> None:
        self.fates.append((row.get("prompt_index", -1), fate))


def calls_nothing(_row: JsonObject) -> str:
    return ""


def merge(folder: Path, prompts: list[str], rules: MergeRules | None = None) -> tuple[MergeReport, list[bytes], Seen]:
    seen = Seen()
    rows = scan_rows(folder)
    report = merge_rows(
        folder, rows, match_rows(keys_of(prompts), rows), rules or MergeRules(calls_nothing, seen.count)
    )
    assert not list(folder.glob(".*"))
    return report, (folder / "trajectories.jsonl").read_bytes().splitlines(keepends=True), seen


def test_rows_of_all_batches_in_prompt_order_byte_for_byte(tmp_path: Path) -> None:
    rows = [a_row(index, f"na\u00efve \U0001f642 {index}") for index in range(6)]
    for batch_num, indices in ((10, (3, 0)), (2, (5, 1)), (0, (2, 4))):
        write_batch(tmp_path, batch_num, [rows[index] for index in indices])
    report, lines, seen = merge(tmp_path, [f"na\u00efve \U0001f642 {index}" for index in range(6)])
    assert lines == [line(row) + b"\n" for row in rows]
    assert report.fates == {"kept": 6}
    assert seen.fates == [(index, "kept") for index in range(6)]
    assert report.orphans == 0


def test_one_row_a_sample_and_every_row_is_counted_once(tmp_path: Path) -> None:
    write_batch(
        tmp_path, 0, [a_failure(0, "a"), a_row(1, "b"), a_row(2, "c", discarded="no_reasoning"), a_failure(3, "d")]
    )
    write_batch(
        tmp_path, 1, [a_row(0, "a"), a_row(1, "b"), a_failure(3, "d"), b"junk\n", a_failure(9, "gone"), b'{"torn']
    )
    report, lines, seen = merge(tmp_path, ["a", "b", "c", "d", "e"])
    assert [json.loads(text)["prompt_index"] for text in lines] == [0, 1]
    assert report.fates == {"kept": 2, "discarded": 1, "failed": 1, "superseded": 4}
    assert seen.fates[:4] == [(0, "kept"), (1, "kept"), (2, "discarded"), (3, "failed")]
    assert seen.fates[4:] == [(0, "superseded"), (1, "superseded"), (3, "superseded"), (9, "superseded")]


def test_filtered_rows_are_named_with_the_reason(tmp_path: Path) -> None:
    seen = Seen()

    def drop_reason(row: JsonObject) -> str:
        return "unknown tool: foo_bar" if row["prompt_index"] == 1 else ""

    write_batch(tmp_path, 7, [a_row(0, "a"), a_row(1, "b"), a_row(2, "c", discarded="no_reasoning")])
    report, lines, _ = merge(tmp_path, ["a", "b", "c"], MergeRules(drop_reason, seen.count))
    assert len(lines) == 1
    assert report.filtered == {"unknown tool": 1}
    assert report.filtered_rows.lines() == ["sample 1 in batch_7.jsonl: unknown tool: foo_bar"]
    assert seen.fates == [(0, "kept"), (1, "filtered"), (2, "discarded")]


@pytest.mark.parametrize(
    ("saved", "written"),
    [
        (b'{"prompt_index": 0, "prompt": "a", "x": "\\u00e9"}', b'{"prompt_index": 1, "prompt": "a", "x": "\\u00e9"}'),
        (b'{"prompt_index":0,"prompt":"a"}', b'{"prompt_index":1,"prompt":"a"}'),
        (b' { "prompt_index" : 0 , "prompt":"a"}', None),
        (b'{"prompt": "a", "prompt_index": 0}', b'{"prompt": "a", "prompt_index": 1}'),
        (b'{"prompt_index": 0.0, "prompt": "a"}', b'{"prompt_index": 1, "prompt": "a"}'),
        (b'{"prompt_index": "0", "prompt": "a"}', b'{"prompt_index": 1, "prompt": "a"}'),
        (b'{"prompt": "a"}', b'{"prompt": "a", "prompt_index": 1}'),
    ],
)
def test_a_row_whose_sample_moved_gets_its_index_of_today(tmp_path: Path, saved: bytes, written: bytes | None) -> None:
    write_batch(tmp_path, 0, [saved + b"\n"])
    _, lines, seen = merge(tmp_path, ["new", "a"])
    assert len(lines) == 1
    assert json.loads(lines[0]) == {**json.loads(saved), "prompt_index": 1}
    assert written is None or json.loads(lines[0]) == json.loads(written)
    assert seen.fates == [(1, "kept")]
    assert (tmp_path / "batch_0.jsonl").read_bytes() == saved + b"\n"


def test_rows_of_deleted_samples_stay_in_the_batch_files_alone(tmp_path: Path) -> None:
    write_batch(tmp_path, 0, [a_row(0, "a"), a_row(1, "gone"), a_row(2, "c"), a_row(8, "gone too"), a_row(None, "odd")])
    report, lines, _ = merge(tmp_path, ["a", "c", "new"])
    assert [json.loads(text)["conversations"][1]["value"] for text in lines] == ["a", "c"]
    assert [json.loads(text)["prompt_index"] for text in lines] == [0, 1]
    assert report.orphans == 3
    assert report.fates["superseded"] == 3


def test_rows_of_another_writer_can_be_completed(tmp_path: Path) -> None:
    seen = Seen()

    def complete(row: JsonObject) -> bool:
        if "sandbox" in row["metadata"]:
            return False
        row["metadata"]["sandbox"] = "\ud800"
        return True

    whole = a_row(1, "b")
    whole["metadata"]["sandbox"] = "local"
    write_batch(tmp_path, 0, [an_original_row(0, "a"), whole])
    _, lines, _ = merge(tmp_path, ["a", "b"], MergeRules(calls_nothing, seen.count, complete))
    assert json.loads(lines[0])["metadata"]["sandbox"] == "\ufffd"
    assert lines[1] == line(whole) + b"\n"


def test_lines_only_a_patient_parser_takes_are_written_for_strict_ones(tmp_path: Path) -> None:
    odd = b'\xef\xbb\xbf{"prompt_index": 0, "prompt": "\\ud800", "x": NaN}\r\n'
    write_batch(tmp_path, 0, [odd, line(a_row(1, "b")) + b"  \r\n"])
    _, lines, _ = merge(tmp_path, ["\ufffd", "b"])
    assert json.loads(lines[0]) == {"prompt_index": 0, "prompt": "\ufffd", "x": None}
    assert lines[0].decode() == '{"prompt_index": 0, "prompt": "\ufffd", "x": null}\n'
    assert lines[1] == line(a_row(1, "b")) + b"\n"


def test_nothing_to_merge_leaves_an_empty_file(tmp_path: Path) -> None:
    report, lines, _ = merge(tmp_path, ["a"])
    assert lines == []
    assert not report.fates


def test_the_file_is_replaced_at_once_and_stays_when_the_merge_fails(tmp_path: Path) -> None:
    write_batch(tmp_path, 0, [a_row(0, "a")])
    merge(tmp_path, ["a"])
    before = (tmp_path / "trajectories.jsonl").read_bytes()
    rows = scan_rows(tmp_path)
    write_batch(tmp_path, 0, [b'{"now": "shorter"}\n'])
    with pytest.raises(RunDirError, match=r"batch_0\.jsonl was changed while the run was reading it"):
        merge_rows(tmp_path, rows, match_rows(keys_of(["a"]), rows), MergeRules(calls_nothing, Seen().count))
    (tmp_path / "batch_0.jsonl").unlink()
    with pytest.raises(RunDirError, match=r"cannot read the rows in .*: No such file"):
        merge_rows(tmp_path, rows, match_rows(keys_of(["a"]), rows), MergeRules(calls_nothing, Seen().count))
    assert (tmp_path / "trajectories.jsonl").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trajectories.jsonl"]


def test_a_target_that_cannot_be_replaced_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "trajectories.jsonl").mkdir()
    with pytest.raises(RunDirError, match=r"cannot write .*trajectories\.jsonl: Is a directory"):
        merge(tmp_path, ["a"])


def test_more_batches_than_may_be_open(tmp_path: Path) -> None:
    prompts = [str(index) for index in range(150)]
    for index, prompt in enumerate(prompts):
        write_batch(tmp_path, (index * 67) % 150, [a_row(index, prompt)])
    report, lines, _ = merge(tmp_path, prompts)
    assert report.fates == {"kept": 150}
    assert [json.loads(text)["prompt_index"] for text in lines] == list(range(150))


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    count, size = 400, 50_000
    write_batch(tmp_path, 0, (a_row(index, str(index), filler="x" * size) for index in range(count)))
    tracemalloc.start()
    try:
        rows = scan_rows(tmp_path)
        match = match_rows(keys_of(map(str, range(count))), rows)
        report = merge_rows(tmp_path, rows, match, MergeRules(calls_nothing, lambda _row, _fate: None))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report.fates == {"kept": count}
    assert peak < 5_000_000


prompt_lists = st.lists(st.sampled_from(["a", "b", "c"]), max_size=6)
actions = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["done", "failed", "discarded"])), max_size=12)


@given(prompt_lists, actions)
def test_what_is_kept_is_what_is_done_and_not_discarded(prompts: list[str], done: list[tuple[int, str]]) -> None:
    rows: list[Row] = []
    last: dict[int, str] = {}
    for index, what in done:
        if index < len(prompts):
            rows.append(a_row(index, prompts[index], failed=what == "failed", discarded=what == "discarded"))
            last[index] = what
    with TemporaryDirectory() as folder:  # hypothesis has no tmp_path of its own for an example
        write_batch(Path(folder), 0, rows)
        report, lines, seen = merge(Path(folder), prompts)
    assert [json.loads(text)["prompt_index"] for text in lines] == sorted(
        i for i, what in last.items() if what == "done"
    )
    assert report.fates.total() == len(seen.fates) == len(rows)
    assert report.fates["superseded"] == len(rows) - len(last)
