"""A net under sandboxes that do not isolate: refuses commands that are plainly meant to harm the host.

Recursive removal of the system, of homes and of what all share; writing to raw disks; fork bombs; signals to every
process; turning the machine off. The text is read as a shell would read it, so quoting, prefixes such as ``sudo`` and
nesting do not hide a command, and a command that is only spoken of (in an argument, a comment, a document) is none.

It is no wall: programs in other languages, scripts in files and values that only running would tell are not seen.
"""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from sandboxes.guard_rules import (
    EVERYTHING,
    find_on_all,
    find_roots,
    has_flag,
    init,
    kill,
    operands,
    pkill,
    power,
    wrapped,
)
from sandboxes.shell_commands import Command, Names, TooMuchError, stdin_of
from sandboxes.shell_values import UNKNOWN, UNSET
from sandboxes.shell_words import Reader

# Nobody removes these whole, nor all that is in them.
SHARED_FOLDERS = (
    "/", "/home", "/media", "/mnt", "/nix", "/opt", "/root", "/run", "/snap", "/srv",
    "/usr/local", "/usr/local/bin", "/usr/local/lib", "/usr/local/sbin", "/usr/local/share", "/usr/src",
    "/var", "/var/cache", "/var/lib", "/var/log", "/var/spool",
    "/tmp", "/var/tmp",  # noqa: S108 (names, nothing is written)
)  # fmt: skip
# Nor anything below these, but for what people put there themselves.
SYSTEM_TREES = (
    "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/sbin", "/sys", "/usr",
)  # fmt: skip
OWN_PLACES = ("/dev/shm/", "/usr/local/", "/usr/src/")  # noqa: S108 (a name, nothing is written)

MAX_NESTING = 20  # texts in texts: sh -c in sh -c
_RAW_DISK = re.compile(
    r"/proc/sysrq-trigger$|/dev/(?:[shv]d[a-z]|xvd[a-z]|nvme\d|mmcblk\d|md\d|dm-\d|mapper/|disk/|loop\d|sr\d|nbd\d|ram\d"
    r"|pmem\d|k?mem$|port$)"
)
_ITEM_ENDS = re.compile(r"\\0|\0")  # of xargs -0: a NUL, and what printf makes one of
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "mksh"})
_POWER = frozenset({"shutdown", "reboot", "halt", "poweroff", "killall5"})
_DISK_TOOLS = frozenset({
    "badblocks", "blkdiscard", "cfdisk", "cryptsetup", "fdisk", "hdparm", "mke2fs", "mkswap", "parted", "pvcreate",
    "sfdisk", "sgdisk", "shred", "tee", "truncate", "wipefs",
})  # fmt: skip
_SAYS_WHAT_TO_RUN = frozenset({*_SHELLS, "su", "runuser", "script", "flock"})  # after -c


def guard(command: str, *, home: str, cwd: str = "", variables: Mapping[str, str] | None = None) -> str:
    """Return why a command is not to be run, "" when it may be.

    ``home``: the user's real home, which HOME counts as; ``cwd``: where the command starts, absolute, "" when not
    known; ``variables``: those that are set when it starts. A variable that nothing sets counts as empty.
    """
    known = {"IFS": " \t\n", "TMPDIR": UNKNOWN, **(variables or {}), "HOME": home}
    try:
        return _Guard(home, cwd, Names(known)).check(command)
    except (TooMuchError, RecursionError):
        return "it is too long or nests too deeply to be checked"


def exported(text: str) -> dict[str, str]:
    """Return the variables that shell text such as ``export NAME=value`` sets; none when it is too long to be read."""
    names = Names({})
    try:
        Reader(text, names).read()
    except (TooMuchError, RecursionError):
        return {}
    return names.variables


def is_shell(command: str) -> bool:
    """Tell whether a command is a shell that takes commands from its stdin."""
    name, *options = command.split() or [""]
    return name.rpartition("/")[2] in _SHELLS and all(re.fullmatch(r"-[ils]+", option) for option in options)


