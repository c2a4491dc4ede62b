"""Where commands run. ``BACKENDS`` is the whole list; ``select`` chooses from it."""

from __future__ import annotations

from dataclasses import dataclass

from sandboxes.base import Backend
from sandboxes.bubblewrap import BubblewrapBackend
from sandboxes.docker import DockerBackend
from sandboxes.local import LocalBackend

# Each name is a value of --sandbox. A new backend is one file here and one line.
BACKENDS: dict[str, Backend] = {
    "bubblewrap": BubblewrapBackend(),
    "docker": DockerBackend(),
    "local": LocalBackend(),
}


@dataclass(frozen=True)
class Selection:
    """The backend for a sample, or why there is none."""

    backend: Backend | None
    problem: str = ""  # why there is none, and what to do about it; "" when there is one
    warning: str = ""  # what the user should know about the choice that was made


def select(kind: str, *, wants_image: bool) -> Selection:
    """Choose the backend for samples with, or without, an image; ``kind`` as in --sandbox. May take a few seconds."""
    if kind == "auto":
        return _select("docker", wants_image=True) if wants_image else _best()
    return _select(kind, wants_image=wants_image)


def _select(kind: str, *, wants_image: bool) -> Selection:
    backend = BACKENDS.get(kind)
    if backend is None:
        problem = f"sandbox {kind} is not available in this version"
        if wants_image:
            return Selection(None, f"{problem}, and samples with an image need a sandbox that runs images")
        return Selection(None, f"{problem}; choose from auto, {', '.join(BACKENDS)}")
    if wants_image and not backend.takes_images:
        return Selection(None, f"sandbox {kind} cannot run images; choose another one for samples with an image")
    if reason := backend.unavailable():
        return Selection(None, reason)
    return Selection(backend)


def _best() -> Selection:
    isolated = _select("bubblewrap", wants_image=False)
    if isolated.backend:
        return isolated
    chosen = _select("local", wants_image=False)
    return Selection(chosen.backend, chosen.problem, f"commands run on this machine, not isolated: {isolated.problem}")
