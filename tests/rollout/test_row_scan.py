from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.content import ANYWHERE, PROMPT_BYTES, content_key, placeless_key
from rollout.files import RunDirError
from rollout.row_index import NO_INDEX, RowIndex
from rollout.row_scan import _Helper, scan_rows
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
    assert told(index) == ["0.jsonl:2: cut in the middle; its sample runs again, unless it has another row"]


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


# Many rows: helpers read a part of them

ODDITIES: list[Row | bytes] = [b"junk", b"", b'{"prompt_index": 1}', b"\xff", b'{"conversations": [{"from": "human"']


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=7))
def test_rows_that_helpers_read_are_found_as_any_others(tmp_path: Path, batches: list[list[int]]) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    for number, codes in enumerate(batches):
        rows = [ODDITIES[code] if code < len(ODDITIES) else a_row(code, f"prompt {code}") for code in codes]
        write_batch(folder, number * number, [row for row in rows if row])
    alone, shared = scan_rows(folder), scan_rows(folder, worth_sharing_bytes=1)
    assert [shared.keys[row] for row in range(len(shared))] == [alone.keys[row] for row in range(len(alone))]
    assert {**vars(shared), "keys": 0} == {**vars(alone), "keys": 0}


def test_what_a_helper_cannot_read_is_told_here(tmp_path: Path) -> None:
    for number in range(8):
        write_batch(tmp_path, number, [a_row(number, "a" * 999)])
    (tmp_path / "batch_7.jsonl").unlink()
    (tmp_path / "batch_7.jsonl").symlink_to("/proc/self/mem")  # a file for all one can see
    with pytest.raises(RunDirError, match=r"cannot read .*batch_7.jsonl: "):
        scan_rows(tmp_path, worth_sharing_bytes=1)


def many_rows(folder: Path) -> None:
    write_batch(folder, 0, [a_row(0, "short")])
    write_batch(folder, 1, [a_row(number, f"{number}" * 1000) for number in range(3000)])


@contextmanager
def soon(do: Callable[[], None]) -> Iterator[None]:
    """Do something in this process, wherever it is, after a tenth of a second."""
    before = signal.signal(signal.SIGALRM, lambda _number, _frame: do())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split()]


needs_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="one core has nobody to share with")


@needs_cores
def test_helpers_end_when_they_are_no_longer_waited_for(tmp_path: Path) -> None:
    many_rows(tmp_path)
    others = children()

    def stop() -> None:
        assert len(children()) > len(others)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), soon(stop):  # as with Ctrl-C in the middle of a long scan
        scan_rows(tmp_path, worth_sharing_bytes=1)
    assert children() == others


@needs_cores
def test_what_a_killed_helper_had_to_read_is_read_here(tmp_path: Path) -> None:
    many_rows(tmp_path)
    others = children()
    killed: list[int] = []

    def kill() -> None:
        killed.extend(set(children()) - set(others))
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

    with soon(kill):
        index = scan_rows(tmp_path, worth_sharing_bytes=1)
    assert killed
    assert list(index.indices) == [0, *range(3000)]


def test_a_helper_that_is_stuck_is_not_waited_for(tmp_path: Path) -> None:
    many_rows(tmp_path)
    with _Helper.start(tmp_path, [0, 1]) as helper:
        os.kill(helper.process.pid, signal.SIGSTOP)
        assert helper.rows(patience_seconds=0.2) is None
    assert helper.process.returncode == -signal.SIGKILL
