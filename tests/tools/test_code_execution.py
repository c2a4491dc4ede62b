"""execute_code in real sandboxes, with the tools that scripts call."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from model_tools import CATALOGUE, Toolbox, offered
from sandboxes import BACKENDS
from sandboxes.base import Sandbox, SandboxError, SandboxSpec
from tests.program import nap, processes_with, wait_until
from tests.sandboxes import containers
from tools.base import JsonObject, Tool, ToolContext, ToolError, ToolLimits, tool
from tools.calls import ToolCall
from tools.code_execution import MAX_CALLS

Work = Callable[[Toolbox], Awaitable[Any]]
ALL = ("terminal", "file", "code_execution")
KEY = "sk-Zx81kd92mAl0QpW8rT6yZx81kd92mAl0QpW8rT6y"


DOCKER = pytest.param("docker", marks=pytest.mark.docker)


@pytest.fixture(params=["local", "bubblewrap", DOCKER])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return usable(request.param, monkeypatch)


@pytest.fixture(params=["local", pytest.param("bubblewrap", marks=pytest.mark.slow), DOCKER])
def a_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return usable(request.param, monkeypatch)


def usable(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if name == "docker":
        containers.use("docker", monkeypatch)
    if reason := BACKENDS[name].unavailable():
        pytest.skip(reason)
    return name


def in_rollout(
    work: Work, kind: str = "local", toolsets: Sequence[str] = ALL, seconds: float = 20, extra: Sequence[Tool] = ()
) -> Any:
    async def rollout() -> Any:
        spec = SandboxSpec("tests", f"code-{time.monotonic_ns()}", env={"MY_TOKEN": "hunter2hunter2"})
        sandbox = await BACKENDS[kind].open(spec)

        async def opened() -> Sandbox:
            return sandbox

        try:
            context = ToolContext(opened, ToolLimits(script_seconds=seconds))
            catalogue = CATALOGUE | {own.name: own for own in extra}
            names = [*offered(toolsets), *(own.name for own in extra)]
            return await work(Toolbox(names, context, (), catalogue))
        finally:
            await context.close()
            await sandbox.close()

    return asyncio.run(rollout())


async def execute(toolbox: Toolbox, code: str) -> JsonObject:
    result: JsonObject = json.loads((await toolbox.run(ToolCall("c", "execute_code", {"code": code}))).content)
    return result


def run(code: str, kind: str = "local", **surroundings: Any) -> JsonObject:
    async def work(toolbox: Toolbox) -> JsonObject:
        return await execute(toolbox, code)

    result: JsonObject = in_rollout(work, kind, **surroundings)
    return result


EVERYTHING = """
import json
from hermes_tools import patch, read_file, search_files, terminal, write_file
results = [
    write_file("notes/a.txt", "one\\ntwo\\n"),
    read_file("notes/a.txt"),
    read_file(path="notes/a.txt", limit=1),
    read_file("notes/a.txt"),
    patch(path="notes/a.txt", old_string="two", new_string="three"),
    search_files("three", path="notes"),
    terminal("export WORD=naïve; mkdir -p deep; cd deep; pwd"),
    terminal("echo $WORD; exit 3"),
    read_file("no_such_file"),
]
print(json.dumps(results))
"""


def test_a_script_calls_the_tools_in_every_sandbox(kind: str) -> None:
    async def work(toolbox: Toolbox) -> tuple[JsonObject, JsonObject]:
        done = await execute(toolbox, EVERYTHING)
        after = await toolbox.run(
            ToolCall("c", "terminal", {"command": "basename $PWD; echo $WORD; ls ${TMPDIR:-/tmp}"})
        )
        return done, json.loads(after.content)

    done, after = in_rollout(work, kind)
    assert done["status"] == "success", done
    assert done["tool_calls_made"] == 9
    assert 0 < done["duration_seconds"] < 20
    assert "error" not in done
    written, read, first, again, patched, found, moved, failed, missing = json.loads(done["output"])
    assert written["bytes_written"] == 8
    assert read["content"] == again["content"] == "1|one\n2|two"  # "unchanged" is for who has read it
    assert first["content"] == "1|one"
    assert patched["success"]
    assert found["total_count"] == 1
    assert moved["output"].endswith("/deep\n")
    assert (failed["output"], failed["exit_code"]) == ("naïve\n", 3)
    assert "not found" in missing["error"]
    assert after["output"].split()[:2] == ["deep", "naïve"]  # what a script's commands leave stays
    assert "tmp." not in after["output"]


def test_how_scripts_end(a_kind: str) -> None:
    async def work(toolbox: Toolbox) -> list[JsonObject]:
        codes = [
            "print('x'); import sys; print('why', file=sys.stderr)",
            "print('x'); import sys; print('why', file=sys.stderr); sys.exit(3)",
            "print('x')\n1/0",
            "x = = 1",
            "raise KeyboardInterrupt",
            "import os; os.kill(os.getpid(), 9)",
            "import os, signal; os.kill(os.getppid(), 9); signal.pause()",
        ]
        return [await execute(toolbox, code) for code in codes]

    fine, failed, raised, wrong, interrupted, killed, orphan = in_rollout(work, a_kind)
    assert (fine["status"], fine["output"], fine.get("error")) == ("success", "x\n", None)
    assert (failed["status"], failed["output"], failed["error"]) == ("error", "x\n", "why")
    assert (raised["status"], raised["output"]) == ("error", "x\n")
    assert 'script.py", line 2' in raised["error"]
    assert raised["error"].endswith("ZeroDivisionError: division by zero")
    assert "SyntaxError" in wrong["error"]
    assert interrupted["status"] == "interrupted"
    assert (killed["status"], killed["error"]) == ("error", "The script ended with -9")
    assert (orphan["status"], orphan["error"]) == ("error", "The script was killed.")


def test_a_script_has_no_key_and_no_stdin(a_kind: str) -> None:
    code = "import os, sys; print(repr(sys.stdin.read())); print(sorted(os.environ))"
    done = run(code, a_kind)
    assert done["output"].startswith("''\n")
    assert "MY_TOKEN" not in done["output"]
    assert "PATH" in done["output"]


def test_time_is_up(a_kind: str) -> None:
    sleeping = nap(3081)
    code = f"import os, subprocess; print('begun'); subprocess.run(['sh', '-c', '{sleeping}; true'])"
    done = run(code, a_kind, seconds=1.5)
    assert (done["status"], done["output"]) == ("timeout", "begun\n")
    assert done["error"].startswith("The script took longer than 1.5 seconds and was killed")
    assert done["duration_seconds"] < 10
    assert not processes_with(sleeping)


def test_time_is_up_for_the_tool_a_script_waits_for() -> None:
    sleeping = nap(3082)
    done = run(f"from hermes_tools import terminal; terminal('{sleeping}')", seconds=1)
    assert (done["status"], done["tool_calls_made"]) == ("timeout", 1)
    assert not processes_with(sleeping)


def test_children_end_with_the_script() -> None:
    sleeping = nap(3083)
    done = run(f"import subprocess; subprocess.Popen('{sleeping}'.split()); print('done')")
    assert (done["status"], done["output"]) == ("success", "done\n")

    async def work(toolbox: Toolbox) -> list[int]:
        await execute(toolbox, f"import subprocess; subprocess.Popen('{sleeping}'.split())")
        return processes_with(sleeping)

    assert in_rollout(work) == []


def test_output_is_bounded() -> None:
    code = "import sys; print('a' * 100_000 + 'z' * 100_000); sys.stderr.write('e' * 1_000_000); sys.exit(1)"
    done = run(code)
    assert done["output"].startswith("a" * 20_000 + "\n[150001 of 200001 bytes left out]\n")
    assert done["output"].endswith("z" * 29_999 + "\n")
    assert 10_000 < len(done["error"]) < 10_100
    endless = run("while True: print('x' * 100_000)", seconds=1)
    assert endless["status"] == "timeout"
    assert len(endless["output"]) < 51_000
    assert run("print('\\x1b[31mred\\x1b[0m', end='')")["output"] == "red"
    assert run("import sys; sys.stdout.buffer.write(b'\\xff\\x00')")["output"] == "�" * 2


def test_calls_are_bounded() -> None:
    code = f"""
