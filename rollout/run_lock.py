"""One process a run folder: a lock that the kernel takes back when its owner dies, however it dies.

Where the file system has no locks (some network mounts), a file with the owner's pid stands in: an owner that is dead
is noticed on the same machine; on another machine it cannot be, and a person has to remove the file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rollout.files import RunDirError, explained, open_regular, open_to_read

_LOCK_NAME = ".lock"
_PID_NAME = ".pid"
LOCK_FILES = (_LOCK_NAME, _PID_NAME)
_OWNER_BYTES = 400  # of a pid file: a pid, a host, a time
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass
class RunLock:
    """Held from ``acquire`` to ``release``."""

    folder: Path
    warning: str = ""  # set where a pid file stands in for a lock
    _handle: int = -1

    @classmethod
    def acquire(cls, folder: Path) -> RunLock:
        """Take the lock at once or not at all. Raises RunDirError that names the process that holds it."""
        lock = cls(folder)
        path = folder / _LOCK_NAME
        with explained(f"lock {folder}"):
            handle = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            try:
                if _lock_works(handle):
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, str(os.getpid()).encode(), 0)
                    lock._handle, handle = handle, -1
            except BlockingIOError:
                raise _taken(folder, os.pread(handle, 32, 0).decode(errors="replace")) from None
            finally:
                if handle >= 0:
                    os.close(handle)
            if lock._handle < 0:
                _claim_pid_file(folder)
                lock.warning = f"locks do not work on the file system of {folder}; {_PID_NAME} guards it instead"
        return lock

    @staticmethod
    def held(folder: Path) -> bool:
        """Tell whether a process is known to hold the kernel's lock, without touching anything.

        Where that cannot be known, ``acquire`` decides. Raises IrregularFileError.
        """
        try:
            handle = open_regular(folder / _LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            # A shared lock: an exclusive one takes a descriptor that may write, on NFS.
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(handle)
        return False

    def release(self) -> None:
        """Give the folder free; calling it twice does no harm."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        elif self.warning:
            (self.folder / _PID_NAME).unlink(missing_ok=True)
            self.warning = ""


def _lock_works(handle: int) -> bool:
    """Lock an open file; False where locks do not work. Raises BlockingIOError when another process has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _taken(folder: Path, owner: str) -> RunDirError:
    return RunDirError(f"another process (pid {owner.strip() or 'unknown'}) is running this run in {folder}")


def _claim_pid_file(folder: Path) -> None:
    path = folder / _PID_NAME
    while True:
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            _remove_if_dead(path)
            continue
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {socket.gethostname()} {_start_of(os.getpid())}")
        return


def _remove_if_dead(path: Path) -> None:
    """Remove the pid file of a dead process. Raises RunDirError when its owner lives, or may live."""
    with suppress(FileNotFoundError):
        with open_to_read(path) as file:
            owner = file.read(_OWNER_BYTES).decode(errors="replace")
        pid, _, rest = owner.partition(" ")
        host, _, start = rest.rpartition(" ")
        if not pid.isdecimal() or host != socket.gethostname():
            raise RunDirError(f"{path} says that a process ({owner or 'unknown'}) runs this run; if not so, remove it")
        if start == _start_of(int(pid)) != "":
            raise _taken(path.parent, pid)
        path.unlink()


def _start_of(pid: int) -> str:
    """Return when a process started, which tells it from a later one with the same pid; "" when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[19]
    except OSError:  # no such process, or a system without /proc
        pass
    try:
        os.kill(pid, 0)
    except PermissionError:
        return "alive"
    except OSError:
        return ""
    return "alive"
