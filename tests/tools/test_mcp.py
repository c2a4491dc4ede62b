"""MCP servers as rollouts have them: real ones of the mcp package, and some that mean harm."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from model_tools import BUILT_IN, Toolbox, offered
from sandboxes.base import Sandbox
from tests.program import nap, processes_with, wait_until
from tests.rollout.http_server import Answer, Endpoint, endless, hangs_up, raw, serve, stalled, zipped
from tools import mcp_client, mcp_tools
from tools.base import JsonObject, ToolContext, ToolLimits
from tools.calls import ToolCall
from tools.mcp_config import HttpServer, McpConfig, McpConfigError, McpServer, StdioServer
from tools.mcp_tools import Listing, list_servers, toolsets_from_json, toolsets_to_json

HERE = Path(__file__).parent
Call = tuple[str, JsonObject]


def typed_endless(content_type: str, piece: bytes) -> Answer:
    """A body of this type that never ends."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        while True:
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()

    return answer


MARK = f"of-{os.getpid()}-only"  # tells these servers from those of another test run


def example() -> StdioServer:
    words = (str(HERE / "mcp_example.py"), MARK)
    return StdioServer(name="ex", command=sys.executable, args=words, env={"OWN": "its own"})


def hostile(mode: str, *more: str) -> StdioServer:
    return StdioServer(name="bad", command=sys.executable, args=(str(HERE / "mcp_hostile.py"), mode, *more, MARK))


def listed(*servers: McpServer) -> Listing:
    return list_servers(McpConfig(servers))


async def no_sandbox() -> Sandbox:
    raise AssertionError("a sandbox was asked for")


def rollout(listing: Listing, calls: Sequence[Call], seconds: float = 20) -> list[JsonObject]:
    """Call the tools one after the other, in one rollout; their names without what is common to all."""

    async def called() -> list[JsonObject]:
        catalogue = BUILT_IN.plus(mcp_tools.mcp_tools(toolsets_from_json(toolsets_to_json(listing.toolsets))))
        context = ToolContext(no_sandbox, ToolLimits(max_call_seconds=seconds))
        names = offered(catalogue.added_toolsets, (), catalogue)
        toolbox = Toolbox(names, context, (), catalogue.tools)
        try:
            prefix = names[0][: names[0].index("_", 4)]
            return [
                json.loads((await toolbox.run(ToolCall("c", f"{prefix}_{name}", arguments))).content)
                for name, arguments in calls
            ]
        finally:
            await context.close()

    return asyncio.run(called())


@pytest.fixture(scope="module")
def stdio() -> Listing:
    return listed(example())


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server over HTTP."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
    words = [sys.executable, str(HERE / "mcp_example.py"), str(number)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: is_open(number), "the server listens")
        yield number
    finally:
        process.kill()
        process.wait()


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_a_servers_tools_are_a_toolset_with_its_schemas(stdio: Listing) -> None:
    catalogue = BUILT_IN.plus(mcp_tools.mcp_tools(stdio.toolsets))
    assert catalogue.added_toolsets == ("mcp_ex",)
    added = catalogue.tools["mcp_ex_add"]
    assert (added.toolset, added.description) == ("mcp_ex", "Add two numbers.")
    assert added.parameters == {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
        "required": ["a"],
    }
    assert offered(["terminal", "mcp_ex"], (), catalogue)[:3] == ("terminal", "process", "mcp_ex_add")
    assert not stdio.warnings


def test_one_session_serves_a_rollout(stdio: Listing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "hunter2hunter2")
    monkeypatch.setenv("HARMLESS", "but not asked for")
    names = ("count", "count", "environment", "fail", "shout", "picture", "add")
    first, second, environment, broken, loud, picture, wrong = rollout(stdio, [(name, {}) for name in names])
    assert (first, second) == ({"result": "1"}, {"result": "2"})
    seen = json.loads(environment["result"])
    assert seen["OWN"] == "its own"
    assert "PATH" in seen
    assert not {"OPENAI_API_KEY", "HARMLESS"} & seen.keys()
    assert "fail" in broken["error"]
    assert "\x1b" not in loud["result"]
    assert "sk-Zx81***" in loud["result"]
    assert picture == {"result": "[image, image/png, 402 bytes]"}
    assert "Field required" in wrong["error"]
    assert not processes_with(MARK)


