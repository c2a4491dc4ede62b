from __future__ import annotations

import ast
from typing import Any

import pytest

from endpoints.script import ScriptedReply
from tests.program import Json, Played, Workplace, answer, call, play, results, terminal

DONE = answer("done")

TWINS = """\
class Sums:
    def run(self):
        first = load_numbers()
        total = sum(first)
        return total


class Texts:
    def run(self):
        second = open_file()
        total = second.read()
        return total
"""
MISQUOTED = """\
    def run(self):
        qqqq(8, 9) ** wwww
        total = sum(first)
        return total
"""
FOUR_SPACES = "def f(x):\n    if x:\n        return 1\n    return 2\n"
TWICE = "a = 1\nb = 2\na = 1\n"
CURLY = "say(\u201chello\u201d)\nsay(\u2018bye\u2019)\n"  # curly quotes
CHINESE = "第一行\n第二行\n"
PNG = r"printf '\211PNG\r\n\032\n\000\000\000\rIHDR\000\000' > pic.png"


def write(path: str, content: str) -> ScriptedReply:
    return call("write_file", {"path": path, "content": content})


def read(path: str, **more: Any) -> ScriptedReply:
    return call("read_file", {"path": path, **more})


def patch(path: str, old: str, new: str, **more: Any) -> ScriptedReply:
    return call("patch", {"path": path, "old_string": old, "new_string": new, **more})


def show(path: str) -> ScriptedReply:
    """The file's bytes, as a literal."""
    return terminal(f"python3 -c \"print(open('{path}', 'rb').read())\"")


SCENES = {
    "twins": [write("t.py", TWINS), patch("t.py", MISQUOTED, "    def run(self):\n        pass\n"), show("t.py"), DONE],
    "line ends": [
        terminal(r"printf 'one\r\ntwo\r\nthree\r\n' > c.txt"),
        patch("c.txt", "one\ntwo\n", "1\n2\n2a\n"),
        show("c.txt"),
        DONE,
    ],
    "indentation": [
        write("i.py", FOUR_SPACES),
        patch("i.py", "  if x:\n    return 1\n", "  if x:\n    return 7\n"),
        show("i.py"),
        DONE,
    ],
    "twice": [
        write("w.py", TWICE),
        patch("w.py", "a = 1", "a = 3"),
        show("w.py"),
        patch("w.py", "a = 1", "a = 3", replace_all=True),
        show("w.py"),
        DONE,
    ],
    "curly": [write("q.py", CURLY), patch("q.py", 'say("hello")', 'say("hi")'), show("q.py"), DONE],
    "text": [
        terminal("""python3 -c "print('x' * 998 + chr(10) + 'é' * 10)" > long.txt"""),  # the first é is at byte 999
        read("long.txt"),
        write("zh.txt", CHINESE),
        read("zh.txt"),
        DONE,
    ],
    "mark": [
        terminal(r"printf '\357\273\277first\nsecond\n' > bom.txt"),
        read("bom.txt"),
        patch("bom.txt", "first", "1st"),
        write("bom.txt", "new\n"),
        show("bom.txt"),
        DONE,
    ],
    "image": [terminal(PNG), read("pic.png"), DONE],
    "odd files": [
        terminal("touch empty; printf 'no end' > torn; python3 -c \"print('y' * 100000)\" > wide; mkdir folder"),
        read("empty"),
        read("torn"),
        read("wide"),
        read("folder"),
        read("emtpy"),
        read("/dev/zero"),
        DONE,
    ],
    "search": [
        write("src/a.py", "needle = 1\n"),
        write("src/b.txt", "no\nneedle too\n"),
        call("search_files", {"pattern": "needle"}),
        call("search_files", {"pattern": "*.py", "target": "files"}),
        DONE,
    ],
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    place = Workplace(tmp_path_factory.mktemp("files"))
    return play(place, SCENES, concurrency=len(SCENES))


def told(played: Played, prompt: str) -> list[Json]:
    return results(played.row(prompt))


def content(result: Json) -> bytes:
    return bytes(ast.literal_eval(result["output"].strip()))


def test_every_rollout_goes_on_to_its_end(played: Played) -> None:
    assert played.ended.code == 0, played.ended
    assert all(row["completed"] for row in played.place.trajectories())


def test_a_block_that_is_misquoted_is_not_replaced(played: Played) -> None:
    _, refused, now = told(played, "twins")
    assert refused["success"] is False
    assert "total = sum(first)" in str(refused)  # the nearest lines
    assert content(now) == TWINS.encode()


def test_an_edit_keeps_the_files_line_ends(played: Played) -> None:
    _, edited, now = told(played, "line ends")
    assert edited["success"] is True
    assert content(now) == b"1\r\n2\r\n2a\r\nthree\r\n"


def test_an_edit_takes_on_the_files_indentation(played: Played) -> None:
    _, edited, now = told(played, "indentation")
    assert edited["success"] is True
    assert content(now).decode() == FOUR_SPACES.replace("return 1", "return 7")


def test_text_that_occurs_twice_is_refused_with_the_lines(played: Played) -> None:
    _, refused, before, edited, now = told(played, "twice")
    assert refused["success"] is False
    assert "2" in refused["error"]
    assert "lines 1, 3" in refused["error"] or ("1" in refused["error"] and "3" in refused["error"])
    assert content(before) == TWICE.encode()
    assert edited["success"] is True
    assert content(now) == b"a = 3\nb = 2\na = 3\n"


def test_curly_quotes_are_matched_by_straight_ones(played: Played) -> None:
    _, edited, now = told(played, "curly")
    assert edited["success"] is True
    first, second, _ = content(now).decode().split("\n")
    assert "hi" in first
    assert second == "say(\u2018bye\u2019)"


def test_text_is_text_whatever_its_language(played: Played) -> None:
    _, accents, _, chinese = told(played, "text")
    assert accents["content"].endswith("\n2|" + "é" * 10)
    assert accents["total_lines"] == 2
    assert chinese["content"] == "1|第一行\n2|第二行"


def test_a_byte_order_mark_is_neither_shown_nor_lost(played: Played) -> None:
    _, seen, edited, written, now = told(played, "mark")
    assert seen["content"] == "1|first\n2|second"
    assert edited["success"] is True
    assert "\ufeff" not in edited["diff"]
    assert "error" not in written
    assert content(now) == b"\xef\xbb\xbfnew\n"


def test_an_image_is_left_to_the_vision_tool(played: Played) -> None:
    _, refused = told(played, "image")
    assert refused["is_image"] is True
    assert "vision_analyze" in refused["error"]


def test_odd_files(played: Played) -> None:
    _, empty, torn, wide, folder, missing, device = told(played, "odd files")
    assert "error" not in empty
    assert empty["total_lines"] == 0
    assert torn["content"] == "1|no end"
    assert wide["content"] == f"1|{'y' * 2000}... [truncated]"
    assert "folder" in folder["error"]
    assert "empty" in str(missing["similar_files"])
    assert "error" in device


def test_searches(played: Played) -> None:
    _, _, found, named = told(played, "search")
    assert found["total_count"] == 2
    assert {match["path"].rpartition("/")[2] for match in found["matches"]} == {"a.py", "b.txt"}
    assert [path.rpartition("/")[2] for path in named["files"]] == ["a.py"]
