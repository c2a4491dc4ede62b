"""Tools of the user's own: a Python file, read at the door, run in every worker from the same text.

The file marks async functions with the program's ``@tool``. What it raises is told and never ends anything: while it is
loaded as a ToolsFileError, in a call as the tool's error, with a traceback in the run's log. Loading is bounded in time
where that is asked for, and a user who interrupts it is heard. Its code runs in the worker, not in the sandbox, and is
trusted like the program itself; it must await, not block.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from sandboxes.base import CommandRefused, SandboxError, SandboxFileError
from tools.base import JsonObject, Tool, ToolContext, ToolError, ToolFunction, ToolLimits
from tools.services import Settings

LOAD_SECONDS = 60.0  # for the file to run, at the door
RESERVED_PREFIX = "mcp_"  # of the names of MCP servers' toolsets and tools
_MODULE = "tools_file"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAY_RAISE = (ToolError, SandboxError, SandboxFileError, CommandRefused)


class ToolsFileError(ValueError):
    """The user's tools cannot be used; one line that says why, with file and line where there is one."""


class _SlowError(BaseException):
    """Loading takes too long; nothing that catches an Exception holds it up."""


class _UserCodeError(Exception):
    """The user's code raised something; the message says what, ``place`` where in the file."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


@dataclass(frozen=True)
class ToolsFile:
    """A file of tools, as it was read."""

    path: str
    text: str

    @classmethod
    def read(cls, path: Path) -> ToolsFile:
        """Raise ToolsFileError when there is no such text."""
        try:
            return cls(str(path.absolute()), path.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise ToolsFileError(f"--tools_file={path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ToolsFileError(f"--tools_file={path} is not UTF-8: {error.reason}") from None

    def load(self, own: dict[str, Tool], seconds: float = 0) -> list[Tool]:
        """Run the file and return its tools, checked. Those it imports from ``own``, the program's, are left out.

        ``seconds``: how long that may take; 0 is no limit. A limit needs the main thread. Raises ToolsFileError.
        """
        try:
            with _time_limit(seconds):
                return self._loaded(own)
        except _UserCodeError as error:
            raise ToolsFileError(f"{error.place}: {error}") from None
        except _SlowError as error:
            place = _place(error, self.path)
            raise ToolsFileError(f"{place}: loading the file took longer than {seconds:g} seconds") from None

    def _loaded(self, own: dict[str, Tool]) -> list[Tool]:
        with (
            _user_code(self.path, (KeyboardInterrupt, _SlowError)),
            redirect_stdout(sys.stderr),
        ):  # stdout is the report's
            module = self._run()
        self._check_twice(module)
        found = {id(value): value for value in vars(module).values() if isinstance(value, Tool)}
        tools = [tool for tool in found.values() if own.get(tool.name) is not tool]
        if not tools:
            raise ToolsFileError(f"{self.path} holds no tool: mark an async function with @tool of tools.base")
        return [self._checked(tool) for tool in tools]

    def _run(self) -> ModuleType:
        spec = ModuleSpec(_MODULE, _Loader(self), origin=self.path)
        spec.has_location = True
        module = module_from_spec(spec)
        folder = str(Path(self.path).parent)
        if folder not in sys.path:
            sys.path.append(folder)  # last: what it holds must not hide modules of the program
        sys.modules[_MODULE] = module
        assert spec.loader is not None  # noqa: S101 - it was just given
        spec.loader.exec_module(module)
        return module

    def _check_twice(self, module: ModuleType) -> None:
        """Refuse a tool that another one of the same name has replaced without a word."""
        lines: dict[str, int] = {}
        for node in ast.parse(self.text).body:
            if not isinstance(node, ast.AsyncFunctionDef) or not isinstance(vars(module).get(node.name), Tool):
                continue
            if node.name in lines:
                message = f"tool {node.name!r} is there already, in line {lines[node.name]}; give one another name"
                raise ToolsFileError(f"{self.path}:{node.lineno}: {message}")
            lines[node.name] = node.lineno

    def _checked(self, tool: Tool) -> Tool:
        code = getattr(tool.function, "__code__", None)
        place = f"{code.co_filename}:{code.co_firstlineno}" if code else self.path
        for what, name in (("tool", tool.name), ("toolset", tool.toolset)):
            if not _NAME.fullmatch(name):
                raise ToolsFileError(f"{place}: {what} name {name!r} must be 1 to 64 of A-Z a-z 0-9 _ -")
            if name.startswith(RESERVED_PREFIX) or name == "all":
                raise ToolsFileError(f"{place}: {what} name {name!r} is taken by the program")
        try:
            with _user_code(self.path, (KeyboardInterrupt, _SlowError)):
                seconds = float(tool.limit_seconds(ToolLimits()))
                json.dumps(tool.parameters)
        except _UserCodeError as error:
            raise ToolsFileError(f"{place}: tool {tool.name!r}: {error}") from None
        if not seconds > 0:
            raise ToolsFileError(f"{place}: tool {tool.name!r}: limit_seconds must be above 0, not {seconds:g}")
        return replace(tool, function=_guarded(tool, self.path), missing=_guarded_missing(tool, self.path))


class _Loader(InspectLoader):
    """Runs the text that was read, whatever the file holds by now."""

    def __init__(self, file: ToolsFile) -> None:
        self._file = file

    def get_source(self, _fullname: str) -> str:
        return self._file.text

    def get_code(self, _fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self._file.text, self._file.path)
        return code


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _SlowError in what takes longer. By a signal of its own: SIGALRM is of whoever ends the program."""
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _SlowError

    before = signal.signal(signal.SIGVTALRM, stop)
    clock = threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), signal.SIGVTALRM))
    clock.daemon = True
    clock.start()
    try:
        yield
    finally:
        clock.cancel()
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _user_code(path: str, may_raise: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Turn whatever the user's code raises into a _UserCodeError."""
    try:
        yield
    except may_raise:
        raise
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # whatever strangers' code raises must end nothing here
        raise _user_code_error(error, path) from error


def _user_code_error(error: BaseException, path: str) -> _UserCodeError:
    if isinstance(error, SyntaxError) and error.lineno:
        return _UserCodeError(f"SyntaxError: {error.msg}", f"{error.filename}:{error.lineno}")
    message = f"{type(error).__name__}: {' '.join(_said(error).split())}".removesuffix(": ")
    return _UserCodeError(message, _place(error, path))


def _place(error: BaseException, path: str) -> str:
    """Return where in the file it was raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{path}:{lines[-1]}" if lines else path


def _said(error: BaseException) -> str:
    """Return an error's text, which strangers' code makes too and may fail at."""
    return "".join(traceback.format_exception_only(error)).partition(": ")[2]


def _guarded(tool: Tool, path: str) -> ToolFunction:
    """Return the tool's function with its faults told to the model, and its result made plain JSON."""

    async def call(context: ToolContext, **arguments: Any) -> JsonObject:
        try:
            with _user_code(path, _MAY_RAISE):
                result = await tool.function(context, **arguments)
                plain = json.loads(json.dumps(result, default=str))
        except _UserCodeError as error:
            fault = "".join(traceback.format_exception(error.__cause__))
            context.log("trace", f"tool {tool.name} failed at {error.place}: {fault}")
            raise ToolError(f"{tool.name} failed: {error}") from None
        return plain if isinstance(plain, dict) else {"result": plain}

    return call


def _guarded_missing(tool: Tool, path: str) -> Callable[[Settings], str]:
    def missing(settings: Settings) -> str:
        try:
            with _user_code(path):
                return str(tool.missing(settings) or "")
        except _UserCodeError as error:
            return f"what it says of its needs failed at {error.place}: {error}"

    return missing