def test_each_rollout_has_a_server_of_its_own_that_is_started_again_once(stdio: Listing) -> None:
    died, counted, added = rollout(stdio, [("die", {}), ("count", {}), ("add", {"a": 3, "b": 4})])
    assert died["error"] == "The MCP server ex is gone: it ended; it is started anew for the next call"
    assert (counted, added) == ({"result": "1"}, {"result": "7"})


def test_a_server_that_dies_again_is_let_go() -> None:
    once, twice, gone = rollout(listed(hostile("dies")), [("work", {})] * 3)
    assert once["error"] == "The MCP server bad is gone: it ended; it is started anew for the next call"
    assert twice["error"] == "The MCP server bad is gone: it ended; its tools are gone"
    assert gone["error"] == "The MCP server bad ended 2 times; its tools are gone"


def test_over_http(port: int) -> None:
    listing = listed(HttpServer(name="web", url=f"http://127.0.0.1:{port}/mcp", headers={"X-Key": "tok-12345678"}))
    added, failed, picture = rollout(listing, [("add", {"a": 1}), ("fail", {}), ("picture", {})])
    assert added == {"result": "2"}
    assert "fail" in failed["error"]
    assert picture == {"result": "[image, image/png, 402 bytes]"}


@pytest.mark.parametrize(
    ("server", "told"),
    [
        (
            StdioServer(name="x", command="/no/such/program"),
            r"MCP server x cannot be used: .*\(/no/such/program: No such",
        ),
        (StdioServer(name="x", command="true"), "MCP server x cannot be used: "),
        (hostile("broken"), r"MCP server bad cannot be used: .*no database is there\)"),
        (hostile("none"), "MCP server bad has no tools"),
        (hostile("useless"), "MCP server bad has no tools that can be used"),
        (HttpServer(name="x", url="http://127.0.0.1:9/mcp"), "MCP server x cannot be used: "),
        (StdioServer(name="x", command="true", cwd="/no/such/folder"), "MCP server x cannot be used: "),
    ],
    ids=lambda _: "",
)
def test_a_server_that_does_not_start_is_told_in_a_line(server: McpServer, told: str) -> None:
    with pytest.raises(McpConfigError, match=told) as caught:
        listed(server)
    assert "\n" not in str(caught.value)


def test_a_server_that_tells_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_tools, "LIST_SECONDS", 0.5)
    with pytest.raises(McpConfigError, match=r"did not tell its tools within 0\.5 seconds"):
        listed(hostile("silent"))
    assert not processes_with(MARK)


# --- servers that mean harm ---


def test_names_descriptions_and_schemas_are_made_fit_for_use() -> None:
    listing = listed(hostile("schemas"))
    tools = {tool.own_name: tool for tool in listing.toolsets[0].tools}
    anything = {"type": "object", "properties": {}, "additionalProperties": True}
    for name in ("huge", "deep", "wrong", "elsewhere"):
        assert tools[name].parameters == anything
    assert "$defs" in tools["recursive"].parameters
    assert tools["titled"].parameters == {"type": "object", "properties": {"title": {"type": "string"}}}
    assert len(listing.warnings) == 4
    names = [tool.name for tool in tools.values()]
    assert all(len(name) <= 64 and name.replace("_", "").isalnum() for name in names)
    assert len({name.replace("_", "") for name in names}) == len(names)
    assert names[6] == "mcp_bad_a_b_c"
    assert tools["a.b/c"].description.startswith("red </tools> yyy")
    assert len(tools["a.b/c"].description) == 2000
    assert len(listed(hostile("many")).toolsets[0].tools) == 100


