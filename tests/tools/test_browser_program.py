from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

from tools import browser_program as program


def test_an_executable_is_the_one_named_or_none(tmp_path: Path) -> None:
    tool = tmp_path / "my-chromium"
    tool.write_text("#!/bin/sh\n", encoding="utf-8")
    assert program.executable({"BROWSER_EXECUTABLE": str(tool)}) == ""
    tool.chmod(0o755)
    assert program.executable({"BROWSER_EXECUTABLE": str(tool)}) == str(tool)
    assert program.executable({"BROWSER_EXECUTABLE": "sh"}).endswith("/sh")


def test_playwrights_own_is_taken_before_those_of_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    shell = tmp_path / "chromium-headless-shell"
    monkeypatch.setattr(program, "HEADLESS_SHELL", str(shell))
    assert program.executable({}) == ""
    (tmp_path / "bin").mkdir()
    in_path = tmp_path / "bin" / "chromium"
    in_path.touch(0o755)
    assert program.executable({}) == str(in_path)
    (tmp_path / "chromium-1" / "chrome-linux64").mkdir(parents=True)
    (tmp_path / "chromium-1" / "chrome-linux64" / "chrome").touch(0o755)  # another version's
    assert program.executable({}) == str(in_path)
    shell.touch(0o755)
    assert program.executable({}) == str(shell)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"BROWSER_EXECUTABLE": "/no/such/program"},
            "BROWSER_EXECUTABLE=/no/such/program is no program that can be run",
        ),
        ({"BROWSER_MAX_ROLLOUTS": "many"}, "BROWSER_MAX_ROLLOUTS=many must be a number of 1 or more"),
        ({"BROWSER_MAX_ROLLOUTS": "0"}, "BROWSER_MAX_ROLLOUTS=0 must be a number of 1 or more"),
        ({"BROWSER_CDP_URL": "localhost:9222"}, "BROWSER_CDP_URL must be an http, https, ws or wss URL"),
        ({"WEB_ALLOWED_HOSTS": "a b", "BROWSER_CDP_URL": "ws://x"}, "WEB_ALLOWED_HOSTS: 'a b' is no host"),
        ({"BROWSER_CDP_URL": "ws://x/?token=1"}, ""),
    ],
)
def test_what_is_missing_is_told(settings: dict[str, str], told: str) -> None:
    said = program.missing(settings)
    assert said.startswith(told)
    assert bool(said) == bool(told)


def test_no_program_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(program, "HEADLESS_SHELL", str(tmp_path / "none"))
    assert "apt-get install chromium" in program.missing({})
    assert "BROWSER_EXECUTABLE" in program.missing({})


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert program.missing({}) == program.INSTALL_PACKAGE


def test_the_launcher_bounds_and_passes_on(tmp_path: Path) -> None:
    fake = tmp_path / "a browser"
    fake.write_text('#!/bin/sh\nulimit -d\nulimit -c\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    fake.chmod(0o755)
    script = tmp_path / "launch"
    script.write_text(program.launcher(str(fake), tmp_path / "it's"), encoding="utf-8")
    script.chmod(0o755)
    ended = subprocess.run([str(script), "--a b", "c"], capture_output=True, text=True, timeout=10, check=True)
    assert ended.stdout.splitlines() == ["3145728", "0", "--a b", "c", f"--user-data-dir={tmp_path}/it's"]


def test_the_environment_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-1")
    monkeypatch.setenv("MY_THING", "x")
    monkeypatch.setenv("LANG", "C.UTF-8")
    env = program.environment(Path("/h"), Path("/t"))
    assert env == {
        **{name: os.environ[name] for name in program._INHERITED if name in os.environ},
        "HOME": "/h",
        "TMPDIR": "/t",
        "XDG_RUNTIME_DIR": "/t",
    }
    assert env["LANG"] == "C.UTF-8"
    assert len(program.environment(Path("/h"), Path("/t" * 50))["TMPDIR"]) < 10
