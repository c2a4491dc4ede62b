from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.file_sandbox import Rollout, rollout_in
from tools.base import JsonObject
from tools.search import _extended, _without_braces, search_files

PROGRAMS = "sh find grep sort tr xargs cut sed head tail wc readlink stat cat"
BUSYBOX = shutil.which("busybox")


def folder_of_programs(folder: Path, engine: str) -> str:
    """Return a $PATH with which a sandbox has ripgrep, no ripgrep, no PCRE in grep either, or only busybox."""
    folder.mkdir()
    for name in PROGRAMS.split():
        target = BUSYBOX if engine == "busybox" else shutil.which(name)
        assert target
        (folder / name).symlink_to(target)
    if engine == "rg":
        (folder / "rg").symlink_to(shutil.which("rg") or "")
    if engine == "grep -E":
        (folder / "grep").unlink()
        (folder / "grep").write_text(f'#!/bin/sh\ncase "$*" in *P*) exit 2 ;; esac\nexec {shutil.which("grep")} "$@"\n')
        (folder / "grep").chmod(0o755)
    return str(folder)


@pytest.fixture(
    params=[
        pytest.param("rg", marks=pytest.mark.skipif(not shutil.which("rg"), reason="needs ripgrep")),
        "grep -P",
        "grep -E",
        pytest.param("busybox", marks=pytest.mark.skipif(not BUSYBOX, reason="needs busybox")),
    ]
)
def everywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rollout]:
    folder = tmp_path / "work"
    folder.mkdir()
    with rollout_in(folder, folder_of_programs(tmp_path / "programs", request.param)) as opened:
        yield opened


def search(rollout: Rollout, pattern: str, **arguments: Any) -> JsonObject:
    return rollout.call(search_files, pattern=pattern, **arguments)


def lines(result: JsonObject) -> list[tuple[str, int, str]]:
    """Return path, line and content of each match, whichever form they have."""
    assert "error" not in result, result
    if "matches" in result:
        return [(match["path"], match["line"], match["content"]) for match in result["matches"]]
    found, path = [], ""
    for line in result["matches_text"].split("\n"):
        match = re.fullmatch(r"  (\d+)[:-] (.*)", line)
        if match:
            found.append((path, int(match[1]), match[2]))
        else:
            path = line
    return found


# --- target=content ---


def test_matches_have_path_line_and_content(everywhere: Rollout) -> None:
    everywhere.write("a.py", "import os\ndef f():\n    return 1\n")
    everywhere.write("sub/b.py", "x = 1\n\n    def g(): pass\r\n")
    assert search(everywhere, r"def \w+") == {
        "total_count": 2,
        "matches": [
            {"path": "a.py", "line": 2, "content": "def f():"},
            {"path": "sub/b.py", "line": 3, "content": "    def g(): pass"},
        ],
    }
    assert search(everywhere, "nothing like it") == {"total_count": 0, "matches": []}


def test_names_that_look_like_a_place_in_a_file(everywhere: Rollout) -> None:
    everywhere.write("a:12:b.txt", "needle\n")
    everywhere.write("plain.txt", "x: needle:3:y\n")
    found = lines(search(everywhere, "needle"))
    if everywhere.shell("{ printf x | grep -qZ x || command -v rg; } >/dev/null 2>&1 && echo yes"):
        assert found == [("a:12:b.txt", 1, "needle"), ("plain.txt", 1, "x: needle:3:y")]
    assert ("plain.txt", 1, "x: needle:3:y") in found
    with_context = search(everywhere, "needle", context=1)
    assert ("plain.txt", 1, "x: needle:3:y") in lines(with_context)


def test_five_matches_and_more_are_grouped_by_file(rollout: Rollout) -> None:
    rollout.write("a", "x\n" * 3)
    rollout.write("b", "y\nx\nx\n")
    result = search(rollout, "x")
    assert result["matches_text"] == "a\n  1: x\n  2: x\n  3: x\nb\n  2: x\n  3: x"
    assert result["total_count"] == 5


