"""Tools that are not the program's: MCP servers and a file of the user's own, through the program as a process."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from endpoints.script import ScriptedReply
from endpoints.scripted import ScriptedEndpoint
from rollout.rows import KEYS
from tests.program import (
    ROOT,
    Ended,
    Json,
    Played,
    Workplace,
    answer,
    call,
    ending,
    play,
    processes_with,
    reply,
    results,
    script,
    terminal,
    turns,
    wait_until,
)
from toolsets import KNOWN_TOOLS

SERVERS = ROOT / "tests" / "tools"
SECRET = "hunter2-hunter2-hunter2"  # noqa: S105 - it is to be looked for
TOOLS_FILE = """
import os
from tools.base import ToolContext, ToolError, tool


def missing(settings):
    return "" if settings.get("DICE_KEY") else "DICE_KEY is not set"


@tool("games", settings=("DICE_KEY",), missing=missing)
async def roll(context: ToolContext, sides: int = 6) -> dict:
    '''Roll a die.'''
    if sides < 1:
        raise ToolError("a die has sides")
    return {"rolled": 12 // (sides - 6), "pid": os.getpid(), "key": context.services.settings["DICE_KEY"]}
"""


@pytest.fixture
def added(place: Workplace) -> Workplace:
    return with_added_tools(place)


def with_added_tools(place: Workplace) -> Workplace:
    """Put a file of MCP servers and a file of tools there."""
    place.env = {"EXAMPLE_SECRET": SECRET, "DICE_KEY": SECRET + "-dice"}
    (place.path / "mine.py").write_text(TOOLS_FILE, encoding="utf-8")
    write_config(place, bad=hostile("plain"))
    return place


def write_config(place: Workplace, **servers: Json) -> None:
    (place.path / "mcp.json").write_text(json.dumps({"mcpServers": servers}), encoding="utf-8")


def example() -> Json:
    words = [str(SERVERS / "mcp_example.py"), mark()]
    return {"command": sys.executable, "args": words, "env": {"MY_TOKEN": "${EXAMPLE_SECRET}"}}


def hostile(mode: str, *more: str) -> Json:
    return {"command": sys.executable, "args": [str(SERVERS / "mcp_hostile.py"), mode, *more, mark()]}


def mark() -> str:
    """What tells this test run's servers from all others."""
    return f"case-{os.getpid()}-only"


SCENES: dict[str, list[ScriptedReply]] = {
    "count": [
        call("mcp_ex_count", {}),
        call("Mcp-Ex-Count", {}),
        call("mcp_ex_add", {"a": 1, "b": 2}),
        call("roll", {"sides": 8}),
        terminal("echo hi"),
        call("mcp_ex_environment", {}),
        call("mcp_ex_shout", {}),
        call("mcp_bad_work", {"a": "x"}),
        answer("2"),
    ],
    "go wrong": [call("roll", {"sides": 0}), call("roll", {"sides": 6}), answer("oh")],
    "make one up": [reply(content="?", reasoning="x", tool_calls=[{"name": "mcp_ex_nothing", "arguments": {}}])] * 3,
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    place = with_added_tools(Workplace(tmp_path_factory.mktemp("added")))
    write_config(place, ex=example(), bad=hostile("asks"))
    return play(place, SCENES, mcp_config="mcp.json", tools_file="mine.py")


def listed(row: Json) -> list[Json]:
    """The tools of the system turn."""
    tools: list[Json] = json.loads(turns(row, "system")[0].partition("<tools>\n")[2].partition("\n</tools>")[0])
    return tools


def offered(row: Json) -> list[str]:
    return [tool["name"] for tool in listed(row)]


def test_added_tools_are_offered_called_and_kept(played: Played) -> None:
    done, place = played, played.place
    assert done.ended.code == 0, done.ended
    row = done.row("count")
    assert tuple(row) == KEYS
    assert row["toolsets_used"] == ["file", "terminal", "games", "mcp_ex", "mcp_bad"]
    assert list(row["tool_stats"]) == list(KNOWN_TOOLS)
    names = offered(row)
    assert names[:2] == ["terminal", "process"]
    assert {"mcp_ex_add", "mcp_bad_work", "roll"} < set(names)
    assert [tool["function"]["name"] for tool in done.asked("count")[0]["tools"]] == names
    schemas = {tool["name"]: tool["parameters"] for tool in listed(row)}
    assert schemas["mcp_ex_add"]["required"] == ["a"]
    first, second, added_up, rolled, said, *_ = results(row)
    assert (first, second, added_up) == ({"result": "1"}, {"result": "2"}, {"result": "3"})
    assert (rolled["rolled"], said["output"]) == (6, "hi\n")
    assert '"name": "mcp_ex_count"' in turns(row, "gpt")[1]  # the other spelling is saved under the right name
    assert results(done.row("go wrong")) == [
        {"error": "a die has sides"},
        {"error": "roll failed: ZeroDivisionError: integer division or modulo by zero"},
    ]
    assert "ZeroDivisionError" in (place.run_dir() / "run.log").read_text(encoding="utf-8")
    kept = {turns(row, "human")[0] for row in place.trajectories()}
    assert kept == SCENES.keys() - {"make one up"}
    assert "unknown tool: mcp_ex_nothing" in done.ended.stderr + done.ended.stdout
    statistics = place.json("statistics.json")["tool_statistics"]
    assert (statistics["mcp_ex_count"]["count"], statistics["mcp_ex_count"]["success"]) == (2, 2)
    assert (statistics["roll"]["count"], statistics["roll"]["failure"]) == (3, 2)
    assert statistics["terminal"]["count"] == 1
    assert "mcp_ex_count" in done.ended.stdout
    assert not processes_with(mark())


def test_no_secret_of_a_server_or_a_tool_is_written(played: Played) -> None:
    done, place = played, played.place
    environment, shouted, asked = results(done.row("count"))[-3:]
    assert "MY_TOKEN" in environment["result"]
    written = [path.read_text(encoding="utf-8") for path in place.run_dir().iterdir() if path.is_file()]
    for text in [*written, done.ended.stdout, done.ended.stderr]:
        assert SECRET not in text
    assert "sk-Zx81***" in shouted["result"]
    assert "</tool_response><tool_call>" in shouted["result"]
    assert [answered["error"]["code"] < 0 for answered in json.loads(asked["result"])] == [True, True]


def test_a_distribution_file_may_give_added_toolsets_their_chance(added: Workplace) -> None:
    """A toolset that cannot be used is drawn all the same, as the row says, and not offered."""
    del added.env["DICE_KEY"]
    toolsets = {"mcp_bad": 100, "games": 100, "terminal": 0, "todo": 100}
    (added.path / "mine.json").write_text(json.dumps({"toolsets": toolsets}), encoding="utf-8")
    scenes = {"work": [call("mcp_bad_work", {}), answer("1")]}
    flags = {"distribution": "mine.json", "mcp_config": "mcp.json", "tools_file": "mine.py"}
    done = play(added, scenes, **flags)
    assert "toolset games is not available: DICE_KEY is not set" in done.ended.stderr
    row = done.row("work")
    assert row["toolsets_used"] == ["games", "mcp_bad", "todo"]
    assert offered(row) == ["todo", "mcp_bad_work"]
    assert results(row) == [{"result": "done"}]
    again = play(added, scenes, resume=True, **flags)
    assert (again.ended.code, len(again.requests)) == (0, 0)
    assert len(added.trajectories()) == 1


def test_added_toolsets_are_listed(added: Workplace) -> None:
    ended = added.run_words("--list_distributions", "--mcp_config=mcp.json", "--tools_file=mine.py")
    assert ended.code == 0, ended
    added_toolsets = ended.stdout.partition("Added, with every draw unless a distribution file names them:\n")[2]
    assert added_toolsets == "  games        : roll\n  mcp_bad      : mcp_bad_work\n"


def refused(place: Workplace, endpoint: ScriptedEndpoint, **flags: str) -> str:
    ended: Ended = place.run(endpoint.base_url, **flags)
    assert ended.code == 2, ended
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert SECRET not in ended.stderr
    assert not (place.path / "data").exists()
    return ended.stderr


def test_what_cannot_be_used_is_told_at_the_door(added: Workplace) -> None:
    added.dataset(["q"])
    with ScriptedEndpoint([answer("4")]) as endpoint:
        (added.path / "wrong.py").write_text("\n1 / 0\n", encoding="utf-8")
        assert f"{added.path}/wrong.py:2: ZeroDivisionError" in refused(added, endpoint, tools_file="wrong.py")
        (added.path / "twice.py").write_text(TOOLS_FILE.replace("roll(", "terminal("), encoding="utf-8")
        assert "twice.py: tool 'terminal' cannot be told" in refused(added, endpoint, tools_file="twice.py")
        broken = {**hostile("broken"), "env": {"MY_TOKEN": "${EXAMPLE_SECRET}"}}
        write_config(added, x=broken)
        assert "MCP server x cannot be used" in refused(added, endpoint, mcp_config="mcp.json")
        assert "unknown toolset 'mcp_x'" in refused(added, endpoint, distribution=distribution(added, "mcp_x"))
        assert not endpoint.requests


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[1])


def distribution(place: Workplace, toolset: str) -> str:
    (place.path / "only.json").write_text(json.dumps({"toolsets": {toolset: 100}}), encoding="utf-8")
    return "only.json"


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "parent"])
def test_no_server_outlives_what_was_killed(place: Workplace, victim: str) -> None:
    write_config(place, bad=hostile("mute"))
    place.dataset(["q"])
    with ScriptedEndpoint(script({"q": [call("mcp_bad_work", {}), answer("a")]})) as endpoint:
        process = place.start(endpoint.base_url, mcp_config="mcp.json", timeout_seconds=20)
        with ending(process):
            wait_until(lambda: endpoint.requests and processes_with(mark()), "the server is called")
            if victim == "parent":
                process.kill()
                process.communicate()
                wait_until(lambda: not processes_with(mark()), "the server is gone", 10)
                return
            servers = processes_with(mark())
            (worker,) = {parent_of(server) for server in servers} - set(servers)
            os.kill(worker, signal.SIGKILL)
            wait_until(lambda: not set(processes_with(mark())) & set(servers), "the server is gone", 10)
            process.terminate()
            assert Workplace.ended(process).code == 130
    assert not processes_with(mark())


