"""How busy this machine is, as the kernel tells it; where it tells nothing, all is well."""

from __future__ import annotations

import os
from pathlib import Path

from rollout.controller import Host

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def look() -> Host:
    """Return the share of memory that is free (of the cgroup's limit where that is tighter), and the load."""
    return Host(free_memory=min(_free_of_machine(), _free_of_cgroup()), load=_load())


def _free_of_machine() -> float:
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines())
        return int(lines["MemAvailable"].split()[0]) / int(lines["MemTotal"].split()[0])
    except (OSError, KeyError, ValueError, ZeroDivisionError):
        return 1.0


def _free_of_cgroup() -> float:
    """Return what is left below memory.max of cgroup v2, file caches counted as free."""
    try:
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))  # "max" is no number: no limit
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        counts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        return max(limit - used + int(counts.get("inactive_file", 0)), 0) / limit
    except (OSError, ValueError, ZeroDivisionError):
        return 1.0


def _load() -> float:
    try:
        return os.getloadavg()[0] / len(os.sched_getaffinity(0))
    except OSError:
        return 0.0
