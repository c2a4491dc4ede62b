"""What reading shell text finds: its commands, and what the names in it stand for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from sandboxes.shell_values import UNKNOWN, UNSET, one_of, written

MAX_VALUE_CHARS = 10_000  # of a variable; a longer value counts as not known
_NEVER_EMPTY = frozenset("0#?$!-")


class TooMuchError(Exception):
    """The text nests deeper, or holds more commands, than anybody writes by hand."""


@dataclass
class Command:
    """One simple command."""

    words: list[str] = field(default_factory=list)
    redirections: list[tuple[str, str]] = field(default_factory=list)  # operator, target
    stdin: str = ""  # text of its here-documents and here-strings
    fed_by: Command | None = None  # its left neighbour in a pipeline
    background: bool = False
    function: str = ""  # the innermost function whose body it is in
    scope: tuple[int, ...] = ()  # the subshells it is in, outermost first


@dataclass
class HereDocument:
    """One that was announced; its body comes after the line."""

    command: Command
    delimiter: str
    strip_tabs: bool
    literal: bool


@dataclass
class Names:
    """What is known of a shell's names while its text is read."""

    variables: dict[str, str]
    functions: dict[str, str] = field(default_factory=dict)  # bodies
    aliases: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # what is read where <(…) stands, by the word that it became
    compounds: list[Command] = field(default_factory=list)  # that are redirected: loops, groups
    loop_stdin: str = ""  # what these read, as an earlier reading of the same text has found
    called: set[str] = field(default_factory=set)  # functions and aliases that are being read
    complete: bool = True  # a name that is not known is not set

    def value(self, name: str) -> str:
        """Return a variable's value, UNSET or UNKNOWN."""
        return self.variables.get(name, UNSET if self.complete and name not in _NEVER_EMPTY else UNKNOWN)

    def fresh(self) -> Names:
        """Return a copy for another reading."""
        return replace(
            self,
            variables=dict(self.variables),
            functions=dict(self.functions),
            aliases=dict(self.aliases),
            files=dict(self.files),
            compounds=[],
            called=set(),
        )

    def set(self, name: str, value: str) -> None:
        """Set a variable."""
        self.variables[name] = value if len(value) <= MAX_VALUE_CHARS else UNKNOWN

    def set_arguments(self, arguments: list[str]) -> dict[str, str]:
        """Set ``$1``, ``$2``, … and ``$@``; return what they were."""
        old = {name: value for name, value in self.variables.items() if name.isdigit() or name in ("@", "*")}
        for name in old:
            del self.variables[name]
        for index, value in enumerate(arguments[:9]):
            self.set(str(index + 1), value)
        if arguments:
            self.set("@", one_of(arguments))
            self.set("*", one_of(arguments))
        return old

    def written_by(self, commands: list[Command]) -> str:
        """Return what a substitution writes where that is plain to see."""
        if not commands:
            return ""
        if len(commands) != 1 or not commands[0].words:
            return UNKNOWN
        if commands[0].words == ["pwd"]:
            return self.value("PWD")
        return written(commands[0].words) or UNKNOWN

    def learn(self, command: Command) -> None:
        """Take note of what a builtin does to names."""
        name, *arguments = command.words
        if name == "read":
            for target in arguments:
                if re.fullmatch(r"[A-Za-z_]\w*", target):
                    self.set(target, one_of((stdin_of(command) or self.loop_stdin).split()) or UNKNOWN)
        elif name in ("mapfile", "readarray", "getopts", "let") and arguments:
            self.set(arguments[-1], one_of(stdin_of(command).split()) or UNKNOWN)
        elif name == "printf" and arguments[:1] == ["-v"] and len(arguments) > len(("-v", "name")):
            self.set(arguments[1], written([name, *arguments[2:]]) or UNKNOWN)
        elif name == "alias":
            self.aliases.update((parts[0], parts[2]) for word in arguments if (parts := word.partition("="))[1])
        elif name == "set" and "--" in arguments:
            self.set_arguments(arguments[arguments.index("--") + 1 :])
        elif name in (".", "source") or (name == "set" and re.match(r"-[a-z]*u", " ".join(arguments))):
            self.complete = False  # it may set any; with -u no unset one is used


def stdin_of(command: Command | None) -> str:
    """Return what a command reads, where that is plain to see: a document, or what its left neighbour writes."""
    text, chain = "", command
    while chain:
        if chain.stdin:
            return chain.stdin
        chain = chain.fed_by
        if chain and chain.words:
            text = written(chain.words)
            if text or chain.words[0] not in ("cat", "tee"):
                return text
    return text
