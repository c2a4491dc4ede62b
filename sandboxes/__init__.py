"""Where commands run. ``BACKENDS`` is the whole list."""

from __future__ import annotations

from sandboxes.base import Backend
from sandboxes.bubblewrap import BubblewrapBackend
from sandboxes.local import LocalBackend

BACKENDS: dict[str, Backend] = {
    "bubblewrap": BubblewrapBackend(),
    "local": LocalBackend(),
}
