from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout.resume import match_rows
from rollout.row_scan import scan_rows
from rollout.run_dir import RunDir, RunDirError, check_run
from tests.rollout.run_files import a_row, keys_of, line, open_run, write_batch

NAMES_REFUSED = [
    "",
    ".",
    "..",
    "a/b",
    "/x",
    "../x",
    "a\0b",
    " a",
    "a ",
    "a\nb",
    "\x1b[31m",
    "\ud800",
    "x" * 256,
    "é" * 128,
]
NAMES_TAKEN = ["r", "007", "1e3", "-x", ".hidden", "naïve \U0001f642", "a b", "..a", "x" * 255]


def listing(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.parametrize("run_name", NAMES_REFUSED, ids=ascii)
def test_a_name_that_is_not_one_folder_is_refused_and_nothing_made(tmp_path: Path, run_name: str) -> None:
    with pytest.raises(RunDirError) as caught:
        open_run(tmp_path / "data", run_name=run_name)
    assert "run_name" in str(caught.value)
    assert str(caught.value).isprintable()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("run_name", NAMES_TAKEN, ids=ascii)
def test_a_name_that_is_one_folder_is_taken(tmp_path: Path, run_name: str) -> None:
    with open_run(tmp_path / "data", run_name=run_name) as run_dir:
        assert run_dir.path == tmp_path / "data" / run_name
        assert run_dir.path.is_dir()
        assert run_dir.log_path.parent == run_dir.path


def test_the_folder_stands_under_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RunDir.open("r", resume=False) as run_dir:
        assert run_dir.path == Path("data/r")
    assert (tmp_path / "data" / "r").is_dir()


def test_checking_touches_nothing(tmp_path: Path) -> None:
    assert check_run("r", resume=False, data=tmp_path / "data") == tmp_path / "data" / "r"
    assert check_run("r", resume=True, data=tmp_path / "data") == tmp_path / "data" / "r"
    assert list(tmp_path.iterdir()) == []


def test_links_and_files_in_the_way_are_refused(tmp_path: Path) -> None:
    outside, data = tmp_path / "outside", tmp_path / "data"
    outside.mkdir()
    data.mkdir()
    (data / "link").symlink_to(outside)
    (data / "loop").symlink_to("loop")
    (data / "prompts.jsonl").write_bytes(b"")
    for run_name, told in (("link", "is a link"), ("loop", "is a link"), ("prompts.jsonl", "is not a folder")):
        for resume in (False, True):
            with pytest.raises(RunDirError, match=told):
                open_run(data, run_name=run_name, resume=resume)
    with pytest.raises(RunDirError, match=r"prompts\.jsonl is not a folder"):
        open_run(data / "prompts.jsonl")
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("file", ["batch_0.jsonl", "batch_12.jsonl", "trajectories.jsonl"])
def test_a_fresh_start_over_rows_is_refused_and_touches_nothing(tmp_path: Path, file: str) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / file).write_bytes(line(a_row(0, "a")) + b"\n")
    (folder / ".x.tmp").write_bytes(b"")
    before = listing(tmp_path), folder.stat().st_mtime_ns
    with pytest.raises(RunDirError, match="pass --resume, or choose another run_name"):
        open_run(tmp_path)
    assert (listing(tmp_path), folder.stat().st_mtime_ns) == before
    with open_run(tmp_path, resume=True):
        pass


def test_a_fresh_start_over_a_folder_without_rows_is_allowed(tmp_path: Path) -> None:
    write_batch(tmp_path / "r", 4, [])
    (tmp_path / "r" / "checkpoint.json").write_text('{"run_name": "r", "batch_stats": {"9": {}}}', encoding="utf-8")
    with open_run(tmp_path) as run_dir:
        assert run_dir.first_batch == 5
        assert run_dir.warnings == []


