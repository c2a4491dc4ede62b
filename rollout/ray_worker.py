"""What runs on a node of a Ray cluster: a worker like any other, on a socket that it opens to the driver's machine.

The process is Ray's, for this one task. Of the node's environment it keeps nothing that looks like a secret; the run's
keys come with the settings, over the socket, as they do everywhere.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, suppress
from functools import partial
from importlib.metadata import version
from typing import Any

from rollout.leftovers import sweep
from rollout.secrecy import for_workers, wipe_proc
from rollout.spawner import allow_open_files
from rollout.worker import main as worker_main
from sandboxes import max_sandboxes, places
from sandboxes.base import SandboxError

CONNECT_SECONDS = 10.0
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
_MUST_AGREE = ("openai", "pydantic", "aiohttp")


def versions() -> dict[str, str]:
    """Return what must be alike on all nodes."""
    return {name: version(name) for name in _MUST_AGREE}


def keep_alive(connection: socket.socket) -> None:
    """Let a connection end within half a minute when the other machine is gone without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def run(host: str, port: int, token: bytes, share: int) -> None:
    """Be a worker, one of up to ``share`` on this machine. Raises OSError when the driver does not listen."""
    wipe_proc()
    for name in os.environ.keys() - for_workers(os.environ).keys():
        del os.environ[name]
    allow_open_files()
    connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
    keep_alive(connection)
    connection.sendall(token)
    connection.settimeout(None)
    with ExitStack() as stack:
        worker_main(connection, partial(_on_this_machine, share=share, stack=stack))


def _on_this_machine(settings: dict[str, Any], *, share: int, stack: ExitStack) -> dict[str, Any]:
    """Return the run's settings with what holds here: how many sandboxes this worker may have at once."""
    os.environ.update(settings["sandbox_keys"])
    kinds = {settings["sandbox"], settings["image_sandbox"]}
    folder = ""
    with suppress(SandboxError):  # rollouts will meet with the same, and say so
        sweep(kinds)  # what workers that died here have left
        if bound := max_sandboxes(kinds):
            offered = places.offered(max(bound // share, 1), max(places.MADE_AT_ONCE // share, 1))
            folder = str(stack.enter_context(offered))
    return {**settings, "places": folder}
