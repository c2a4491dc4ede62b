"""MCP servers' tools as tools of the program: what servers offer, read once; what they answer, as text.

Each server's tools are the toolset ``mcp_<server>``, each tool is ``mcp_<server>_<tool>``. A rollout has sessions of
its own with the servers it calls, opened at the first call and closed at its end; a server whose session ends, or that
does not answer in time, is started again once per rollout. The ``mcp`` package is imported only where there are
servers.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, TypeAdapter

from tools.base import JsonObject, Tool, ToolContext, ToolError
from tools.mcp_config import McpConfig, McpConfigError, McpServer, plain_name
from tools.terminal import strip_ansi

if TYPE_CHECKING:
    from tools.mcp_client import Connection

LIST_SECONDS = 30.0  # for all servers to start and tell their tools
MAX_STARTS = 2  # of a server, per rollout
MAX_TOOLS = 100  # of a server
MAX_NAME_CHARS = 64
MAX_DESCRIPTION_CHARS = 2000
MAX_SCHEMA_CHARS = 20_000
MAX_SCHEMA_DEPTH = 30
MAX_TEXT_CHARS = 200_000  # of a result, before it is made to fit like any other
_LABELS = ("title", "$schema", "$id")
_DATA = ("default", "enum", "const", "examples")  # these hold values, not schemas
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class McpToolFacts(BaseModel):
    """One tool, as its server tells of it and as the model is shown it."""

    name: str  # the whole one
    own_name: str  # the server's
    description: str
    parameters: JsonObject


class McpToolset(BaseModel):
    """A server and its tools; goes to the workers as JSON. It holds secrets."""

    server: McpServer
    tools: list[McpToolFacts]


@dataclass(frozen=True)
class Listing:
    """What all servers offer."""

    toolsets: tuple[McpToolset, ...] = ()
    warnings: tuple[str, ...] = ()


def toolset_name(server: McpServer) -> str:
    """Return the name of a server's toolset."""
    return f"mcp_{server.name}"


def list_servers(config: McpConfig) -> Listing:
    """Start every server, ask for its tools, and end it again. Raises McpConfigError for one that does not answer."""
    if not config.servers:
        return Listing()
    if importlib.util.find_spec("mcp") is None:
        raise McpConfigError("--mcp_config needs the mcp package; install it with: pip install -e '.[mcp]'")
    listed = asyncio.run(_list_all(config.servers))
    toolsets: list[McpToolset] = []
    warnings: list[str] = []
    taken: set[str] = set()
    for server, tools in zip(config.servers, listed, strict=True):
        if len(tools) > MAX_TOOLS:
            warnings.append(f"MCP server {server.name}: only the first {MAX_TOOLS} of its {len(tools)} tools are taken")
        facts = [made for tool in tools[:MAX_TOOLS] if (made := _facts(server, tool, taken, warnings))]
        if not facts:
            raise McpConfigError(f"MCP server {server.name} has no tools{' that can be used' if tools else ''}")
        toolsets.append(McpToolset(server=server, tools=facts))
    return Listing(tuple(toolsets), tuple(warnings))


async def _list_all(servers: Sequence[McpServer]) -> list[list[Any]]:
    return await asyncio.gather(*(_list(server) for server in servers))


async def _list(server: McpServer) -> list[Any]:
    from tools.mcp_client import Connection, McpGoneError, McpRefusedError  # noqa: PLC0415 - an extra, and slow

    connection = Connection(server, listens_to_stderr=True)
    try:
        async with asyncio.timeout(LIST_SECONDS):
            return await connection.tools()
    except TimeoutError:
        problem = f"did not tell its tools within {LIST_SECONDS:g} seconds"
    except (McpGoneError, McpRefusedError) as error:
        problem = f"cannot be used: {error}"
    finally:
        await connection.close()
    said = bytes(connection.complaint).decode("utf-8", "replace").strip().rpartition("\n")[2]
    raise McpConfigError(f"MCP server {server.name} {problem}{f' ({_plain(said, 300)})' if said else ''}")


