"""How many containers a run may have at once: what the user says, else what the machine's memory bears."""

from __future__ import annotations

import re
from pathlib import Path

USED_SHARE = 0.1  # of its memory limit that a container needs as a rule
USED_MB_WITHOUT_LIMIT = 512
MIN_USED_MB = 64  # with what the engine itself needs for it
KEPT_SHARE = 0.1  # of what is available now that is left to others
MOST = 256  # a bridge has a thousand ports, and engines get slow long before that


def capacity(available_mb: float, limit_mb: float) -> int:
    """Return how many containers with a memory limit (0 = none) so much memory bears, 1 at least."""
    used_mb = max(MIN_USED_MB, limit_mb * USED_SHARE) if limit_mb else USED_MB_WITHOUT_LIMIT
    return max(1, min(MOST, int(available_mb * (1 - KEPT_SHARE) / used_mb)))


def available_mb(engine_total_bytes: int) -> float:
    """Return the memory that containers may take; all an engine has where that is another machine's."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE))
    here_kib = int(found.get("MemTotal", 0))
    if engine_total_bytes and abs(engine_total_bytes / 1024 - here_kib) > here_kib * 0.01:
        return engine_total_bytes / (1 << 20)
    return int(found.get("MemAvailable", here_kib)) / 1024
