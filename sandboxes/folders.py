"""The private folders of sandboxes on this machine: where they are, whose they are, and how they go.

They live in one folder per user, mode 0700, under the temporary folder. A folder's name tells its owner: the worker's
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sandboxes import processes
from sandboxes.base import SandboxError

_NAME = re.compile(r"(?P<pid>\d+)-(?P<start>\d+)-(?P<namespace>\d+)-\d+")
_FEW = 64  # entries of a folder
_SMALL_BYTES = 1 << 20  # of a file
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Folder:
    """One sandbox's folder and what is in it."""

    root: Path

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

    @property
    def channel(self) -> Path:
        """What the worker and the resident shell share; commands have no business there."""
        return self.root / "channel"


def base() -> Path:
    """Return this user's folder of sandboxes, made when it is not there. Raises SandboxError when it is not ours."""
    temporary = tempfile.gettempdir()
    if not re.fullmatch(r"[\w./+-]+", temporary):  # the path stands unquoted in shell text
        temporary = "/tmp"  # noqa: S108 (the folder below is checked to be ours)
    path = Path(temporary) / f"batch-runner-{os.getuid()}"
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
        undo.callback(remove_tree, folder.root)
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
        yield folder.channel
    finally:
        remove_tree(folder.root)


def _create() -> Folder:
    me = processes.process(os.getpid())
    if me is None:
        raise SandboxError("/proc does not show this process; sandboxes need a mounted /proc")
    folder = Folder(base() / f"{me.pid}-{me.start_ticks}-{_namespace(me.pid)}-{next(_numbers)}")
    try:
        for path in (folder.root, folder.home, folder.tmp, folder.workspace, folder.channel):
            path.mkdir(mode=0o700)
    except OSError as error:
        remove_tree(folder.root)
        raise SandboxError(f"no folder for the sandbox: {error}") from error
    return folder


def remove_tree(path: Path) -> None:
    """Remove a folder whatever the modes inside; what still resists is left to the next sweep."""
    shutil.rmtree(path, ignore_errors=True)
    for folder, names, _ in os.walk(path):  # what is left is looked into once it may be
        for inner in (Path(folder, name) for name in names):
            if not inner.is_symlink():
                with contextlib.suppress(OSError):
                    inner.chmod(0o700)
    shutil.rmtree(path, ignore_errors=True)


def remove_if_small(path: Path) -> bool:
    """Remove a folder when that takes no time worth mentioning; tell whether it is gone."""
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
    for path in where.iterdir():
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
