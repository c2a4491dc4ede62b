"""A process that has imported what a worker needs once, and forks workers from that.

Importing the openai client takes most of a second; forking takes milliseconds, and the workers share the memory. The
spawner has no threads and holds nothing of any run: it only forks and reaps. It ends when its control socket is closed,
that is, with the parent; its workers then see their own sockets close and end themselves.

Control socket (SOCK_SEQPACKET): the parent sends a worker's number with one file descriptor, the worker's socket. There
is no answer: a worker tells its pid itself, and its socket closes when it ends or was never born.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Protocol, TypeAlias

from rollout.secrecy import without_secrets

WORKER_EXIT_SECONDS = 3.5  # what workers get to close their sandboxes once the parent has let go of them
_ROOT = Path(__file__).resolve().parent.parent
_MESSAGE_BYTES = 64
_PR_SET_PDEATHSIG = 1
GC_ALLOCATIONS = 10_000  # between two collections: JSON makes many objects, and hardly a cycle
_OPEN_FILES = 16_384  # a rollout that is busy has about seven, and a worker has hundreds of rollouts


class Spawner(Protocol):
    """Where a pool gets its workers from. Never blocks, but for ``close``."""

    def fileno(self) -> int:
        """Return what becomes readable when the spawner is gone, for selectors."""
        ...

    def spawn(self, number: int, worker_socket: socket.socket) -> None:
        """Ask for a worker on this socket, which closes when there will be none. Raises OSError when it is gone.

        A frame ``waits`` before the worker's own first one says that there is no place for it yet.
        """
        ...

    def kill(self, pid: int) -> bool:
        """Kill a worker that is stuck, and whose socket is closed next; ``pid`` is 0 where it never spoke.

        False when that cannot be done: then it is the spawner that is stuck.
        """
        ...

    def close(self) -> None:
        """End it, after its workers, whose sockets must be closed by now; what does not end is killed."""
        ...


StartSpawner: TypeAlias = "Callable[[IO[bytes] | int], Spawner]"  # given the run's log file


@dataclass
class LocalSpawner:
    """The parent's hand on the spawner process."""

    control: socket.socket
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, log_file: IO[bytes] | int = subprocess.DEVNULL) -> LocalSpawner:
        """Start the process; it gets ready while the parent goes on.

        What it or a dying worker prints goes to ``log_file``. Variables that look like secrets do not reach it.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from rollout.spawner import main; main()"
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env=without_secrets(os.environ),
                start_new_session=True,  # Ctrl-C at a terminal reaches the parent alone
            )
        return cls(ours, process)

    def fileno(self) -> int:
        """Return the control socket, for selectors."""
        return self.control.fileno()

    def spawn(self, number: int, worker_socket: socket.socket) -> None:
        """Ask for a worker on this socket. Raises OSError when the spawner is gone."""
        socket.send_fds(self.control, [str(number).encode()], [worker_socket.fileno()])

    def kill(self, pid: int) -> bool:
        """Kill a worker. False when it was never forked, since the process itself is stuck."""
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pid > 0

    def close(self) -> None:
        """End the process, after its workers, whose sockets must be closed by now; what does not end is killed."""
        self.control.close()
        self.process.send_signal(signal.SIGCONT)  # one that somebody has stopped would not see it
        try:
            self.process.wait(timeout=WORKER_EXIT_SECONDS + 1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class _Nursery:
    """The spawner's side."""

    control: socket.socket
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def serve(self) -> None:
        self.selector.register(self.control, selectors.EVENT_READ)
        has_parent = True
        while has_parent:
            for key, _ in self.selector.select():
                if key.fileobj is not self.control:
                    self._reap(key.fd, key.data)
                elif request := self._receive():
                    self._fork(*request)
                else:
                    has_parent = False
        self.selector.unregister(self.control)
        self._see_workers_out()

    def _receive(self) -> tuple[int, int] | None:
        try:
            message, descriptors, _, _ = socket.recv_fds(self.control, _MESSAGE_BYTES, 1)
        except ConnectionError:
            return None
        return (int(message), descriptors[0]) if message else None

    def _see_workers_out(self) -> None:
        """Wait for the workers, which have lost their parent too; kill what takes too long."""
        deadline = time.monotonic() + WORKER_EXIT_SECONDS
        while self.selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in self.selector.select(left):
                self._reap(key.fd, key.data)
        for key in list(self.selector.get_map().values()):
            os.kill(key.data, signal.SIGKILL)
            self._reap(key.fd, key.data)

    def _fork(self, number: int, descriptor: int) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            sys.stderr.write(f"worker {number} cannot be forked: {error}\n")
            os.close(descriptor)  # by which the parent sees that there is none
            return
        if pid == 0:
            self.selector.close()
            self.control.close()
            _become_worker(descriptor)
        os.close(descriptor)
        self.selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)

    def _reap(self, pidfd: int, pid: int) -> None:
        self.selector.unregister(pidfd)
        os.close(pidfd)
        os.waitpid(pid, 0)


def _become_worker(descriptor: int) -> None:
    from rollout.worker import main as worker_main  # noqa: PLC0415 - already imported; here it is only looked up

    code = 1
    try:
        os.setsid()  # a worker and its sandboxes are no part of anybody's process group
        worker_main(socket.socket(fileno=descriptor))
        code = 0
    finally:
        # No finalizers of the spawner's may run in a fork of it.
        try:
            if error := sys.exception():
                traceback.print_exception(error)
            sys.stderr.flush()
        finally:
            os._exit(code)


def leave_it_to_the_parent(_number: int, _frame: FrameType | None) -> None:
    """Pass over what is sent to all processes of a run. Not ignored: commands in sandboxes would inherit that."""


def allow_open_files() -> None:
    """Let this process have as many open files as a worker needs, where the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> None:
    """Run the spawner on the control socket whose number is the last argument."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)  # to see the parent's end, though it is stopped
    faulthandler.enable()  # what crashes leaves a trace in the run's log
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave_it_to_the_parent)
    allow_open_files()
    gc.disable()  # saves a tenth of the imports; what they made is then kept out of every later collection
    import rollout.worker as _worker  # noqa: PLC0415 - this is the import that is paid once

    _worker.warm_up()
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 20, 20)
    gc.enable()
    with socket.socket(fileno=int(sys.argv[-1])) as control:
        _Nursery(control).serve()