def _facts(server: McpServer, tool: Any, taken: set[str], warnings: list[str]) -> McpToolFacts | None:
    """Return a tool as the model is shown it, None for one that cannot be; say what is wrong with it."""
    match tool:
        case {"name": str(own_name), "inputSchema": dict(schema)} if own_name:
            pass
        case {"name": str(own_name)} if own_name:
            shown = _plain(own_name, MAX_NAME_CHARS)
            warnings.append(f"MCP server {server.name}: tool {shown!r} is left out: its inputSchema is no object")
            return None
        case _:
            warnings.append(f"MCP server {server.name}: a tool without a name is left out")
            return None
    name = _full_name(server.name, own_name, taken)
    parameters, problem = usable_schema(schema)
    if problem:
        warnings.append(f"MCP server {server.name}: tool {name} is shown without its schema, which {problem}")
    told = [text for key in ("description", "title") if isinstance(text := tool.get(key), str)]
    description = _plain(next(filter(None, told), ""), MAX_DESCRIPTION_CHARS)
    return McpToolFacts(name=name, own_name=own_name, description=description, parameters=parameters)


def _full_name(server: str, tool: str, taken: set[str]) -> str:
    """Return a name of legal length and characters that cannot be taken for another one, however it is spelt."""
    name = f"mcp_{server}_{plain_name(tool, 1000)}"
    if len(name) > MAX_NAME_CHARS or _spelling(name) in taken:
        digest = hashlib.sha256(f"{server}\0{tool}".encode(errors="replace")).hexdigest()[:8]
        name = f"{name[: MAX_NAME_CHARS - 9]}_{digest}"
    taken.add(_spelling(name))
    return name


def _spelling(name: str) -> str:
    return re.sub(r"[-_]", "", name).lower()


def usable_schema(schema: Any) -> tuple[JsonObject, str]:
    """Return a tool's schema as the model may be shown it, and what was wrong with the server's, "" for nothing."""
    blank: JsonObject = {"type": "object", "properties": {}}
    anything = {**blank, "additionalProperties": True}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        return anything, "is no object's"
    if _depth(schema) > MAX_SCHEMA_DEPTH or len(json.dumps(schema)) > MAX_SCHEMA_CHARS:
        return anything, "is too large"
    if not isinstance(schema.get("properties", {}), dict):
        return anything, "is not valid"
    if any(not str(reference).startswith("#") for reference in _references(schema)):
        return anything, "refers to another place"
    from jsonschema import Draft202012Validator  # noqa: PLC0415 - an extra
    from jsonschema.exceptions import SchemaError  # noqa: PLC0415

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError:
        return anything, "is not valid"
    return {**blank, **_without_titles(schema)}, ""


def _without_titles(schema: Any) -> Any:
    """Drop what costs tokens and says nothing: the titles that libraries make of names."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    told = {key: value for key, value in schema.items() if not (key in _LABELS and isinstance(value, str))}
    return {key: value if key in _DATA else _without_titles(value) for key, value in told.items()}


def _depth(value: Any) -> int:
    """Return how deep a JSON value is nested, as far as that matters."""
    depth, level = 0, [value]
    while level and depth <= MAX_SCHEMA_DEPTH:
        depth += 1
        level = [inner for item in level for inner in _inside(item)]
    return depth


def _references(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from (value[key] for key in ("$ref", "$dynamicRef") if key in value and not isinstance(value[key], dict))
    for inner in _inside(value):
        yield from _references(inner)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _plain(text: str, max_chars: int) -> str:
    return _CONTROL.sub("", strip_ansi(text.replace("\r\n", "\n"))).strip()[:max_chars]


class _NoArguments(BaseModel):
    """MCP tools' arguments are checked by their servers."""


@dataclass(frozen=True)
class McpTool(Tool):
    """A tool of an MCP server: takes its arguments as they are."""

    def checked(self, arguments: JsonObject) -> JsonObject:
        """Return the arguments as the function takes them: in one piece."""
        return {"arguments": arguments}


def mcp_tools(toolsets: Iterable[McpToolset]) -> list[Tool]:
    """Return the servers' tools for the catalogue."""
    return [_tool(toolset.server, facts) for toolset in toolsets for facts in toolset.tools]


def toolsets_to_json(toolsets: Iterable[McpToolset]) -> list[JsonObject]:
    """Return what ``toolsets_from_json`` takes."""
    return [toolset.model_dump(mode="json") for toolset in toolsets]


def toolsets_from_json(data: Any) -> tuple[McpToolset, ...]:
    """Read what the door found out, and import what sessions need: later it would hold up whatever else runs."""
    toolsets = _TOOLSETS.validate_python(data)
    if toolsets:
        import tools.mcp_client  # noqa: F401, PLC0415 - an extra, and slow
    return toolsets


_TOOLSETS = TypeAdapter(tuple[McpToolset, ...])


