"""Where commands run. ``BACKENDS`` is the whole list; ``select`` chooses from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sandboxes.base import Backend, BoundedBackend
from sandboxes.bubblewrap import BubblewrapBackend
from sandboxes.docker import DockerBackend
from sandboxes.local import LocalBackend
from sandboxes.modal import ModalBackend
from sandboxes.singularity import SingularityBackend

# Each name is a value of --sandbox. A new backend is one file here and one line.
BACKENDS: dict[str, Backend] = {
    "bubblewrap": BubblewrapBackend(),
    "docker": DockerBackend(),
    "local": LocalBackend(),
    "modal": ModalBackend(),
    "singularity": SingularityBackend(),
}

_SETTINGS = re.compile(r"TERMINAL_\w+")
_KEYS = {"modal": re.compile(r"MODAL_\w+"), "singularity": re.compile(r"(APPTAINER|SINGULARITY)_DOCKER_\w+")}


@dataclass(frozen=True)
class Selection:
    """The backend for a sample, or why there is none."""

    backend: Backend | None
    problem: str = ""  # why there is none, and what to do about it; "" when there is one
    warning: str = ""  # what the user should know about the choice that was made


def keys(kinds: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables these kinds need where sandboxes are opened, secrets among them; no sandbox sees them."""
    needed = [_SETTINGS, *(_KEYS[kind] for kind in kinds if kind in _KEYS)]
    return {name: value for name, value in environ.items() if any(names.fullmatch(name) for names in needed)}


def max_sandboxes(kinds: Iterable[str]) -> int:
    """Return how many sandboxes of these kinds this machine bears at once, for a whole run; 0 is any number.

    Raises SandboxError. May take a few seconds.
    """
    backends = [BACKENDS[kind] for kind in kinds if kind]
    return min((backend.max_sandboxes() for backend in backends if isinstance(backend, BoundedBackend)), default=0)


def select(kind: str, *, wants_image: bool) -> Selection:
    """Choose the backend for samples with, or without, an image; ``kind`` as in --sandbox. May take a few seconds."""
    if kind == "auto":
        return _select("docker", wants_image=True) if wants_image else _best()
    return _select(kind, wants_image=wants_image)


def _select(kind: str, *, wants_image: bool) -> Selection:
    backend = BACKENDS[kind]
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
