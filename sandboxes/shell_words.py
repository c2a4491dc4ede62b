"""Reading shell text the way a shell does, as far as the guard needs it: which commands would run, with which words.

Quotes, escapes, comments, here-documents, expansions of known variables, substitutions, braces and tildes are followed.
What cannot be known stands as ``UNKNOWN`` inside its word. Nothing is run, nothing is looked up, any text is accepted:
what a shell would call a syntax error is read as far as it goes.
"""

from __future__ import annotations

import re
import shlex

from sandboxes.shell_commands import Command, HereDocument, Names, TooMuchError
from sandboxes.shell_values import (
    UNKNOWN,
    alternatives,
    ansi_unquoted,
    braces_expanded,
    closing,
    cut,
    fields_of,
    one_of,
)

MAX_DEPTH = 40
MAX_COMMANDS = 2000

_PLAIN = re.compile(r"""[^\s'"\\$`;&|<>()#~]+|[#~]""")
_QUOTED_PLAIN = re.compile(r'[^"\\$`]+')
_REDIRECTION = re.compile(r"(?:\d*|&)(>>|>\||>&|<&|<>|<<<|<<-|<<|>|<)")
_OPERATOR = re.compile(r"\n|;;&|;;|;&|;|&&|&|\|\||\|&|\||\(|\)")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_RESERVED = frozenset({
    "if", "then", "elif", "else", "fi", "do", "done", "while", "until", "!", "{", "}", "esac",
    "coproc",
})  # fmt: skip
_DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset"})


