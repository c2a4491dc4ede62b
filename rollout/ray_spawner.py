"""Workers on a Ray cluster, as the parent has them: a child process that is Ray's driver and bridges their sockets.

The pool speaks to a worker over a local socket, wherever that runs; the child (ray_driver.py) passes the bytes on to
the node and back. What Ray does to its driver's process, its signal handlers, its threads, its end when the cluster is
gone, happens to the child: the parent sees a spawner that died, and starts another. No key reaches the child or a
process of Ray's but through those sockets.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import IO

from rollout.preflight import PreflightError
from rollout.secrecy import for_workers
from rollout.spawner import control_sockets, released_until, see_end

JOIN_SECONDS = 30  # that a cluster gets to answer
BEGIN_SECONDS = 90  # that a Ray instance of our own gets to start
_ROOT = Path(__file__).resolve().parent.parent


@dataclass
class RaySpawner:
    """The parent's hand on the child. Control socket as in spawner.py; its standard output is one line, see Ready."""

    control: socket.socket
    process: subprocess.Popen[bytes]
    _deadline: float = inf

    @classmethod
    def start(cls, address: str, num_workers: int, log_file: IO[bytes] | int = subprocess.DEVNULL) -> RaySpawner:
        """Start the process, which joins the cluster while the parent goes on; "" is an instance of its own."""
        ours, theirs = control_sockets()
        code = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from rollout.ray_driver import main; main()"
        seconds = JOIN_SECONDS if address else BEGIN_SECONDS
        words = [str(theirs.fileno()), str(num_workers), str(seconds), address]
        with theirs, ExitStack() as on_error:
            on_error.callback(ours.close)
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, *words],  # -P: a folder named ray where the user stands is not Ray
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env=_environment(address),
                start_new_session=True,  # Ctrl-C at a terminal reaches the parent alone
            )
            on_error.pop_all()
        return cls(ours, process)

    def answer(self) -> dict[str, str | list[str]]:
        """Wait for its line; {} when it ended without one."""
        pipe = self.process.stdout
        if pipe is None:
            return {}
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            # It ends by itself in time; the rest is for a machine that is slow to end it.
            line = pipe.readline() if selector.select(BEGIN_SECONDS + 5) else b""
        answer: dict[str, str | list[str]] = json.loads(line or b"{}")
        return answer

    def log_to(self, log_file: IO[bytes] | int) -> None:
        """Let it write where the run's log is, now that there is one."""
        if not isinstance(log_file, int):
            socket.send_fds(self.control, [b"log"], [log_file.fileno()])

    def fileno(self) -> int:
        """Return the control socket, for selectors."""
        return self.control.fileno()

    def spawn(self, number: int, worker_socket: socket.socket) -> None:
        """Ask for a worker on this socket. Raises OSError when the child is gone, or too much is asked of it."""
        socket.send_fds(self.control, [str(number).encode()], [worker_socket.fileno()])

    def kill(self, _pid: int) -> bool:
        """Do nothing: the child has Ray kill the worker that does not end when its socket is closed."""
        return True

    def release(self) -> None:
        """Let the child end and, with it, all its processes on the cluster, and the instance that is its own."""
        self.control.close()
        self._deadline = min(self._deadline, released_until())

    def close(self) -> None:
        """Release the child and see its end."""
        self.release()
        see_end(self.process, self._deadline)
        if self.process.stdout:
            self.process.stdout.close()


@dataclass
class RayCluster:
    """A cluster that has answered."""

    address: str
    num_workers: int
    first: RaySpawner | None  # that has asked, until the pool takes it

    def start_spawner(self, log_file: IO[bytes] | int) -> RaySpawner:
        """Give the pool a spawner; one that must be replaced joins the cluster anew, while the pool goes on."""
        spawner, self.first = self.first, None
        if spawner is None:
            return RaySpawner.start(self.address, self.num_workers, log_file)
        spawner.log_to(log_file)
        return spawner

    def close(self) -> None:
        """Leave the cluster, when no pool has taken that over."""
        if self.first:
            self.first.close()


@contextmanager
def ray_cluster(address: str | None, num_workers: int, *, loopback: bool) -> Iterator[RayCluster]:
    """Join a cluster, for a run whose endpoint listens on this machine alone when ``loopback``. Raises PreflightError.

    Without an address it is that of RAY_ADDRESS; without that, an instance on this machine for as long as the run.
    """
    where = address or os.environ.get("RAY_ADDRESS", "").strip()
    if "://" in where:
        raise PreflightError(f"{where} is no host:port of a Ray cluster's head; Ray Client addresses will not do")
    with ExitStack() as stack:
        spawner = RaySpawner.start(where, num_workers)
        cluster = RayCluster(where, num_workers, spawner)
        stack.callback(cluster.close)
        answer = spawner.answer()
        if not answer:
            silent = f"no Ray cluster answers at {where} within {JOIN_SECONDS} seconds"
            raise PreflightError(silent if where else f"Ray does not start here within {BEGIN_SECONDS} seconds")
        if "error" in answer:
            raise PreflightError(f"Ray{f' at {where}' if where else ''}: {answer['error']}")
        if loopback and answer["others"]:
            others = ", ".join(answer["others"][:3])
            told = "the endpoint listens on this machine's loopback, where the cluster's other machines"
            raise PreflightError(f"{told} ({others}) do not reach it; use --base_url with an address that they reach")
        yield cluster


def _environment(address: str) -> dict[str, str]:
    """Return the child's environment, which an instance of its own inherits: no key, but what Ray itself is told."""
    told = {name: value for name, value in os.environ.items() if name.startswith("RAY_") and name != "RAY_ADDRESS"}
    own = {"RAY_USAGE_STATS_ENABLED": "0"}
    if not address:  # nobody else is to use it
        own |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {**for_workers(os.environ), **told, **own}
