"""The program as a process that need not import first: forked from one that has, it runs the same file as ``__main__``.

Importing takes a second of a processor, and hundreds of tests start the program. All else is as always: arguments,
environment, folder, streams, signals and exit code are the process's own, and ``/proc`` shows its command. Not the same
are the environment that ``/proc`` shows, how much memory a process shares, and whose child it is.

    python -m tests.forked DESCRIPTOR ROOM

serves on this socket until it closes; ROOM is text as long as the longest command that can be shown.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import select
import selectors
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROOM = 1 << 14  # bytes of a command, its words' ends included
_NUMBER = struct.Struct("=i")
_MESSAGE_BYTES = 1 << 20
_ARG_START = 45  # of /proc/self/stat behind the name, see proc(5)
_PR_SET_MM, _PR_SET_MM_ARG_END = 35, 9


class Forked(subprocess.Popen[str]):
    """A program that is begun and waited for through the server; Popen does all else.

    So it goes by what Popen calls itself, which has been the same in every Python from 3.9 on.
    """

    def _execute_child(self, args: Sequence[str], *how: Any) -> None:
        cwd, environ = how[4:6]
        stdin, _, _, stdout, _, stderr = pipes = how[9:15]
        request = {"words": args, "cwd": str(cwd), "environ": environ}
        self._status, status = os.pipe()
        try:
            server, _ = _serving()
            socket.send_fds(server, [json.dumps(request).encode()], [stdin, stdout, stderr, status])
        finally:
            os.close(status)
        self.pid = self._number()
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _number(self) -> int:
        told = os.read(self._status, _NUMBER.size)
        assert told, "the server that programs are forked from is gone"
        return int(_NUMBER.unpack(told)[0])

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        ends = select.poll()
        ends.register(self._status)
        if not ends.poll(0 if wait_flags & os.WNOHANG else None):
            return 0, 0
        status = self._number()
        os.close(self._status)
        return self.pid, status

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


@cache
def _serving() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the server of this process; it ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        words = [sys.executable, "-m", "tests.forked", str(theirs.fileno()), " " * ROOM]
        return ours, subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])


def serve(control: socket.socket) -> tuple[Mapping[str, Any], list[int]]:
    """Fork for each request, and tell how what was begun has ended; returns only in what was forked."""
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is control:
                message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 4)
                if not message:
                    sys.exit()
                *streams, status = descriptors
                pid = os.fork()
                if not pid:
                    selector.close()  # later it would close what has got its number by then
                    control.close()
                    return json.loads(message), streams
                for descriptor in streams:
                    os.close(descriptor)
                os.write(status, _NUMBER.pack(pid))
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))
            else:
                pid, status = key.data
                selector.unregister(key.fd)
                os.close(key.fd)
                how = os.waitpid(pid, 0)[1]
                with suppress(BrokenPipeError):  # nobody waits for it any more
                    os.write(status, _NUMBER.pack(how))
                os.close(status)


def become(request: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Make this process what would have been started."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    os.closerange(len(streams), os.sysconf("SC_OPEN_MAX"))
    encoding = sys.stdout.encoding
    sys.stdin = open(0, encoding=encoding, closefd=False)  # noqa: SIM115 (as Python itself opens them)
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding, "backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.orig_argv[:] = request["words"]
    sys.argv[:] = request["words"][1:]
    shown = b"".join(os.fsencode(word) + b"\0" for word in request["words"])
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_ARG_START : _ARG_START + 2])
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)
    ctypes.CDLL(None).prctl(_PR_SET_MM, _PR_SET_MM_ARG_END, ctypes.c_ulong(start + len(shown)), 0, 0)  # where it may


def main(control: socket.socket) -> None:
    """Import, serve, and then be the program."""
    gc.disable()
    sys.path[0] = str(ROOT)
    import batch_runner  # noqa: F401, PLC0415
    import rollout.worker  # noqa: PLC0415

    rollout.worker.warm_up()
    del sys.modules["batch_runner"]
    gc.freeze()
    become(*serve(control))
    gc.enable()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
