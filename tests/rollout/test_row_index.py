from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from rollout.content import ANYWHERE, PROMPT_BYTES, content_key, placeless_key
from rollout.files import RunDirError
from rollout.row_index import NO_INDEX, RowIndex, scan_rows
from tests.rollout.run_files import Row, a_failure, a_row, an_original_row, line, write_batch


def scan(folder: Path, *rows: Row | bytes) -> RowIndex:
    write_batch(folder, 0, rows)
    return scan_rows(folder)


def told(index: RowIndex) -> list[str]:
    return [problem.rpartition("batch_")[2] for problem in index.problems.lines()]


def test_rows_are_found_where_they_are_in_the_order_of_batch_numbers(tmp_path: Path) -> None:
    for batch_num in (10, 9, 2):
        write_batch(
            tmp_path, batch_num, [a_row(batch_num, "na\u00efve \U0001f642"), b" \n", a_failure(batch_num + 1, "b")]
        )
    index = scan_rows(tmp_path)
    assert list(index.batches) == [2, 2, 9, 9, 10, 10]
    assert list(index.indices) == [2, 3, 9, 10, 10, 11]
    for row in range(len(index)):
        data = (tmp_path / f"batch_{index.batches[row]}.jsonl").read_bytes()
        text = data[index.offsets[row] : index.offsets[row] + index.lengths[row]]
        assert json.loads(text)["prompt_index"] == index.indices[row]
    assert not index.problems.count


@pytest.mark.parametrize(
    ("row", "outcome"),
    [
        (a_row(0, "p"), "completed"),
        (a_row(0, "p", completed=False), "not_completed"),
        (a_row(0, "p", completed=False, partial=True), "partial"),
        (a_row(0, "p", discarded="no_reasoning"), "discarded"),
        (a_failure(0, "p"), "failed"),
        (an_original_row(0, "p"), "completed"),
        ({"prompt_index": 0, "discarded": "no_reasoning", "prompt": "p"}, "discarded"),
        ({"prompt_index": 0, "messages": [{"role": "user", "content": "p"}], "failed": True}, "failed"),
    ],
)
def test_outcomes(tmp_path: Path, row: Row, outcome: str) -> None:
    index = scan(tmp_path, row)
    assert index.outcome(0) == outcome
    assert index.failed(0) == (outcome == "failed")
    assert list(index.outcomes()) == [(0, outcome)]


@pytest.mark.parametrize(
    "row",
    [
        an_original_row(0, "p"),
        {"conversations": [{"from": "human", "value": " p\n"}, {"from": "human", "value": "summarise"}]},
        {"conversations": [], "prompt": "p"},
        {"conversations": None, "prompt": ["p"]},
        {"prompt": "p", "metadata": "odd"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"text": "p"}]}]},
        {"prompt": "p", "metadata": {"image": "busybox", "cwd": None}},
    ],
)
def test_rows_that_do_not_say_where_they_ran_answer_anywhere(tmp_path: Path, row: Row) -> None:
    index = scan(tmp_path, row)
    assert index.keys[0] == placeless_key("p")
    assert index.keys[0][PROMPT_BYTES:] == ANYWHERE


def test_rows_of_ours_say_what_they_answer(tmp_path: Path) -> None:
    index = scan(tmp_path, a_row(0, "p", image="busybox", cwd="/app"), a_row(1, " p\n"), a_row(2, "7"))
    assert index.keys[0] == content_key("p", "busybox", "/app")
    assert index.keys[1] == content_key("p", "", "")
    assert index.keys[2] == content_key("7", "", "")


@pytest.mark.parametrize("saved", [None, "3", 3.0, True, -1, 1 << 63, [3]])
def test_an_index_of_another_kind_is_none(tmp_path: Path, saved: object) -> None:
    assert list(scan(tmp_path, {"prompt_index": saved, "prompt": "p"}).indices) == [NO_INDEX]


def test_lone_surrogates_and_nuls_compare_as_the_sample_has_them(tmp_path: Path) -> None:
    index = scan(tmp_path, b'{"prompt": "a\\ud800b\\u0000"}\n', {"prompt": "a\ufffdb\ufffd"})
    assert index.keys[0] == index.keys[1]


