"""Keeps an MCP server that runs on this machine: no process of it outlives whoever started the keeper.

A program of its own, run as ``python -I -S mcp_keeper.py COMMAND ...``: it starts the command with its own stdin,
stdout and stderr, lets go of stdout, whose end is then the server's to make, and waits. When the other end of its stdin
is closed, also by the death of who held it, the server gets a moment to end by itself and is killed then, with every
process it has left, those in sessions of their own too: they become the keeper's children. It ends with the server's
exit code, 127 when there is no such command.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

GRACE_SECONDS = 0.5  # what a server gets to end once its stdin has ended
_KILL_SECONDS = 3.0
_NOT_FOUND = 127
_PR_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    """Run the command until it ends or nobody talks to it any more; return its exit code."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    try:
        server = subprocess.Popen(command, start_new_session=True)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return _NOT_FOUND
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        return _watch(server)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        _kill_all()


def _watch(server: subprocess.Popen[bytes]) -> int:
    ended = os.pidfd_open(server.pid)
    poller = select.poll()
    poller.register(0, 0)  # asked for nothing, it tells of the other end's closing alone
    poller.register(ended, select.POLLIN)
    if ended not in (fd for fd, _ in poller.poll()):
        poller.unregister(0)
        poller.poll(GRACE_SECONDS * 1000)
    code = server.poll()
    return 128 + signal.SIGKILL if code is None else code


def _kill_all() -> None:
    """Kill children until there are none: those of the killed come to us. Not every kernel tells of them."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    if not children.exists():
        return
    deadline = time.monotonic() + _KILL_SECONDS
    while (pids := [int(pid) for pid in children.read_text().split()]) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for _ in pids:
            with suppress(ChildProcessError):
                os.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
