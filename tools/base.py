"""What a tool is: a function the model may call, and what it gets to work with.

A tool is an ``async`` function marked ``@tool(toolset)``: its first argument is the ToolContext, the rest become the
JSON schema the model is shown, checked and coerced by pydantic before the function runs. A text under an argument is
``Annotated[int, Field(description="...")]``; a choice is a ``Literal``. It returns a JSON object; to tell the model
that something went wrong it raises ToolError. SandboxError ends the rollout; anything else it raises is a fault of the
program, of which the model is told in a line and the run's log in full.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from sandboxes.base import Sandbox
from tools.calls import ToolDefinition, ToolMessage
from tools.services import Answer, AuxiliaryError, Question, Services, Settings, Spent

JsonObject = dict[str, Any]
ToolFunction = Callable[..., Awaitable[JsonObject]]
StateT = TypeVar("StateT")


class ToolError(Exception):
    """Told to the model as ``{"error": message}`` plus ``details``; the rollout goes on."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class ToolLimits:
    """Bounds of every tool call, in time of its own: see ``own_time``."""

    terminal_timeout_seconds: float = 180.0  # a command's default, and the longest `process wait`; $TERMINAL_TIMEOUT
    max_foreground_seconds: float = 600.0  # longer foreground time-outs are refused; $TERMINAL_MAX_FOREGROUND_TIMEOUT
    script_seconds: float = 300.0  # of a script of execute_code, with all its tool calls
    max_call_seconds: float = 120.0  # any other tool's call; one that takes longer is hung, and the model is told
    max_result_chars: int = 100_000  # a longer result is cut, whatever the tool


@runtime_checkable
class Closable(Protocol):
    """A state that holds something to give back when the rollout is over."""

    async def close(self) -> None:
        """Give it back. Raises nothing that is not a fault of the program."""


def _no_log(_level: str, _text: str) -> None:
    pass


@dataclass
class ToolContext:
    """One rollout's tools' surroundings."""

    open_sandbox: Callable[[], Awaitable[Sandbox]]  # makes it on the first call, then returns the same one
    limits: ToolLimits = field(default_factory=ToolLimits)
    services: Services = field(default_factory=Services)
    spent: Spent = field(default_factory=Spent)  # by auxiliary models so far
    # Runs another tool of the rollout by name, as the model would; set by the toolbox, for tools that call tools.
    call_tool: Callable[[str, JsonObject], Awaitable[ToolMessage]] | None = None
    offered: Sequence[ToolDefinition] = ()  # the rollout's tools; set by the toolbox
    by_script: bool = False  # a script calls, not the model: it has not read what the model was told before
    log: Callable[[str, str], None] = _no_log  # level and text of a line for the run's log
    _states: dict[type, Any] = field(default_factory=dict)

    def state(self, cls: type[StateT]) -> StateT:
        """Return this rollout's own instance of ``cls``, made without arguments when first asked for."""
        if cls not in self._states:
            self._states[cls] = cls()
        return self._states[cls]  # type: ignore[no-any-return]

    async def ask(self, question: Question) -> Answer:
        """Ask an auxiliary model and count what it cost. Raises ToolError."""
        try:
            answer = await self.services.models.ask(question)
        except AuxiliaryError as error:
            raise ToolError(str(error)) from None
        self.spent += answer.spent
        return answer

    async def close(self) -> None:
        """Close the states that are Closable, the latest first; the sandbox is its maker's to close."""
        while self._states:
            _, state = self._states.popitem()
            if isinstance(state, Closable):
                await state.close()


@dataclass(frozen=True)
class Tool:
    """A tool as the catalogue holds it."""

    name: str
    toolset: str
    description: str
    function: ToolFunction
    schema: Callable[[], tuple[type[BaseModel], JsonObject]]  # made when first asked for, which takes milliseconds
    limit_seconds: Callable[[ToolLimits], float]  # after which a call counts as hung
    settings: tuple[str, ...] = ()  # environment variables it reads from ``context.services.settings``
    missing: Callable[[Settings], str] = lambda _: ""  # why it cannot be used and what to do about it, or ""

    @property
    def parameters(self) -> JsonObject:
        """The JSON schema of the arguments object. Raises TypeError when the function's arguments make none."""
        return self.schema()[1]

    @property
    def arguments(self) -> type[BaseModel]:
        """What checks and coerces the arguments. Raises TypeError."""
        return self.schema()[0]

    async def __call__(self, context: ToolContext, arguments: JsonObject) -> JsonObject:
        """Check the arguments and run. Raises ToolError, SandboxError."""
        return await self.function(context, **self.checked(arguments))

    def checked(self, arguments: JsonObject) -> JsonObject:
        """Return the arguments as the function takes them, defaults filled in. Raises ToolError.

        What models do all the time is understood: numbers and booleans as text, a list or an object as JSON text, null
        for an argument that may be left out, arguments that do not exist.
        """
        required = self.parameters.get("required", [])
        given = {
            name: _unpacked(arguments[name], schema)
            for name, schema in self.parameters["properties"].items()
            if name in arguments and (name in required or arguments[name] is not None)
        }
        try:
            model = self.arguments.model_validate(given)
        except ValidationError as error:
            unknown = ", ".join(sorted(arguments.keys() - self.parameters["properties"].keys()))
            hint = f" (unknown: {unknown})" if unknown else ""
            raise ToolError(f"Invalid arguments for {self.name}: {_problems(error)}{hint}") from None
        return {name: getattr(model, name) for name in self.arguments.model_fields}


