"""An MCP server that means harm, without the mcp package: ``python mcp_hostile.py MODE [NAP]``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

MODE = sys.argv[1]
Json = dict[str, Any]


def say(message: Json) -> None:
    say_line(json.dumps({"jsonrpc": "2.0", **message}))


def say_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def schema(**keys: Any) -> Json:
    return {"type": "object", "properties": {"a": {"type": "string"}}, **keys}


def deep(levels: int) -> Json:
    value: Json = {"type": "string"}
    for _ in range(levels):
        value = {"type": "object", "properties": {"x": value}}
    return value


TOOLS: list[Json] = [{"name": "work", "description": "Work.", "inputSchema": schema()}]
if MODE == "schemas":
    recursive = {"$defs": {"T": {"type": "object", "properties": {"t": {"$ref": "#/$defs/T"}}}}}
    TOOLS = [
        {"name": "huge", "inputSchema": schema(description="x" * 1_000_000)},
        {"name": "deep", "inputSchema": deep(40)},
        {"name": "wrong", "inputSchema": schema(properties={"a": {"type": "nonsense"}})},
        {"name": "elsewhere", "inputSchema": schema(properties={"a": {"$ref": "http://10.0.0.1/x"}})},
        {"name": "recursive", "inputSchema": schema(**recursive)},
        {
            "name": "titled",
            "inputSchema": {"type": "object", "title": "T", "properties": {"title": {"type": "string"}}},
        },
        {"name": "a.b/c", "description": "\x1b[31mred\x1b[0m </tools> \x00" + "y" * 5000, "inputSchema": schema()},
        {"name": "a_b_c", "inputSchema": schema()},
        {"name": "n" * 200, "inputSchema": schema()},
        {"name": "n" * 201, "inputSchema": schema()},
    ]
if MODE == "many":
    TOOLS = [{"name": f"tool_{number}", "inputSchema": schema()} for number in range(300)]
if MODE == "bottomless":
    TOOLS = [{"name": "work", "inputSchema": deep(400)}]
if MODE == "misshapen":
    TOOLS = [
        {"name": "work", "description": "half \ud800", "inputSchema": schema(required="a")},
        {"name": "text", "inputSchema": "all"},
        {"name": "none"},
        {"inputSchema": schema()},
    ]
if MODE == "useless":
    TOOLS = [{"name": "work"}]
if MODE == "none":
    TOOLS = []


ODD_ANSWERS: dict[str, Json] = {
    "half": {"result": {"content": [{"type": "text", "text": "half \ud83d pair"}]}},
    "code": {"error": {"code": "E42", "message": "no such row"}},
    "object": {"error": {"code": -1, "message": {"reason": "none"}}},
    "text": {"error": "only a text"},
    "list": {"result": [1, 2]},
    "nothing": {},
    "deep": {"result": {"content": [{"type": "text", "text": "deep", "_meta": deep(300)}]}},
    "number": {"result": {"content": 7}},
    "parts": {
        "result": {
            "content": [
                {"type": "hologram", "x": 1},
                {"type": "text", "text": "known"},
                {"type": "text"},
                {"type": "image", "data": "AAAA"},
                {},
                "bare",
            ]
        }
    },
}
if MODE == "odd":
    TOOLS = [{"name": name, "inputSchema": schema()} for name in (*ODD_ANSWERS, "batch", "count")]
CALLS: list[str] = []


def text(said: str) -> Json:
    return {"content": [{"type": "text", "text": said}]}


def answer(call: Json) -> None:
    """Answer a call; say with ``count`` how many there were: who answers in an odd way goes on."""
    CALLS.append(call["params"]["name"])
    if MODE == "closes":
        os.close(1)
        time.sleep(1000)
    match CALLS[-1] if MODE == "odd" else "":
        case "":
            say({"id": call["id"], "result": work()})
        case "count":
            say({"id": call["id"], "result": text(str(len(CALLS)))})
        case "batch":
            note = {"jsonrpc": "2.0", "method": "notifications/message", "params": 7}
            say_line(json.dumps([note, {"jsonrpc": "2.0", "id": call["id"], "result": text("batch")}]))
        case name:
            say({"id": call["id"], **ODD_ANSWERS[name]})


def work() -> Json:
    if MODE == "flood":
        while True:
            say({"method": "notifications/message", "params": {"level": "info", "data": "x" * 50}})
    if MODE == "endless":
        while True:
            sys.stdout.write("x" * 65536)
    if MODE == "mute":
        time.sleep(1000)
    if MODE == "dies":
        sys.exit(1)
    if MODE == "nonsense":
        return {"content": "all of it"}
    if MODE == "asks":
        say({"id": 900, "method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 9}})
        say({"id": 901, "method": "roots/list"})
        answers = [json.loads(sys.stdin.readline()) for _ in range(2)]
        return text(json.dumps(answers))
    if MODE == "long":
        return text("z" * 3_000_000)
    return text("done")


def main() -> None:
    if MODE == "stubborn":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        subprocess.Popen(["sleep", sys.argv[2].rpartition(" ")[2]], start_new_session=True)
    if MODE == "greets":
        say_line("Welcome to my server!\n\n{}")
    if MODE == "broken":
        sys.exit("the secret is hunter2hunter2, and no database is there")
    for line in sys.stdin:
        message = json.loads(line)
        match "silent" if MODE == "silent" else message.get("method"):
            case "initialize":
                info = {"name": "hostile", "version": "1"}
                version = message["params"]["protocolVersion"]
                say(
                    {
                        "id": message["id"],
                        "result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info},
                    }
                )
            case "tools/list":
                say({"id": message["id"], "result": {"tools": TOOLS}})
            case "tools/call":
                answer(message)
    while MODE == "stubborn":
        time.sleep(1000)


if __name__ == "__main__":
    main()
