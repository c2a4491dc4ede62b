"""A process that has imported what a worker needs once, and forks workers from that.

Importing the openai client takes most of a second; forking takes milliseconds, and the workers share the memory. The
spawner has no threads and holds nothing of any run: it only forks and reaps. It ends when its control socket is closed,
that is, with the parent; its workers then see their own sockets close and end themselves.

The command forks its spawner from itself, before it has threads or files or has read anything: what both import is then
imported once. Anybody else's process may be in any state, so there the spawner is a program of its own; so is one that
takes the place of another.

Control socket (SOCK_SEQPACKET): the parent sends a worker's number with one file descriptor, the worker's socket. There
is no answer: a worker tells its pid itself, and its socket closes when it ends or was never born. To a forked spawner
the run's log file is sent first, and until then it sleeps.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from types import FrameType
from typing import IO, Protocol, TypeAlias

from rollout.secrecy import for_workers, wipe_proc

WORKER_EXIT_SECONDS = 3.5  # what workers get to close their sandboxes once the parent has let go of them
_ROOT = Path(__file__).resolve().parent.parent
_MESSAGE_BYTES = 64
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_SPAWNER_NAME, _WORKER_NAME = b"rollout.spawner", b"rollout.worker"  # for ps and top; the kernel takes 15 bytes
_libc = ctypes.CDLL(None)
_LEFT_TO_THE_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GC_ALLOCATIONS = 10_000  # between two collections: JSON makes many objects, and hardly a cycle
_OPEN_FILES = 16_384  # a rollout that is busy has about seven, and a worker has hundreds of rollouts


class Spawner(Protocol):
    """Where a pool gets its workers from. Never blocks, but for ``close``.

    One that is stuck is asked no more, but not closed: healthy workers live on that are its to see out.
    """

    def fileno(self) -> int:
        """Return what becomes readable when the spawner is gone, for selectors."""
        ...

    def spawn(self, number: int, worker_socket: socket.socket) -> None:
        """Ask for a worker on this socket, which closes when there will be none. Raises OSError when that is refused.

        A frame ``waits`` before the worker's own first one says that there is no place for it yet.
        """
        ...

    def kill(self, pid: int) -> bool:
        """Kill a worker that is stuck, and whose socket is closed next; ``pid`` is 0 where it never spoke.

        False when that cannot be done: then it is the spawner that is stuck.
        """
        ...

    def release(self) -> None:
        """Let it end, after its workers, whose sockets must be closed by now. Does not wait for that."""
        ...

    def close(self) -> None:
        """Release it and see its end; what does not end in time is killed."""
        ...


StartSpawner: TypeAlias = "Callable[[IO[bytes] | int], Spawner]"  # given the run's log file


class _Child(Protocol):
    """The parent's hand on a process of its own; subprocess.Popen is one."""

    def send_signal(self, sig: int) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class _Forked:
    """A process that was forked from this one."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pidfd = os.pidfd_open(pid)

    def send_signal(self, sig: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, sig)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, once. Raises subprocess.TimeoutExpired."""
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("the spawner", timeout or 0)
        os.close(self._pidfd)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass
class LocalSpawner:
    """The parent's hand on the spawner process."""

    control: socket.socket
    process: _Child
    _deadline: float = inf

    @classmethod
    def start(cls, log_file: IO[bytes] | int = subprocess.DEVNULL) -> LocalSpawner:
        """Start the process; it gets ready while the parent goes on.

        What it or a dying worker prints goes to ``log_file``. Variables that look like secrets do not reach it.
        """
        ours, theirs = control_sockets()
        code = (
            f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from rollout.spawner import main; main({theirs.fileno()})"
        )
        with theirs, ExitStack() as on_error:
            on_error.callback(ours.close)
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env=for_workers(os.environ),
                start_new_session=True,  # Ctrl-C at a terminal reaches the parent alone
            )
            on_error.pop_all()
        return cls(ours, process)

    def fileno(self) -> int:
        """Return the control socket, for selectors."""
        return self.control.fileno()

    def spawn(self, number: int, worker_socket: socket.socket) -> None:
        """Ask for a worker on this socket. Raises OSError when the spawner is gone, or too much is asked of it."""
        socket.send_fds(self.control, [str(number).encode()], [worker_socket.fileno()])

    def kill(self, pid: int) -> bool:
        """Kill a worker. False when it was never forked, since the process itself is stuck."""
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pid > 0

    def release(self) -> None:
        """Let the process end, after its workers, whose sockets must be closed by now."""
        self.control.close()
        self.process.send_signal(signal.SIGCONT)  # one that somebody has stopped would not see it
        self._deadline = min(self._deadline, released_until())

    def close(self) -> None:
        """Release the process and see its end; what does not end in time is killed."""
        self.release()
        see_end(self.process, self._deadline)


