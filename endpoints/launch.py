"""Starting the models that come with the program: a child process per run, found by the words of ``--base_url``.

``scripted:FILE`` answers from prepared replies, ``embedded`` is a small real model; any other base_url is somebody
else's endpoint and none of this file's business. Nothing heavy is imported here: the child does that, and ends when
this process does (see child.py).
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from endpoints.child import EndpointError
from endpoints.weights import check_embedded, model_name

__all__ = ["Endpoint", "EndpointError", "check_endpoint", "listens_here", "start_endpoint"]

SCRIPTED = "scripted:"
EMBEDDED = "embedded"
EMBEDDED_CONCURRENCY = 2  # more rollouts at once only wait for the same cores
_START_SECONDS = {"scripted": 60.0, "embedded": 900.0}  # the first start of embedded joins and checks 1.1 GB
_END_SECONDS = 5.0
_ROOT = Path(__file__).resolve().parent.parent
_CHILD = """import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
name = sys.argv.pop(1)
runpy.run_module(name, run_name="__main__", alter_sys=True)
"""


@dataclass
class Endpoint:
    """An endpoint of our own that is ready. Close it; it also ends by itself when this process does."""

    base_url: str
    max_in_flight: int | None  # rollouts at once that it is any use to start; None: any number
    process: subprocess.Popen[bytes]

    def death(self) -> str:
        """Say that it has died, in one line; "" while it lives."""
        code = self.process.poll()
        return "" if code is None else f"the endpoint's process has died (exit code {code}); the run's log may say why"

    def close(self) -> None:
        """End its process."""
        _end(self.process)


def check_endpoint(base_url: str, model: str) -> str:
    """Return the name of the model that will answer, after checking that our endpoint can be started.

    Returns "" when the endpoint is not one of ours. Raises EndpointError.
    """
    if base_url.startswith(SCRIPTED):
        from endpoints.script import ScriptError, load_script  # noqa: PLC0415 - its many models take a while to build

        try:
            load_script(base_url.removeprefix(SCRIPTED))
        except ScriptError as error:
            raise EndpointError(str(error)) from None
        return model
    if base_url == EMBEDDED:
        check_embedded(model)
        return model_name(model)
    return ""


def listens_here(base_url: str) -> bool:
    """Tell whether only this machine reaches the endpoint: one of ours, or somebody else's on loopback."""
    if base_url.startswith(SCRIPTED) or base_url == EMBEDDED:
        return True
    host = urlsplit(base_url).hostname or ""
    return host == "localhost" or host.startswith("127.") or host == "::1"


def start_endpoint(
    base_url: str, model: str, log_path: Path, tell: Callable[[str], None], environ: Mapping[str, str] = os.environ
) -> Endpoint | None:
    """Start the endpoint if it is one of ours, else return None; ``tell`` gets lines about what is waited for.

    What the process itself prints goes to ``log_path``; ``environ`` is its environment. Raises EndpointError.
    """
    if base_url.startswith(SCRIPTED):
        words = ["endpoints.scripted", base_url.removeprefix(SCRIPTED)]
    elif base_url == EMBEDDED:
        words = ["endpoints.embedded", model]
    else:
        return None
    kind = words[0].partition(".")[2]
    with log_path.open("ab", buffering=0) as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD, str(_ROOT), *words],  # -P: a json.py in the user's folder is not ours
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=dict(environ),
            start_new_session=True,  # Ctrl-C is the run's business
        )
    with ExitStack() as on_error:
        on_error.callback(_end, process)
        ready = _wait_ready(process, kind, tell)
        on_error.pop_all()
    return Endpoint(ready["base_url"], EMBEDDED_CONCURRENCY if kind == EMBEDDED else None, process)


def _wait_ready(process: subprocess.Popen[bytes], kind: str, tell: Callable[[str], None]) -> dict[str, str]:
    for line in _lines(process.stdout, _START_SECONDS[kind]):
        if "ready" in line:
            ready: dict[str, str] = line["ready"]
            return ready
        if "error" in line:
            raise EndpointError(line["error"])
        tell(line["progress"])
    raise EndpointError(f"the {kind} endpoint did not start; the run's log says why")


def _lines(pipe: IO[bytes] | None, limit_seconds: float) -> Iterator[dict[str, Any]]:
    """Yield what the child says, until it ends or the time is over."""
    if pipe is None:
        return
    deadline = time.monotonic() + limit_seconds
    data = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while selector.select(max(deadline - time.monotonic(), 0)):
            chunk = os.read(pipe.fileno(), 65_536)
            if not chunk:
                return
            *whole, data = (data + chunk).split(b"\n")
            for line in whole:
                yield json.loads(line)


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe:
            with suppress(OSError):
                pipe.close()
    try:
        process.wait(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
