from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from model_tools import CATALOGUE, Toolbox, bounded_json, offered, toolset_availability
from sandboxes.base import CommandRefused, Sandbox, SandboxError, SandboxFileError
from tests.tools.surroundings import surroundings
from tools.base import JsonObject, Tool, ToolContext, ToolError, ToolLimits, tool
from tools.calls import ToolCall, ToolMessage
from tools.own_time import in_line
from toolsets import DISTRIBUTIONS, KNOWN_TOOLS, TOOLSETS, tools_of

KEY = "sk-Zx81kd92mAl0QpW8rT6yZx81kd92mAl0QpW8rT6y"
CLOSED_BOOK = ("terminal", "process", "read_file", "write_file", "patch", "search_files", "todo")  # need no network


@tool("todo")
async def give(_context: ToolContext, result: Any, *, error: str = "") -> JsonObject:
    """Give back what was given."""
    if error:
        raise ToolError(error, **result)
    return {"result": result}


@tool("todo", limit_seconds=lambda limits: limits.max_call_seconds)
async def hang(_context: ToolContext) -> JsonObject:
    """Never answer."""
    await asyncio.Event().wait()
    return {}


@tool("todo", limit_seconds=lambda limits: limits.max_call_seconds)
async def queue(context: ToolContext, *, hang_after: bool = False, by_way_of: str = "") -> JsonObject:
    """Wait in a line of ours, or have another tool do so."""
    if by_way_of:
        assert context.call_tool
        return {"told": (await context.call_tool(by_way_of, {})).content}
    with in_line():
        await asyncio.sleep(0.4)
    if hang_after:
        await asyncio.Event().wait()
    return {"waited": True}


@tool("todo")
async def fail(_context: ToolContext, kind: str) -> JsonObject:
    """Raise what was asked for."""
    raise {
        "fault": ZeroDivisionError("a fault\nof the program"),
        "timeout": TimeoutError("of somebody else"),
        "sandbox": SandboxError("the container is gone"),
        "memory": MemoryError(),
        "file": SandboxFileError("a.txt: Is a directory"),
        "refused": CommandRefused("this would harm the host"),
    }[kind]


OWN: dict[str, Tool] = {own.name: own for own in (give, hang, queue, fail)}


async def no_sandbox() -> Sandbox:
    raise SandboxError("no engine")


def own_toolbox(**limits: Any) -> Toolbox:
    return Toolbox(tuple(OWN), ToolContext(no_sandbox, ToolLimits(**limits)), [], OWN)


def run_own(name: str, toolbox: Toolbox | None = None, **arguments: Any) -> JsonObject:
    message = asyncio.run((toolbox or own_toolbox()).run(ToolCall("c1", name, arguments)))
    result: JsonObject = json.loads(message.content)
    return result


def in_rollout(work: Callable[[Toolbox], Awaitable[Any]], secrets: tuple[str, ...] = (), **limits: Any) -> Any:
    async def rollout() -> Any:
        async with surroundings(ToolLimits(**limits)) as context:
            return await work(Toolbox(offered(["terminal", "todo"]), context, secrets))

    return asyncio.run(rollout())


def run(name: str, arguments: JsonObject, problem: str = "", **limits: Any) -> ToolMessage:
    async def work(toolbox: Toolbox) -> ToolMessage:
        return await toolbox.run(ToolCall("c1", name, arguments, problem))

    message: ToolMessage = in_rollout(work, **limits)
    return message


# --- what is offered ---


def test_the_catalogue_is_of_known_tools_under_their_toolsets() -> None:
    for name, built in CATALOGUE.items():
        assert name == built.name
        assert name in tools_of([built.toolset])
        assert built.description


def test_offered_tools_come_in_a_fixed_order_whatever_the_draw() -> None:
    names = offered(["todo", "terminal"])
    assert names == offered(["terminal", "todo", "terminal"]) == ("terminal", "process", "todo")
    assert set(offered(["all"])) == set(CATALOGUE)
    assert offered([]) == ()


def test_a_toolset_that_is_not_built_says_so() -> None:
    for name in TOOLSETS:
        reason = toolset_availability(name, {})
        assert reason == (
            "" if offered([name]) else "not built into this version; choose or write a distribution without it"
        )
    assert toolset_availability("terminal", {}) == toolset_availability("debugging", {}) == ""


def test_tools_of_a_sandbox_need_one() -> None:
    told = toolset_availability("terminal", {}, "docker does not answer")
    assert told == "needs a working sandbox: docker does not answer"
    assert toolset_availability("todo", {}, "docker does not answer") == ""