def control_sockets() -> tuple[socket.socket, socket.socket]:
    """Make the parent's end, which never blocks, and the child's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def released_until() -> float:
    """Return when a spawner that is released now must have ended (monotonic seconds)."""
    return time.monotonic() + WORKER_EXIT_SECONDS + 1


def see_end(process: _Child, deadline: float) -> None:
    """Wait for the end of a process; kill it when it takes longer."""
    try:
        process.wait(timeout=max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def forked_early() -> Iterator[StartSpawner]:
    """Fork a spawner from this process now, and have what starts it. One that is never started ends with the context.

    Only for a process without threads that holds nothing of a run yet, and reads nothing more from its stdin.
    """
    sleeping: list[LocalSpawner] = []
    with suppress(OSError):  # then it is told when a spawner is really wanted
        sleeping.append(_fork_spawner())

    def start(log_file: IO[bytes] | int = subprocess.DEVNULL) -> LocalSpawner:
        if sleeping:
            spawner = sleeping.pop()
            try:
                _send_log(spawner.control, log_file)
            except OSError:  # it has died in its sleep
                spawner.close()
            else:
                return spawner
        return LocalSpawner.start(log_file)

    try:
        yield start
    finally:
        for spawner in sleeping:
            spawner.close()


def _fork_spawner() -> LocalSpawner:
    ours, theirs = control_sockets()
    with theirs:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_PARENT)  # our handlers are not for the child
        try:
            pid = os.fork()
            if pid == 0:
                _become_spawner(theirs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return LocalSpawner(ours, _Forked(pid))


def _become_spawner(control: socket.socket) -> None:
    """Be in the fork what a program of its own would be: no secrets, no open files, no terminal."""
    with _no_way_back():
        os.setsid()  # Ctrl-C at a terminal reaches the parent alone
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        os.dup2(control.fileno(), 3, inheritable=False)
        os.closerange(4, max(os.sysconf("SC_OPEN_MAX"), _OPEN_FILES))  # what a shell gave the program is not for it
        for name in os.environ.keys() - for_workers(os.environ).keys():
            del os.environ[name]
        main(3, asleep=True)


def _send_log(control: socket.socket, log_file: IO[bytes] | int) -> None:
    with open(os.devnull, "r+b") as nothing:  # noqa: PTH123 (a device)
        log = nothing if isinstance(log_file, int) else log_file
        socket.send_fds(control, [b"log"], [nothing.fileno(), log.fileno(), log.fileno()])


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

    def _receive(self) -> tuple[int, list[int]] | None:
        try:
            message, descriptors, _, _ = socket.recv_fds(self.control, _MESSAGE_BYTES, 1)
        except ConnectionError:
            return None
        return (int(message), descriptors) if message else None

    def _see_workers_out(self) -> None:
        """Wait for the workers, which have lost their parent too; kill what takes too long."""
        deadline = time.monotonic() + WORKER_EXIT_SECONDS
        while self.selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in self.selector.select(left):
                self._reap(key.fd, key.data)
        for key in list(self.selector.get_map().values()):
            os.kill(key.data, signal.SIGKILL)
            self._reap(key.fd, key.data)

    def _fork(self, number: int, descriptors: list[int]) -> None:
        if not descriptors:  # the kernel has closed it, by which the parent sees that there is no worker
            sys.stderr.write(f"worker {number} cannot be forked: too many open files\n")
            return
        (descriptor,) = descriptors
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

    with _no_way_back():
        _libc.prctl(_PR_SET_NAME, _WORKER_NAME, 0, 0, 0)
        os.setsid()  # a worker and its sandboxes are no part of anybody's process group
        worker_main(socket.socket(fileno=descriptor))


@contextmanager
def _no_way_back() -> Iterator[None]:
    """End the process with the block, for it is a fork: no finalizer of its parent's may run in it."""
    code = 1
    try:
        yield
        code = 0
    finally:
        try:
            if error := sys.exception():
                traceback.print_exception(error)
            sys.stderr.flush()
        finally:
            os._exit(code)


def leave_it_to_the_parent(_number: int, _frame: FrameType | None) -> None:
    """Pass over what is sent to all processes of a run. Not ignored: commands in sandboxes would inherit that."""


def allow_open_files() -> None:
    """Let this process have as many open files as a worker, or a parent of many, needs, where the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main(descriptor: int, *, asleep: bool = False) -> None:
    """Run the spawner on the control socket of this number; ``asleep``: the run's log file comes first."""
    wipe_proc()  # the password of a proxy
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)  # to see the parent's end, though it is stopped
    _libc.prctl(_PR_SET_NAME, _SPAWNER_NAME, 0, 0, 0)
    for number in _LEFT_TO_THE_PARENT:
        signal.signal(number, leave_it_to_the_parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_THE_PARENT)
    with socket.socket(fileno=descriptor) as control:
        if asleep and not _wake(control):
            return
        faulthandler.enable()  # what crashes leaves a trace in the run's log
        allow_open_files()
        gc.disable()  # saves a tenth of the imports; what they made is then kept out of every later collection
        import rollout.worker as _worker  # noqa: PLC0415 - this is the import that is paid once

        _worker.warm_up()
        gc.freeze()
        gc.set_threshold(GC_ALLOCATIONS, 20, 20)
        gc.enable()
        _Nursery(control).serve()


def _wake(control: socket.socket) -> bool:
    """Wait for what becomes stdin, stdout and stderr; False when nothing was wanted."""
    message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 3)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    return bool(message)