@pytest.mark.parametrize(
    ("junk", "reason"),
    [
        (b"7\n", "0.jsonl:2: not a JSON object; ignored"),
        (b"[]\n", "0.jsonl:2: not a JSON object; ignored"),
        (b"{}\n", "0.jsonl:2: a row without a prompt; ignored"),
        (b'{"prompt_index": 3}\n', "0.jsonl:2: a row without a prompt; ignored"),
        (b'{"prompt": {}}\n', '0.jsonl:2: "prompt" is an object, not text; ignored'),
        (b'{"prompt": "\xff"}\n', "0.jsonl:2: not valid UTF-8; ignored"),
        (b"\0\0\0\0\n", "0.jsonl:2: not valid JSON (Expecting value, column 1); ignored"),
        (b'{"prompt_index": 1, "conversa\n', "0.jsonl:2: not valid JSON"),
    ],
)
def test_junk_is_told_and_passed_over(tmp_path: Path, junk: bytes, reason: str) -> None:
    index = scan(tmp_path, a_row(0, "a"), junk, a_row(1, "b"))
    assert list(index.indices) == [0, 1]
    assert index.problems.count == 1
    assert told(index)[0].startswith(reason)


@pytest.mark.parametrize("torn", [b'{"prompt_index": 1, "conversa', b"{", b"\0" * 5000, line(a_row(1, "b"))[:-1]])
def test_a_torn_last_line_is_told_and_its_sample_runs_again(tmp_path: Path, torn: bytes) -> None:
    index = scan(tmp_path, a_row(0, "a"), torn)
    assert list(index.indices) == [0]
    assert told(index) == ["0.jsonl:2: cut in the middle; its sample runs again"]


def test_every_way_to_tear_a_line_is_survived(tmp_path: Path) -> None:
    whole = line(a_row(1, "na\u00efve"))
    for length in range(1, len(whole)):
        assert list(scan(tmp_path, a_row(0, "a"), whole[:length]).indices) == [0]


def test_a_whole_last_line_without_its_newline_counts(tmp_path: Path) -> None:
    index = scan(tmp_path, a_row(0, "a"), line(a_row(1, "b")))
    assert list(index.indices) == [0, 1]
    assert not index.problems.count


def test_windows_line_ends_and_byte_order_marks_of_editors(tmp_path: Path) -> None:
    rows = [b"\xef\xbb\xbf" + line(a_row(0, "a")) + b"\r\n", line(a_row(1, "b")) + b"\r\n"]
    index = scan(tmp_path, *rows)
    assert list(index.indices) == [0, 1]
    assert list(index.lengths) == [len(rows[0]) - 2, len(rows[1]) - 2]


def names(folder: Path, *files: str) -> Iterable[Path]:
    return [folder / file for file in files]


def test_other_files_are_left_alone_and_odd_batch_names_told(tmp_path: Path) -> None:
    row = line(a_row(0, "a"))
    for path in names(
        tmp_path, "batch_x.jsonl", "batch_01.jsonl", "batch_-1.jsonl", "batch_1.jsonl.bak", "batch_2.json"
    ):
        path.write_bytes(row)
    (tmp_path / "trajectories.jsonl").write_bytes(row)
    (tmp_path / f"batch_{'9' * 30}.jsonl").write_bytes(row)
    (tmp_path / "batch_3.jsonl").mkdir()
    (tmp_path / "batch_4.jsonl").write_bytes(b"")
    os.mkfifo(tmp_path / "batch_5.jsonl")
    index = scan_rows(tmp_path)
    assert not len(index)
    assert index.problems.count == 8
    assert all("not a batch file" in problem for problem in index.problems.lines())


def test_no_file_is_changed(tmp_path: Path) -> None:
    path = write_batch(tmp_path, 0, [a_row(0, "a"), b"junk\n", b'{"torn'])
    before, stat = path.read_bytes(), path.stat()
    scan_rows(tmp_path)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, stat.st_mtime_ns)
    assert [entry.name for entry in tmp_path.iterdir()] == ["batch_0.jsonl"]


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"cannot read .*gone: No such file or directory"):
        scan_rows(tmp_path / "gone")
