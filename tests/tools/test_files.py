from __future__ import annotations

import asyncio
import json
import os
import struct
import zlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sandboxes.base import SandboxFileError
from tests.tools.file_sandbox import Rollout, rollout_in
from tests.tools.surroundings import surroundings
from tools.files import MAX_LINE_CHARS, WHOLE_FILE_BYTES, read_file, write_file
from tools.patch import patch
from tools.search import search_files
from tools.text_files import clean, decode, is_binary, is_image, shown

BOM = b"\xef\xbb\xbf"


def png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0\0")) + chunk(b"IEND", b"")


# --- read_file: what a range looks like ---


def test_lines_are_numbered_from_one(rollout: Rollout) -> None:
    rollout.write("a.txt", "one\ntwo\n")
    assert rollout.call(read_file, path="a.txt") == {
        "content": "1|one\n2|two",
        "total_lines": 2,
        "file_size": 8,
        "truncated": False,
    }


def test_a_range_says_where_to_go_on(rollout: Rollout) -> None:
    rollout.write("a.txt", "".join(f"line {n}\n" for n in range(1, 11)))
    result = rollout.call(read_file, path="a.txt", offset=3, limit="2")
    assert result["content"] == "3|line 3\n4|line 4"
    assert result["truncated"] is True
    assert "3-4 of 10" in result["hint"]
    assert "offset=5" in result["hint"]


@pytest.mark.parametrize(
    ("offset", "limit", "first", "count"), [(0, 2, 1, 2), (-5, 1, 1, 1), (1, 0, 1, 1), (1, 9999, 1, 2000)]
)
def test_odd_ranges_are_clamped(rollout: Rollout, offset: int, limit: int, first: int, count: int) -> None:
    rollout.write("a.txt", "x\n" * 2500)
    lines = rollout.call(read_file, path="a.txt", offset=offset, limit=limit)["content"].split("\n")
    assert lines[0] == f"{first}|x"
    assert len(lines) == count


def test_an_offset_beyond_the_end_is_told_readably(rollout: Rollout) -> None:
    rollout.write("a.txt", "one\ntwo")
    result = rollout.call(read_file, path="a.txt", offset=7)
    assert result["content"] == ""
    assert result["truncated"] is False
    assert result["hint"] == "offset 7 is beyond the end: the file has 2 lines."


def test_an_empty_file_is_no_error(rollout: Rollout) -> None:
    rollout.write("empty", "")
    result = rollout.call(read_file, path="empty")
    assert result == {
        "content": "",
        "total_lines": 0,
        "file_size": 0,
        "truncated": False,
        "hint": "The file is empty.",
    }


@pytest.mark.parametrize(
    ("data", "content", "total"),
    [
        (b"no end", "1|no end", 1),
        (b"\n", "1|", 1),
        (b"a\n\nb\n", "1|a\n2|\n3|b", 3),
        (b"a\r\nb\r\n", "1|a\n2|b", 2),
        (BOM + b"first\n", "1|first", 1),
        (BOM, "", 0),
        ("a\u2028b\x0cc\n".encode(), "1|a\u2028b\x0cc", 1),
    ],
)
def test_line_ends_and_bom(rollout: Rollout, data: bytes, content: str, total: int) -> None:
    rollout.write("a.txt", data)
    result = rollout.call(read_file, path="a.txt")
    assert (result["content"], result["total_lines"]) == (content, total)


def test_a_long_line_is_cut_with_a_marker(rollout: Rollout) -> None:
    rollout.write("a.txt", "é" * 100_000 + "\nshort\n")
    first, second = rollout.call(read_file, path="a.txt")["content"].split("\n")
    assert first == "1|" + "é" * MAX_LINE_CHARS + "... [truncated]"
    assert second == "2|short"


def test_a_result_that_is_too_long_asks_for_a_smaller_range(rollout: Rollout) -> None:
    rollout.write("a.txt", ("x" * 999 + "\n") * 400)
    result = rollout.call(read_file, path="a.txt")
    assert "100,000" in result["error"]
    assert "limit" in result["error"]
    suggested = int(result["error"].rpartition("limit=")[2].split()[0])
    assert "error" not in rollout.call(read_file, path="a.txt", limit=suggested)