def tool(
    toolset: str,
    *,
    name: str = "",
    limit_seconds: Callable[[ToolLimits], float] = lambda limits: limits.max_call_seconds,
    settings: tuple[str, ...] = (),
    missing: Callable[[Settings], str] = lambda _: "",
) -> Callable[[ToolFunction], Tool]:
    """Make a Tool of an async function: its docstring is the description, its annotations are the schema.

    ``settings`` names the environment variables it reads; ``missing`` says of these why the tool cannot be used on this
    machine and what to do about it, or "". It is asked at the door, in every run: it must be quick and import nothing.
    """

    def make(function: ToolFunction) -> Tool:
        tool_name = name or function.__name__
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"tool {tool_name} must be an async function")
        _check_signature(tool_name, function)
        return Tool(
            name=tool_name,
            toolset=toolset,
            description=inspect.cleandoc(function.__doc__ or ""),
            function=function,
            schema=cache(partial(_schema, tool_name, function)),
            limit_seconds=limit_seconds,
            settings=settings,
            missing=missing,
        )

    return make


def valid_text(text: str) -> str:
    """Replace half surrogate pairs: they are no text in any encoding."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _schema(tool_name: str, function: ToolFunction) -> tuple[type[BaseModel], JsonObject]:
    arguments = _arguments_model(tool_name, function)
    return arguments, _plain_schema(arguments.model_json_schema())


def _check_signature(tool_name: str, function: ToolFunction) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters:
        raise TypeError(f"tool {tool_name} must take the ToolContext as its first argument")
    for parameter in parameters[1:]:
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if variadic or parameter.annotation is parameter.empty:
            raise TypeError(f"tool {tool_name}: every argument needs a name and a type, unlike {parameter}")


def _arguments_model(tool_name: str, function: ToolFunction) -> type[BaseModel]:
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    fields: dict[str, Any] = {
        parameter.name: (parameter.annotation, ... if parameter.default is parameter.empty else parameter.default)
        for parameter in parameters[1:]
    }
    return create_model(tool_name, __config__=ConfigDict(coerce_numbers_to_str=True), **fields)


def _unpacked(value: Any, schema: JsonObject) -> Any:
    """Undo the JSON text a model wrapped a list or an object in."""
    if isinstance(value, str) and schema.get("type") in ("array", "object"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value  # the check says what is wrong with it
    return value


def _problems(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, item['loc'])) or 'arguments'}: {item['msg'].removeprefix('Value error, ')}"
        for item in error.errors(include_url=False, include_input=False)
    )


def _plain_schema(schema: Any, shared: JsonObject | None = None) -> Any:
    """Drop what costs tokens and says nothing: titles, null branches, empty defaults. Resolve ``$ref``."""
    if isinstance(schema, list):
        return [_plain_schema(item, shared) for item in schema]
    if not isinstance(schema, dict):
        return schema
    shared = schema.get("$defs", {}) if shared is None else shared
    if "$ref" in schema:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _plain_schema({**shared[schema["$ref"].rpartition("/")[2]], **rest}, shared)
    plain = {key: _plain_schema(value, shared) for key, value in schema.items() if _tells_something(key, value)}
    if "properties" in schema:  # its keys are names, not keywords
        plain["properties"] = {name: _plain_schema(value, shared) for name, value in schema["properties"].items()}
    branches = [branch for branch in plain.pop("anyOf", []) if branch != {"type": "null"}]
    if len(branches) > 1:
        plain["anyOf"] = branches
    return {**branches[0], **plain} if len(branches) == 1 else plain


def _tells_something(key: str, value: Any) -> bool:
    if key == "default":
        return value is not None and value is not False and value != ""
    return key not in ("title", "$defs", "properties")
