"""execute_code: a Python script in the rollout's sandbox, which may call the rollout's other tools.

It needs nothing of a sandbox but commands, files and a background process with a stdin, so it works in all of them. The
script runs under ``script_runner.py``; each of its calls comes out as the output of one command that reads a FIFO, is
run as the model's own would be, and is answered on the runner's stdin. What the script calls is no call of the model's:
it counts in ``tool_calls_made``, not in the row's ``tool_stats``. No key is in its environment. In ``local`` a script
can do what the user can do: the guard reads commands, not Python.
"""

from __future__ import annotations

import asyncio
import base64
import json
import keyword
import shlex
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from sandboxes.base import BackgroundProcess, Sandbox, SandboxFileError
from tools.base import JsonObject, ToolContext, ToolError, tool
from tools.calls import ToolDefinition
from tools.terminal import strip_ansi

MODULE = "hermes_tools"  # what scripts import; the original's name, which models know
CALLABLE = ("web_search", "web_extract", "read_file", "write_file", "search_files", "patch", "terminal")
MAX_CALLS = 50
STDOUT_BYTES = 50_000
STDERR_BYTES = 10_000
_MAX_REQUEST_CHARS = 4_000_000
_SETUP_SECONDS = 30.0
_MARGIN_SECONDS = 15.0  # on top of the script's time: to start it, and to hear of its end
_NOT_IN_SCRIPTS = {"terminal": ("background", "pty")}
_FUTURE = "from __future__ import annotations\n"  # must stand in front of everything else
_RUNNER = Path(__file__).with_name("script_runner.py").read_text(encoding="utf-8").partition(_FUTURE)[2]
_SETUP = (
    "(command -v python3 > /dev/null || exit 9;"
    ' folder=$(mktemp -d) && mkfifo "$folder/requests" && printf %s "$folder")'
)
_NO_PYTHON = 9
_NOT_TO_BE_RUN = (126, 127)  # by these exit codes a shell, or a stand-in for python3, says so


@tool("code_execution", limit_seconds=lambda limits: limits.script_seconds + _SETUP_SECONDS + 2 * _MARGIN_SECONDS)
async def execute_code(
    context: ToolContext, code: Annotated[str, Field(description="A whole script; print what you need")]
) -> JsonObject:
    """Run a Python script in the sandbox: for many tool calls, or for data too long to read.

    Of your other tools, those among web_search, web_extract, read_file, write_file, search_files, patch and terminal
    can be imported from `hermes_tools`; they take the tools' arguments, return dicts. At most 5 minutes and 50 calls.
    """
    if not code.strip():
        raise ToolError("code is empty", status="error")
    sandbox = await context.open_sandbox()
    folder = await _folder(sandbox)
    stubs = {tool.name: _stub(tool) for tool in context.offered if tool.name in CALLABLE}
    job = {
        "code": code.encode("utf-8", "replace").decode(),
        "module": MODULE,
        "stubs": "\n".join(stubs.values()),
        "seconds": context.limits.script_seconds,
        "limits": [STDOUT_BYTES, STDERR_BYTES],
    }
    runner = f"{_FUTURE}JOB = {job!r}\n{_RUNNER}"
    await sandbox.write_file(f"{folder}/runner.py", runner.encode())
    started = time.monotonic()
    process = await sandbox.start(f"exec python3 {shlex.quote(folder)}/runner.py")
    calls = _Calls(context, sandbox, process, f"{folder}/requests", frozenset(stubs))
    ended = await calls.serve_until_end()
    if process.exit_code() in _NOT_TO_BE_RUN:
        raise _no_python()
    result = _result(process.output() if ended else "", context.limits.script_seconds)
    return {
        **result,
        "tool_calls_made": calls.made,
        "duration_seconds": round(time.monotonic() - started, 2),
    }


async def _folder(sandbox: Sandbox) -> str:
    """Return a new folder with the FIFO in it. Raises ToolError."""
    done = await sandbox.exec(_SETUP, timeout_seconds=_SETUP_SECONDS)
    if done.exit_code == _NO_PYTHON:
        raise _no_python()
    if done.exit_code or not done.output.startswith("/"):
        raise ToolError(f"The script cannot be run here: {done.output.strip()[-300:]}", status="error")
    return done.output.strip()