def test_what_was_refused_is_not_taken_for_read(rollout: Rollout) -> None:
    rollout.write("a.txt", ("x" * 999 + "\n") * 400)
    first, second = (rollout.call(read_file, path="a.txt") for _ in range(2))
    assert first["error"] == second["error"]


# --- read_file: paths ---


def test_paths_start_at_the_working_folder_or_at_home(rollout: Rollout) -> None:
    rollout.write("sub folder/it's.txt", "found\n")
    for path in ("sub folder/it's.txt", "~/sub folder/it's.txt", f"{rollout.folder}//sub folder/./it's.txt"):
        rollout.forget()
        assert rollout.call(read_file, path=path)["content"] == "1|found"
    rollout.write("-n", "an option?\n")
    assert rollout.call(read_file, path="-n")["content"] == "1|an option?"
    rollout.write("$(touch owned)", "text\n")
    assert rollout.call(read_file, path="$(touch owned)")["content"] == "1|text"
    assert not (rollout.folder / "owned").exists()


def test_a_missing_file_names_similar_ones(rollout: Rollout) -> None:
    for name in ("config.yaml", "config.yml", "Main.py", "other.txt"):
        rollout.write(f"src/{name}", "x")
    result = rollout.call(read_file, path="src/config.yaaml")
    assert result["error"] == "File not found: src/config.yaaml"
    assert set(result["similar_files"]) == {"src/config.yaml", "src/config.yml"}
    assert rollout.call(read_file, path="src/main.py")["similar_files"] == ["src/Main.py"]
    assert rollout.call(read_file, path="src/main.js")["similar_files"] == ["src/Main.py"]
    assert rollout.call(read_file, path="nowhere/at/all.txt")["similar_files"] == []


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/dev/stdin", "fifo"])
def test_devices_and_pipes_are_refused(rollout: Rollout, path: str) -> None:
    os.mkfifo(rollout.folder / "fifo")
    assert "error" in rollout.call(read_file, path=path)


@pytest.mark.parametrize("path", ["", "  ", "a\0b", "a\nb"])
def test_paths_that_no_file_has(rollout: Rollout, path: str) -> None:
    assert "path" in rollout.call(read_file, path=path)["error"]
    assert "path" in rollout.call(write_file, path=path, content="")["error"]


def test_folders_and_broken_links_are_told_readably(rollout: Rollout) -> None:
    (rollout.folder / "loop").symlink_to("loop")
    rollout.write("file", "x")
    assert "is a folder" in rollout.call(read_file, path=".")["error"]
    assert "circular" in rollout.call(read_file, path="loop")["error"]
    assert "does not exist" in rollout.call(read_file, path="gone/../file")["error"]
    assert "not found" in rollout.call(read_file, path="file/below")["error"]


def test_a_working_folder_that_is_gone(rollout: Rollout) -> None:
    rollout.shell("mkdir lost; cd lost; rmdir ../lost")
    assert "error" in rollout.call(read_file, path="x")


# --- read_file: text or not ---


@pytest.mark.parametrize(
    "data",
    [
        b"a" * 999 + "é and more".encode() * 3,
        ("界" * 40_000).encode(),
        "你好\n第二行\n".encode(),
        BOM + "größe\n".encode(),
        b"\x1b[31mred\x1b[0m\n",
        b"tab\tform\x0cfeed\n",
        b"valid " * 2000 + b"one bad byte far inside: \xe9\n",
    ],
)
def test_text_is_text(rollout: Rollout, data: bytes) -> None:
    rollout.write("a.txt", data)
    result = rollout.call(read_file, path="a.txt")
    assert "error" not in result
    assert json.dumps(result).encode()


@pytest.mark.parametrize("size", range(8185, 8200))
def test_a_character_across_the_judged_part_is_text(size: int) -> None:
    assert not is_binary(b"a" * size + "🙂é界".encode() * 10)


@pytest.mark.parametrize(
    "data", [b"ab\0cd", b"\x80\x81\x82", "caf\xe9".encode("latin-1"), b"cut \xe7\x95", "x".encode("utf-16")]
)
def test_binary_is_refused(rollout: Rollout, data: bytes) -> None:
    rollout.write("a.txt", data)
    result = rollout.call(read_file, path="a.txt")
    assert result["is_binary"] is True
    assert "vision_analyze" in result["error"]


