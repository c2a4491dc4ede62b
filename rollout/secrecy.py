"""Keeping keys out of sight: of child processes, and of whoever reads ``/proc`` of this one.

A sandbox of kind ``local`` runs as the same user as this program and can read ``/proc/<pid>/environ`` and ``cmdline``;
so the secrets are wiped there, where the kernel shows them, while ``os.environ`` and ``sys.argv`` keep theirs. Memory
itself stays readable to root and, where the kernel lets a user trace their own processes, to that user.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.secret_names import is_plain, names_secret, secrets_in_address

_MASK = "***"
# What people give to a local server that wants any key: to mask these words would spoil texts and keep nothing secret.
_NO_SECRETS = frozenset({"anything", "whatever", "placeholder", "not-needed", "not_needed", "no-key-required"})
_JSON_IN_JSON = 2
_SECRET_CHARS = 12
_KEY_CHARS = 8
_SECRET_FLAG = b"__api_key"
# Fields of /proc/self/stat after the command name (see proc(5)): 48 arg_start, 49 arg_end, 50 env_start, 51 env_end.
_ARG_START = 48 - 3


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that needs no key."""
    return {name: value for name, value in environ.items() if not _may_hold_secret(name, value)}


def for_workers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for workers: no key, but the way out, though there be a password in it."""
    proxies = {name: value for name, value in environ.items() if name.lower().endswith("_proxy")}
    return without_secrets(environ) | proxies


def known_secrets(environ: Mapping[str, str], keys: Iterable[str]) -> list[str]:
    """Return the texts that must be in no row: ``keys``, and what the environment holds that is secret.

    Short ones are left out, for they would be found in ordinary text; so are places and addresses that hold nothing.
    Each is there as it is, as JSON has it, and as JSON inside a text in JSON has it; the longest come first.
    """
    held = {text for name, value in environ.items() for text in _secrets_of(name, value) if len(text) >= _SECRET_CHARS}
    secrets = {*held, *(key for key in keys if len(key) >= _KEY_CHARS)} - _NO_SECRETS
    return sorted({text for secret in secrets for text in _spellings(secret)}, key=len, reverse=True)


def _may_hold_secret(name: str, value: str) -> bool:
    return names_secret(name) or any(secrets_in_address(value))


def _secrets_of(name: str, value: str) -> Iterator[str]:
    parts = set(secrets_in_address(value))
    yield from parts
    if parts or (names_secret(name) and not is_plain(value)):
        yield value


def hold_any(line: bytes, secrets: Iterable[str]) -> bool:
    """Tell whether a JSON line may hold one of these texts."""
    return any(_in_json(secret).encode() in line for secret in secrets)


def masked(value: Any, secrets: Iterable[str]) -> Any:
    """Return a JSON value without these texts in its own, whoever said them. Keys of objects stay as they are."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, _MASK)
        return value
    if isinstance(value, dict):
        return {key: masked(item, secrets) for key, item in value.items()}
    return [masked(item, secrets) for item in value] if isinstance(value, list) else value


def _spellings(secret: str) -> set[str]:
    spellings = {secret}
    for _ in range(_JSON_IN_JSON):
        spellings |= {_in_json(text, ascii_only=ascii_only) for text in spellings for ascii_only in (False, True)}
    return spellings


def _in_json(text: str, *, ascii_only: bool = False) -> str:
    return json.dumps(text, ensure_ascii=ascii_only)[1:-1]


def wipe_proc() -> None:
    """Overwrite the values of secret variables and of ``--api_key``, however it is spelt, in what ``/proc/self`` shows.

    Does nothing where there is no such file system.
    """
    try:
        stat = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return
    fields = stat.rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = map(int, fields[_ARG_START : _ARG_START + 4])
    _wipe(env_start, env_end, _secret_of_entry)
    _wipe(arg_start, arg_end, _secret_of_argument)


def _secret_of_entry(entry: bytes, _: bytes) -> bytes:
    name, _, value = entry.partition(b"=")
    return value if _may_hold_secret(name.decode("latin-1"), value.decode("latin-1")) else b""


def _secret_of_argument(word: bytes, before: bytes) -> bytes:
    if _spelt(before) == _SECRET_FLAG:
        return word
    flag, _, value = word.partition(b"=")
    return value if _spelt(flag) == _SECRET_FLAG else b""


def _spelt(flag: bytes) -> bytes:
    return flag.replace(b"-", b"_")  # both are understood


def _wipe(start: int, end: int, secret_at_end: Callable[[bytes, bytes], bytes]) -> None:
    if end <= start:
        return
    offset, before = start, b""
    for entry in ctypes.string_at(start, end - start).split(b"\0"):
        secret = secret_at_end(entry, before)
        ctypes.memset(offset + len(entry) - len(secret), ord("x"), len(secret))
        offset += len(entry) + 1
        before = entry