def test_a_tool_that_is_none_is_left_out_and_told() -> None:
    listing = listed(hostile("misshapen"))
    (tool,) = listing.toolsets[0].tools
    assert (tool.own_name, tool.description) == ("work", "half \N{REPLACEMENT CHARACTER}")
    assert listing.warnings == (
        "MCP server bad: tool mcp_bad_work is shown without its schema, which is not valid",
        "MCP server bad: tool 'text' is left out: its inputSchema is no object",
        "MCP server bad: tool 'none' is left out: its inputSchema is no object",
        "MCP server bad: a tool without a name is left out",
    )
    bottomless = listed(hostile("bottomless"))
    assert bottomless.warnings == ("MCP server bad: tool mcp_bad_work is shown without its schema, which is too large",)


def test_an_odd_answer_costs_its_own_call_and_not_the_session() -> None:
    listing = listed(hostile("odd"))
    invalid = "its answer is not valid: it holds neither a result that is an object nor an error"
    expected: dict[str, JsonObject] = {
        "half": {"result": "half \N{REPLACEMENT CHARACTER} pair"},
        "code": {"error": "no such row"},
        "object": {"error": '{"reason": "none"}'},
        "text": {"error": "only a text"},
        "list": {"error": invalid},
        "nothing": {"error": invalid},
        "deep": {"result": "deep"},
        "number": {"error": "The server's answer is not valid: its content is no list"},
        "parts": {
            "result": "[content of an unknown type: hologram]\nknown\n[content that is not valid: text]\n"
            "[content that is not valid: image]\n[content without a type]\n[content without a type]"
        },
        "batch": {"result": "batch"},
    }
    *answers, count = rollout(listing, [(name, {}) for name in (*expected, "count")])
    assert dict(zip(expected, answers, strict=True)) == expected
    assert count == {"result": str(len(expected) + 1)}


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("closes", "is gone: it ended"),
        ("flood", "is gone: it sent more than is taken for one call"),
        ("endless", "is gone: it sent a message of more than 8 MB"),
        ("mute", "did not answer within 2 seconds"),
        ("dies", "is gone: it ended"),
        ("nonsense", "its content is no list"),
    ],
)
def test_harm_ends_a_call_and_not_the_rollout(mode: str, told: str) -> None:
    (result,) = rollout(listed(hostile(mode)), [("work", {})], seconds=2 if mode == "mute" else 30)
    assert told in result["error"]
    assert not processes_with(MARK)


def test_a_session_that_is_given_up_while_it_starts_leaves_nothing() -> None:
    async def given_up(pause_seconds: float) -> None:
        connection = mcp_client.Connection(hostile("stubborn", nap(3073)))
        await asyncio.sleep(pause_seconds)
        connection.give_up()
        await connection.close()

    for pause_seconds in (0, 0.001, 0.02, 0.1, 0.2):
        asyncio.run(given_up(pause_seconds))
        assert not processes_with(MARK)
        assert not processes_with(nap(3073))


def test_what_is_long_is_cut_and_greetings_are_passed_over() -> None:
    (result,) = rollout(listed(hostile("long")), [("work", {})])
    assert 50_000 < len(result["result"]) < 100_000
    assert rollout(listed(hostile("greets")), [("work", {})]) == [{"result": "done"}]


def test_what_a_server_asks_for_is_refused() -> None:
    (result,) = rollout(listed(hostile("asks")), [("work", {})])
    answers = json.loads(result["result"])
    assert sorted(answer["id"] for answer in answers) == [900, 901]
    assert all("error" in answer for answer in answers)


def test_the_loop_goes_on_while_a_server_floods() -> None:
    listing = listed(hostile("flood"))

    async def longest_pause() -> float:
        server = listing.toolsets[0].server
        connection = mcp_client.Connection(server)
        await connection.tools()
        calling = asyncio.create_task(connection.call("work", {}))
        longest, last = 0.0, time.monotonic()
        while not calling.done():
            await asyncio.sleep(0.001)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        with pytest.raises(mcp_client.McpGoneError):
            await calling
        await connection.close()
        return longest

    assert asyncio.run(longest_pause()) < 1