def test_images_are_pointed_to_the_vision_tool(rollout: Rollout) -> None:
    rollout.write("photo.txt", png())
    result = rollout.call(read_file, path="photo.txt")
    assert result["is_image"] is True
    assert "vision_analyze" in result["error"]
    assert all(map(is_image, (b"\xff\xd8\xff\xe0", b"GIF89a", b"RIFF\1\2\3\4WEBP", b"II*\0")))
    assert not any(map(is_image, (b"RIFF", b"BM is a text", b"", b"GIF")))


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
@example("\ufeff\ufefftwo of them")
def test_valid_text_is_never_binary_and_keeps_every_byte(text: str) -> None:
    data = text.encode()
    assert not is_binary(data) or "\0" in text
    assert decode(data).encode() == data


@given(st.binary())
def test_any_bytes_come_back_as_they_were(data: bytes) -> None:
    assert decode(data).encode() == data
    assert json.dumps(shown(decode(data).text), ensure_ascii=False).encode()


# --- read_file: large files ---


def test_a_large_file_stays_in_the_sandbox(rollout: Rollout) -> None:
    fetched: list[int] = []
    read = rollout.sandbox.read_file

    async def watched(path: str, *, max_bytes: int) -> bytes:
        fetched.append(max_bytes)
        return await read(path, max_bytes=max_bytes)

    rollout.sandbox.read_file = watched  # type: ignore[method-assign]
    lines = 4_000_000
    rollout.write("big.log", BOM + "zeile 1 é\n".encode() * lines + b"last")
    result = rollout.call(read_file, path="big.log", offset=lines, limit=2)
    assert result["content"] == f"{lines}|zeile 1 é\n{lines + 1}|last"
    assert result["total_lines"] == lines + 1
    assert result["truncated"] is False
    assert max(fetched) <= WHOLE_FILE_BYTES + 1
    first = rollout.call(read_file, path="big.log")
    assert first["content"].startswith("1|zeile 1 é\n2|zeile")
    assert "search_files" in first["hint"]
    beyond = rollout.call(read_file, path="big.log", offset=10**18)
    assert "beyond the end" in beyond["hint"]


def test_long_lines_of_a_large_file(rollout: Rollout) -> None:
    rollout.write("big.txt", ("🙂" * 200_000 + "\r\n") + "short\r\n\r\n\r\n")
    result = rollout.call(read_file, path="big.txt")
    first, *others = result["content"].split("\n")
    assert first == "1|" + "🙂" * MAX_LINE_CHARS + "... [truncated]"
    assert others == ["2|short", "3|", "4|"]


def test_too_much_of_a_large_file_asks_for_a_smaller_range(rollout: Rollout) -> None:
    rollout.write("big.txt", ("x" * 5000 + "\n") * 300)
    result = rollout.call(read_file, path="big.txt", limit=300)
    suggested = int(result["error"].rpartition("limit=")[2].split()[0])
    assert "error" not in rollout.call(read_file, path="big.txt", limit=suggested)


# --- read_file: again ---


def test_an_unchanged_range_is_not_sent_again(rollout: Rollout) -> None:
    rollout.write("a.txt", "one\ntwo\n")
    assert "content" in rollout.call(read_file, path="a.txt")
    again = rollout.call(read_file, path=str(rollout.folder / "a.txt"))
    assert again["status"] == "unchanged"
    for _ in range(2):
        assert rollout.call(read_file, path="a.txt")["error"].startswith("BLOCKED")
    assert "content" in rollout.call(read_file, path="a.txt", limit=1)


def test_a_write_or_patch_lets_it_be_read_again(rollout: Rollout) -> None:
    rollout.write("a.txt", "one\n")
    for change in (
        lambda: rollout.call(write_file, path="a.txt", content="one\n"),
        lambda: rollout.call(patch, path="a.txt", old_string="one", new_string="two"),
        lambda: rollout.write("a.txt", "six\n"),  # behind the tools' back, of the same size
    ):
        rollout.call(read_file, path="a.txt")
        rollout.call(read_file, path="a.txt")
        change()
        assert "content" in rollout.call(read_file, path="a.txt")


