"""Keeping keys out of sight: of child processes, and of whoever reads ``/proc`` of this one.

A sandbox of kind ``local`` runs as the same user as this program and can read ``/proc/<pid>/environ`` and ``cmdline``;
so the secrets are wiped there, where the kernel shows them, while ``os.environ`` and ``sys.argv`` keep theirs. Memory
itself stays readable to root and, where the kernel lets a user trace their own processes, to that user.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
MASK = b"***"
_SECRET_CHARS = 12
_KEY_CHARS = 8
_SECRET_FLAG = b"--api_key"
# Fields of /proc/self/stat after the command name (see proc(5)): 48 arg_start, 49 arg_end, 50 env_start, 51 env_end.
_ARG_START = 48 - 3


def secret_names(environ: Iterable[str]) -> list[str]:
    """Return the variables whose name says that they hold a secret."""
    return [name for name in environ if _SECRET_NAME.search(name)]


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that needs no key."""
    hidden = set(secret_names(environ))
    return {name: value for name, value in environ.items() if name not in hidden}


def known_secrets(environ: Mapping[str, str], keys: Iterable[str]) -> list[str]:
    """Return the texts that must be in no row: ``keys``, and what the environment holds under a secret's name.

    Short ones are left out, for they would be found in ordinary text.
    """
    held = [environ[name] for name in secret_names(environ) if len(environ[name]) >= _SECRET_CHARS]
    return sorted({*held, *(key for key in keys if len(key) >= _KEY_CHARS)}, key=len, reverse=True)


def hidden(line: bytes, secrets: Iterable[str]) -> bytes:
    """Return a JSON line without these secrets, whoever said them."""
    for secret in secrets:
        line = line.replace(json.dumps(secret, ensure_ascii=False)[1:-1].encode(), MASK)
    return line


def wipe_proc() -> None:
    """Overwrite the values of secret variables and of ``--api_key`` in what ``/proc/self`` shows.

    Does nothing where there is no such file system.
    """
    try:
        stat = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return
    fields = stat.rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = map(int, fields[_ARG_START : _ARG_START + 4])
    _wipe(env_start, env_end, lambda entry, _: bool(_SECRET_NAME.search(entry.partition(b"=")[0].decode("latin-1"))))
    _wipe(arg_start, arg_end, lambda entry, before: (entry if b"=" in entry else before).startswith(_SECRET_FLAG))


def _wipe(start: int, end: int, is_secret: Callable[[bytes, bytes], bool]) -> None:
    if end <= start:
        return
    offset, before = start, b""
    for entry in ctypes.string_at(start, end - start).split(b"\0"):
        if is_secret(entry, before):
            name = entry.find(b"=") + 1
            ctypes.memset(offset + name, ord("x"), len(entry) - name)
        offset += len(entry) + 1
        before = entry