PATTERNS = {  # each with the lines of a file that it finds
    r"\d+": (["b12"], ["a"]),
    r"[\d.]+x": (["a.x", "1.5x"], ["ax"]),
    r"\bfoo\b": (["a foo b"], ["foobar"]),
    r"(?:ab)+c": (["ababc"], ["ac"]),
    r"f\(\s*\)": (["f( )"], ["f(x)"]),
    r"a|b{2}": (["xa", "bb"], ["b"]),
    r"^\s+x$": (["  x"], ["x"]),
    r"[^\s]é": (["aé"], [" é"]),
    "-n": (["-n"], ["n"]),
    "--help": (["--help"], ["help"]),
    r"it's \$HOME `x`": (["it's $HOME `x`"], ["it's"]),
    "界": (["世界"], ["世"]),
}


def test_patterns_mean_the_same_everywhere(everywhere: Rollout) -> None:
    for number, (pattern, (found, others)) in enumerate(PATTERNS.items()):
        everywhere.write(f"f{number}", "\n".join([*others, *found]))
        assert [content for _, _, content in lines(search(everywhere, pattern, path=f"f{number}"))] == found, pattern


def test_bad_patterns_are_told(everywhere: Rollout) -> None:
    everywhere.write("f", "a\n")
    for pattern in ("a(", "[a"):
        assert "Bad pattern" in search(everywhere, pattern)["error"]
    for pattern in ("", "a\nb", "a\0b"):
        assert "one line" in search(everywhere, pattern)["error"]


def test_hidden_files_are_left_out(everywhere: Rollout) -> None:
    for name in ("seen", ".env", ".git/config", "sub/.hidden/x", "sub/.hidden.txt", "sub/seen.txt"):
        everywhere.write(name, "needle\n")
    assert [path for path, _, _ in lines(search(everywhere, "needle"))] == ["seen", "sub/seen.txt"]
    assert [path for path, _, _ in lines(search(everywhere, "needle", file_glob="*.txt"))] == ["sub/seen.txt"]
    assert search(everywhere, "*", target="files")["files"] == ["seen", "sub/seen.txt"]
    assert search(everywhere, "env", target="files")["files"] == []
    assert lines(search(everywhere, "needle", path=".env")) == [(".env", 1, "needle")]
    assert lines(search(everywhere, "needle", path=".git")) == [(".git/config", 1, "needle")]


def test_paths_are_written_as_given(everywhere: Rollout) -> None:
    everywhere.write("sub dir/f's.txt", "needle\n")
    folder = str(everywhere.folder)
    for path, expected in {
        "sub dir": "sub dir/f's.txt",
        "sub dir/": "sub dir/f's.txt",
        "./sub dir": "./sub dir/f's.txt",
        "sub dir/f's.txt": "sub dir/f's.txt",
        folder: f"{folder}/sub dir/f's.txt",
        f"{folder}/sub dir/f's.txt": f"{folder}/sub dir/f's.txt",
        "~/sub dir": "~/sub dir/f's.txt",
        "sub dir/../sub dir": "sub dir/../sub dir/f's.txt",
    }.items():
        assert lines(search(everywhere, "needle", path=path)) == [(expected, 1, "needle")]


def test_a_path_that_is_no_file_or_folder_is_told(rollout: Rollout) -> None:
    os.mkfifo(rollout.folder / "fifo")
    for path in ("nowhere", "nowhere/f", "-x", "/dev/zero", "fifo"):
        assert "not found" in search(rollout, "x", path=path)["error"]


def test_names_can_be_narrowed(everywhere: Rollout) -> None:
    for name in ("a.py", "b.ts", "c.tsx", "sub/d.py", "sub/deep/e.py"):
        everywhere.write(name, "needle\n")
    for glob, expected in {
        "*.py": ["a.py", "sub/d.py", "sub/deep/e.py"],
        "*.{ts,tsx}": ["b.ts", "c.tsx"],
        "**/*.py": ["a.py", "sub/d.py", "sub/deep/e.py"],
        "sub/**/*.py": ["sub/d.py", "sub/deep/e.py"],
        "d.p?": ["sub/d.py"],
        "*.nope": [],
    }.items():
        found = search(everywhere, "needle", file_glob=glob, output_mode="files_only")
        assert sorted(found["files"]) == expected, glob