def _tool(server: McpServer, facts: McpToolFacts) -> Tool:
    async def call(context: ToolContext, arguments: JsonObject) -> JsonObject:
        return await context.state(McpSessions).call(server, facts.own_name, arguments)

    return McpTool(
        name=facts.name,
        toolset=toolset_name(server),
        description=facts.description,
        function=call,
        schema=lambda: (_NoArguments, facts.parameters),
        limit_seconds=lambda limits: limits.max_call_seconds,
    )


@dataclass
class _Kept:
    """A server's sessions in one rollout."""

    connection: Connection | None = None
    starts: int = 0
    past: list[Connection] = field(default_factory=list)  # given up, and perhaps not closed yet


@dataclass
class McpSessions:
    """One rollout's sessions, by server."""

    servers: dict[str, _Kept] = field(default_factory=dict)

    async def call(self, server: McpServer, name: str, arguments: JsonObject) -> JsonObject:
        """Call a tool and return its result. Raises ToolError."""
        from tools.mcp_client import McpGoneError, McpRefusedError  # noqa: PLC0415 - an extra, and slow

        kept = self.servers.setdefault(server.name, _Kept())
        connection = self._connected(server, kept)
        try:
            return result_of(await connection.call(name, arguments))
        except McpRefusedError as error:
            raise ToolError(_plain(str(error), MAX_DESCRIPTION_CHARS)) from None
        except McpGoneError as error:
            self._forget(kept)
            again = "it is started anew for the next call" if kept.starts < MAX_STARTS else "its tools are gone"
            raise ToolError(f"The MCP server {server.name} is gone: {_plain(str(error), 300)}; {again}") from None
        except asyncio.CancelledError:  # it took too long, or the rollout is over
            self._forget(kept)
            raise

    async def close(self) -> None:
        """End all sessions."""
        ends = [
            connection.close()
            for kept in self.servers.values()
            for connection in (*kept.past, kept.connection)
            if connection is not None
        ]
        await asyncio.gather(*ends)

    @staticmethod
    def _connected(server: McpServer, kept: _Kept) -> Connection:
        from tools.mcp_client import Connection  # noqa: PLC0415 - an extra, and slow

        if kept.connection is None or kept.connection.ended:
            McpSessions._forget(kept)
            if kept.starts >= MAX_STARTS:
                raise ToolError(f"The MCP server {server.name} ended {kept.starts} times; its tools are gone")
            kept.starts += 1
            kept.connection = Connection(server)
        return kept.connection

    @staticmethod
    def _forget(kept: _Kept) -> None:
        if kept.connection is not None:
            kept.connection.give_up()
            kept.past.append(kept.connection)
            kept.connection = None


def result_of(answer: JsonObject) -> JsonObject:
    """Return a server's answer as a tool's result: its texts, and a note for what is none. Raises ToolError."""
    content, structured = answer.get("content", []), answer.get("structuredContent")
    if not isinstance(content, list):
        raise ToolError("The server's answer is not valid: its content is no list")
    text = "\n".join(filter(None, map(_block_text, content)))
    if not text and structured is not None:
        text = json.dumps(structured, ensure_ascii=False)
    if len(text) > MAX_TEXT_CHARS:
        middle = f"\n[{len(text) - MAX_TEXT_CHARS} characters left out]\n"
        text = text[: MAX_TEXT_CHARS * 2 // 5] + middle + text[-MAX_TEXT_CHARS * 3 // 5 :]
    text = strip_ansi(text)
    if answer.get("isError"):
        raise ToolError(text or "the tool failed and does not say why")
    return {"result": text}


def _block_text(block: Any) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            told = text
        case {"type": "image" | "audio" as kind, "data": str(data), "mimeType": str(media_type)}:
            told = f"[{kind}, {_plain(media_type, 100)}, {len(data) * 3 // 4} bytes]"
        case {"type": "resource_link", "name": str(name), "uri": str(uri)}:
            told = f"[resource {_plain(name, 200)}: {_plain(uri, 1000)}]"
        case {"type": "resource", "resource": {"uri": str(uri), **rest}}:
            own_text = rest.get("text")
            told = f"[resource {_plain(uri, 1000)}]" + (f"\n{own_text}" if isinstance(own_text, str) else "")
        case {"type": "text" | "image" | "audio" | "resource_link" | "resource" as kind}:
            told = f"[content that is not valid: {kind}]"
        case {"type": str(kind)}:
            told = f"[content of an unknown type: {_plain(kind, 100)}]"
        case _:
            told = "[content without a type]"
    return told
