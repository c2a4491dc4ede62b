"""The tools' face: what the model is shown, and what runs when it calls one.

Owns the catalogue of the tools there are, those a run adds included; the reading of the names models write; and the
form of every result: one JSON object as valid text, key-shaped strings masked, bounded in length, within a time limit.
A tool that fails tells the model and the rollout goes on, even where the fault is the program's, which the run's log
then tells of as well; only a dead sandbox and want of memory pass through to the caller.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from sandboxes.base import CommandRefused, SandboxError, SandboxFileError
from tools.base import JsonObject, Tool, ToolContext, ToolError, valid_text
from tools.browser import BROWSER_TOOLS
from tools.calls import ToolCall, ToolDefinition, ToolMessage
from tools.code_execution import execute_code
from tools.files import read_file, write_file
from tools.image_gen import image_generate
from tools.moa import mixture_of_agents
from tools.own_time import own_time, wait_by
from tools.patch import patch
from tools.redact import redact
from tools.search import search_files
from tools.terminal import process, terminal
from tools.todo import todo
from tools.vision import vision_analyze
from tools.web import web_extract, web_search
from toolsets import KNOWN_TOOLS, TOOLSETS, Toolset, tools_of

CATALOGUE: dict[str, Tool] = {  # the tools of the program; a new one is one name more
    tool.name: tool
    for tool in (
        terminal,
        process,
        read_file,
        write_file,
        patch,
        search_files,
        execute_code,
        todo,
        web_search,
        web_extract,
        vision_analyze,
        image_generate,
        mixture_of_agents,
        *BROWSER_TOOLS,
    )
}
SANDBOXED_TOOLSETS = frozenset({"terminal", "file", "code_execution", "image_gen"})  # their tools need the sandbox


@dataclass(frozen=True)
class Catalogue:
    """The tools there are, by name, and the toolsets they form."""

    tools: Mapping[str, Tool] = field(default_factory=lambda: CATALOGUE)
    toolsets: Mapping[str, Toolset] = field(default_factory=lambda: TOOLSETS)

    def plus(self, tools: Iterable[Tool]) -> Catalogue:
        """Return this catalogue with more tools; each joins its toolset, which is made where there is none.

        Raises ValueError when two tools have names that cannot be told apart, however a model spells them.
        """
        taken = {_spelling(name): name for name in (*KNOWN_TOOLS, *self.tools)}
        all_tools, toolsets = dict(self.tools), dict(self.toolsets)
        for tool in tools:
            other = taken.setdefault(_spelling(tool.name), tool.name)
            if other in KNOWN_TOOLS or other in all_tools:
                raise ValueError(f"tool {tool.name!r} cannot be told from tool {other!r}; give it another name")
            all_tools[tool.name] = tool
            toolset = toolsets.get(tool.toolset, Toolset(""))
            toolsets[tool.toolset] = replace(toolset, tools=(*toolset.tools, tool.name))
        return Catalogue(all_tools, toolsets)

    @property
    def added_toolsets(self) -> tuple[str, ...]:
        """The toolsets that are not the program's."""
        return tuple(name for name in self.toolsets if name not in TOOLSETS)

    def tools_of(self, toolsets: Iterable[str]) -> tuple[Tool, ...]:
        """Return the tools of these toolsets that are built, in a fixed order. Raises ValueError."""
        return tuple(self.tools[name] for name in tools_of(toolsets, self.toolsets) if name in self.tools)


BUILT_IN = Catalogue()


def tool_settings(environ: Mapping[str, str], catalogue: Catalogue = BUILT_IN) -> dict[str, str]:
    """Return what the tools read of the environment; see ``tools.services``."""
    names = {name for tool in catalogue.tools.values() for name in tool.settings}
    return {name: text for name in sorted(names) if (text := environ.get(name, "").strip())}