def test_every_distribution_can_be_asked_for() -> None:
    for distribution in DISTRIBUTIONS.values():
        for name in distribution.probabilities:
            assert isinstance(toolset_availability(name, {}), str)


def test_definitions_are_what_the_model_is_shown() -> None:
    async def work(toolbox: Toolbox) -> tuple[Any, ...]:
        return toolbox.definitions

    definitions = in_rollout(work)
    assert [definition.name for definition in definitions] == ["terminal", "process", "todo"]
    for definition in definitions:
        assert definition.parameters["type"] == "object"
        assert not {"title", "$ref", "$defs"} & set(json.dumps(definition.parameters).split('"'))


def test_the_definitions_cost_few_tokens() -> None:
    shown = [
        {"name": built.name, "description": built.description, "parameters": built.parameters}
        for name in CLOSED_BOOK
        if (built := CATALOGUE.get(name))
    ]
    assert len(json.dumps(shown)) / 4 < 1500


# --- names ---


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("terminal", "terminal"),
        ("Terminal", "terminal"),
        (" TERMINAL\n", "terminal"),
        ("functions.terminal", "terminal"),
        ("functions::terminal", "terminal"),
        ("functions.terminal:0", "terminal"),
        ("default_api.terminal", "terminal"),
        ("tool_terminal", "terminal"),
        ("terminal_tool", "terminal"),
        ("TerminalTool", "terminal"),
        ("terminal<|channel|>commentary", "terminal"),
        ("read_file", "read_file"),
        ("Read_File", "read_file"),
        ("read-file", "read_file"),
        ("read file", "read_file"),
        ("read.file", "read_file"),
        ("readFile", "read_file"),
        ("ReadFile", "read_file"),
        ("functions.readFile", "read_file"),
        ("READ_FILE", "read_file"),
        ("browserNavigate", "browser_navigate"),
        ("tool", None),
        ("functions.", None),
        ("", None),
        ("bash", None),
        ("shell.terminal", None),
        ("terminals", None),
        ("my_terminal", None),
        ("terminal_run", None),
        ("file", None),
        ("read", None),
        ("readfiles", None),
        ("todo" * 1000, None),
        ("tool_" * 100_000 + "terminal", None),
        ("терминал", None),
        ("execute_code", None),  # known, not offered here
    ],
)
def test_names(written: str, meant: str | None) -> None:
    names = [name for name in KNOWN_TOOLS if name != "execute_code"]
    toolbox = Toolbox(names, ToolContext(no_sandbox), (), dict.fromkeys(names, give))
    assert toolbox.resolve(written) == meant


def test_no_two_tools_share_a_spelling() -> None:
    toolbox = Toolbox(KNOWN_TOOLS, ToolContext(no_sandbox), (), dict.fromkeys(KNOWN_TOOLS, give))
    for name in KNOWN_TOOLS:
        for spelling in (name.upper(), name.title().replace("_", ""), name.replace("_", "-"), f"functions.{name}:3"):
            assert toolbox.resolve(spelling) == name


@given(st.text())
def test_any_name_is_an_offered_tool_or_none(name: str) -> None:
    toolbox = Toolbox(KNOWN_TOOLS, ToolContext(no_sandbox), (), dict.fromkeys(KNOWN_TOOLS, give))
    assert toolbox.resolve(name) in {None, *KNOWN_TOOLS}


# --- running ---


def test_a_call_runs_under_its_right_name() -> None:
    message = run("Terminal", {"command": "echo 1"})
    assert (message.tool_call_id, message.name) == ("c1", "terminal")
    assert json.loads(message.content) == {"output": "1\n", "exit_code": 0, "error": None}


def test_text_is_kept_readable() -> None:
    assert "naïve 🙂" in run("terminal", {"command": "printf 'naïve 🙂'"}).content


def test_an_unknown_tool_is_told_what_there_is() -> None:
    message = run("does_not_exist", {})
    assert message.name == "does_not_exist"
    assert json.loads(message.content) == {
        "error": "Unknown tool 'does_not_exist'; the tools are: terminal, process, todo"
    }


def test_a_call_with_broken_arguments_is_never_run() -> None:
    message = run("terminal", {"_raw": '{"command": "echo hi'}, problem="not valid JSON: line 1 column 13")
    error = json.loads(message.content)["error"]
    assert error == "Invalid arguments for terminal: not valid JSON: line 1 column 13; nothing was run"


def test_wrong_arguments_are_told() -> None:
    assert json.loads(run("terminal", {}).content) == {
        "error": "Invalid arguments for terminal: command: Field required"
    }
    assert "command" in json.loads(run("terminal", {"_raw": "x"}).content)["error"]
    nested: Any = "x"
    for _ in range(5000):
        nested = [nested]
    assert "nested too deeply" in json.loads(run("todo", {"todos": nested}).content)["error"]


