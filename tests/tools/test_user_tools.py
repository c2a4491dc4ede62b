from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import model_tools
from model_tools import BUILT_IN, CATALOGUE, Toolbox, offered
from tests.tools.surroundings import surroundings
from tools.base import JsonObject, Tool, ToolContext, ToolLimits
from tools.calls import ToolCall
from tools.user_tools import ToolsFile, ToolsFileError

HEAD = "from tools.base import ToolContext, ToolError, tool\n"
DICE = """
@tool("games")
async def roll(context: ToolContext, sides: int = 6) -> dict:
    '''Roll a die.'''
    if sides < 1:
        raise ToolError("a die has sides", sides=sides)
    return {"rolled": 12 // sides}
"""


@pytest.fixture(autouse=True)
def path_as_it_was() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before


def load(folder: Path, text: str) -> list[Tool]:
    path = folder / "mine.py"
    path.write_text(text, encoding="utf-8")
    return ToolsFile.read(path).load(CATALOGUE)


def run(tool: Tool, limits: ToolLimits | None = None, **arguments: object) -> tuple[JsonObject, list[str]]:
    """Call a tool in a rollout; return the result and what was logged."""
    logged: list[str] = []

    async def called() -> str:
        async with surroundings(limits) as context:
            context.log = lambda _level, text: logged.append(text)
            toolbox = Toolbox([tool.name], context, (), {tool.name: tool})
            return (await toolbox.run(ToolCall("c", tool.name, arguments))).content

    return json.loads(asyncio.run(called())), logged


@pytest.mark.parametrize(
    "waits", ["time.sleep(60)", "threading.Lock().acquire() and lock.acquire()", "while True: pass"]
)
def test_a_file_that_blocks_is_not_waited_for(tmp_path: Path, waits: str) -> None:
    text = (
        f"import threading, time\nlock = threading.Lock()\nlock.acquire()\ntry:\n    {waits}\nexcept Exception: pass\n"
    )
    path = tmp_path / "mine.py"
    path.write_text(text, encoding="utf-8")
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(ToolsFileError, match=r"mine\.py:5: loading the file took longer than 0\.5 seconds$"):
        ToolsFile.read(path).load(CATALOGUE, 0.5)
    assert signal.getsignal(signal.SIGVTALRM) is before


def test_who_interrupts_the_loading_is_heard(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path, "raise KeyboardInterrupt")


def test_two_tools_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolsFileError, match=r"mine\.py:11: tool 'roll' is there already, in line 4; give one another"):
        load(tmp_path, HEAD + DICE + DICE)
    replaced = "roll = None\n" + HEAD + DICE + "two = tool('games', name='other')(roll.function)\n"
    assert [each.name for each in load(tmp_path, replaced)] == ["roll", "other"]


def test_a_file_of_tools(tmp_path: Path) -> None:
    (roll,) = load(tmp_path, HEAD + DICE)
    assert (roll.name, roll.toolset, roll.description) == ("roll", "games", "Roll a die.")
    assert roll.parameters["properties"] == {"sides": {"type": "integer", "default": 6}}
    assert run(roll, sides=3) == ({"rolled": 4}, [])
    assert run(roll, sides=0) == ({"error": "a die has sides", "sides": 0}, [])


def test_tools_join_the_catalogue_in_toolsets_of_their_own_or_the_programs(tmp_path: Path) -> None:
    more = '\n@tool("terminal")\nasync def whoami(context: ToolContext) -> dict:\n    return {}\n'
    catalogue = BUILT_IN.plus(load(tmp_path, HEAD + DICE + more))
    assert catalogue.added_toolsets == ("games",)
    assert offered(["games"], (), catalogue) == ("roll",)
    assert offered(["terminal"], (), catalogue) == ("terminal", "process", "whoami")
    assert offered(["terminal"]) == ("terminal", "process")
    assert set(offered(["all"], (), catalogue)) == {*CATALOGUE, "roll", "whoami"}