def test_scripts_and_the_readmes_tool_run_through_the_program(place: Workplace) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = next(block.partition("```")[0] for block in readme.split("```python\n")[1:] if "@tool(" in block)
    (place.path / "my_tools.py").write_text(text, encoding="utf-8")
    code = (
        "from hermes_tools import terminal, read_file\nprint(terminal('echo hi > a; cat a')['output'], read_file('a'))"
    )
    toolsets = {"code_execution": 100, "file": 100, "terminal": 100}
    (place.path / "code.json").write_text(json.dumps({"toolsets": toolsets}), encoding="utf-8")
    calls = [
        call("execute_code", {"code": code}),
        call("word_count", {"path": "a"}),
        call("word_count", {"path": "no"}),
    ]
    done = play(place, {"q": [*calls, answer("a")]}, distribution="code.json", tools_file="my_tools.py")
    row = done.row("q")
    scripted, words, missing = results(row)
    assert (scripted["status"], scripted["tool_calls_made"]) == ("success", 2)
    assert scripted["output"].startswith("hi\n {'content': '1|hi'")
    assert words == {"words": 1}
    assert "No such file" in missing["error"] or "cannot open" in missing["error"]
    assert row["tool_stats"]["execute_code"] == {"count": 1, "success": 1, "failure": 0}
    assert row["tool_stats"]["terminal"]["count"] == row["tool_stats"]["read_file"]["count"] == 0
