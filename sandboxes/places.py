"""Places for sandboxes: so many at once over all worker processes of a run, and no more.

The run's parent listens on a unix socket in a folder of its own and accepts a connection for each place. A connection
is a place from the byte that says so until it ends, and it ends with the process that holds it, however that dies. Who
holds one says when its sandbox is made: only so many are made at once. Who waits holds nothing that anybody else could
wait for: each rollout has one sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sandboxes import folders
from sandboxes.base import SandboxError

MADE_AT_ONCE = 8  # of a machine's sandboxes; engines get no faster with more, but slow to answer
_SOCKET = "places"
_GIVEN, _MADE = b"!", b"."


@contextmanager
def offered(number: int, made_at_once: int = 0) -> Iterator[Path]:
    """Offer places for a while, in a thread; yield the folder that ``PlaceQueue`` needs. Raises SandboxError.

    ``made_at_once``: of so many the sandboxes may be in the making; 0 is any number. Each place takes a descriptor of
    this process: where it may not have so many there are fewer places.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = number if descriptors == resource.RLIM_INFINITY else min(number, descriptors // 2)
    with folders.owned() as folder, socket.socket(socket.AF_UNIX) as listener:
        with _short(folder) as path:
            listener.bind(path)
        listener.listen()
        ours, theirs = socket.socketpair()
        door = _Door(listener, number, made_at_once or number)
        thread = threading.Thread(target=door.serve, args=(theirs,), name="places", daemon=True)
        with ours, theirs:
            thread.start()
            try:
                yield folder
            finally:
                ours.close()
                thread.join()


class _Door:
    """Lets in as many as there is room for; the others wait in the kernel's queue, in the order they came."""

    def __init__(self, listener: socket.socket, number: int, made_at_once: int) -> None:
        self._listener = listener
        self._number = number
        self._made_at_once = made_at_once
        self._taken: set[socket.socket] = set()
        self._making: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._is_open = False

    def serve(self, end: socket.socket) -> None:
        """Serve until there is something to read from ``end``."""
        self._selector.register(end, selectors.EVENT_READ)
        with self._selector:
            while True:
                self._open_or_shut()
                for ready in [key.fileobj for key, _ in self._selector.select()]:
                    if ready is end:
                        for place in self._taken:
                            place.close()
                        return
                    if ready is self._listener:
                        self._admit()
                    elif isinstance(ready, socket.socket):
                        self._hear(ready)

    def _open_or_shut(self) -> None:
        room = len(self._taken) < self._number and len(self._making) < self._made_at_once
        if room and not self._is_open:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif self._is_open and not room:
            self._selector.unregister(self._listener)
        self._is_open = room

    def _admit(self) -> None:
        place, _ = self._listener.accept()
        self._taken.add(place)
        self._making.add(place)
        self._selector.register(place, selectors.EVENT_READ)
        with contextlib.suppress(OSError):  # it does not wait any more, which is heard next
            place.send(_GIVEN)

    def _hear(self, place: socket.socket) -> None:
        self._making.discard(place)
        try:
            made = place.recv(1)
        except OSError:
            made = b""
        if not made:  # it has ended
            self._selector.unregister(place)
            self._taken.remove(place)
            place.close()


class Place:
    """A place that was given."""

    def __init__(self, connection: asyncio.StreamWriter) -> None:
        self._connection = connection

    def made(self) -> None:
        """Say that the sandbox is made: another one may be begun."""
        self._connection.write(_MADE)

    def give_back(self) -> None:
        """Give it back; may be done twice."""
        self._connection.close()


class PlaceQueue:
    """One worker's way to the places."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._turn = asyncio.Lock()  # in this worker; so few connections wait that the kernel's queue has room

    async def take(self) -> Place:
        """Wait for a place and return it. Raises SandboxError when the run is over."""
        async with self._turn:
            try:
                with _short(self._folder) as path:
                    reader, connection = await asyncio.open_unix_connection(path)
            except OSError as error:
                raise SandboxError(f"no place for a sandbox can be had: {error}") from error
            given = b""
            try:
                with contextlib.suppress(OSError):
                    given = await reader.read(1)
            finally:
                if not given:
                    connection.close()
        if not given:
            raise SandboxError("no place for a sandbox can be had: the run is over")
        return Place(connection)


@contextmanager
def _short(folder: Path) -> Iterator[str]:
    """Yield a path to a folder's socket that is short enough for one, however long the folder's own is."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{_SOCKET}"
    finally:
        os.close(descriptor)