def test_what_is_appended_is_there_after_sync_and_read_back(tmp_path: Path) -> None:
    with open_run(tmp_path) as run_dir:
        run_dir.append(0, line(a_row(0, "a")))
        run_dir.append(1, line(a_row(2, "c")) + b"\n")
        run_dir.append(0, line(a_row(1, "naïve \U0001f642")))
        run_dir.sync()
        run_dir.finish_batch(1)
        run_dir.finish_batch(77)
        rows = run_dir.scan()
    assert list(rows.indices) == [0, 1, 2]
    assert list(match_rows(keys_of(["a", "naïve \U0001f642", "c", "d"]), rows).pending()) == [3]
    assert (tmp_path / "r" / "batch_1.jsonl").read_bytes() == line(a_row(2, "c")) + b"\n"


def test_what_this_process_wrote_is_added_to_an_earlier_scan(tmp_path: Path) -> None:
    write_batch(tmp_path / "r", 3, [a_row(0, "a"), b"junk\n"])
    (tmp_path / "r" / "batch_x.jsonl").write_bytes(b"")
    with open_run(tmp_path, resume=True) as run_dir:
        rows = run_dir.scan()
        run_dir.append(4, line(a_row(1, "b")))
        run_dir.sync()
        run_dir.scan_own(rows)
        again = run_dir.scan()
        assert (
            (list(rows.batches), list(rows.indices)) == (list(again.batches), list(again.indices)) == ([3, 4], [0, 1])
        )
        assert rows.problems.lines() == again.problems.lines()
        with pytest.raises(ValueError, match="already"):
            run_dir.scan_own(rows)


@pytest.mark.parametrize("bad", [b"", b"\n", b"a\nb", b"a\n\n"])
def test_a_row_is_one_line(tmp_path: Path, bad: bytes) -> None:
    with open_run(tmp_path) as run_dir, pytest.raises(ValueError, match="one line"):
        run_dir.append(0, bad)


def first_batch(data: Path) -> int:
    with open_run(data, resume=True) as run_dir:
        return run_dir.first_batch


def test_new_batches_are_numbered_above_every_file_and_every_key_and_old_files_stay(tmp_path: Path) -> None:
    old = write_batch(tmp_path / "r", 0, [a_row(0, "a"), b'{"torn'])
    before = old.read_bytes()
    assert first_batch(tmp_path) == 1
    stats = '{"run_name": "r", "batch_stats": {"7": {"processed": 2}}}'
    (tmp_path / "r" / "checkpoint.json").write_text(stats, encoding="utf-8")
    assert first_batch(tmp_path) == 8
    write_batch(tmp_path / "r", 11, [])
    with open_run(tmp_path, resume=True) as run_dir:
        assert run_dir.first_batch == 12
        with pytest.raises(ValueError, match="earlier"):
            run_dir.append(11, b"{}")
        run_dir.append(12, line(a_row(1, "b")))
    assert old.read_bytes() == before
    assert (tmp_path / "r" / "batch_11.jsonl").read_bytes() == b""
    assert list(scan_rows(tmp_path / "r").batches) == [0, 12]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_many_batches_at_once_keep_few_files_open(tmp_path: Path) -> None:
    before = open_files()
    with open_run(tmp_path) as run_dir:
        for index in range(400):
            run_dir.append(index % 100, line(a_row(index, str(index))))
            assert open_files() < before + 80
    assert open_files() == before
    rows = scan_rows(tmp_path / "r")
    assert sorted(rows.indices) == list(range(400))
    assert not rows.problems.count


def test_what_a_killed_process_left_half_replaced_is_swept(tmp_path: Path) -> None:
    write_batch(tmp_path / "r", 0, [a_row(0, "a")])
    for name in (".checkpoint.json.tmp", ".trajectories.jsonl.tmp"):
        (tmp_path / "r" / name).write_bytes(b"{")
    with open_run(tmp_path, resume=True) as run_dir:
        assert sorted(path.name for path in run_dir.path.iterdir()) == [".lock", "batch_0.jsonl"]


def test_json_files_are_utf8_whatever_they_say(tmp_path: Path) -> None:
    with open_run(tmp_path) as run_dir:
        run_dir.write_json("statistics.json", {"run_name": "naïve \U0001f642"}, indent=2)
        text = (run_dir.path / "statistics.json").read_text(encoding="utf-8")
    assert text == '{\n  "run_name": "naïve \U0001f642"\n}\n'
    assert json.loads(text)["run_name"] == "naïve \U0001f642"
