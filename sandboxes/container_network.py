"""A listening socket in the network of a container: how a process of the host serves a container that has no network.

A container whose network is ``none`` has a loopback of its own and nothing else: no route, no name server, no
neighbour, nothing of the host. A process with rights over that network (root, or the user of a rootless engine) enters
it for a moment to listen there, and hands the socket out. That is this file too, as a program: who enters another
user's name space must be alone in its process.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

HELPER_SECONDS = 30
_CAP_SYS_ADMIN = 21


def listen_inside(pid: int, port: int) -> socket.socket:
    """Listen on the loopback of the network that a process of a container is in. Raises OSError. Blocks."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        words = [sys.executable, "-I", "-S", __file__, str(pid), str(port), str(theirs.fileno())]
        try:
            done = subprocess.run(
                words,
                pass_fds=[theirs.fileno()],
                env={},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=HELPER_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise OSError(str(error)) from error
        if done.returncode:
            raise OSError(done.stderr.strip().rpartition("\n")[2])
        _, (descriptor,), _, _ = socket.recv_fds(ours, 1, 1)
    return socket.socket(fileno=descriptor)


def problem(engine_host: str) -> str:
    """Say why the networks of an engine's containers cannot be entered from here; "" when they can, as far as known."""
    scheme, _, path = engine_host.partition("://")
    if scheme not in ("unix", "http+unix"):
        return f"it needs an engine on this machine, and {engine_host} may be on another one"
    try:
        rootless = Path(path).stat().st_uid == os.getuid() != 0
    except OSError:
        rootless = False
    if rootless or _may_enter():
        return ""
    return "it needs root's rights on this machine, or a rootless engine of your own"


def _may_enter() -> bool:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(capabilities and int(capabilities[1], 16) >> _CAP_SYS_ADMIN & 1)


def _enter(pid: int) -> None:
    """Enter the network of a process, through its user name space where that is another one. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    spaces = {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("user", "net")}
    own = {
        kind
        for kind, space in spaces.items()
        if os.path.samestat(os.fstat(space), Path(f"/proc/self/ns/{kind}").stat())
    }
    if "net" in own:
        raise OSError("the container has no network of its own")
    for kind in [kind for kind in spaces if kind not in own]:
        if libc.setns(spaces[kind], 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def main() -> None:
    """Be the process that enters: arguments are a pid, a port, and the socket that the listener is sent through."""
    pid, port, channel = map(int, sys.argv[1:])
    _enter(pid)
    with socket.create_server(("127.0.0.1", port)) as listener, socket.socket(fileno=channel) as out:
        socket.send_fds(out, [b"."], [listener.fileno()])


if __name__ == "__main__":
    main()
