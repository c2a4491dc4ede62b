from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.file_sandbox import Rollout
from tools.base import JsonObject
from tools.files import read_file, write_file
from tools.patch import MAX_DIFF_CHARS, patch, unified

BOM = b"\xef\xbb\xbf"


def replaced(rollout: Rollout, old: str, new: str, **arguments: Any) -> JsonObject:
    return rollout.call(patch, path="f.txt", old_string=old, new_string=new, **arguments)


def patched(rollout: Rollout, *lines: str) -> JsonObject:
    return rollout.call(patch, mode="patch", patch="\n".join(["*** Begin Patch", *lines, "*** End Patch"]))


def tree(rollout: Rollout) -> dict[str, bytes]:
    files = (path for path in rollout.folder.rglob("*") if path.is_file())
    return {str(path.relative_to(rollout.folder)): path.read_bytes() for path in files}


# --- mode=replace ---


def test_a_replacement_shows_its_diff(rollout: Rollout) -> None:
    rollout.write("f.txt", "one\ntwo\nthree\n")
    assert replaced(rollout, "two", "2") == {
        "success": True,
        "diff": "--- a/f.txt\n+++ b/f.txt\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three",
        "files_modified": ["f.txt"],
    }
    assert rollout.bytes("f.txt") == b"one\n2\nthree\n"


def test_bom_line_ends_and_mode_stay(rollout: Rollout) -> None:
    path = rollout.write("f.txt", BOM + b"first\r\nlast\r\n")
    path.chmod(0o755)
    assert replaced(rollout, "first\nlast", "first\nmiddle\nlast")["success"] is True
    assert rollout.bytes("f.txt") == BOM + b"first\r\nmiddle\r\nlast\r\n"
    assert path.stat().st_mode & 0o777 == 0o755


def test_bytes_that_are_no_text_stay(rollout: Rollout) -> None:
    filler = b"text " * 2000
    rollout.write("f.txt", filler + b"\n\xe9\xff old\n")
    result = replaced(rollout, "old", "new")
    assert "\ufffd\ufffd new" in result["diff"]
    assert rollout.bytes("f.txt") == filler + b"\n\xe9\xff new\n"
    assert "not found" in replaced(rollout, "\udce9", "x")["error"]  # what a model sends never means such a byte


def test_failures_leave_the_file_and_show_where_to_look(rollout: Rollout) -> None:
    text = b"def area(shape):\n    return shape.width\n"
    rollout.write("f.txt", text)
    result = replaced(rollout, "def aera(shape):\n    return 0", "x")
    assert result["success"] is False
    assert "1|def area(shape):" in result["error"]
    assert "read_file" in result["_hint"]
    assert rollout.bytes("f.txt") == text


def test_several_places_are_told_with_their_lines(rollout: Rollout) -> None:
    rollout.write("f.txt", "x\ny\nx\n")
    result = replaced(rollout, "x", "z")
    assert "2 times" in result["error"]
    assert "lines 1, 3" in result["error"]
    assert rollout.bytes("f.txt") == b"x\ny\nx\n"
    assert replaced(rollout, "x", "z", replace_all="true")["success"] is True
    assert rollout.bytes("f.txt") == b"z\ny\nz\n"


