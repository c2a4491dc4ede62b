"""The text that goes to a shell, and the frames that come back."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes import shell
from sandboxes.shell import Frames

SHELL_TEXT = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=40)


def test_frames_in_any_chunks() -> None:
    stream = b"p12 11\0eexport A='x'\n\0d/a b\n\0x3\0"
    for size in range(1, len(stream) + 1):
        frames = Frames()
        for start in range(0, len(stream), size):
            frames.feed(stream[start : start + size])
        assert (frames.pid, frames.parent, frames.exit_code) == (12, 11, 3)
        assert (frames.variables, frames.folder) == (b"export A='x'\n", b"/a b\n")


@pytest.mark.parametrize(
    "junk", [b"\0\0", b"p\0", b"p1\0", b"p-1 -1\0", b"p0 0\0", b"pa b\0", b"x\0", b"x-1\0", b"xyz\0", b"?\0"]
)
def test_junk_is_passed_over(junk: bytes) -> None:
    frames = Frames()
    frames.feed(junk)
    assert frames == Frames()
    frames.feed(b"p5 6\0x0\0")
    assert (frames.pid, frames.exit_code) == (5, 0)


def test_the_first_pid_counts() -> None:
    frames = Frames()
    frames.feed(b"p5 6\0p1 1\0")
    assert (frames.pid, frames.parent) == (5, 6)


def test_a_frame_that_is_too_long_is_passed_over_whole() -> None:
    frames = Frames()
    for _ in range(40):
        frames.feed(b"e" * 65_536)
    frames.feed(b"\0x1\0")
    assert (frames.variables, frames.exit_code) == (None, 1)


@settings(max_examples=30)
@given(st.dictionaries(st.from_regex(r"[A-Z_]{1,8}X", fullmatch=True), SHELL_TEXT, max_size=4), SHELL_TEXT)
def test_quoting(variables: dict[str, str], text: str) -> None:
    script = shell.exports(variables) + shell.encode(f"printf %s {shell.quote(text)}")
    names = "".join(f'; printf "\\n%s" "${name}"' for name in variables)
    done = subprocess.run(["sh", "-c", script + names.encode()], env={}, capture_output=True, check=True)
    assert done.stdout == "\n".join([text, *variables.values()]).encode()


@given(st.text(max_size=40))
def test_any_text_can_be_encoded(text: str) -> None:
    assert b"\0" not in shell.encode(text)


@given(st.binary(max_size=20).map(lambda name: name.replace(b"\0", b"")))
def test_any_name_comes_back(name: bytes) -> None:
    assert shell.encode(shell.decode_name(name)) == name


@pytest.mark.parametrize("program", ["bash", "dash", "busybox"])
def test_the_resident_is_plain_shell(program: str) -> None:
    arguments = ["busybox", "sh"] if program == "busybox" else [program]
    try:
        done = subprocess.run([*arguments, "-n"], input=shell.RESIDENT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip(f"{program} is not installed")
    assert (done.returncode, done.stderr) == (0, "")