class Reader:
    """Reads one text. ``names`` are the known ones; what the text sets is added as it is met."""

    def __init__(self, text: str, names: Names, depth: int = 0) -> None:
        self.commands: list[Command] = []  # in the order they end
        self._text = text
        self._position = 0
        self._names = names
        self._depth = depth
        self._documents: list[HereDocument] = []
        self._scope: tuple[int, ...] = ()
        self._scopes = 0
        self._functions: list[tuple[str, int, int]] = []  # name, braces open around it, where its body begins
        self._in_function = False  # the text is part of a body
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
        if command.words:
            self._names.learn(command)
            self._call(command.words[0], command.words[1:])
        return True

    def _call(self, name: str, arguments: list[str]) -> None:
        """Read what a function or an alias stands for."""
        names = self._names
        if self._defining() or name in names.called:
            return
        names.called.add(name)
        if name in names.functions:
            outer = names.set_arguments(arguments)
            self._inner(names.functions[name]).read()
            names.set_arguments([])
            names.variables.update(outer)
        elif name in names.aliases:
            self._inner(f"{names.aliases[name]} {shlex.join(arguments)}").read()
        names.called.discard(name)

    def _defining(self) -> bool:
        return self._in_function or bool(self._functions)

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
        self._functions.append((command.words[0], self._braces, self._position))
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
            more = len(command.words) > len(("for", "name", "in"))
            known = [self._names.value(command.words[1])] if more else []
            self._names.set(command.words[1], one_of([*known, *fields]))
        elif command.words[0] in ("for", "select") and len(command.words) == 1 and fields:
            self._names.set(fields[0], UNKNOWN)
        elif command.words[0] == "function" and len(command.words) == 1:
            self._functions.append((fields[0] if fields else "", self._braces, self._position))
        command.words += fields

    def _assign(self, assignment: re.Match[str]) -> None:
        value = assignment[2]
        if value == "~" or value.startswith("~/"):
            value = self._names.value("HOME") + value[1:]
        if not value and self._text.startswith("(", self._position):
            value = one_of(self._array())
        self._names.set(assignment[1], value)

    def _array(self) -> list[str]:
        """Read the values of ``name=(…)``."""
        self._position += 1
        values: list[str] = []
        while self._position < len(self._text):
            operator, start = self._operator(), self._position
            if operator == ")":
                self._position += 1
                break
            if not operator:
                values += [re.sub(r"^\[[^]]*\]=", "", word) for word in self._word()]
                self._position += self._position == start  # what is no word
        return values

    def _reserved(self, word: str) -> None:
        self._braces += {"{": 1, "}": -1}.get(word, 0)
        if word == "}" and self._functions and self._functions[-1][1] >= self._braces:
            name, _, start = self._functions.pop()
            self._names.functions[name] = self._text[start : self._position]
        if word == "coproc" and (match := re.compile(r"\s+\w+(?=\s+[{(])").match(self._text, self._position)):
            self._position = match.end()

    def _redirection(self, command: Command, operator: str) -> None:
        self._operator_blanks()
        start = self._position
        target = " ".join(self._word())
        raw = self._text[start : self._position]
        if operator in ("<<", "<<-"):
            literal = any(mark in raw for mark in "'\"\\")
            self._documents.append(HereDocument(command, target, operator == "<<-", literal))
        elif operator == "<<<":
            command.stdin += target + "\n"
        else:
            command.stdin += self._names.files.get(target, "") if operator == "<" else ""
            command.redirections.append((operator, target))
        if not command.words:
            self._names.compounds.append(command)

    def _operator_blanks(self) -> None:
        while self._text.startswith((" ", "\t"), self._position):
            self._position += 1

    def _here_documents(self) -> None:
        """At the start of a line: read the bodies that were announced."""
        for document in self._documents:
            tabs = r"\t*" if document.strip_tabs else ""
            line = re.compile(rf"^{tabs}{re.escape(document.delimiter)}$", re.MULTILINE)
            end = line.search(self._text, self._position)
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
        reader = Reader(text, self._names, self._depth + 1)
        reader._in_function = self._defining()
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
                first, *more = fields_of(self._dollar() if char == "$" else self._backticks())
                fields += [current + first, *more[:-1]] if more else []
                current = more[-1] if more else current + first
            elif text.startswith(("<(", ">("), self._position):
                self._position += 2
                commands = self._script()
                self._position += 1
                current += f"{UNKNOWN}<{len(self._names.files)}"
                self._names.files[current] = self._names.written_by(commands)
            else:
                break
        raw = text[start : self._position]
        fields = [word for item in [*fields, current] if item or quoted for word in alternatives(item)]
        return [word for item in fields for word in braces_expanded(item)] if "{" in raw else fields

    def _tilde(self, plain: str) -> str:
        """Expand a tilde that begins a word; it comes alone, and what follows is a part of its own."""
        if plain != "~":
            return plain
        user = re.compile(r"[\w.-]*").match(self._text, self._position)
        if not user or not user[0]:
            return self._names.value("HOME")
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
            return self._names.written_by(commands)
        if text.startswith("${", self._position):
            return self._parameter()
        self._position += 1
        if name := _NAME.match(text, self._position):
            self._position = name.end()
            return self._value(name[0])
        return "$"

    def _arithmetic(self) -> None:
        """Step over ``((…))``, of which the first parenthesis has been read.

        It may as well be a subshell in a subshell. Read as commands it does no harm, but ``<<`` is no document there.
        """
        start = self._position
        self._position = closing(self._text, start - 1, "()") + 1
        self._inner(self._text[start : self._position]).read()

    def _parameter(self) -> str:
        """Read ``${name…}``: what is left of the name's value, else what is said to stand in for it."""
        start, position = self._position + 2, closing(self._text, self._position, "{}")
        self._position = position + 1
        content = self._text[start:position]
        if indirect := re.match(r"!([A-Za-z_]\w*)(?![\w\[@*])", content):
            content = self._names.variables.get(indirect[1], "") + content[indirect.end() :]
        name = _NAME.match(content)
        operation = self._inner(content[name.end() if name else 0 :]).expand()
        if name and name[0] in self._names.variables:
            return cut(self._names.variables[name[0]], operation)
        operation = operation.lstrip(":")
        if operation.startswith(("-", "=")):
            return operation[1:]
        return self._value(name[0]) if name and not operation.startswith("?") else UNKNOWN

    def _value(self, name: str) -> str:
        """Return a variable's value; what a function's body finds is told when it is called."""
        return self._names.variables.get(name, UNKNOWN) if self._defining() else self._names.value(name)

    def _backticks(self) -> str:
        match = re.compile(r"`((?:[^`\\]|\\.)*)`?", re.DOTALL).match(self._text, self._position)
        self._position = match.end() if match else len(self._text)
        inner = self._inner(re.sub(r"\\([`$\\])", r"\1", match[1] if match else ""))
        before = len(self.commands)
        inner.read()
        return self._names.written_by(self.commands[before:])