def test_the_file_may_use_its_neighbours_and_the_programs_tools(tmp_path: Path) -> None:
    (tmp_path / "beside_mine.py").write_text("SIDES = 4\n", encoding="utf-8")
    text = HEAD + "from tools.terminal import terminal\nfrom beside_mine import SIDES\n" + DICE
    assert [tool.name for tool in load(tmp_path, text.replace("12 //", "SIDES * 3 //"))] == ["roll"]


def test_a_tool_may_use_the_sandbox(tmp_path: Path) -> None:
    text = """
@tool("shell")
async def look(context: ToolContext) -> dict:
    sandbox = await context.open_sandbox()
    return {"said": (await sandbox.exec("echo hi", timeout_seconds=5)).output}
"""
    assert run(load(tmp_path, HEAD + text)[0])[0] == {"said": "hi\n"}


GIVEN_UP = "The tool did not answer within 0.3 seconds and was given up"


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ("return 1 // 0", {"error": "odd failed: ZeroDivisionError: integer division or modulo by zero"}),
        ("raise SystemExit(3)", {"error": "odd failed: SystemExit: 3"}),
        ("raise TimeoutError", {"error": "odd failed: TimeoutError"}),
        ("raise KeyboardInterrupt", {"error": "odd failed: KeyboardInterrupt"}),
        ("raise BaseException('base')", {"error": "odd failed: BaseException: base"}),
        ("import asyncio; raise asyncio.CancelledError", {"error": "The tool cancelled itself"}),
        ("return [1, 2]", {"result": [1, 2]}),
        ("return 'text'", {"result": "text"}),
        ("return {'path': __import__('pathlib').PurePosixPath('/a'), 1: {2}}", {"path": "/a", "1": "{2}"}),
        ("loop = []; loop.append(loop); return loop", {"error": "odd failed: ValueError: Circular reference detected"}),
        ("import asyncio; await asyncio.sleep(9)", {"error": GIVEN_UP}),
    ],
)  # fmt: skip
def test_what_a_tool_does_wrong_is_told_and_ends_nothing(tmp_path: Path, body: str, result: JsonObject) -> None:
    (odd,) = load(tmp_path, f'{HEAD}\n@tool("odd")\nasync def odd(context: ToolContext) -> dict:\n    {body}\n')
    told, logged = run(odd, ToolLimits(max_call_seconds=0.3))
    assert told == result
    if "failed" in str(result):
        assert f"tool odd failed at {tmp_path}/mine.py" in logged[0]
    if "ZeroDivision" in str(result):
        assert f"{tmp_path}/mine.py:5: Traceback" in logged[0]


STUBBORN = """
@tool("odd")
async def odd(context: ToolContext) -> dict:
    import asyncio
    for _ in range(2):
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            pass
    return {}
"""


def test_a_tool_that_will_not_be_cancelled_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_tools, "_GRACE_SECONDS", 0.1)
    (odd,) = load(tmp_path, HEAD + STUBBORN)
    assert run(odd, ToolLimits(max_call_seconds=0.3))[0] == {"error": GIVEN_UP}


def test_a_result_that_is_nested_deeply_is_told(tmp_path: Path) -> None:
    body = "deep = {}\n    for _ in range(900): deep = {'a': deep}\n    return deep"
    (odd,) = load(tmp_path, f'{HEAD}\n@tool("odd")\nasync def odd(context: ToolContext) -> dict:\n    {body}\n')
    assert "nested too deeply" in run(odd)[0]["error"] or "RecursionError" in run(odd)[0]["error"]