def _no_python() -> ToolError:
    return ToolError("There is no Python 3 in this sandbox; use the terminal instead", status="error")


def _stub(definition: ToolDefinition) -> str:
    """Return a tool as a Python function; its arguments that may be left out are None."""
    left_out = _NOT_IN_SCRIPTS.get(definition.name, ())
    required = definition.parameters.get("required", [])
    names = [
        name
        for name in definition.parameters["properties"]
        if name not in left_out and name.isidentifier() and not keyword.iskeyword(name)
    ]
    names.sort(key=lambda name: name not in required)
    signature = ", ".join(name if name in required else f"{name}=None" for name in names)
    arguments = ", ".join(f"{name!r}: {name}" for name in names)
    return (
        f"\n\ndef {definition.name}({signature}):\n    {json.dumps(definition.description)}\n"
        f"    return _call({definition.name!r}, {{{arguments}}})\n"
    )


@dataclass
class _Calls:
    """Runs what the script asks for."""

    context: ToolContext
    sandbox: Sandbox
    process: BackgroundProcess
    requests: str  # the FIFO
    allowed: frozenset[str]
    made: int = field(default=0)

    async def serve_until_end(self) -> bool:
        """Answer calls until the script has ended, however it does; False when it had to be killed."""
        seconds = self.context.limits.script_seconds + _MARGIN_SECONDS
        serving = asyncio.create_task(self._serve(seconds))
        ending = asyncio.create_task(self.process.wait(seconds))
        try:
            await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            ended = await ending
            if serving.done():
                serving.result()
            return ended
        finally:
            serving.cancel()
            ending.cancel()
            await asyncio.gather(serving, ending, return_exceptions=True)
            await self.process.kill()

    async def _serve(self, seconds: float) -> None:
        command = f"cat {shlex.quote(self.requests)}"
        while True:
            asked = await self.sandbox.exec_plain(command, timeout_seconds=seconds, max_output_chars=_MAX_REQUEST_CHARS)
            if asked.exit_code:  # the FIFO is gone with the runner
                return
            answer = await self._answer(asked.output)
            try:
                await self.process.write(answer.encode() + b"\n")
            except SandboxFileError:  # it has ended
                return

    async def _answer(self, request: str) -> str:
        """Return a JSON object in one line."""
        try:
            asked = json.loads(request)
            name, arguments = str(asked["name"]), dict(asked["arguments"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return _error("the call could not be read; it may be too long")
        if name not in self.allowed:
            return _error(f"{name} cannot be called from a script here")
        if self.made >= MAX_CALLS:
            return _error(f"Tool call limit reached ({MAX_CALLS}); nothing was run")
        self.made += 1
        for argument in _NOT_IN_SCRIPTS.get(name, ()):
            arguments.pop(argument, None)
        return await self._run(name, arguments)

    async def _run(self, name: str, arguments: dict[str, Any]) -> str:
        assert self.context.call_tool is not None  # noqa: S101 - the toolbox sets it before any call
        self.context.by_script = True
        try:
            return (await self.context.call_tool(name, arguments)).content
        finally:
            self.context.by_script = False


def _error(message: str) -> str:
    return json.dumps({"error": message})


def _result(said: str, seconds: float) -> JsonObject:
    """Return what the runner's last line says, in the tool's words."""
    words = said.rstrip().rpartition("\n")[2].split()
    try:
        ended, code, *streams = words
        exit_code = int(code)
        output, errors = (
            strip_ansi(base64.b64decode(text if text != "=" else "").decode("utf-8", "replace")) for text in streams
        )
    except ValueError:
        return {"status": "error", "output": "", "error": f"The script was killed. {said.strip()[-1000:]}".strip()}
    if ended == "timeout":
        error = f"The script took longer than {seconds:g} seconds and was killed"
        return {"status": "timeout", "output": output, "error": f"{error}\n{errors}".strip()}
    if exit_code in (-signal.SIGINT, 128 + signal.SIGINT):
        return {"status": "interrupted", "output": output, "error": errors.strip() or "The script was interrupted"}
    if exit_code:
        return {"status": "error", "output": output, "error": errors.strip() or f"The script ended with {exit_code}"}
    return {"status": "success", "output": output}
