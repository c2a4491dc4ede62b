"""``flock`` as the Linux client of NFSv4 answers it. Made from its manual page: a real NFS mount was not tried."""

from __future__ import annotations

import errno
import fcntl
import os

_flock = fcntl.flock


def flock(handle: int, operation: int) -> None:
    """Lock as a byte range is locked: who only reads may share, and who only writes may only exclude."""
    mode = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE
    if (operation & fcntl.LOCK_EX and mode == os.O_RDONLY) or (operation & fcntl.LOCK_SH and mode == os.O_WRONLY):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    _flock(handle, operation)
