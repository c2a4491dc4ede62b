"""Reading shell text the way a shell does, as far as the guard needs it: which commands would run, with which words.

Quotes, escapes, comments, here-documents, expansions of known variables, substitutions, braces and tildes are followed.
What cannot be known stands as ``UNKNOWN`` inside its word. Nothing is run, nothing is looked up, any text is accepted:
what a shell would call a syntax error is read as far as it goes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from sandboxes.shell_values import UNKNOWN, ansi_unquoted, braces_expanded, written

MAX_DEPTH = 40
MAX_COMMANDS = 2000
MAX_VALUE_CHARS = 10_000  # of a variable; a longer value counts as not known

_PLAIN = re.compile(r"""[^\s'"\\$`;&|<>()#~]+|[#~]""")
_QUOTED_PLAIN = re.compile(r'[^"\\$`]+')
_REDIRECTION = re.compile(r"(?:\d*|&)(>>|>\||>&|<&|<>|<<<|<<-|<<|>|<)")
_OPERATOR = re.compile(r"\n|;;&|;;|;&|;|&&|&|\|\||\|&|\||\(|\)")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_RESERVED = frozenset({"if", "then", "elif", "else", "fi", "do", "done", "while", "until", "!", "{", "}", "esac"})
_DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset"})


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
class _HereDocument:
    command: Command
    delimiter: str
    strip_tabs: bool
    literal: bool


class Reader:
    """Reads one text. ``variables`` are the known ones; assignments in the text are added as they are met."""

    def __init__(self, text: str, variables: dict[str, str], depth: int = 0) -> None:
        self.commands: list[Command] = []  # in the order they end
        self._text = text
        self._position = 0
        self._variables = variables
        self._depth = depth
        self._documents: list[_HereDocument] = []
        self._scope: tuple[int, ...] = ()
        self._scopes = 0
        self._functions: list[tuple[str, int]] = []  # name, and the braces that were open around it
        self._braces = 0

    def read(self) -> list[Command]:
        """Return every command that the text could run. Raises TooMuchError."""
        while self._position < len(self._text):
            self._script()
            self._position += 1  # a closing parenthesis that nobody opened
        return self.commands

    def expand(self) -> str:
        """Return the text with expansions done, as in double quotes; what is substituted counts as run."""
        return self._double_quoted(end="")

    def _script(self) -> list[Command]:
        """Read commands up to a closing parenthesis or the end; the parenthesis is left to the caller."""
        if self._depth > MAX_DEPTH:
            raise TooMuchError
        self._depth += 1
        outer, self._scopes = self._scope, self._scopes + 1
        self._scope = (*outer, self._scopes)
        found: list[Command] = []
        pipeline: list[Command] = []
        command = self._new_command()
        while self._position < len(self._text):
            operator = self._operator()
            if operator == ")":
                break
            if not operator:
                self._part(command)
                continue
            if self._ended(command, pipeline):
                found.append(command)
            if operator == "(":
                self._parenthesis(command)
            if operator not in ("|", "|&"):
                for part in pipeline:
                    part.background = part.background or operator == "&"
                pipeline = []
            command = self._new_command()
        if self._ended(command, pipeline):
            found.append(command)
        self._scope = outer
        self._depth -= 1
        return found

    def _parenthesis(self, command: Command) -> None:
        """Read what an opening parenthesis begins: arithmetic, a function's head, a subshell."""
        if self._text.startswith("(", self._position):
            self._arithmetic()
        elif not self._function_head(command):
            self._script()
            self._position += 1

    def _ended(self, command: Command, pipeline: list[Command]) -> bool:
        if not command.words and not command.redirections:
            return False
        if len(self.commands) >= MAX_COMMANDS:
            raise TooMuchError
        command.fed_by = pipeline[-1] if pipeline else None
        pipeline.append(command)
        self.commands.append(command)
        return True

    def _new_command(self) -> Command:
        return Command(scope=self._scope, function=self._functions[-1][0] if self._functions else "")

    def _operator(self) -> str:
        """Step over blanks and comments; return the operator that follows, "" for a word or a redirection."""
        text = self._text
        while self._position < len(text):
            if text[self._position] in " \t\r":
                self._position += 1
            elif text.startswith("\\\n", self._position):
                self._position += 2
            elif text[self._position] == "#":
                end = text.find("\n", self._position)
                self._position = len(text) if end < 0 else end
            else:
                break
        match = _OPERATOR.match(text, self._position)
        if not match or text.startswith(("&>", "&>>"), self._position):
            return "" if self._position < len(text) else "\n"
        if match[0] != ")":
            self._position = match.end()
        if match[0] == "\n":
            self._here_documents()
        return match[0]

    def _function_head(self, command: Command) -> bool:
        """After an opening parenthesis: whether it is that of ``name()``."""
        end = re.compile(r"\s*\)").match(self._text, self._position)
        if not end or len(command.words) != 1:
            return False
        self._position = end.end()
        self._functions.append((command.words[0], self._braces))
        return True

    def _part(self, command: Command) -> None:
        """Read a redirection, or a word with what it brings."""
        match = _REDIRECTION.match(self._text, self._position)
        if match and not self._text.startswith(("<(", ">("), self._position):
            self._position = match.end()
            self._redirection(command, match[1])
            return
        start = self._position
        fields = self._word()
        raw = self._text[start : self._position]
        assignment = _ASSIGNMENT.fullmatch("".join(fields))
        if not command.words:
            if raw in _RESERVED:
                self._reserved(raw)
                return
            if assignment:
                self._assign(assignment)
                return
        elif assignment and command.words[0] in _DECLARING:
            self._assign(assignment)
        elif command.words[0] == "for" and len(command.words) >= len(("for", "name", "in")):
            known = self._variables.get(command.words[1], "") if len(command.words) > len(("for", "name", "in")) else ""
            self._variables[command.words[1]] = " ".join([known, *fields]).strip()
        elif command.words[0] == "function" and len(command.words) == 1:
            self._functions.append((fields[0] if fields else "", self._braces))
        command.words += fields

    def _assign(self, assignment: re.Match[str]) -> None:
        value = assignment[2]
        if value == "~" or value.startswith("~/"):
            value = self._variables.get("HOME", UNKNOWN) + value[1:]
        self._variables[assignment[1]] = value if len(value) <= MAX_VALUE_CHARS else UNKNOWN

    def _reserved(self, word: str) -> None:
        self._braces += {"{": 1, "}": -1}.get(word, 0)
        if word == "}" and self._functions and self._functions[-1][1] >= self._braces:
            self._functions.pop()

    def _redirection(self, command: Command, operator: str) -> None:
        self._operator_blanks()
        start = self._position
        target = " ".join(self._word())
        raw = self._text[start : self._position]
        if operator in ("<<", "<<-"):
            literal = any(mark in raw for mark in "'\"\\")
            self._documents.append(_HereDocument(command, target, operator == "<<-", literal))
        elif operator == "<<<":
            command.stdin += target + "\n"
        else:
            command.redirections.append((operator, target))

    def _operator_blanks(self) -> None:
        while self._text.startswith((" ", "\t"), self._position):
            self._position += 1

    def _here_documents(self) -> None:
        """At the start of a line: read the bodies that were announced."""
        for document in self._documents:
            tabs = r"\t*" if document.strip_tabs else ""
            end = re.compile(rf"^{tabs}{re.escape(document.delimiter)}$", re.MULTILINE).search(
                self._text, self._position
            )
            body = self._text[self._position : end.start() if end else len(self._text)]
            if not end:  # a shell would take all the rest for the document; here it counts as commands, too
                document.command.stdin += body
                continue
            document.command.stdin += body if document.literal else self._inner(body).expand()
            self._position = end.end() + 1
        self._documents = []

    def _inner(self, text: str) -> Reader:
        """Return a reader of a text inside of this one, whose commands count as this one's."""
        if self._depth > MAX_DEPTH:
            raise TooMuchError
        reader = Reader(text, self._variables, self._depth + 1)
        reader.commands = self.commands
        reader._scope = (*self._scope, -len(self.commands) - 1)
        return reader

    def _word(self) -> list[str]:
        """Read one word; return the fields it becomes: several, or none, where an expansion stands unquoted."""
        text, start = self._text, self._position
        fields, current, quoted = [], "", False
        while self._position < len(text):
            char = text[self._position]
            if match := _PLAIN.match(text, self._position):
                self._position = match.end()
                current += self._tilde(match[0]) if match.start() == start else match[0]
            elif char == "\\":
                current += text[self._position + 1 : self._position + 2].replace("\n", "")
                self._position += 2
            elif char in "'\"" or text.startswith(("$'", '$"'), self._position):
                quoted = True
                current += self._quoted()
            elif char in "$`":
                first, *more = re.split(r"[ \t\n]+", self._dollar() if char == "$" else self._backticks())
                fields += [current + first, *more[:-1]] if more else []
                current = more[-1] if more else current + first
            elif text.startswith(("<(", ">("), self._position):
                self._position += 2
                self._script()
                self._position += 1
                current += UNKNOWN
            else:
                break
        raw = text[start : self._position]
        fields = [item for item in [*fields, current] if item or quoted]
        return [word for item in fields for word in braces_expanded(item)] if "{" in raw else fields

    def _tilde(self, plain: str) -> str:
        """Expand a tilde that begins a word; it comes alone, and what follows is a part of its own."""
        if plain != "~":
            return plain
        user = re.compile(r"[\w.-]*").match(self._text, self._position)
        if not user or not user[0]:
            return self._variables.get("HOME", UNKNOWN)
        self._position = user.end()
        return "/root" if user[0] == "root" else f"/home/{user[0]}"

    def _quoted(self) -> str:
        text = self._text
        if text[self._position] == '"' or text.startswith('$"', self._position):
            self._position = text.index('"', self._position) + 1
            return self._double_quoted(end='"')
        start = text.index("'", self._position) + 1
        if start == self._position + 1:
            end = text.find("'", start)
            end = len(text) if end < 0 else end
            self._position = end + 1
            return text[start:end]
        ansi = re.compile(r"(?:[^'\\]|\\.)*", re.DOTALL).match(text, start)
        self._position = (ansi.end() if ansi else start) + 1
        return ansi_unquoted(ansi[0] if ansi else "")

    def _double_quoted(self, end: str) -> str:
        pieces = []
        while self._position < len(self._text):
            char = self._text[self._position]
            if match := _QUOTED_PLAIN.match(self._text, self._position):
                self._position = match.end()
                pieces.append(match[0])
            elif char == "\\":
                escaped = self._text[self._position + 1 : self._position + 2]
                pieces.append("" if escaped == "\n" else escaped if escaped in '$`"\\' else char + escaped)
                self._position += 2
            elif char == "$":
                pieces.append(self._dollar())
            elif char == "`":
                pieces.append(self._backticks())
            else:
                self._position += 1
                if char == end:
                    break
                pieces.append(char)
        return "".join(pieces)

    def _dollar(self) -> str:
        """Read an expansion; return its value, as far as it is known."""
        text = self._text
        if text.startswith("$((", self._position):
            self._position += 2
            self._arithmetic()
            return UNKNOWN
        if text.startswith("$(", self._position):
            self._position += 2
            commands = self._script()
            self._position += 1
            return self._value_of(commands)
        if text.startswith("${", self._position):
            return self._parameter()
        self._position += 1
        if name := _NAME.match(text, self._position):
            self._position = name.end()
            return self._variables.get(name[0], UNKNOWN)
        return "$"

    def _arithmetic(self) -> None:
        """Step over ``((…))``, of which the first parenthesis has been read.

        It may as well be a subshell in a subshell. Read as commands it does no harm, but ``<<`` is no document there.
        """
        start, depth = self._position, 1
        while depth and self._position < len(self._text):
            depth += {"(": 1, ")": -1}.get(self._text[self._position], 0)
            self._position += 1
        self._inner(self._text[start : self._position]).read()

    def _parameter(self) -> str:
        """Read ``${name…}``: the name's value whatever is done to it, else what is said to stand in for it."""
        start, depth = self._position + 2, 0
        for position in range(self._position, len(self._text)):
            depth += {"{": 1, "}": -1}.get(self._text[position], 0)
            if depth == 0 and position > self._position:
                break
        else:
            position = len(self._text)
        self._position = position + 1
        content = self._text[start:position]
        name = _NAME.match(content)
        operation = self._inner(content[name.end() if name else 0 :]).expand().lstrip(":")
        if name and name[0] in self._variables:
            return self._variables[name[0]]
        return operation[1:] if operation.startswith(("-", "=")) else UNKNOWN

    def _backticks(self) -> str:
        match = re.compile(r"`((?:[^`\\]|\\.)*)`?", re.DOTALL).match(self._text, self._position)
        self._position = match.end() if match else len(self._text)
        inner = self._inner(re.sub(r"\\([`$\\])", r"\1", match[1] if match else ""))
        before = len(self.commands)
        inner.read()
        return self._value_of(self.commands[before:])

    def _value_of(self, commands: list[Command]) -> str:
        """Return what a substitution writes where that is plain to see."""
        if not commands:
            return ""
        if len(commands) != 1 or not commands[0].words:
            return UNKNOWN
        if commands[0].words == ["pwd"]:
            return self._variables.get("PWD", UNKNOWN)
        return written(commands[0].words) or UNKNOWN