from hermes_tools import terminal
for number in range({MAX_CALLS}):
    assert terminal("true")["exit_code"] == 0
print(terminal("touch too_much"))
print(terminal.__doc__)
"""
    done = run(code)
    assert done["tool_calls_made"] == MAX_CALLS
    assert "Tool call limit reached (50); nothing was run" in done["output"]
    assert "Run a shell command" in done["output"]


def test_only_what_the_rollout_offers_can_be_called() -> None:
    code = """
import hermes_tools
print([name for name in ("terminal", "process", "read_file", "todo", "web_search") if hasattr(hermes_tools, name)])
print(hermes_tools._call("terminal", {"command": "touch forbidden"}))
print(hermes_tools._call("execute_code", {"code": "1"}))
"""
    done = run(code, toolsets=("file", "code_execution"))
    assert done["output"].splitlines() == [
        "['read_file']",
        "{'error': 'terminal cannot be called from a script here'}",
        "{'error': 'execute_code cannot be called from a script here'}",
    ]
    assert done["tool_calls_made"] == 0


def test_terminal_runs_in_the_foreground_only() -> None:
    code = """
import hermes_tools
print(hermes_tools._call("terminal", {"command": "echo hi", "background": True, "pty": True}))
try:
    hermes_tools.terminal("true", background=True)
