"""What of the host's environment a sandbox on this machine may see: a short list, and never a key."""

from __future__ import annotations

import os
import re

from sandboxes.base import SandboxError, SandboxSpec

INHERITED = re.compile(r"PATH|LANG|LC_[A-Z]+|TERM|TZ")
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # of a variable


def variables(spec: SandboxSpec, *, home: str, tmp: str) -> dict[str, str]:
    """Return the first variables of a sandbox. Raises SandboxError for a name that no shell can hold."""
    inherited = {name: value for name, value in os.environ.items() if INHERITED.fullmatch(name)}
    check_names(spec)
    return {"PATH": DEFAULT_PATH, **inherited, "HOME": home, "TMPDIR": tmp, **spec.env}


def check_names(spec: SandboxSpec) -> None:
    """Raise SandboxError for a name in ``spec.env`` that no shell can hold."""
    for name in spec.env:
        if not NAME.fullmatch(name):
            raise SandboxError(f"{name!r} cannot be the name of a variable")