def test_the_third_failure_in_a_row_gives_a_stronger_hint(rollout: Rollout) -> None:
    rollout.write("f.txt", "text\n")
    rollout.write("g.txt", "text\n")
    hints = [replaced(rollout, "nothing like it", "x")["_hint"] for _ in range(3)]
    assert hints[0] == hints[1]
    assert "3 patches" in hints[2]
    assert "write_file" in hints[2]
    assert rollout.call(patch, path="g.txt", old_string="zzz", new_string="x")["_hint"] == hints[0].replace("f.", "g.")
    replaced(rollout, "text", "other")
    assert replaced(rollout, "nothing like it", "x")["_hint"] == hints[0]
    assert "2 patches" not in patched(rollout, "*** Update File: f.txt", "-nope", "+x")["_hint"]
    assert "3 patches" in patched(rollout, "*** Update File: f.txt", "-nope", "+x")["_hint"]
    rollout.call(write_file, path="f.txt", content="text\n")
    assert replaced(rollout, "nothing like it", "x")["_hint"] == hints[0]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"path": "f.txt"},
        {"path": "f.txt", "old_string": "a"},  # a forgotten new_string is not a deletion
        {"path": "f.txt", "new_string": "a"},
        {"path": "f.txt", "old_string": " \n", "new_string": "a"},
        {"path": "f.txt", "old_string": "a", "new_string": "a"},
        {"path": "gone.txt", "old_string": "a", "new_string": "b"},
        {"path": ".", "old_string": "a", "new_string": "b"},
        {"path": "binary", "old_string": "a", "new_string": "b"},
        {"path": "~/.bashrc", "old_string": "a", "new_string": "b"},
        {"mode": "patch"},
        {"mode": "patch", "patch": "a"},
        {"path": "\0", "old_string": "a", "new_string": "b"},
    ],
)
def test_calls_that_cannot_be_meant(rollout: Rollout, arguments: JsonObject) -> None:
    for name, data in {"f.txt": b"a\n", "binary": b"a\0", ".bashrc": b"a\n"}.items():
        rollout.write(name, data)
    before = tree(rollout)
    result = rollout.call(patch, **arguments)
    assert result["success"] is False
    assert result["error"]
    assert tree(rollout) == before


def test_other_modes_are_refused_with_the_choices(rollout: Rollout) -> None:
    assert "'replace' or 'patch'" in rollout.call(patch, mode="edit")["error"]


def test_an_empty_replacement_deletes(rollout: Rollout) -> None:
    rollout.write("f.txt", "a\nb\n")
    assert replaced(rollout, "a\n", "")["success"] is True
    assert rollout.bytes("f.txt") == b"b\n"


def test_syntax_is_checked_after_an_edit(rollout: Rollout) -> None:
    rollout.write("f.py", "x = 1\n")
    result = rollout.call(patch, path="f.py", old_string="1", new_string="(1")
    assert result["success"] is True
    assert result["lint"]["status"] == "error"


def test_an_edit_goes_through_a_link(rollout: Rollout) -> None:
    rollout.write("real.txt", "a\n")
    (rollout.folder / "f.txt").symlink_to("real.txt")
    replaced(rollout, "a", "b")
    assert (rollout.folder / "f.txt").is_symlink()
    assert rollout.bytes("real.txt") == b"b\n"


def test_files_that_are_too_large_are_left_to_the_terminal(rollout: Rollout) -> None:
    rollout.write("f.txt", b"line of text\n" * 800_000)
    assert "larger than" in replaced(rollout, "line", "x")["error"]


FUNCTIONS = """\
def load(path):
    text = read(path)
    return parse(text)

def load(path):
    lines = open(path).readlines()
    return parse(text)
"""


@pytest.mark.parametrize(
    ("text", "old", "new", "result"),
    [
        (FUNCTIONS, "def load(path):\n    data = fetch(url, 3)\n    return parse(text)", "pass", "refused: not found"),
        ("if (x) {\n  run(1);\n}\nif (y) {\n  run(2);\n}", "if (x) {\n  run(2);\n}", "z", "refused: not found"),
        ("alpha 1\nbeta 2\ngamma 3", "alpha 1\nbeta 9999\ngamma 3", "z", "refused: not found"),
        ("a\r\nb\r\n", "a\nb", "a\nc\nd", "a\r\nc\r\nd\r\n"),
        (
            "def f():\n    if x:\n        return 1\n",
            "  if x:\n    return 1",
            "  if x:\n    y()\n    return 2",
            "def f():\n    if x:\n        y()\n        return 2\n",
        ),
        ("x = 1\ny = 2\nx = 1\n", "x = 1", "x = 3", "refused: 2 times (lines 1, 3)"),
        ("say \u201chi\u201d\n", 'say "hi"', "say no", "say no\n"),
    ],
)
def test_misquoted_text_is_edited_in_the_right_place_or_not_at_all(
    rollout: Rollout, text: str, old: str, new: str, result: str
) -> None:
    rollout.write("f.txt", text)
    answer = replaced(rollout, old, new)
    if result.startswith("refused: "):
        assert result.removeprefix("refused: ") in answer["error"]
        result = text
    assert rollout.bytes("f.txt") == result.encode()
    assert answer["success"] is (result != text)


