"""Systems that misbehave: small libraries that stand before the C library of one program."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_BEGIN = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
"""

SLOW_DISK = """
int fsync(int fd) {
    usleep(1000 * atoi(getenv("FSYNC_MILLISECONDS")));
    return ((int (*)(int)) dlsym(RTLD_NEXT, "fsync"))(fd);
}
"""

NO_LOCKS = """
int flock(int fd, int operation) { errno = ENOLCK; return -1; }
"""

# The wall clock is wrong by the size of a file; everything else that tells the time stays right.
JUMPING_CLOCK = """
int clock_gettime(clockid_t id, struct timespec *now) {
    int result = ((int (*)(clockid_t, struct timespec *)) dlsym(RTLD_NEXT, "clock_gettime"))(id, now);
    struct stat wrong;
    if (id == CLOCK_REALTIME && stat(getenv("CLOCK_WRONG_BY"), &wrong) == 0) now->tv_sec += wrong.st_size - 1000000000;
    return result;
}
"""


def preloaded(source: str, folder: Path) -> dict[str, str]:
    """The variables under which programs see a system like that."""
    if not shutil.which("cc"):
        pytest.skip("a C compiler is needed to build a system that misbehaves")
    (folder / "shim.c").write_text(_BEGIN + source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "shim.so", "shim.c", "-ldl"], cwd=folder, check=True)
    return {"LD_PRELOAD": str(folder / "shim.so")}