def test_long_lines_are_cut_and_the_whole_is_bounded(rollout: Rollout) -> None:
    rollout.write("long", "é" * 50_000 + "needle\n")
    [(_, _, content)] = lines(search(rollout, "needle"))
    assert content == "é" * 500 + "... [truncated]"
    rollout.write("many", ("needle " + "x" * 490 + "\n") * 500)
    result = search(rollout, "needle", limit=200, path="many")
    assert len(str(result)) < 60_000
    assert result["truncated"] is True
    assert result["total_count"] == 500
    shown = len(lines(result))
    assert f"offset={shown}." in result["hint"]
    assert lines(search(rollout, "needle", limit=200, path="many", offset=shown))[0][1] == shown + 1


def test_pages(everywhere: Rollout) -> None:
    everywhere.write("f", "".join(f"needle {number}\n" for number in range(1, 11)))
    first = search(everywhere, "needle", limit=4)
    assert [number for _, number, _ in lines(first)] == [1, 2, 3, 4]
    assert (first["total_count"], first["truncated"], first["hint"]) == (10, True, "Go on with offset=4.")
    last = search(everywhere, "needle", limit=4, offset=8)
    assert [number for _, number, _ in lines(last)] == [9, 10]
    assert "truncated" not in last
    assert lines(search(everywhere, "needle", offset=10**30)) == []
    assert len(lines(search(everywhere, "needle", limit=0, offset=-3))) == 1


def test_context_shows_the_lines_around(everywhere: Rollout) -> None:
    everywhere.write("f", "1\n2\nneedle 3\n4\n5\n6\nneedle 7\n8\n9\nneedle 10")
    everywhere.write("g-5-g", "needle\n\nlast:3:x\n")
    result = search(everywhere, "needle", context=1)
    assert result["total_count"] == 4
    assert result["matches_text"] == (
        "f\n  2- 2\n  3: needle 3\n  4- 4\n  6- 6\n  7: needle 7\n  8- 8\n  9- 9\n  10: needle 10\n"
        "g-5-g\n  1: needle\n  2- "
    )
    alone = search(everywhere, "needle", context="2", path="g-5-g")
    assert alone["matches"][0] == {"path": "g-5-g", "line": 1, "content": "needle"}
    assert alone["matches"][2] == {"path": "g-5-g", "line": 3, "content": "last:3:x", "context": True}
    assert len(lines(search(everywhere, "needle 7", context=999))) == 10


def test_binary_files_do_not_get_in_the_way(everywhere: Rollout) -> None:
    everywhere.write("a.bin", b"\0\1\2" * 1000 + b"other\n\xff\xfe")
    everywhere.write("b.txt", b"needle \xff here\n")
    result = search(everywhere, "needle")
    assert [(path, number) for path, number, _ in lines(result)] in ([("b.txt", 1)], [])


def test_names_with_a_line_break_are_left_out(everywhere: Rollout) -> None:
    for name in ("d/a\nb.txt", "d/e\n=0", "d/f\n0/c.txt", "d/g.txt"):
        everywhere.write(name, "hit\n")
    assert lines(search(everywhere, "hit", path="d")) == [("d/g.txt", 1, "hit")]
    assert search(everywhere, "hit", path="d", output_mode="count") == {"total_count": 1, "counts": {"d/g.txt": 1}}
    for how in ({"output_mode": "files_only"}, {"target": "files"}):
        assert search(everywhere, "" if "target" in how else "hit", path="d", **how) == {
            "total_count": 1,
            "files": ["d/g.txt"],
        }


# --- a search that does not come to its end ---


@pytest.mark.parametrize("mode", ["content", "files_only", "count"])
@pytest.mark.parametrize("program", ["kill -9 $$", "kill -9 $PPID", "exec sh -c 'kill -9 0'"])
def test_a_search_that_dies_has_not_found_nothing(tmp_path: Path, mode: str, program: str) -> None:
    programs = folder_of_programs(tmp_path / "programs", "grep -P")
    folder = tmp_path / "work"
    folder.mkdir()
    with rollout_in(folder, programs) as rollout:
        rollout.write("a", "x\n")
        grep = tmp_path / "programs" / "grep"
        real = grep.readlink()
        grep.unlink()
        grep.write_text(f'#!/bin/sh\ncase "$*" in *-H*) {program} ;; esac\nexec {real} "$@"\n')
        grep.chmod(0o755)
        assert "broke off" in search(rollout, "x", output_mode=mode)["error"]


