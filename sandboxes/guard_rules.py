"""What the guard knows of single programs: how their arguments are read, and which of them harm by themselves."""

from __future__ import annotations

import re
from collections import deque

EVERYTHING = re.compile(r"[*?.!^\[\]]*[*?][*?.!^\[\]]*")  # a glob with no letter of its own
_POWER_VERBS = frozenset({"poweroff", "reboot", "halt", "kexec", "rescue", "emergency", "soft-reboot"})
# Commands that run the command in their arguments: options that take a value, and words before that command.
_WRAPPERS: dict[str, tuple[str, int]] = {
    "sudo": ("-u -g -h -p -C -r -t -T -U -D -R --user --group --host --prompt --chdir", 0),
    "doas": ("-u -C", 0),
    "env": ("-u -C --unset --chdir", 0),
    "exec": ("-a", 0),
    "command": ("", 0),
    "builtin": ("", 0),
    "busybox": ("", 0),
    "toybox": ("", 0),
    "nohup": ("", 0),
    "setsid": ("", 0),
    "nice": ("-n --adjustment", 0),
    "ionice": ("-c -n -p --class --classdata", 0),
    "chrt": ("-T -P -D", 1),
    "taskset": ("", 1),
    "timeout": ("-s -k --signal --kill-after", 1),
    "time": ("-f -o --format --output", 0),
    "stdbuf": ("-i -o -e --input --output --error", 0),
    "strace": ("-o -e -p -s", 0),
    "unshare": ("", 0),
    "chroot": ("", 1),
    "runuser": ("-u -g -G -s --user --group --supp-group --shell", 0),
    "systemd-run": ("-u -p -E -M -H --unit --property --setenv --slice --description --uid --gid --machine", 0),
    "nsenter": ("-t -S -G --target --setuid --setgid", 0),
    "flock": ("-w -E --timeout", 1),
    "watch": ("-n --interval", 0),
    "xargs": ("-n -L -P -s -d -a -E -I --max-args --max-procs --delimiter --arg-file --replace", 0),
    "parallel": ("-j --jobs", 0),
}
_FIND_TESTS = frozenset({
    "-name", "-iname", "-path", "-ipath", "-wholename", "-regex", "-iregex", "-newer", "-mtime", "-mmin", "-atime",
    "-ctime", "-size", "-empty", "-user", "-perm",
})  # fmt: skip
_FIND_RUNS = frozenset({"-exec", "-execdir", "-ok", "-okdir"})
_FIND_ACTIONS = _FIND_RUNS | {"-delete", "-print", "-print0"}
# By these names the programs run that run the rollouts.
_RUNNERS = ("sh", "bash", "python", "python3", *(f"python3.{minor}" for minor in range(11, 20)))
_VALUED = re.compile(
    r"-[uUGgPstFOoynZ]|--(?:signal|euid|uid|user|group|pgroup|parent|session|terminal|ns|context|\w+-than)"
)
_NARROWING = {  # options by which only some of the named processes are meant
    "pkill": re.compile(r"-[gPstF]\w*|--(?:pgroup|parent|session|terminal|pidfile)\b.*"),
    "killall": re.compile(r"-[oynZ]|--(?:older-than|younger-than|ns|context)\b.*"),
}


def wrapped(words: list[str]) -> list[str] | None:
    """Return the command that a prefix such as ``sudo`` runs, None when the first word is no such prefix."""
    name, rest = words[0].rpartition("/")[2], words[1:]
    if name not in _WRAPPERS:
        return None
    valued, positionals = _WRAPPERS[name]
    while rest:
        word = rest[0]
        if name == "command" and word in ("-v", "-V"):
            return []
        if word.startswith("-") and word != "-":
            rest = rest[2:] if word in valued.split() else rest[1:]
            if word == "--":
                break
        elif re.match(r"[A-Za-z_]\w*=", word):
            rest = rest[1:]
        else:
            break
    return rest[positionals:]


def has_flag(arguments: list[str], letters: str, long: str) -> bool:
    """Tell whether a flag is among the options: one of the letters, or the long name or a beginning of it."""
    for word in arguments:
        if word == "--":
            return False
        if word.startswith("--"):
            if len(word) > len("--") and long.startswith(word):
                return True
        elif word.startswith("-") and set(letters) & set(word):
            return True
    return False


