"""What dead runs have left behind on this machine: removed when a run starts and ends, and on request."""

from __future__ import annotations

from collections.abc import Iterable

from sandboxes import BACKENDS

_CHEAP = ("docker", "local")  # asked at every start: they know without looking far whether anything can be left


def sweep(kinds: Iterable[str]) -> list[str]:
    """Remove what is left of these kinds of sandboxes and of the cheap ones; return a line about each that went.

    Never anything of a living run, and nothing that is not ours. Raises SandboxError.
    """
    return [line for kind in sorted({*kinds, *_CHEAP} - {""}) for line in BACKENDS[kind].sweep()]


def clean() -> str:
    """Remove all that is left, and return what to tell of it. Raises SandboxError."""
    problems = {kind: backend.unavailable() for kind, backend in BACKENDS.items()}
    lines = [f"removed {line}" for line in sweep(kind for kind, problem in problems.items() if not problem)]
    skipped = [f"{kind} was not looked into: {problem}" for kind, problem in problems.items() if problem]
    return "\n".join([*(lines or ["nothing was left behind"]), *skipped])