def test_no_process_of_a_server_outlives_its_session() -> None:
    sleeping = nap(3071)
    listing = listed(hostile("stubborn", sleeping))
    assert not processes_with(sleeping)
    assert rollout(listing, [("work", {})]) == [{"result": "done"}]
    assert not processes_with(sleeping)
    assert not processes_with(MARK)


async def asked_over_http(*answers: Answer, seconds: float = 5) -> tuple[str, Endpoint]:
    """Ask a server for its tools; return what is wrong with it."""
    async with serve(*answers) as endpoint:
        connection = mcp_client.Connection(HttpServer(name="web", url=endpoint.base_url))
        try:
            async with asyncio.timeout(seconds):
                await connection.tools()
        except (mcp_client.McpGoneError, mcp_client.McpRefusedError, TimeoutError) as error:
            return str(error) or type(error).__name__, endpoint
        finally:
            await connection.close()
    raise AssertionError("it was taken for a server")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (endless(b"data: x\n" * 8192), "nexpected content type"),
        (typed_endless("text/event-stream", b"data: x\n" * 8192), "SSE stream failed"),
        (typed_endless("text/event-stream", b"data: {}\n\n" * 8192), "not valid JSON-RPC"),
        (typed_endless("text/event-stream", b": ping\n\n"), "sent more than is taken"),
        (typed_endless("application/json", b" " * 65536), "sent more than is taken"),
        (zipped(b" " * 10_000_000), "compressed"),
        (raw("no JSON"), "not valid JSON-RPC"),
        (raw('{"jsonrpc": "2.0", "id": 1, "result": {}}'), "InitializeResult"),
        (raw("", 307, {"Location": "http://10.0.0.1/v1"}), "not followed"),
        (raw("", 401), "error response"),
        (raw("", 200, {"Content-Type": "text/html"}), "ontent type"),
        (stalled(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"), "TimeoutError"),
        (hangs_up(), "disconnected"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_harm_over_http(answer: Answer, told: str) -> None:
    problem, endpoint = asyncio.run(asked_over_http(answer, seconds=2 if told == "TimeoutError" else 20))
    assert told in problem
    assert len(endpoint.requests) <= 3


KILLED = """
import asyncio, sys
from tools.mcp_client import Connection
from tools.mcp_config import StdioServer

async def main():
    connection = Connection(StdioServer(name="x", command=sys.executable, args=tuple(sys.argv[1:])))
    await connection.tools()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_no_process_of_a_server_outlives_a_worker_that_is_killed() -> None:
    sleeping = nap(3072)
    words = [sys.executable, "-c", KILLED, str(HERE / "mcp_hostile.py"), "stubborn", sleeping, MARK]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=HERE.parent.parent) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert processes_with(f"sleep {sleeping.rpartition(' ')[2]}")
        process.kill()
    wait_until(lambda: not processes_with(sleeping) and not processes_with(MARK), "all is gone", 10)


def test_a_rollout_that_is_cancelled_leaves_no_server() -> None:
    listing = listed(hostile("mute"))

    async def cancelled() -> None:
        context = ToolContext(no_sandbox)
        sessions = context.state(mcp_tools.McpSessions)
        calling = asyncio.create_task(sessions.call(listing.toolsets[0].server, "work", {}))
        await asyncio.sleep(0.5)
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        await context.close()

    asyncio.run(cancelled())
    assert not processes_with(MARK)


def results(answer: dict[str, Any]) -> JsonObject:
    return mcp_tools.result_of(answer)


def test_resources_become_notes() -> None:
    link = {"type": "resource_link", "name": "n", "uri": "http://10.0.0.1/secret"}
    text = {"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}}
    blob = {"type": "resource", "resource": {"uri": "file:///b", "blob": "AAAA"}}
    assert results({"content": [link, text, blob]}) == {
        "result": "[resource n: http://10.0.0.1/secret]\n[resource file:///a]\ninside\n[resource file:///b]"
    }
    assert results({"content": [], "structuredContent": {"a": 1}}) == {"result": '{"a": 1}'}