def test_rollouts_remember_on_their_own(rollout: Rollout) -> None:
    rollout.write("a.txt", "one\n")
    assert "content" in rollout.call(read_file, path="a.txt")
    with rollout_in(rollout.folder) as other:
        assert "content" in other.call(read_file, path="a.txt")


# --- write_file ---


def test_write_makes_folders(rollout: Rollout) -> None:
    assert rollout.call(write_file, path="a/b/c.txt", content="é\n") == {"bytes_written": 3, "dirs_created": True}
    assert rollout.call(write_file, path="a/b/d.txt", content="") == {"bytes_written": 0, "dirs_created": False}
    assert rollout.bytes("a/b/c.txt") == "é\n".encode()


def test_write_keeps_bom_line_ends_and_mode(rollout: Rollout) -> None:
    path = rollout.write("run.sh", BOM + b"old\r\ntext\r\n")
    path.chmod(0o750)
    result = rollout.call(write_file, path="run.sh", content="new\ntext\r\nhere\n")
    assert rollout.bytes("run.sh") == BOM + b"new\r\ntext\r\nhere\r\n"
    assert result["bytes_written"] == len(rollout.bytes("run.sh"))
    assert path.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize(
    ("old", "content", "new"),
    [
        (b"a\nb\r\n", "x\ny\n", b"x\ny\n"),  # mixed before: as the model wrote it
        (b"a\n", "x\r\ny\r\n", b"x\r\ny\r\n"),
        (b"one line", "x\ny\n", b"x\ny\n"),
        (b"\0\r\n", "x\n", b"x\n"),
        (BOM, "\ufeffx", BOM + b"x"),
        (b"", "\ufeffx", BOM + b"x"),
    ],
)
def test_what_is_not_clear_is_not_imposed(rollout: Rollout, old: bytes, content: str, new: bytes) -> None:
    rollout.write("a.txt", old)
    rollout.call(write_file, path="a.txt", content=content)
    assert rollout.bytes("a.txt") == new


def test_write_goes_through_links(rollout: Rollout) -> None:
    rollout.write("real.txt", "old")
    (rollout.folder / "link.txt").symlink_to("real.txt")
    (rollout.folder / "dangling.txt").symlink_to("later.txt")
    rollout.call(write_file, path="link.txt", content="new")
    rollout.call(write_file, path="dangling.txt", content="made")
    assert (rollout.folder / "link.txt").is_symlink()
    assert (rollout.bytes("real.txt"), rollout.bytes("later.txt")) == (b"new", b"made")


@pytest.mark.parametrize("content", ["\ud83d", "\udc80 alone", "pair \ud83d\ude42", "nul \0 byte", "🙂"])
def test_odd_characters_do_not_crash(rollout: Rollout, content: str) -> None:
    result = rollout.call(write_file, path="a.txt", content=content)
    assert result["bytes_written"] == len(rollout.bytes("a.txt"))
    assert rollout.bytes("a.txt").decode() == clean(content)
    assert rollout.call(write_file, path=f"{content.replace(chr(0), '')}.txt", content="")["bytes_written"] == 0


@given(st.text(alphabet=st.characters()))
def test_clean_text_can_be_written_and_is_otherwise_the_same(text: str) -> None:
    cleaned = clean(text)
    assert len(cleaned.encode()) >= len(cleaned)
    if not any("\ud800" <= char <= "\udfff" for char in text):
        assert cleaned == text


@pytest.mark.parametrize(
    "path",
    [
        "~/.ssh/authorized_keys",
        "~/.ssh/deep/er",
        "~/.bashrc",
        ".netrc",
        "sub/../.npmrc",
        "~/.config/gh/hosts.yml",
        "/etc/passwd",
        "/etc//shadow",
        "/etc/sudoers.d/me",
        "/root/.pypirc",
        "/home/anyone/.profile",
        "door/id_rsa",
        "bashrc.link",
        ".zshrc",
    ],
)
def test_protected_files_are_never_written(rollout: Rollout, path: str) -> None:
    (rollout.folder / "sub").mkdir()
    (rollout.folder / ".ssh").mkdir()
    (rollout.folder / "door").symlink_to(".ssh")
    (rollout.folder / "bashrc.link").symlink_to(".bashrc")
    rollout.write("dotfiles/zshrc", "kept")
    (rollout.folder / ".zshrc").symlink_to("dotfiles/zshrc")
    assert "Write denied" in rollout.call(write_file, path=path, content="x")["error"]
    added = f"*** Begin Patch\n*** Add File: {path}\n+x\n*** End Patch"
    assert "Write denied" in rollout.call(patch, mode="patch", patch=added)["error"]
    assert rollout.bytes("dotfiles/zshrc") == b"kept"


