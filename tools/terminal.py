"""The terminal toolset: commands, and the background processes they leave.

Owns what the model is told about a command; how it runs (persistence, time-outs, what is kept of the output, which
commands are refused) is the sandbox's business. Background processes belong to the rollout: nobody else sees them, and
they end with its sandbox. Session ids count up, so that two runs of the same script read the same.
"""

from __future__ import annotations

import re
import shlex
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import Field

from sandboxes.base import BackgroundProcess, ExecResult, SandboxFileError
from tools.base import JsonObject, ToolContext, ToolError, ToolLimits, tool

HUNG_MARGIN_SECONDS = 30.0  # on top of a command's own time-out; after it the sandbox does not answer any more
TIMEOUT_EXIT_CODE = 124
LOG_LINES = 200

_TIMEOUT = "Seconds; what takes over 10 minutes goes to the background"
_ANSI = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # colours, cursor movements
    r"|[\]PX^_][^\x07\x1b]*+(?:\x07|\x1b\\)"  # titles, links and other strings, to their end
    r"|[ -/]+[0-~]|[0-Z\\-~])"  # character sets and single functions
)
_WORKDIR = re.compile(r"[\w/.~ +@=,:%-]+")


@tool("terminal", limit_seconds=lambda limits: limits.max_foreground_seconds + HUNG_MARGIN_SECONDS)
async def terminal(  # noqa: PLR0913 - the arguments are the tool's schema
    context: ToolContext,
    *,
    command: str,
    background: Annotated[bool, Field(description="For servers and long jobs; follow with process")] = False,
    timeout: Annotated[int | None, Field(ge=1, description=_TIMEOUT)] = None,  # noqa: ASYNC109 - the model's word
    workdir: Annotated[str, Field(description="Folder for this command only")] = "",
    pty: Annotated[bool, Field(description="Ignored: there is no terminal")] = False,
) -> JsonObject:
    """Run a shell command; output has stdout and stderr. cwd and exported variables persist. stdin is empty."""
    _check(command, workdir)
    limits = context.limits
    seconds = min(limits.terminal_timeout_seconds, limits.max_foreground_seconds) if timeout is None else timeout
    if background:
        result = await _start(context, command, workdir)
    elif seconds > limits.max_foreground_seconds:
        raise _refused(
            f"timeout {timeout} is above the foreground limit of {limits.max_foreground_seconds:g} seconds; "
            "run it with background=true and follow it with the process tool"
        )
    else:
        sandbox = await context.open_sandbox()
        result = _finished(command, await sandbox.exec(command, timeout_seconds=seconds, cwd=workdir), seconds)
    return {**result, "note": "there is no pty here; the command ran without one"} if pty else result


def _check(command: str, workdir: str) -> None:
    if not command.strip():
        raise _refused("command is empty")
    if "\0" in command:
        raise _refused("command holds a NUL character")
    if workdir and not _WORKDIR.fullmatch(workdir):
        raise _refused(
            f"workdir {workdir!r} holds characters other than letters, digits, blanks and / . ~ + @ = , : % - _"
        )


def _refused(message: str) -> ToolError:
    return ToolError(message, output="", exit_code=-1)


def _finished(command: str, done: ExecResult, seconds: float) -> JsonObject:
    output = strip_ansi(done.output)
    if done.timed_out:
        notice = f"[Command timed out after {seconds:g}s]"
        return {
            "output": f"{output.rstrip()}\n{notice}".lstrip("\n"),
            "exit_code": TIMEOUT_EXIT_CODE,
            "error": f"Command timed out after {seconds:g} seconds and was killed",
        }
    result: JsonObject = {"output": output, "exit_code": done.exit_code, "error": None}
    meaning = exit_code_meaning(command, done.exit_code)
    return {**result, "exit_code_meaning": meaning} if meaning else result


def strip_ansi(text: str) -> str:
    """Remove the escape sequences that colour a terminal and move its cursor."""
    return _ANSI.sub("", text) if "\x1b" in text else text


_MEANINGS = {
    (program, exit_code): meaning
    for programs, exit_code, meaning in (
        ("grep egrep fgrep zgrep rg ag ack", 1, "nothing matched"),
        ("diff cmp colordiff", 1, "the files differ"),
        ("test [", 1, "the condition is false"),
        ("find", 1, "a folder could not be read"),
        ("pgrep", 1, "no process matched"),
        ("curl", 6, "the host name cannot be resolved"),
        ("curl", 7, "the connection is refused"),
        ("curl", 22, "the server answered with an error status"),
        ("curl", 28, "the transfer timed out"),
    )
    for program in programs.split()
}
_EXIT_CODES_WITH_MEANING = frozenset(exit_code for _, exit_code in _MEANINGS)
_MAX_PARSED_CHARS = 4000


def exit_code_meaning(command: str, exit_code: int) -> str:
    """Say what a program uses this exit code for, where that may be no failure; "" where nothing is known.

    Looks at the last simple command of the last line, because its exit code is the one a shell passes on.
    """
    if exit_code not in _EXIT_CODES_WITH_MEANING or len(command) > _MAX_PARSED_CHARS:
        return ""
    try:
        words = list(shlex.shlex(command.strip().rpartition("\n")[2], posix=True, punctuation_chars=True))
    except ValueError:  # an open quote: the line is the end of something longer
        return ""
    program = ""
    for word in words:
        if set(word) <= set("();|&"):
            program = ""
        elif not program and not re.match(r"\w+=", word):
            program = word.rpartition("/")[2]
    meaning = _MEANINGS.get((program, exit_code))
    return f"{program} exits with {exit_code} when {meaning}" if meaning else ""


