"""What a bubblewrap sandbox sees of the host's files: the system, and the tools on PATH, never a home or a project.

The system is /usr with what belongs to it, and the files of /etc that programs need and that hold no secrets. Tools
installed elsewhere (pyenv, a virtual environment, /opt) are found through PATH; of their folders only those that hold
programs and libraries are shown. In a home or a project a folder on PATH counts only where it is part of such an
installation: ~/bin stays hidden, and so does whatever of a home or a project lies inside the system, as in /usr/src.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
ETC = (
    "alternatives", "crypto-policies", "fonts", "hosts", "java-*", "ld.so.cache", "localtime", "mime.types",
    "nsswitch.conf", "os-release", "pki/ca-trust", "pki/tls/certs", "protocols", "python3*", "resolv.conf", "services",
    "ssl/certs", "ssl/openssl.cnf", "timezone",
)  # fmt: skip
INSTALLATION_MARKS = ("pyvenv.cfg", "conda-meta", "libexec/pyenv", "lib/node_modules", "lib/python3*")
PROGRAM_FOLDERS = ("conda-meta", "include", "lib", "lib64", "libexec", "plugins", "pyvenv.cfg", "version", "versions")
INTERPRETERS = ("python3", "python", "node")  # links to them are followed to where they are installed

# As container engines do: what changes the kernel is read-only, what shows its memory is empty. It matters for root.
PROC_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/mtrr", "/proc/sys", "/proc/sysrq-trigger")
PROC_EMPTY = ("/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug", "/proc/timer_list")


@dataclass(frozen=True)
class View:
    """Arguments of bwrap that show the host's files, and the PATH that is left of the host's."""

    arguments: tuple[str, ...]
    path: str


@functools.cache
def host_view(path_variable: str) -> View:
    """Work out what this process's sandboxes see."""
    hidden = [path for path in _hidden() if path != Path("/")]
    entries = [entry for entry in path_variable.split(":") if _is_shown(Path(entry), hidden)]
    arguments = [*_system(), *_etc()]
    for path in hidden:
        if _is_in(path, SYSTEM) and not any(Path(entry).is_relative_to(path) for entry in ("/usr/bin", "/usr/lib")):
            arguments += ["--tmpfs", str(path)]
    for tool in _outermost(_tools(entries, hidden)):
        arguments += ["--ro-bind", str(tool), str(tool)]
    return View(tuple(arguments), ":".join(entries))


def proc_arguments() -> list[str]:
    """Return arguments of bwrap for a /proc of the sandbox's own."""
    arguments = ["--proc", "/proc"]
    for path in PROC_READ_ONLY:
        if Path(path).exists():
            arguments += ["--ro-bind", path, path]
    for path in PROC_EMPTY:
        if Path(path).exists():
            arguments += ["--ro-bind", "/dev/null", path]
    return arguments


def in_system(path: str) -> bool:
    """Tell whether the system, not a sandbox, decides what is at an absolute path."""
    return path == "/" or _is_in(Path(path), (*SYSTEM, "/etc", "/proc", "/dev", "/run", "/sys", "/var"))


def _hidden() -> Iterator[Path]:
    """Yield the homes and the projects: this program's own, and where it was started (runs are in there)."""
    yield Path(os.path.expanduser("~"))  # noqa: PTH111 (Path.home raises where there is none)
    with contextlib.suppress(KeyError):  # in containers a user may have no entry
        yield Path(pwd.getpwuid(os.getuid()).pw_dir)
    yield Path(__file__).resolve().parents[1]
    yield Path.cwd()


def _system() -> Iterator[str]:
    for name in SYSTEM:
        path = Path(name)
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), name)
        elif path.is_dir():
            yield from ("--ro-bind", name, name)


def _etc() -> Iterator[str]:
    for path in (path for pattern in ETC for path in Path("/etc").glob(pattern)):
        if not os.access(path, os.R_OK):
            continue
        target = path.resolve()
        if path.is_symlink() and _is_in(target, SYSTEM):
            yield from ("--symlink", str(target), str(path))  # each mount costs time when a sandbox is made
        else:
            yield from ("--ro-bind", str(path), str(path))


def _is_shown(entry: Path, hidden: list[Path]) -> bool:
    if not entry.is_absolute() or not os.access(entry, os.R_OK | os.X_OK) or not entry.is_dir():
        return False
    if any(path.is_relative_to(entry) for path in hidden):
        return False
    return not _is_in(entry, hidden) or any(True for mark in INSTALLATION_MARKS for _ in entry.parent.glob(mark))


def _tools(entries: list[str], hidden: list[Path]) -> Iterator[Path]:
    """Yield what must be shown for the entries of PATH that the system does not show anyway."""
    folders = [Path(entry) for entry in entries]
    for name in INTERPRETERS:
        program = shutil.which(name, path=":".join(entries))
        while program:
            folders.append(Path(program).parent)
            program = str(Path(program).parent / Path(program).readlink()) if Path(program).is_symlink() else ""
    for folder in folders:
        if (not _is_in(folder, SYSTEM) or _is_in(folder, hidden)) and _is_shown(folder, hidden):
            yield folder
            yield from (folder.parent / name for name in PROGRAM_FOLDERS if (folder.parent / name).exists())


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """Leave out what is inside of another one."""
    kept: list[Path] = []
    for path in sorted({Path(os.path.normpath(path)) for path in paths}):
        if not kept or not path.is_relative_to(kept[-1]):
            kept.append(path)
    return kept


def _is_in(path: Path, places: Iterable[Path | str]) -> bool:
    return any(path.is_relative_to(place) for place in places)
