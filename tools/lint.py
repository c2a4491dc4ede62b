"""Syntax checks of what was just written, by pure parsing: nothing is run or imported, the sandbox is not asked."""

from __future__ import annotations

import ast
import json
import sys
import warnings

from tools.base import JsonObject

MAX_CHARS = 100_000  # a longer text would hold up the other rollouts of the worker


def lint(path: str, text: str) -> JsonObject | None:
    """Return ``{"status": "ok" | "error", "output": str}`` for a ``.py`` or ``.json`` file, None for any other."""
    check = {"py": _python_problem, "json": _json_problem}.get(path.rpartition(".")[2])
    if check is None or len(text) > MAX_CHARS:
        return None
    problem = check(text)
    return {"status": "error" if problem else "ok", "output": problem}


def _python_problem(text: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a doubtful escape is no syntax error
            ast.parse(text)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg} (Python {sys.version_info.major}.{sys.version_info.minor})"
    except (ValueError, RecursionError, MemoryError) as error:  # a NUL; nesting beyond the parser
        return str(error) or "nested too deeply"
    return ""


def _json_problem(text: str) -> str:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return f"line {error.lineno}, column {error.colno}: {error.msg}"
    except RecursionError:
        return "nested too deeply"
    return ""
