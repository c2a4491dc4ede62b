"""Reading and writing files through a sandbox: exactly, atomically, and only what is a file in there."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxes.base import Sandbox, SandboxFileError
from tests.sandboxes.support import MINUTE, SPEC, run

EVERY_BYTE = bytes(range(256)) * 5
ODD_NAMES = [
    "plain",
    "a b",
    "it's",
    'quo"te',
    "new\nline",
    "-rf",
    "--",
    "$HOME",
    "`x`",
    "*",
    "é🙂",
    "back\\slash",
    "~x",
    "#",
]


def test_round_trip(any_shell: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        for name in ODD_NAMES:
            data = EVERY_BYTE + name.encode()
            await sandbox.write_file(name, data)
            assert await sandbox.read_file(name, max_bytes=10_000) == data, name
            assert await sandbox.read_file(f"./{name}", max_bytes=10) == data[:10], name
        listed = (await sandbox.exec("set -- *; echo $#; ls -A | grep -c tmp", timeout_seconds=MINUTE)).output
        assert listed == f"{len(ODD_NAMES)}\n0\n"

    run(any_shell, body)


def test_empty_and_large(kind: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        large = os.urandom(1 << 20) * 20
        await sandbox.write_file("large", large)
        assert await sandbox.read_file("large", max_bytes=len(large) + 1) == large
        assert await sandbox.read_file("large", max_bytes=5) == large[:5]
        assert await sandbox.read_file("large", max_bytes=0) == b""
        await sandbox.write_file("large", b"")
        assert await sandbox.read_file("large", max_bytes=5) == b""

    run(kind, body)


def test_where_paths_start(kind: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.exec("mkdir -p sub && cd sub && export HOME=/nowhere", timeout_seconds=MINUTE)
        await sandbox.write_file("a/b/c.txt", b"relative")
        await sandbox.write_file("~/.config/x", b"home")
        shown = await sandbox.exec("cat a/b/c.txt; pwd", timeout_seconds=MINUTE)
        assert shown.output.startswith("relative")
        folder = shown.output.removeprefix("relative").strip()
        assert await sandbox.read_file(f"{folder}/a/b/../b/c.txt", max_bytes=100) == b"relative"
        assert await sandbox.read_file("~/.config/x", max_bytes=100) == b"home"

    run(kind, body)


def test_mode_and_links_are_kept(any_shell: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        script = "echo old > tool; chmod 751 tool; ln -s tool link; ln -s new dangling; umask 077"
        await sandbox.exec(script, timeout_seconds=MINUTE)
        await sandbox.write_file("link", b"new")
        with pytest.raises(SandboxFileError, match="Dangling"):
            await sandbox.write_file("dangling", b"not made")
        shown = await sandbox.exec("stat -c %a tool; cat tool; readlink link", timeout_seconds=MINUTE)
        assert shown.output == "751\nnewtool\n"
        listed = await sandbox.exec("ls -A", timeout_seconds=MINUTE)
        assert listed.output.split() == ["dangling", "link", "tool"]

    run(any_shell, body)


def test_what_is_no_file_is_refused(any_shell: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.exec("mkdir d; mkfifo f; touch file; ln -s /dev/zero z", timeout_seconds=MINUTE)
        started = time.monotonic()
        for path, reason in [
            ("missing", "No such file"),
            ("d", "Is a directory"),
            ("f", "Not a regular file"),
            ("z", "Not a regular file"),
            ("/dev/zero", "Not a regular file"),
            ("file/x", "No such file|Not a directory"),
            ("", "path is needed"),
            ("a\0b", "cannot hold NUL"),
        ]:
            with pytest.raises(SandboxFileError, match=reason):
                await sandbox.read_file(path, max_bytes=10)
        for path, reason in [
            ("d", "Is a directory"),
            ("f", "Not a regular file"),
            ("z", "Not a regular file"),
            ("file/x", "Not a directory|File exists"),
            ("/proc/no/such", "mkdir|Permission|directory"),
            ("", "path is needed"),
        ]:
            with pytest.raises(SandboxFileError, match=reason):
                await sandbox.write_file(path, b"x")
        assert time.monotonic() - started < 10
        assert (await sandbox.exec("ls -A", timeout_seconds=MINUTE)).output.split() == ["d", "f", "file", "z"]

    run(any_shell, body)


def test_no_command_breaks_them(kind: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        breaking = "export PATH=/nowhere IFS=x POSIXLY_CORRECT=1 LD_PRELOAD=/no.so; cd /usr; cat() { :; }"
        await sandbox.exec(breaking, timeout_seconds=MINUTE)
        await sandbox.write_file("~/x", b"content")
        assert await sandbox.read_file("~/x", max_bytes=100) == b"content"

    run(kind, body)


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "cat").write_text("#!/bin/sh\necho cut; echo 'No space left on device' >&2; exit 1\n")
    (programs / "cat").chmod(0o755)

    async def body(sandbox: Sandbox) -> None:
        await sandbox.exec("echo old > x", timeout_seconds=MINUTE)
        with pytest.raises(SandboxFileError, match="No space left"):
            await sandbox.write_file("x", b"new")
        listed = await sandbox.exec("ls -A; IFS= read -r line <x; echo $line", timeout_seconds=MINUTE)
        assert listed.output == "x\nold\n"

    run("local", body, replace(SPEC, env={"PATH": f"{programs}:/usr/bin:/bin"}))


def test_links_lead_inside_only(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")

    async def body(sandbox: Sandbox) -> None:
        await sandbox.exec(f"ln -s {secret} link; ln -s {tmp_path} folder", timeout_seconds=MINUTE)
        for path in ("link", "folder/secret", str(secret)):
            with pytest.raises(SandboxFileError, match="No such file"):
                await sandbox.read_file(path, max_bytes=100)
        await sandbox.write_file(str(secret), b"of the sandbox")
        assert await sandbox.read_file("link", max_bytes=100) == b"of the sandbox"
        assert secret.read_text() == "of the host"

    run("bubblewrap", body)