ASYNC = "async def f(context: ToolContext) -> dict:\n    return {}\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = = 1", "mine.py:1: SyntaxError: invalid syntax"),
        ("import no_such_module_of_mine", "mine.py:1: ModuleNotFoundError: No module named 'no_such_module_of_mine'"),
        ("\n\n1 / 0", "mine.py:3: ZeroDivisionError: division by zero"),
        ("raise SystemExit", "mine.py:1: SystemExit"),
        ("x = 1", "mine.py holds no tool: mark an async function with @tool of tools.base"),
        (HEAD + "from tools.terminal import terminal", "holds no tool"),
        (HEAD + '@tool("a")\ndef f(context): ...', r"mine.py:2: TypeError: tool f must be an async function"),
        (HEAD + '@tool("a")\nasync def f(): ...', r"mine.py:2: TypeError: tool f must take the ToolContext"),
        (HEAD + '@tool("a")\nasync def f(context, x): ...', r"mine.py:2: TypeError: tool f: every argument needs .* x"),
        (HEAD + '@tool("a")\nasync def f(context, *x: int): ...', r"mine.py:2: TypeError: tool f: every argument"),
        (HEAD + '@tool("a")\nasync def f(context, x: object.__class__.mro): ...', r"mine.py:2: tool .f.: Pydantic"),
        (HEAD + f'@tool("a b")\n{ASYNC}', r"mine.py:2: toolset name 'a b' must be 1 to 64 of"),
        (HEAD + f'@tool("a", name="x.y")\n{ASYNC}', r"mine.py:2: tool name 'x.y' must be 1 to 64 of"),
        (HEAD + f'@tool("mcp_a")\n{ASYNC}', r"mine.py:2: toolset name 'mcp_a' is taken by the program"),
        (HEAD + f'@tool("all")\n{ASYNC}', r"mine.py:2: toolset name 'all' is taken"),
        (HEAD + f'@tool("a", limit_seconds=lambda limits: limits.x)\n{ASYNC}', r"mine.py:2: tool 'f': AttributeError"),
        (HEAD + f'@tool("a", limit_seconds=lambda _: 0)\n{ASYNC}', r"mine.py:2: tool 'f': limit_seconds must be"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_told_in_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ToolsFileError, match=complaint) as caught:
        load(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ToolsFileError, match=r"--tools_file=.*none.py: No such file"):
        ToolsFile.read(tmp_path / "none.py")
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe")
    with pytest.raises(ToolsFileError, match="is not UTF-8"):
        ToolsFile.read(tmp_path / "bytes.py")


@pytest.mark.parametrize("name", ["terminal", "Read_File", "readfile", "web_search", "execute-code"])
def test_a_name_that_is_taken_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be told from tool"):
        BUILT_IN.plus(load(tmp_path, f'{HEAD}@tool("a", name="{name}")\n{ASYNC}'))


def test_what_a_tool_says_of_its_needs_is_asked_carefully(tmp_path: Path) -> None:
    text = HEAD + '@tool("a", settings=("MY_KEY",), missing=lambda settings: "" if settings["MY_KEY"] else "no key")\n'
    (needy,) = load(tmp_path, text + ASYNC)
    assert needy.settings == ("MY_KEY",)
    assert needy.missing({"MY_KEY": "x"}) == ""
    assert "mine.py:2: KeyError: 'MY_KEY'" in needy.missing({})


def test_workers_run_what_the_door_has_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(HEAD + DICE, encoding="utf-8")
    read = ToolsFile.read(path)
    path.write_text("1 / 0", encoding="utf-8")
    assert [tool.name for tool in ToolsFile(**vars(read)).load(CATALOGUE)] == ["roll"]


def test_what_the_file_prints_is_no_part_of_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(tmp_path, f"{HEAD}{DICE}\nprint('hello')\n")
    assert capsys.readouterr() == ("", "hello\n")


def test_two_tools_of_one_function_are_one(tmp_path: Path) -> None:
    assert len(load(tmp_path, f"{HEAD}{DICE}\nagain = roll\n")) == 1


def test_context_is_what_the_programs_own_tools_get(tmp_path: Path) -> None:
    async def none() -> None:
        """No sandbox."""

    context = ToolContext(none)  # type: ignore[arg-type]
    (roll,) = load(tmp_path, HEAD + DICE)
    assert asyncio.run(roll(context, {"sides": "4"})) == {"rolled": 3}