def operands(arguments: list[str]) -> list[str]:
    """Return the arguments that are no options."""
    if "--" in arguments:
        index = arguments.index("--")
        return [word for word in arguments[:index] if not word.startswith("-")] + arguments[index + 1 :]
    return [word for word in arguments if not word.startswith("-")]


def find_roots(arguments: list[str]) -> list[str]:
    """Return the folders where find starts."""
    roots: list[str] = []
    for word in arguments:
        if word in ("-H", "-L", "-P"):
            continue
        if word.startswith(("-", "(", "!", ")")):
            break
        roots.append(word)
    return roots or ["."]


def find_on_all(arguments: list[str]) -> list[list[str]]:
    """Return what find does to all that it meets: each action, with the command that it runs.

    A test narrows the actions behind it, up to the next ``-o``; ``-name '*'`` and a test's opposite narrow nothing.
    """
    on_all: list[list[str]] = []
    narrows = _find_narrows(deque(arguments), on_all, narrowed=False)
    acts = any(word in _FIND_ACTIONS for word in arguments)
    return on_all if acts or narrows else [["-print"]]


def _find_narrows(words: deque[str], on_all: list[list[str]], *, narrowed: bool) -> bool:
    """Take the words of an expression; tell whether it holds for some files only."""
    all_choices, choice, negated = True, narrowed, False
    while words and (word := words.popleft()) != ")":
        if word in ("!", "-not"):
            negated = not negated
            continue
        if word in ("-o", "-or", ","):
            all_choices, choice = all_choices and choice, narrowed
        elif word == "(":
            choice |= _find_narrows(words, on_all, narrowed=choice) and not negated
        elif word in _FIND_TESTS:
            value = words.popleft() if words and word != "-empty" else ""
            choice |= not (negated or EVERYTHING.fullmatch(value))
        elif word in _FIND_ACTIONS:
            action = [word, *(_find_command(words) if word in _FIND_RUNS else ())]
            on_all += [] if choice else [action]
        negated = False
    return all_choices and choice


def _find_command(words: deque[str]) -> list[str]:
    """Take the words of what find runs, and the sign that ends them."""
    command = []
    while words and (word := words.popleft()) not in (";", "+"):
        command.append(word)
    return command


def kill(arguments: list[str]) -> str:
    """Judge ``kill``."""
    targets = arguments
    if targets[:1] and targets[0] in ("-s", "-n", "--signal"):
        targets = targets[2:]
    elif len(targets) > 1 and re.fullmatch(r"-\w+|--signal=\w+", targets[0]):
        targets = targets[1:]
    return "a signal to every process" if "-1" in targets else ""


def init(arguments: list[str]) -> str:
    """Judge ``init``."""
    return "changing the runlevel stops the machine" if {"0", "6"} & set(arguments) else ""


def power(name: str, arguments: list[str]) -> str:
    """Judge ``systemctl`` and ``loginctl``."""
    verb = next((word for word in arguments if not word.startswith("-")), "")
    return f"{name} {verb} stops the machine" if verb in _POWER_VERBS else ""


def pkill(name: str, arguments: list[str]) -> str:
    """Judge ``pkill`` and ``killall``: their patterns must not be what the runner itself is called."""
    patterns, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        if _VALUED.fullmatch(word) and not (name == "pkill" and word in ("-o", "-n")):
            rest = rest[1:]
        elif not word.startswith("-"):
            patterns.append(word)
    if any(_NARROWING[name].fullmatch(word) for word in arguments) or {"--help", "--version", "-V", "-l"} & set(
        arguments
    ):
        return ""
    if not patterns and {"-u", "-U", "--euid", "--uid", "--user"} & set(arguments):
        return "a signal to every process of a user"
    exact = "-x" in arguments if name == "pkill" else not {"-r", "--regexp"} & set(arguments)
    for pattern in patterns:
        try:
            matches = re.compile(rf"(?:{pattern})\Z" if exact else pattern)
        except re.error:
            continue
        if hit := next((runner for runner in _RUNNERS if (matches.match if exact else matches.search)(runner)), ""):
            return f"a signal to every {hit} process"
    return ""