class _Guard:
    """One text and the texts inside of it."""

    def __init__(self, home: str, cwd: str, names: Names, depth: int = 0) -> None:
        self._home = home
        self._names = names
        self._depth = depth
        self._folders: dict[tuple[int, ...], str] = {(): cwd}  # where commands are, by subshell; "" = not known
        self._rules: dict[str, Callable[[list[str]], str]] = {
            "rm": self._rm,
            "chmod": self._change,
            "chown": self._change,
            "chgrp": self._change,
            "mv": self._mv,
            "find": self._find,
            "dd": self._dd,
            "cp": self._last_is_disk,
            "install": self._last_is_disk,
            "kill": kill,
            "pkill": partial(pkill, "pkill"),
            "killall": partial(pkill, "killall"),
            "init": init,
            "telinit": init,
            "systemctl": partial(power, "systemctl"),
            "loginctl": partial(power, "loginctl"),
            "eval": self._eval,
            "trap": lambda arguments: self._inner(arguments[0]) if arguments else "",
        }
        self._scope: tuple[int, ...] = ()

    def check(self, text: str) -> str:
        """Return why a text is refused, "" when it is not."""
        if self._depth > MAX_NESTING:
            raise TooMuchError
        self._names.set("PWD", self._folders[()] or UNKNOWN)
        for command in self._read(text):
            if reason := self._command(command):
                return reason
        return ""

    def _read(self, text: str) -> list[Command]:
        """Read a text, and once more where its loops are told what to read: that stands behind them."""
        again = self._names.fresh()
        commands = Reader(text, self._names).read()
        stdin = "".join(command.stdin for command in self._names.compounds if not command.words)
        if not stdin:
            return commands
        self._names = replace(again, loop_stdin=stdin)
        return Reader(text, self._names).read()

    def _command(self, command: Command) -> str:
        self._scope = command.scope
        for operator, target in command.redirections:
            if ">" in operator and _RAW_DISK.match(target):
                return f"writing to {target}"
        if _is_fork_bomb(command):
            return "a fork bomb"
        if not command.words:
            return ""
        if command.words[0] in ("cd", "pushd"):
            self._go(command.words[1:])
        return self._run(command.words, command)

    def _run(self, words: list[str], command: Command) -> str:
        """Judge the words of one command, and of the one it runs."""
        while words:
            name = words[0].rpartition("/")[2]
            if name == "xargs":
                return self._xargs(words, command)
            inner = wrapped(words)
            if inner is None:
                break
            if reason := self._said(name, words):
                return reason
            words = inner
        if not words:
            return ""
        name, arguments = words[0].rpartition("/")[2], words[1:]
        if UNKNOWN in name:  # whatever it is, it is asked to do as rm does
            return self._rm(arguments) if has_flag(arguments, "f", "--force") else ""
        if name in self._rules:
            return self._rules[name](arguments)
        return self._said(name, words) or self._reads(name, arguments, command) or self._machine(name, arguments)

    def _said(self, name: str, words: list[str]) -> str:
        """Judge a text that is handed over to be run: ``sh -c text``, ``env -S text``, ``watch text``."""
        arguments = words[1:]
        if name == "watch":
            return self._inner(" ".join(word for word in arguments if not word.startswith("-")))
        for index, word in enumerate(arguments[:-1]):
            if name in _SAYS_WHAT_TO_RUN and re.fullmatch(r"-[a-zA-Z]*c|--command", word):
                text, *rest = [*itertools.dropwhile(lambda item: item.startswith("-"), arguments[index + 1 :]), ""]
                return self._inner(text, rest[1:-1])
            if name == "env" and word in ("-S", "--split-string"):
                return self._inner(" ".join(arguments[index + 1 :]))
        return ""

    def _reads(self, name: str, arguments: list[str], command: Command) -> str:
        """Judge a text that a shell reads from its stdin."""
        from_stdin = name in _SHELLS and all(word.startswith("-") for word in arguments)
        if from_stdin or (name in (".", "source", *_SHELLS) and arguments[:1] in (["/dev/stdin"], ["-"])):
            return self._inner(stdin_of(command))
        script = next((word for word in arguments if not word.startswith("-")), "")
        if name in (".", "source", *_SHELLS) and script in self._names.files:
            return self._inner(self._names.files[script])
        return ""

    def _machine(self, name: str, arguments: list[str]) -> str:
        """Judge what is aimed at the machine itself."""
        asks = {"--help", "--version", "-V", "-l", "--list"} & set(arguments)
        if name in _POWER and not asks:
            return f"{name} stops the machine"
        disks = [word for word in arguments if _RAW_DISK.match(word)]
        if name in _DISK_TOOLS and disks and not asks:
            return f"writing to {disks[0]}"
        if name.startswith("mkfs") and not asks:
            files = [word for word in arguments if not word.startswith("-")]
            if not files or any(UNKNOWN in word or word.startswith("/dev/") for word in files):
                return f"{name} makes a file system"
        return ""

    def _xargs(self, words: list[str], command: Command) -> str:
        """Judge what xargs runs, with what plainly comes to it."""
        rest = wrapped(words) or []
        options = [*words[1 : len(words) - len(rest)], ""]
        placeholder = next((a[2:] or b for a, b in itertools.pairwise(options) if a.startswith("-I")), "")
        feeder = command.fed_by
        items = _ITEM_ENDS.sub(" ", stdin_of(command)).split()
        if not items and feeder and feeder.words[:1] == ["find"]:
            prints_all = any(action.startswith("-print") for action, *_ in find_on_all(feeder.words[1:]))
            items = find_roots(feeder.words[1:]) if prints_all else []
        if placeholder:
            rest = [word.replace(placeholder, item) for item in items[:1] or [UNKNOWN] for word in rest]
            return self._run(rest, command)
        return self._run([*rest, *items], command)

    def _rm(self, arguments: list[str]) -> str:
        if not has_flag(arguments, "rR", "--recursive"):
            return ""
        return self._any_protected(operands(arguments), "recursive removal of")

    def _change(self, arguments: list[str]) -> str:
        if not has_flag(arguments, "R", "--recursive"):
            return ""
        return self._any_protected(operands(arguments), "recursive change of")

    def _mv(self, arguments: list[str]) -> str:
        return self._last_is_disk(arguments) or self._any_protected(operands(arguments)[:-1], "moving away")

    def _find(self, arguments: list[str]) -> str:
        roots = find_roots(arguments)
        for action, *run in find_on_all(arguments):
            removes = action == "-delete" or run[:1] == ["rm"]
            if removes and (reason := self._any_protected(roots, "removal of everything below")):
                return reason
            for root in roots:
                if reason := self._run([item.replace("{}", root) for item in run], Command()):
                    return reason
        return ""

    def _dd(self, arguments: list[str]) -> str:
        target = next((word[3:] for word in arguments if word.startswith("of=")), "")
        return f"writing to {target}" if _RAW_DISK.match(target) else ""

    def _last_is_disk(self, arguments: list[str]) -> str:
        target = arguments[-1] if arguments else ""
        return f"writing to {target}" if _RAW_DISK.match(target) else ""

    def _eval(self, arguments: list[str]) -> str:
        return self._inner(" ".join(arguments))

    def _inner(self, text: str, arguments: list[str] | None = None) -> str:
        names = self._names.fresh()
        if arguments:
            names.set_arguments(arguments)
        return _Guard(self._home, self._folder(), names, self._depth + 1).check(text)

    def _go(self, arguments: list[str]) -> None:
        target = next(iter(operands(arguments)), self._home)
        self._folders[self._scope] = self._absolute(target)

    def _folder(self) -> str:
        scopes = (self._scope[:length] for length in range(len(self._scope), -1, -1))
        return next(self._folders[scope] for scope in scopes if scope in self._folders)

    def _absolute(self, path: str) -> str:
        """Return a normal absolute path, "" when it cannot be known."""
        folder, path = self._folder(), path.replace(UNSET, "")
        if not path:
            return ""
        if path.startswith("/") and not path.replace(UNKNOWN, "").strip("/*."):
            return "/"  # what is not known may be nothing
        if UNKNOWN in path or not (path.startswith("/") or folder):
            return ""
        return "/" + os.path.normpath(os.path.join(folder, path)).lstrip("/")  # noqa: PTH118 (text, no file is meant)

    def _any_protected(self, paths: list[str], what: str) -> str:
        return next(
            (f"{what} {path.replace(UNSET, '')}" for path in paths if self._is_protected(self._absolute(path))), ""
        )

    def _is_protected(self, path: str) -> bool:
        folder, name = os.path.split(path)
        while name and EVERYTHING.fullmatch(name):  # all that is in a folder is as much as the folder
            path = folder
            folder, name = os.path.split(path)
        kept = (*SHARED_FOLDERS, *SYSTEM_TREES, os.path.normpath(self._home))
        if any(fnmatch.fnmatchcase(place, path) for place in kept) or re.fullmatch(r"/home/[^/]+", path):
            return True
        own = path.startswith(OWN_PLACES)
        return not own and any(path.startswith(f"{tree}/") for tree in SYSTEM_TREES)


def _is_fork_bomb(command: Command) -> bool:
    """Tell whether a function starts itself beside itself."""
    if not command.function or command.words[:1] != [command.function]:
        return False
    return command.background or (command.fed_by is not None and command.fed_by.words[:1] == command.words[:1])