@pytest.mark.parametrize("path", [".gitignore", "ssh/config", ".bashrc.d/x", "etc/passwd", "a/.ssh/config", ".sshx"])
def test_names_that_only_look_protected(rollout: Rollout, path: str) -> None:
    assert "error" not in rollout.call(write_file, path=path, content="x")


def test_write_to_a_folder_or_below_a_file_is_told(rollout: Rollout) -> None:
    rollout.write("folder/file", "x")
    assert "is a folder" in rollout.call(write_file, path="folder", content="x")["error"]
    assert "error" in rollout.call(write_file, path="folder/file/below", content="x")
    assert "device" in rollout.call(write_file, path="/dev/null", content="x")["error"]
    assert rollout.bytes("folder/file") == b"x"


@pytest.mark.parametrize(
    ("path", "content", "status", "output"),
    [
        ("a.py", "x = 1\n", "ok", ""),
        ("a.py", "def f(:\n    pass\n", "error", "line 1"),
        ("a.py", "x = '\\d'\n", "ok", ""),
        ("a.py", "x = 1\0", "error", "null"),
        ("a.py", "(" * 5000, "error", "nested"),
        ("a.json", '{"a": [1, 2]}', "ok", ""),
        ("a.json", '{"a": 1,}', "error", "line 1, column 9"),
        ("a.json", "[" * 50_000, "error", "nested"),
    ],
)
def test_syntax_is_checked(rollout: Rollout, path: str, content: str, status: str, output: str) -> None:
    check = rollout.call(write_file, path=path, content=content)["lint"]
    assert check["status"] == status
    assert output in check["output"]


def test_syntax_checks_are_for_short_python_and_json_only(rollout: Rollout) -> None:
    assert "lint" not in rollout.call(write_file, path="a.txt", content="def f(:")
    assert "lint" not in rollout.call(write_file, path="long.py", content="x = 1\n" * 50_000)


def test_a_failing_sandbox_operation_is_a_tool_error(rollout: Rollout) -> None:
    async def full(path: str, data: bytes) -> None:
        raise SandboxFileError(f"{path}: no space left for {len(data)} bytes")

    rollout.sandbox.write_file = full  # type: ignore[method-assign]
    assert "no space left" in rollout.call(write_file, path="a.txt", content="x")["error"]


def test_many_rollouts_do_not_disturb_each_other() -> None:
    async def one(number: int) -> str:
        async with surroundings() as context:
            await write_file(context, {"path": "a.txt", "content": f"{number}\n"})
            return str((await read_file(context, {"path": "a.txt"}))["content"])

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(one(number) for number in range(8)))

    assert asyncio.run(all_of_them()) == [f"1|{number}" for number in range(8)]


# --- what the model does to its shell ---


def test_what_the_model_exports_is_not_the_file_tools_business(rollout: Rollout) -> None:
    rollout.write("a.txt", "hit\n")
    rollout.write("large.txt", "line\n" * WHOLE_FILE_BYTES)
    rollout.shell("export PATH=/nonexistent HOME=/nonexistent POSIXLY_CORRECT=1")
    assert rollout.call(read_file, path="~/a.txt")["content"] == "1|hit"
    assert rollout.call(read_file, path="large.txt", offset=3, limit=1)["content"] == "3|line"
    assert rollout.call(read_file, path="a.md")["similar_files"] == ["a.txt"]
    assert rollout.call(search_files, pattern="hit")["matches"] == [{"path": "a.txt", "line": 1, "content": "hit"}]
    moved = rollout.call(patch, patch="*** Begin Patch\n*** Move File: a.txt -> sub/b.txt\n*** End Patch")
    assert moved["success"]
    assert rollout.bytes("sub/b.txt") == b"hit\n"