@dataclass
class Processes:
    """One rollout's background processes by session id, in the order in which they were started."""

    by_id: dict[str, BackgroundProcess] = field(default_factory=dict)


async def _start(context: ToolContext, command: str, workdir: str) -> JsonObject:
    sandbox = await context.open_sandbox()
    started = await sandbox.start(command, cwd=workdir)
    processes = context.state(Processes).by_id
    session_id = f"proc_{len(processes) + 1}"
    processes[session_id] = started
    return {
        "output": "Background process started",
        "session_id": session_id,
        "pid": started.pid,
        "exit_code": 0,
        "error": None,
    }


Action = Literal["list", "poll", "log", "wait", "kill", "write", "submit", "close"]


@tool("terminal", limit_seconds=lambda limits: limits.terminal_timeout_seconds + HUNG_MARGIN_SECONDS)
async def process(  # noqa: PLR0913 - the arguments are the tool's schema
    context: ToolContext,
    *,
    action: Annotated[
        Action,
        Field(description="log: output lines; write: data to stdin; submit: write and newline; close: end stdin"),
    ],
    session_id: Annotated[str, Field(description="All but list need it")] = "",
    data: str = "",
    timeout: Annotated[int | None, Field(ge=1, description="Seconds to wait")] = None,  # noqa: ASYNC109
    offset: Annotated[int | None, Field(ge=0, description="First log line; default: the newest")] = None,
    limit: Annotated[int, Field(ge=1)] = LOG_LINES,
) -> JsonObject:
    """Look after processes started with terminal(background=true)."""
    processes = context.state(Processes).by_id
    if action == "list":
        return {"processes": [_listed(name, running) for name, running in processes.items()]}
    running = _find(processes, session_id, action)
    match action:
        case "poll":
            return _polled(session_id, running)
        case "log":
            return _log(session_id, running, offset, limit)
        case "wait":
            return await _wait(session_id, running, timeout, context.limits)
        case "kill":
            return await _kill(session_id, running)
        case "write" | "submit" | "close":
            return await _feed(running, action, data)


def _find(processes: dict[str, BackgroundProcess], session_id: str, action: str) -> BackgroundProcess:
    if not session_id:
        raise ToolError(f"session_id is required for {action}")
    if session_id not in processes:
        known = ", ".join(processes) or "none"
        raise ToolError(f"No process with ID {session_id}; known: {known}", status="not_found")
    return processes[session_id]


def _listed(session_id: str, running: BackgroundProcess) -> JsonObject:
    return {
        "session_id": session_id,
        "command": running.command[:200],
        "cwd": running.cwd,
        "pid": running.pid,
        "started_at": datetime.fromtimestamp(running.started_at, UTC).isoformat(timespec="seconds"),
        "uptime_seconds": _uptime_seconds(running),
        "status": running.status(),
        "output_preview": _output(running)[-200:],
        **_exit_code(running),
    }


def _polled(session_id: str, running: BackgroundProcess) -> JsonObject:
    return {
        "session_id": session_id,
        "command": running.command,
        "status": running.status(),
        "pid": running.pid,
        "uptime_seconds": _uptime_seconds(running),
        "output_preview": _output(running)[-1000:],
        **_exit_code(running),
    }


def _log(session_id: str, running: BackgroundProcess, offset: int | None, limit: int) -> JsonObject:
    lines = _output(running).splitlines()
    first = max(0, len(lines) - limit) if offset is None else offset
    shown = lines[first : first + limit]
    return {
        "session_id": session_id,
        "status": running.status(),
        "output": "\n".join(shown),
        "total_lines": len(lines),
        "showing": f"{len(shown)} lines from line {first}",
    }


async def _wait(
    session_id: str,
    running: BackgroundProcess,
    timeout: int | None,  # noqa: ASYNC109 - it is what the model asked for
    limits: ToolLimits,
) -> JsonObject:
    longest = limits.terminal_timeout_seconds
    seconds = longest if timeout is None else min(timeout, longest)
    if await running.wait(seconds):
        return {
            "status": "exited",
            "session_id": session_id,
            "exit_code": running.exit_code(),
            "output": _output(running)[-2000:],
        }
    clamped = f" (asked for {timeout}, a wait takes at most {longest:g})" if timeout and timeout > longest else ""
    return {
        "status": "timeout",
        "session_id": session_id,
        "output": _output(running)[-1000:],
        "timeout_note": f"Waited {seconds:g} seconds{clamped}; the process is still running",
    }


async def _kill(session_id: str, running: BackgroundProcess) -> JsonObject:
    if running.status() == "exited":
        return {"status": "already_exited", "session_id": session_id, **_exit_code(running)}
    await running.kill()
    return {"status": "killed", "session_id": session_id}


async def _feed(running: BackgroundProcess, action: str, data: str) -> JsonObject:
    if action == "close":
        await running.close_stdin()
        return {"status": "ok", "message": "stdin closed"}
    encoded = (data + "\n" if action == "submit" else data).encode()
    try:
        await running.write(encoded)
    except SandboxFileError as error:
        raise ToolError(str(error), status="already_exited" if running.status() == "exited" else "error") from None
    return {"status": "ok", "bytes_written": len(encoded)}


def _output(running: BackgroundProcess) -> str:
    return strip_ansi(running.output())


def _uptime_seconds(running: BackgroundProcess) -> int:
    return max(0, int(time.time() - running.started_at))


def _exit_code(running: BackgroundProcess) -> JsonObject:
    code = running.exit_code()
    return {} if code is None else {"exit_code": code}
