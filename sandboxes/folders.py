"""The private folders of sandboxes on this machine: where they are, whose they are, and how they go.

They live in one folder per user, mode 0700, under the temporary folder; what the worker and a sandbox's shell tell each
other goes through a folder of the same name in memory, where files are made and removed in a fraction of the time, and
no busy disk holds up a worker. A folder's name tells its owner: the worker's
pid, its start time, its pid namespace, a number. One whose owner is dead is swept, together with the processes that
were started for it, by whatever run comes next. A folder made in another pid namespace (a container that uses the same
temporary folder) is left alone: nothing here can tell whether its owner lives.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sandboxes import processes
from sandboxes.base import SandboxError

_NAME = re.compile(r"(?P<pid>\d+)-(?P<start>\d+)-(?P<namespace>\d+)-\d+")
_FEW = 64  # entries of a folder
_SMALL_BYTES = 1 << 20  # of a file
_MEMORY = Path("/dev/shm")  # noqa: S108 (the folder made there is checked to be ours)
_ROOM_BYTES = 256 << 20  # free there: what is written to a file in a sandbox passes through
_PAUSES = (0.0, 0.02, 0.1, 0.0)  # seconds after each try: who was killed may yet have made a file meanwhile
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Folder:
    """One sandbox's folder and what is in it."""

    root: Path
    channel: Path  # what the worker and the resident shell share; commands have no business there

    @property
    def home(self) -> Path:
        """HOME."""
        return self.root / "home"

    @property
    def tmp(self) -> Path:
        """TMPDIR."""
        return self.root / "tmp"

    @property
    def workspace(self) -> Path:
        """The first working folder."""
        return self.root / "workspace"

    def remove(self) -> None:
        """Remove it whatever it holds; what resists is left to the next sweep."""
        remove_tree(self.channel)
        remove_tree(self.root)

    def remove_if_small(self) -> bool:
        """Remove it when that takes no time worth mentioning; tell whether it is gone."""
        return _remove_if_small(self.channel) and _remove_if_small(self.root)


def base() -> Path:
    """Return this user's folder of sandboxes, made when it is not there. Raises SandboxError when it is not ours."""
    temporary = tempfile.gettempdir()
    if not re.fullmatch(r"[\w./+-]+", temporary):  # the path stands unquoted in shell text
        temporary = "/tmp"  # noqa: S108 (the folder below is checked to be ours)
    return _private(Path(temporary))


def _bases(room_bytes: int = 0) -> list[Path]:
    """Return this user's folders of sandboxes: the one on disk, and the one in memory where so much is free there."""
    on_disk = base()
    try:
        room = os.statvfs(_MEMORY)
        has_room = room.f_bavail * room.f_frsize >= room_bytes
        if has_room and on_disk.parent != _MEMORY and os.access(_MEMORY, os.W_OK):
            return [on_disk, _private(_MEMORY)]
    except (OSError, SandboxError):
        pass  # no such thing here, or somebody else has taken the name: all is on disk
    return [on_disk]


def _private(parent: Path) -> Path:
    path = parent / f"batch-runner-{os.getuid()}"
    try:
        if not os.path.lexists(path):
            path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise SandboxError(f"no folder for sandboxes: {error}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise SandboxError(f"{path} is not a private folder of this user; remove it")
    return path


@contextlib.contextmanager
def fresh() -> Iterator[Folder]:
    """Make a folder for a sandbox that is about to be built; it goes again when that fails. Raises SandboxError."""
    folder = _create()
    with contextlib.ExitStack() as undo:
        undo.callback(folder.remove)
        try:
            yield folder
        except OSError as error:
            raise SandboxError(f"the sandbox's folder cannot be used: {error}") from error
        undo.pop_all()


@contextlib.contextmanager
def owned() -> Iterator[Path]:
    """Have a private folder for a while; it is swept like a sandbox's when this process dies. Raises SandboxError."""
    folder = _create()
    try:
        yield folder.root
    finally:
        folder.remove()


def _create() -> Folder:
    me = processes.process(os.getpid())
    if me is None:
        raise SandboxError("/proc does not show this process; sandboxes need a mounted /proc")
    name = f"{me.pid}-{me.start_ticks}-{_namespace(me.pid)}-{next(_numbers)}"
    on_disk, *in_memory = _bases(_ROOM_BYTES)
    folder = Folder(on_disk / name, channel=in_memory[0] / name if in_memory else on_disk / name / "channel")
    try:
        for path in (folder.root, folder.home, folder.tmp, folder.workspace, folder.channel):
            path.mkdir(mode=0o700)
    except OSError as error:
        folder.remove()
        raise SandboxError(f"no folder for the sandbox: {error}") from error
    return folder


def remove(name: str) -> None:
    """Remove a sandbox's folder by its name."""
    for each in _bases():
        remove_tree(each / name)


def remove_tree(path: Path) -> None:
    """Remove a folder whatever the modes inside; what still resists is left to the next sweep."""
    for pause in _PAUSES:
        shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(path):
            return
        for folder, names, _ in os.walk(path):  # what is left is looked into once it may be
            for inner in (Path(folder, name) for name in names):
                if not inner.is_symlink():
                    with contextlib.suppress(OSError):
                        inner.chmod(0o700)
        time.sleep(pause)


def _remove_if_small(path: Path) -> bool:
    entries = 0
    for folder, _, files in os.walk(path):
        entries += len(files) + 1
        if entries > _FEW or any(os.lstat(f"{folder}/{name}").st_size > _SMALL_BYTES for name in files):
            return False
    shutil.rmtree(path, ignore_errors=True)
    return not os.path.lexists(path)


def sweep() -> list[str]:
    """End what dead owners left behind; returns the folders of the sandboxes that were."""
    where, here = base(), _namespace("self")
    swept: set[str] = set()
    for item in processes.own_processes():
        folder = Path(processes.marked_folder(item.pid))
        if folder.parent == where and _owner_is_dead(folder.name, here) and _namespace(item.pid) == here:
            processes.kill(item.pid)
            swept.add(folder.name)
    for path in (path for each in _bases() for path in each.iterdir()):
        if is_left_over(path.name):
            remove_tree(path)
            swept.add(path.name)
    return [f"folder {where / name}" for name in sorted(swept)]


def is_left_over(name: str) -> bool:
    """Tell whether this is the name of a sandbox's folder, there or gone already, whose owner is dead, and surely."""
    return _owner_is_dead(name, _namespace("self"))


def _owner_is_dead(name: str, namespace: int) -> bool:
    match = _NAME.fullmatch(name)
    if not match or int(match["namespace"]) != namespace:
        return False
    owner = processes.process(int(match["pid"]))
    return owner is None or owner.start_ticks != int(match["start"])


def _namespace(pid: int | str) -> int:
    """Return the number of a process's pid namespace, 0 where it cannot be told."""
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except OSError:
        return 0