@pytest.mark.parametrize("program", ["find", "grep", "xargs"])
def test_a_program_that_is_not_there_is_told(tmp_path: Path, program: str) -> None:
    programs = folder_of_programs(tmp_path / "programs", "grep -P")
    (tmp_path / "programs" / program).unlink()
    with rollout_in(tmp_path, programs) as rollout:
        assert f"There is no {program} in this sandbox" in search(rollout, "x")["error"]


# --- other outputs ---


def test_files_and_counts(everywhere: Rollout) -> None:
    everywhere.write("a", "x\nx\n")
    everywhere.write("b:3", "x\n")
    everywhere.write("c", "y:0\n")
    assert search(everywhere, "x", output_mode="files_only") == {"total_count": 2, "files": ["a", "b:3"]}
    assert search(everywhere, "x", output_mode="count") == {"total_count": 3, "counts": {"a": 2, "b:3": 1}}
    assert search(everywhere, "x", output_mode="count", limit=1) == {
        "total_count": 3,
        "counts": {"a": 2},
        "truncated": True,
        "hint": "Go on with offset=1.",
    }
    assert search(everywhere, "z", output_mode="files_only") == {"total_count": 0, "files": []}
    assert search(everywhere, "z", output_mode="count") == {"total_count": 0, "counts": {}}
    assert [content for _, _, content in lines(search(everywhere, "y:0"))] == ["y:0"]


def test_files_by_name(everywhere: Rollout) -> None:
    for name in ("a.py", "test_a.py", "sub/test_b.py", "sub/notes.md"):
        everywhere.write(name, "")
    files = [
        search(everywhere, pattern, target="files", path=path)["files"]
        for pattern, path in {"test_*.py": ".", "*.{md,py}": "sub", "notes": ".", "*": "sub/notes.md"}.items()
    ]
    assert files == [
        ["sub/test_b.py", "test_a.py"],
        ["sub/notes.md", "sub/test_b.py"],
        ["sub/notes.md"],
        ["sub/notes.md"],
    ]
    page = search(everywhere, "*.py", target="files", limit=2, offset=1)
    assert (page["files"], page["total_count"]) == (["sub/test_b.py", "test_a.py"], 3)


def test_other_choices_are_refused(rollout: Rollout) -> None:
    assert "'content' or 'files'" in search(rollout, "x", target="names")["error"]
    assert "files_only" in search(rollout, "x", output_mode="names")["error"]


# --- the same again ---


def test_the_same_search_is_warned_of_and_then_blocked(rollout: Rollout) -> None:
    rollout.write("f", "needle\n")
    results = [search(rollout, "needle") for _ in range(5)]
    assert [sorted(result) for result in results] == [
        ["matches", "total_count"],
        ["matches", "total_count"],
        ["matches", "total_count", "warning"],
        ["error"],
        ["error"],
    ]
    assert results[3]["error"].startswith("BLOCKED")
    assert "error" not in search(rollout, "needle", limit=49)
    assert "warning" not in search(rollout, "needle")


def test_a_search_that_finds_something_new_is_another_one(rollout: Rollout) -> None:
    for number in range(6):
        rollout.write(f"f{number}", "needle\n")
        assert "warning" not in search(rollout, "needle", output_mode="count")


# --- pure parts ---


def test_a_regex_as_posix_writes_it() -> None:
    assert _extended(r"\d+(?:a|b)[\w.-][^\s]\.\\d") == r"[0-9]+(a|b)[[:alnum:]_.-][^[:space:]]\.\\d"
    assert _extended(r"[]\d]x[^]]\D") == r"[]0-9]x[^]][^0-9]"
    assert _extended("[[:alpha:]] a[b") == "[[:alpha:]] a[b"


@given(st.text(alphabet="ab.|()*^$ ", max_size=12))
def test_plain_patterns_stay_as_they_are(pattern: str) -> None:
    assert _extended(pattern) == pattern


def test_braces_are_spread() -> None:
    assert _without_braces("*.{a,b}{c,}") == ["*.ac", "*.a", "*.bc", "*.b"]
    assert _without_braces("{a,{b,c}}") == ["a", "b", "a", "c"]
    assert _without_braces("a{b") == ["a{b"]
