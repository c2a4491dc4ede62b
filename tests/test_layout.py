"""The arrows between the rooms point one way, and the files stay readable."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("batch_runner", "toolsets", "model_tools", "rollout", "tools", "sandboxes", "endpoints")
MAY_IMPORT = {
    "batch_runner": {"rollout", "model_tools", "toolsets", "sandboxes", "endpoints"},
    "rollout": {"model_tools", "toolsets", "tools", "sandboxes"},
    "model_tools": {"toolsets", "tools", "sandboxes"},
    "tools": {"sandboxes"},
    "toolsets": set(),
    "sandboxes": set(),
    "endpoints": set(),
}
FILES = sorted(path for room in ROOMS for path in [*ROOT.glob(f"{room}.py"), *ROOT.glob(f"{room}/**/*.py")])
MAX_LINES = 550
MAX_FUNCTION_LINES = 60


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path.name}: relative import"
            names.add(node.module.partition(".")[0])
    return names & set(ROOMS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows(path: Path) -> None:
    room = room_of(path)
    assert imported_rooms(path) - {room} <= MAY_IMPORT[room]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name}: {length} lines"


def test_broad_handlers_stand_at_the_boundaries_only() -> None:
    """Where a run, a rollout and its sandbox end, and where tools, a user's own among them, are called."""
    broad = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler):
                names = ast.unparse(node.type) if node.type else "Exception"
                if {"Exception", "BaseException"} & set(re.findall(r"\w+", names)):
                    broad.append(room_of(path))
    assert sorted(broad) == ["batch_runner", "model_tools", "rollout", "rollout", "tools"]