def test_a_refused_command_is_blocked() -> None:
    result = json.loads(run("terminal", {"command": "mkfs.ext4 /dev/no_such_device"}).content)
    assert result.pop("error")
    assert result == {"output": "", "exit_code": -1, "status": "blocked"}
    assert run_own("fail", kind="refused") == {**result, "error": "this would harm the host"}


def test_errors_of_tools_and_files_are_told_to_the_model() -> None:
    assert run_own("give", result={"hint": "h", "status": "s"}, error="e") == {"hint": "h", "status": "s", "error": "e"}
    assert run_own("fail", kind="file") == {"error": "a.txt: Is a directory"}


def test_a_fault_of_the_program_is_told_in_a_line_and_logged_in_full() -> None:
    logged: list[tuple[str, str]] = []
    context = ToolContext(no_sandbox, log=lambda level, text: logged.append((level, text)))
    toolbox = Toolbox(tuple(OWN), context, [], OWN)
    assert run_own("fail", toolbox, kind="fault") == {
        "error": "fail failed: ZeroDivisionError: a fault of the program",
    }
    assert run_own("fail", toolbox, kind="timeout") == {"error": "fail failed: TimeoutError: of somebody else"}
    assert [level for level, _ in logged] == ["trace", "trace"]
    assert logged[0][1].startswith("tool fail failed: Traceback ")
    assert "ZeroDivisionError: a fault\nof the program" in logged[0][1]


@pytest.mark.parametrize(("kind", "raised"), [("sandbox", SandboxError), ("memory", MemoryError)])
def test_a_dead_sandbox_and_want_of_memory_pass_through(kind: str, raised: type[Exception]) -> None:
    with pytest.raises(raised):
        run_own("fail", kind=kind)


def test_a_sandbox_that_cannot_be_made_ends_the_rollout() -> None:
    toolbox = Toolbox(("terminal", "todo"), ToolContext(no_sandbox))
    with pytest.raises(SandboxError, match="no engine"):
        run_own("terminal", toolbox, command="true")
    assert run_own("todo", toolbox)["todos"] == []  # needs none, and makes none


def test_a_hung_tool_is_given_up_and_the_model_is_told() -> None:
    assert run_own("hang", own_toolbox(max_call_seconds=0.1)) == {
        "error": "The tool did not answer within 0.1 seconds and was given up"
    }


def test_a_tool_that_waits_in_a_line_of_ours_is_not_hung() -> None:
    assert run_own("queue", own_toolbox(max_call_seconds=0.2)) == {"waited": True}
    assert run_own("queue", own_toolbox(max_call_seconds=0.2), by_way_of="queue") == {"told": '{"waited": true}'}
    told = run_own("queue", own_toolbox(max_call_seconds=0.2), hang_after=True)
    assert told == {"error": "The tool did not answer within 0.2 seconds and was given up"}


def test_a_cancelled_call_ends_at_once() -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(own_toolbox().run(ToolCall("c1", "hang", {})))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())


def test_the_wait_for_a_sandbox_is_not_the_tools_fault() -> None:
    @tool("terminal", limit_seconds=lambda _limits: 0.2)
    async def look(context: ToolContext) -> JsonObject:
        """Look at the sandbox."""
        return {"kind": (await context.open_sandbox()).kind}

    async def rollout() -> str:
        async with surroundings() as context:
            waits = [0.4]

            async def open_slowly_at_first() -> Sandbox:
                await asyncio.sleep(waits.pop() if waits else 0)
                return await context.open_sandbox()

            toolbox = Toolbox(("look",), ToolContext(open_slowly_at_first), (), {"look": look})
            return (await toolbox.run(ToolCall("c", "look", {}))).content

    assert asyncio.run(rollout()) == '{"kind": "local"}'


# --- the text of a result ---


