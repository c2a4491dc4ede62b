"""Whose a container is, and whether its owner lives: labels on the container, and a note beside it.

Labels tell the owner: a process with its start time, of this machine since its last start. The note tells whoever comes
next, whatever sandboxes it uses itself, which engine may still have containers of a process that is dead; where there
is no note no engine need be asked.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from sandboxes import folders, processes
from sandboxes.base import SandboxError, SandboxSpec

LABEL = "batch-runner"  # on every container; the names of the others begin with it
RUN, ROLLOUT, OWNER_PID, OWNER_START, MACHINE = (
    f"{LABEL}.{name}" for name in ("run", "rollout", "owner-pid", "owner-start", "machine")
)
_FOLDER = "engines"  # in the folder of this user's sandboxes
_NOTE = re.compile(r"(\d+)-(\d+)-[0-9a-f]+")


def labels(spec: SandboxSpec) -> dict[str, str]:
    """Return the labels of a container that this process is about to make."""
    pid, start = _me()
    return {
        LABEL: "sandbox",
        RUN: spec.run_name,
        ROLLOUT: spec.rollout_id,
        OWNER_PID: str(pid),
        OWNER_START: str(start),
        MACHINE: machine(),
    }


def owner_is_dead(found: Mapping[str, str]) -> bool:
    """Tell by a container's labels; of another machine's containers nothing can be told, so they are left alone."""
    pid, start = found.get(OWNER_PID, ""), found.get(OWNER_START, "")
    return found.get(MACHINE) == machine() and pid.isdecimal() and not _lives(pid, start)


def described(container_id: str, found: Mapping[str, str]) -> str:
    """Return a line about a container."""
    run, rollout = found.get(RUN, "?"), found.get(ROLLOUT, "?")
    return f"container {container_id[:12]} (run {run}, rollout {rollout}, owner {found.get(OWNER_PID, '?')})"


def leave_note(host: str) -> None:
    """Note that this process may leave containers on the engine at ``host``. Raises SandboxError."""
    pid, start = _me()
    key = hashlib.sha256(host.encode(errors="surrogateescape")).hexdigest()[:16]
    folder = folders.base() / _FOLDER
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        text = json.dumps({"host": host, "machine": machine()})
        (folder / f"{pid}-{start}-{key}").write_text(text, encoding="utf-8")
    except OSError as error:
        raise SandboxError(f"no folder for notes about containers: {error}") from error


def notes_of_the_dead() -> dict[Path, str]:
    """Return the notes of dead processes, and the engine's host that each of them names."""
    return {path: note["host"] for path, note in _notes(living=False)}


def in_use(host: str) -> bool:
    """Tell whether a living process of this machine may have containers on an engine."""
    return any(note["host"] == host for _, note in _notes(living=True))


def network() -> tuple[str, dict[str, str]]:
    """Return the name and the labels of the network that this machine's containers share on an engine."""
    key = hashlib.sha256(machine().encode()).hexdigest()[:8]
    return f"{LABEL}-{key}", {LABEL: "network", MACHINE: machine()}


def _notes(*, living: bool) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield this machine's notes of processes that live, or that are dead."""
    for path in (folders.base() / _FOLDER).glob("*"):
        match = _NOTE.fullmatch(path.name)
        if not match or _lives(match[1], match[2]) != living:
            continue
        try:
            note: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # somebody else removes it, or it was never finished: no container came after it
            continue
        if note["machine"] == machine():
            yield path, note


def _me() -> tuple[int, int]:
    me = processes.process(os.getpid())
    return os.getpid(), me.start_ticks if me else 0


def _lives(pid: str, start: str) -> bool:
    owner = processes.process(int(pid))
    return owner is not None and str(owner.start_ticks) == start


def machine() -> str:
    """Return what tells where an owner's pid means something: this boot, this pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