# --- mode=patch ---


def test_a_patch_over_several_files(rollout: Rollout) -> None:
    rollout.write("a.py", "x = 1\ny = 2\n")
    rollout.write("old.txt", "text")
    rollout.write("gone.txt", "text")
    result = patched(
        rollout,
        "*** Update File: a.py",
        "-x = 1",
        "+x = 3",
        "*** Add File: sub/b.json",
        "+{}",
        "*** Delete File: gone.txt",
        "*** Move File: old.txt -> sub/deep/new.txt",
    )
    assert result["success"] is True
    assert result["files_modified"] == ["a.py"]
    assert result["files_created"] == ["sub/b.json", "sub/deep/new.txt"]
    assert result["files_deleted"] == ["gone.txt", "old.txt"]
    assert result["lint"] == {path: {"status": "ok", "output": ""} for path in ("a.py", "sub/b.json")}
    assert "-x = 1\n+x = 3" in result["diff"]
    assert "+++ b/sub/b.json\n@@ -0,0 +1 @@\n+{}" in result["diff"]
    assert "# Moved: old.txt -> sub/deep/new.txt" in result["diff"]
    assert tree(rollout) == {"a.py": b"x = 3\ny = 2\n", "sub/b.json": b"{}\n", "sub/deep/new.txt": b"text"}


GOOD = ("*** Update File: good.txt", "-a", "+A", "*** Add File: fresh.txt", "+x", "*** Delete File: gone.txt")


@pytest.mark.parametrize(
    "bad",
    [
        ("*** Update File: f.txt", "-a", "+A", "@@", "-nothing like it", "+x"),
        ("*** Update File: twice.txt", "-a", "+A"),
        ("*** Update File: missing.txt", "-a", "+A"),
        ("*** Update File: binary", "-a", "+A"),
        ("*** Update File: .", "-a", "+A"),
        ("*** Update File: gone.txt", "-a", "+A"),
        ("*** Add File: f.txt", "+x"),
        ("*** Add File: fresh.txt", "+x"),
        ("*** Add File: .ssh/config", "+x"),
        ("*** Delete File: missing.txt",),
        ("*** Delete File: .",),
        ("*** Move File: missing.txt -> x.txt",),
        ("*** Move File: f.txt -> good.txt",),
        ("*** Move File: f.txt -> .bashrc",),
        ("*** Move File: f.txt -> x.txt", "*** Update File: f.txt", "-a", "+A"),
        ("*** Frobnicate File: f.txt",),
    ],
)
def test_a_patch_is_applied_whole_or_not_at_all(rollout: Rollout, bad: tuple[str, ...]) -> None:
    for name, data in {
        "f.txt": b"a\nb\n",
        "good.txt": b"a\n",
        "gone.txt": b"a\n",
        "twice.txt": b"a\nb\na\n",
        "binary": b"a\0",
    }.items():
        rollout.write(name, data)
    before = tree(rollout)
    result = patched(rollout, *GOOD, *bad)
    assert result["success"] is False
    assert result["error"]
    assert tree(rollout) == before


def test_later_changes_see_earlier_ones(rollout: Rollout) -> None:
    rollout.write("a.txt", "one\ntwo\n")
    result = patched(
        rollout,
        "*** Update File: a.txt",
        "*** Move to: b.txt",
        "-one",
        "+1",
        "*** Update File: b.txt",
        " 1",
        "-two",
        "+2",
        "*** Add File: a.txt",
        "+new",
        "*** Update File: a.txt",
        "-new",
        "+newer",
    )
    assert result["success"] is True, result
    assert tree(rollout) == {"a.txt": b"newer\n", "b.txt": b"1\n2\n"}


