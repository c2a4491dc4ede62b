"""The child's side of an endpoint's process: what it tells the run that started it, and how it ends with it.

The child writes one JSON object a line to its stdout, ``{"progress": text}`` any number of times, then
``{"ready": {"base_url": …, "model": …}}`` or ``{"error": text}``, and nothing more. It ends when its stdin does,
whatever it is doing then: a run that was killed leaves no endpoint behind. What else is printed to stdout goes to
stderr, the log.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

USER_ERROR_EXIT_CODE = 2


class EndpointError(ValueError):
    """The endpoint cannot be had; the message is one line for the user, and says what to do."""


class Parent:
    """The run, as the child sees it."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", errors="replace")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def progress(self, text: str) -> None:
        """Say what is being waited for."""
        self._tell({"progress": text})

    def ready(self, base_url: str, model: str) -> None:
        """Say where requests go, and for which model; an empty model leaves the user's choice."""
        self._tell({"ready": {"base_url": base_url, "model": model}})

    def failed(self, message: str) -> None:
        """Say why there will be no endpoint."""
        self._tell({"error": message})

    def follow(self) -> None:
        """From now on, end when stdin does."""
        threading.Thread(target=self._end_with_stdin, name="parent", daemon=True).start()

    def _tell(self, line: dict[str, Any]) -> None:
        self._out.write(json.dumps(line) + "\n")
        self._out.flush()

    def _end_with_stdin(self) -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(0)


def run_child(serve: Callable[[Parent], None]) -> int:
    """Run an endpoint's process and return its exit code; ``serve`` blocks. Ctrl-C is the run's business, not ours."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = Parent()
    parent.follow()
    try:
        serve(parent)
    except EndpointError as error:
        parent.failed(str(error))
        return USER_ERROR_EXIT_CODE
    return 0