def test_keys_are_masked_and_counted() -> None:
    async def work(toolbox: Toolbox) -> tuple[list[str], int]:
        contents = [
            (await toolbox.run(ToolCall("c", "terminal", {"command": command}))).content
            for command in (f"echo {KEY} {KEY[::-1]}", "echo hunter2hunter2", "echo plain")
        ]
        return contents, toolbox.masked

    contents, masked = in_rollout(work, secrets=("hunter2hunter2",))
    assert KEY not in contents[0]
    assert "sk-Zx81***" in contents[0]
    assert "hunter2hunter2" not in contents[1]
    assert json.loads(contents[2])["output"] == "plain\n"
    assert masked == 2


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("read_file", {"path": "key.pem"}),
        ("read_file", {"path": "key.pem", "offset": 2}),
        ("search_files", {"pattern": "BEGIN", "context": 2}),
        ("search_files", {"pattern": "BEGIN", "context": 9}),
        ("terminal", {"command": "grep -n -A 2 BEGIN *.pem /dev/null"}),
        ("terminal", {"command": "cat -n key.pem"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_no_tool_shows_a_private_key(tool: str, arguments: JsonObject) -> None:
    body = "MC4CAQAwBQYDK2VwBCIEI" + "ABCdef123+" * 4 + "xy="
    text = f"-----BEGIN PRIVATE KEY-----\\n{body}\\n-----END PRIVATE KEY-----\\n"

    async def rollout() -> tuple[str, int]:
        async with surroundings(ToolLimits()) as context:
            toolbox = Toolbox(offered(["terminal", "file"]), context)
            await toolbox.run(ToolCall("c", "terminal", {"command": f"printf %b '{text}' >key.pem"}))
            return (await toolbox.run(ToolCall("c", tool, arguments))).content, toolbox.masked

    content, masked = asyncio.run(rollout())
    assert "***-----END PRIVATE KEY-----" in content
    assert body[:8] not in content
    assert masked == 1


def test_keys_are_masked_in_errors_and_names_too() -> None:
    toolbox = own_toolbox()
    assert KEY not in json.dumps(run_own("give", toolbox, result={KEY: [KEY]}, error=KEY))
    assert toolbox.masked == 3


def test_odd_characters_become_valid_text() -> None:
    assert run_own("give", result=["\ud83d\ude00", "a\ud800b", "\udfff", "x\0y", float("nan")]) == {
        "result": ["\N{GRINNING FACE}", "a\N{REPLACEMENT CHARACTER}b", "\N{REPLACEMENT CHARACTER}", "x�y", None]
    }


ANY_TEXT = st.text(alphabet=st.characters(exclude_categories=()))
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXT, inner),
    max_leaves=30,
)


@given(ANY_JSON, st.integers(150, 400))
def test_any_result_is_valid_bounded_text(value: Any, max_chars: int) -> None:
    message = asyncio.run(own_toolbox(max_result_chars=max_chars).run(ToolCall("c", "give", {"result": value})))
    message.content.encode()
    assert len(message.content) <= max_chars
    assert isinstance(json.loads(message.content), dict)
    assert "\\u0000" not in message.content.replace("\\\\", "")


def test_a_long_result_loses_its_middle_and_says_so() -> None:
    text = "".join(f"line {number}\n" for number in range(20_000))
    result = run_own("give", own_toolbox(max_result_chars=10_000), result=text)["result"]
    assert 8_000 < len(result) < 10_000
    assert result.startswith("line 0\n")
    assert result.endswith("line 19999\n")
    kept = len(result) - len(f"\n[{len(text)} of {len(text)} characters left out]\n")
    assert f" of {len(text)} characters left out]" in result
    assert abs(kept - 9_000) < 10


def test_only_what_is_long_is_cut() -> None:
    cut = json.loads(bounded_json({"output": "x" * 5000, "exit_code": 3, "error": "why"}, 1000))
    assert (cut["exit_code"], cut["error"]) == (3, "why")
    assert "characters left out" in cut["output"]


def test_long_lists_lose_their_end_and_records_keep_their_keys() -> None:
    matches = [{"path": f"src/file_{number}.py", "line": number, "content": "y" * 80} for number in range(1000)]
    cut = json.loads(bounded_json({"total_count": 1000, "matches": matches}, 20_000))
    assert cut["total_count"] == 1000
    assert cut["matches"][0] == matches[0]
    assert cut["matches"][-1].endswith("of 1000 items left out]")
    assert len(cut["matches"]) > 100
    counts = json.loads(bounded_json({"counts": {f"file_{number}": number for number in range(5000)}}, 5_000))
    assert counts["counts"]["left_out"].endswith("of 5000 entries")


def test_what_cannot_be_cut_is_replaced() -> None:
    cut = bounded_json({f"key_{number}_{'x' * 100}": number for number in range(20)}, 1000)
    assert json.loads(cut) == {"error": "the result was too large to be shown"}


def test_described_arguments_are_checked_by_the_toolbox() -> None:
    @tool("todo")
    async def count(_context: ToolContext, to: Annotated[int, Field(ge=1)]) -> JsonObject:
        """Count."""
        return {"counted": to}

    toolbox = Toolbox(("count",), ToolContext(no_sandbox), (), {"count": count})
    assert run_own("count", toolbox, to="3") == {"counted": 3}
    assert "to: Input should be greater" in run_own("count", toolbox, to=0)["error"]