except TypeError as error:
    print(error)
"""
    lines = run(code)["output"].splitlines()
    assert lines[0] == "{'output': 'hi\\n', 'exit_code': 0, 'error': None}"
    assert "background" in lines[1]


def test_threads_and_forks_may_call() -> None:
    code = """
import os
from concurrent.futures import ThreadPoolExecutor
from hermes_tools import terminal
with ThreadPoolExecutor(8) as pool:
    print([result["output"] for result in pool.map(lambda number: terminal(f"echo {number}"), range(9))])
children = []
for number in range(3):
    pid = os.fork()
    if pid == 0:
        os._exit(int(terminal(f"echo {number}")["output"]))
    children.append(pid)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])
"""
    done = run(code)
    assert done["output"].splitlines() == [str([f"{number}\n" for number in range(9)]), "[0, 1, 2]"]
    assert done["tool_calls_made"] == 12


def test_large_arguments_and_results_pass() -> None:
    code = """
from hermes_tools import read_file, terminal, write_file
print(write_file("big.txt", "ä" * 300_000 + "\\n" + "line\\n" * 10)["bytes_written"])
print(len(terminal("head -c 49000 /dev/zero | tr '\\\\0' x")["output"]))
print(write_file("huge.txt", "y" * 5_000_000))
"""
    assert run(code)["output"].splitlines() == [
        "600051",
        "49000",
        "{'error': 'the call could not be read; it may be too long'}",
    ]


def test_keys_are_masked_for_scripts_too() -> None:
    code = (
        f"from hermes_tools import terminal\nprint(terminal('printf %s {KEY[:20]} {KEY[20:]} | tr -d \" \"')['output'])"
    )
    assert KEY not in json.dumps(run(code))


def test_a_sandbox_without_python() -> None:
    async def work(toolbox: Toolbox) -> list[JsonObject]:
        stand_in = "mkdir bin; printf '#!/bin/sh\\nexit 127' > bin/python3; chmod +x bin/python3; PATH=$PWD/bin:$PATH"
        await toolbox.run(ToolCall("c", "terminal", {"command": stand_in}))
        with_stand_in = await execute(toolbox, "print(1)")
        await toolbox.run(ToolCall("c", "terminal", {"command": "export PATH=$PWD"}))
        return [with_stand_in, await execute(toolbox, "print(1)")]

    told = {"status": "error", "error": "There is no Python 3 in this sandbox; use the terminal instead"}
    assert in_rollout(work) == [told, told]


def test_no_code_is_told() -> None:
    assert run(" \n")["error"] == "code is empty"


@tool("code_execution", name="web_search")
async def search(_context: ToolContext, query: str, limit: int = 5) -> JsonObject:
    """Search."""
    if query == "fault":
        raise ZeroDivisionError
    if query == "sandbox":
        raise SandboxError("it is gone")
    if query == "nothing":
        raise ToolError("Error searching web: nothing")
    return {"success": True, "data": {"web": [query] * limit}}


def test_tools_outside_the_sandbox_can_be_called_and_fail_as_ever() -> None:
    code = "from hermes_tools import web_search\nprint(web_search('a', limit=2)['data'], web_search('nothing'))"
    assert run(code, extra=[search])["output"] == "{'web': ['a', 'a']} {'error': 'Error searching web: nothing'}\n"
    code = "from hermes_tools import web_search\nprint(web_search('fault'))"
    assert run(code, extra=[search])["output"] == "{'error': 'web_search failed: ZeroDivisionError'}\n"
    with pytest.raises(SandboxError):
        run("from hermes_tools import web_search\nweb_search('sandbox')", extra=[search])


def test_a_cancelled_rollout_leaves_nothing(kind: str) -> None:
    sleeping = nap(3084)

    async def work(toolbox: Toolbox) -> float:
        task = asyncio.create_task(execute(toolbox, f"import os; os.system('{sleeping}')"))
        await asyncio.to_thread(wait_until, lambda: processes_with(sleeping), "it runs")
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - began

    assert in_rollout(work, kind) < 5
    assert not processes_with(sleeping)
