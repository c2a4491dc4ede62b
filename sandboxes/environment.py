"""What of the host's environment a sandbox on this machine may see: a short list, and never a key."""

from __future__ import annotations

import os
import re

from sandboxes.base import SandboxError, SandboxSpec

INHERITED = re.compile(r"PATH|LANG|LC_[A-Z]+|TERM|TZ")
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def variables(spec: SandboxSpec, *, home: str, tmp: str) -> dict[str, str]:
    """Return the first variables of a sandbox. Raises SandboxError for a name that no shell can hold."""
    inherited = {name: value for name, value in os.environ.items() if INHERITED.fullmatch(name)}
    for name in spec.env:
        if not _NAME.fullmatch(name):
            raise SandboxError(f"{name!r} cannot be the name of a variable")
    return {"PATH": DEFAULT_PATH, **inherited, "HOME": home, "TMPDIR": tmp, **spec.env}