def test_a_file_that_was_only_moved_can_be_updated(rollout: Rollout) -> None:
    rollout.write("a.txt", "one\n")
    moved = ("*** Move File: a.txt -> b.txt", "*** Move File: b.txt -> c.txt", "*** Update File: c.txt", "-one", "+1")
    assert patched(rollout, *moved)["success"] is True
    assert tree(rollout) == {"c.txt": b"1\n"}


def test_moving_keeps_any_bytes_and_links_are_removed_themselves(rollout: Rollout) -> None:
    rollout.write("binary", b"\0\xff").chmod(0o700)
    (rollout.folder / "link").symlink_to("binary")
    assert patched(rollout, "*** Delete File: link")["success"] is True
    assert patched(rollout, "*** Move File: binary -> -odd name'")["success"] is True
    assert tree(rollout) == {"-odd name'": b"\0\xff"}
    assert (rollout.folder / "-odd name'").stat().st_mode & 0o777 == 0o700


def test_mode_may_be_forgotten(rollout: Rollout) -> None:
    text = "*** Begin Patch\n*** Add File: a\n+x\n*** End Patch"
    assert rollout.call(patch, patch=text)["files_created"] == ["a"]


def test_what_was_written_before_a_failure_is_told(rollout: Rollout) -> None:
    rollout.write("a", "x\n")
    rollout.write("file", "")
    result = patched(rollout, "*** Update File: a", "-x", "+y", "*** Add File: file/below", "+x")
    assert result["success"] is False
    assert result["files_modified"] == ["a"]


def test_a_patched_file_can_be_read_again(rollout: Rollout) -> None:
    rollout.write("a", "x\n")
    rollout.call(read_file, path="a")
    patched(rollout, "*** Update File: a", "-x", "+y")
    assert rollout.call(read_file, path="a")["content"] == "1|y"
    patched(rollout, "*** Move File: a -> b", "*** Move File: b -> a")
    assert "content" in rollout.call(read_file, path="a")


# --- the diff ---


def test_a_long_diff_is_bounded(rollout: Rollout) -> None:
    rollout.write("f.txt", "".join(f"line {number} x\n" for number in range(4000)))
    diff = replaced(rollout, " x", " y", replace_all=True)["diff"]
    assert len(diff) < MAX_DIFF_CHARS + 50
    assert "more lines]" in diff
    rollout.write("f.txt", "x\n" * 20_000)
    assert "too many lines" in replaced(rollout, "x", "y", replace_all=True)["diff"]
    rollout.write("f.txt", "x" * 100_000 + "y")
    assert len(replaced(rollout, "y", "z")["diff"]) < 2000


LINES = st.lists(st.sampled_from("abcd"), max_size=30).map(lambda lines: "".join(f"{line}\n" for line in lines))


@given(LINES, LINES)
def test_a_diff_is_what_patch_understands(before: str, after: str) -> None:
    diff = "\n".join(unified(before, after, "f"))
    if before == after:
        assert diff == ""
        return
    old, new = before.splitlines(), after.splitlines()
    result: list[str] = []
    done = 0
    for hunk in ("\n" + diff).split("\n@@ -")[1:]:
        head, *body = hunk.split("\n")
        start, _, count = head.split(" ")[0].partition(",")
        first = int(start) - (count != "0")
        result += old[done:first] + [line[1:] for line in body if line[0] != "-"]
        done = first + sum(line[0] != "+" for line in body)
        assert old[first:done] == [line[1:] for line in body if line[0] != "+"]
    assert result + old[done:] == new


def test_the_patch_program_takes_the_diff(tmp_path: Path) -> None:
    before = "".join(f"{number}\n" for number in range(500))
    after = before.replace("250\n", "x\n").replace("260\n", "")
    (tmp_path / "f").write_text(before)
    diff = "\n".join(unified(before, after, "f")) + "\n"
    subprocess.run(["git", "apply", "-"], input=diff.encode(), cwd=tmp_path, check=True, timeout=20)
    assert (tmp_path / "f").read_text() == after