def missing_tools(settings: Mapping[str, str], catalogue: Catalogue = BUILT_IN) -> dict[str, str]:
    """Return the tools that cannot be used here: name → why, and what to do about it."""
    reasons = {name: tool.missing(settings) for name, tool in catalogue.tools.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def toolset_availability(
    name: str, missing: Mapping[str, str], sandbox_problem: str = "", catalogue: Catalogue = BUILT_IN
) -> str:
    """Say why nothing of a toolset can be used here and what to do about it; "" when some of it can be used.

    ``missing`` is what ``missing_tools`` says; ``sandbox_problem`` is why no sandbox works here, if none does. Raises
    ValueError for a name that is no toolset.
    """
    built = catalogue.tools_of([name])
    if not built:
        return "not built into this version; choose or write a distribution without it"
    if sandbox_problem and all(tool.toolset in SANDBOXED_TOOLSETS for tool in built):
        return f"needs a working sandbox: {sandbox_problem}"
    if all(tool.name in missing for tool in built):
        return "; ".join(dict.fromkeys(missing[tool.name] for tool in built))
    return ""


def offered(toolsets: Iterable[str], missing: Collection[str] = (), catalogue: Catalogue = BUILT_IN) -> tuple[str, ...]:
    """Return the names of the built tools of these toolsets that are not missing, in the catalogue's fixed order."""
    return tuple(tool.name for tool in catalogue.tools_of(toolsets) if tool.name not in missing)


class Toolbox:
    """One rollout's tools."""

    def __init__(
        self,
        names: Sequence[str],
        context: ToolContext,
        secrets: Sequence[str] = (),
        catalogue: Mapping[str, Tool] = CATALOGUE,
    ) -> None:
        """Take the offered tools' names; ``secrets`` are masked in every result, beside all that is key-shaped."""
        self._tools = {name: catalogue[name] for name in names}
        self._spellings = {_spelling(name): name for name in names}
        self._context = context
        context.call_tool = self._call_tool
        self._secrets = tuple(secrets)
        self.masked = 0  # strings masked so far
        self.definitions = tuple(
            ToolDefinition(tool.name, tool.description, tool.parameters) for tool in self._tools.values()
        )
        context.offered = self.definitions

    @property
    def needs_sandbox(self) -> bool:
        """Whether any tool that is offered acts inside the sandbox."""
        return any(tool.toolset in SANDBOXED_TOOLSETS for tool in self._tools.values())

    def resolve(self, name: str) -> str | None:
        """Return the offered tool that ``name`` is a spelling of, or None.

        Understood are another case, other separators (``Read_File``, ``read-file``, ``readFile``) and what servers and
        models put around a name (``functions.read_file:0``, ``tool_read_file``, ``read_file_tool``).
        """
        if name in self._tools:
            return name
        if len(name) <= _MAX_NAME_CHARS:
            for spelling in map(_spelling, (name, _AROUND.sub("", name.strip()))):
                if spelling in self._spellings:
                    return self._spellings[spelling]
        return None

    async def run(self, call: ToolCall) -> ToolMessage:
        """Run one call to its end and return what the model is told. Raises SandboxError, and MemoryError."""
        name = self.resolve(call.name)
        try:
            result = await self._run(name, call)
        except CommandRefused as refusal:
            result = {"output": "", "exit_code": -1, "error": str(refusal), "status": "blocked"}
        except ToolError as error:
            result = {**error.details, "error": str(error)}
        except SandboxFileError as error:
            result = {"error": str(error)}
        except (SandboxError, MemoryError):
            raise  # without a sandbox there is nothing to go on with; who takes the memory need not be this tool
        except Exception as error:  # noqa: BLE001 - one of the few places that record whatever goes wrong
            self._context.log("trace", f"tool {name} failed: {traceback.format_exc()}")
            result = {"error": f"{name} failed: {_in_one_line(error)}"}
        return ToolMessage(call.id, name or call.name, self._text(result))

    async def _call_tool(self, name: str, arguments: JsonObject) -> ToolMessage:
        return await self.run(ToolCall("", name, arguments))

    async def _run(self, name: str | None, call: ToolCall) -> JsonObject:
        if name is None:
            raise ToolError(f"Unknown tool {call.name!r}; the tools are: {', '.join(self._tools) or 'none'}")
        if call.problem:
            raise ToolError(f"Invalid arguments for {name}: {call.problem}; nothing was run")
        tool = self._tools[name]
        try:
            arguments = tool.checked(_map_texts(call.arguments, valid_text))
        except RecursionError:
            raise ToolError(f"Invalid arguments for {name}: they are nested too deeply") from None
        if tool.toolset in SANDBOXED_TOOLSETS:
            await self._context.open_sandbox()  # before the clock: the wait for a sandbox is not the tool's
        return await _within(tool.limit_seconds(self._context.limits), tool.function(self._context, **arguments))

    def _text(self, result: JsonObject) -> str:
        def masked(text: str) -> str:
            shown, count = redact(valid_text(text).replace("\0", "\N{REPLACEMENT CHARACTER}"), self._secrets)
            self.masked += count
            return shown

        try:
            return bounded_json(_map_texts(result, masked), self._context.limits.max_result_chars)
        except RecursionError:
            return _dumps({"error": "the result was nested too deeply to be shown"})


def bounded_json(result: JsonObject, max_chars: int) -> str:
    """Return the result as JSON text of at most ``max_chars`` characters.

    What is too long is cut inside: long texts lose their middle, long lists their end, each with a notice of how much.
    """
    text = _dumps(result)
    share = max_chars * 9 // 10
    while len(text) > max_chars and share:
        text = _dumps(_shortened(result, share))
        share = share * 2 // 3
    return text if len(text) <= max_chars else _dumps({"error": "the result was too large to be shown"})


_MAX_NAME_CHARS = 100
_MAX_FAULT_CHARS = 500
_ENCODER = json.JSONEncoder(ensure_ascii=False)
_GRACE_SECONDS = 3.0  # for a tool to clean up when it is given up
_WHOLE_OBJECT_KEYS = 20  # an object of so few keys is a record, and keeps them all
_AROUND = re.compile(
    r"^(?:functions?|tools?|default_api)(?:\.|::?|/|_)"  # a namespace in front
    r"|(?:_?tool)?(?::\d+|<\|.*)?$",  # the number of the call, or a special token, behind
    re.IGNORECASE,
)


def _spelling(name: str) -> str:
    """Return what all spellings of a tool's name have in common."""
    return re.sub(r"[-_.\s]", "", name).lower()


def _in_one_line(error: Exception) -> str:
    return " ".join("".join(traceback.format_exception_only(error)).split())[:_MAX_FAULT_CHARS]


async def _within(seconds: float, work: Awaitable[JsonObject]) -> JsonObject:
    """Return what a tool returns, within so much time of its own: it is not hung while it waits in a line of ours.

    It runs in a task of its own, for one that will not be cancelled is left behind.
    """
    with own_time() as clock:
        task = asyncio.ensure_future(work)
    try:
        await wait_by(clock, seconds, task)
    except asyncio.CancelledError:
        await _give_up(task)
        raise
    if not task.done():
        await _give_up(task)
        raise ToolError(f"The tool did not answer within {seconds:g} seconds and was given up")
    if task.cancelled():
        raise ToolError("The tool cancelled itself")
    return task.result()


async def _give_up(task: asyncio.Future[JsonObject]) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=_GRACE_SECONDS)
    task.add_done_callback(lambda late: late.cancelled() or late.exception())  # nobody asks for it any more


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with every text in it changed, keys included; what is no JSON becomes its text."""
    match value:
        case str():
            return change(value)
        case dict():
            return {change(str(key)): _map_texts(item, change) for key, item in value.items()}
        case list() | tuple():
            return [_map_texts(item, change) for item in value]
        case float():
            return value if math.isfinite(value) else None
        case None | int():
            return value
    return change(str(value))


def _dumps(value: Any) -> str:
    return _ENCODER.encode(value)


def _shortened(value: Any, share: int) -> Any:
    """Return the value with no text above ``share`` characters, and no more items in a list or an object than fit."""
    kept = share // 50 + 1  # an item of a result is seldom shorter than 50 characters
    if isinstance(value, str) and len(value) > share:
        head, tail = share * 2 // 5, share * 3 // 5
        middle = f"[{len(value) - head - tail} of {len(value)} characters left out]"
        return f"{value[:head]}\n{middle}\n{value[len(value) - tail :]}"
    if isinstance(value, list):
        rest = [f"[{len(value) - kept} of {len(value)} items left out]"] if len(value) > kept else []
        return [*(_shortened(item, share) for item in value[:kept]), *rest]
    if isinstance(value, dict):
        kept = max(kept, _WHOLE_OBJECT_KEYS)
        note = {"left_out": f"{len(value) - kept} of {len(value)} entries"} if len(value) > kept else {}
        return {key: _shortened(item, share) for key, item in islice(value.items(), kept)} | note
    return value
