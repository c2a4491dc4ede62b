"""What a tool is: a function the model may call, and what it gets to work with.

A tool is an ``async`` function marked ``@tool(toolset)``: its first argument is the ToolContext, the rest become the
JSON schema the model is shown, checked and coerced by pydantic before the function runs. It returns a JSON object; to
tell the model that something went wrong it raises ToolError. Anything else it raises is a fault of the program and ends
the rollout, as does SandboxError.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from sandboxes.base import Sandbox

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
    """Bounds of every tool call."""

    terminal_timeout_seconds: float = 180.0  # a command's default, and the longest `process wait`; $TERMINAL_TIMEOUT
    max_foreground_seconds: float = 600.0  # longer foreground time-outs are refused; $TERMINAL_MAX_FOREGROUND_TIMEOUT
    max_result_chars: int = 100_000  # a longer result is cut in the middle, whatever the tool


@dataclass
class ToolContext:
    """One rollout's tools' surroundings."""

    open_sandbox: Callable[[], Awaitable[Sandbox]]  # makes it on the first call, then returns the same one
    limits: ToolLimits = field(default_factory=ToolLimits)
    _states: dict[type, Any] = field(default_factory=dict)

    def state(self, cls: type[StateT]) -> StateT:
        """Return this rollout's own instance of ``cls``, made without arguments when first asked for."""
        if cls not in self._states:
            self._states[cls] = cls()
        return self._states[cls]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Tool:
    """A tool as the catalogue holds it."""

    name: str
    toolset: str
    description: str
    parameters: JsonObject  # JSON schema of the arguments object
    function: ToolFunction
    arguments: type[BaseModel]

    async def __call__(self, context: ToolContext, arguments: JsonObject) -> JsonObject:
        """Check the arguments and run. Raises ToolError, SandboxError."""
        try:
            checked = self.arguments.model_validate(arguments)
        except ValidationError as error:
            raise ToolError(f"Invalid arguments for {self.name}: {_problems(error)}") from None
        return await self.function(context, **{name: getattr(checked, name) for name in type(checked).model_fields})


def tool(toolset: str, *, name: str = "") -> Callable[[ToolFunction], Tool]:
    """Make a Tool of an async function: its docstring is the description, its annotations are the schema."""

    def make(function: ToolFunction) -> Tool:
        tool_name = name or function.__name__
        fields: dict[str, Any] = {}
        parameters = list(inspect.signature(function, eval_str=True).parameters.values())
        for parameter in parameters[1:]:
            default = ... if parameter.default is inspect.Parameter.empty else parameter.default
            fields[parameter.name] = (parameter.annotation, default)
        arguments = create_model(tool_name, __config__=ConfigDict(extra="ignore", coerce_numbers_to_str=True), **fields)
        return Tool(
            name=tool_name,
            toolset=toolset,
            description=inspect.cleandoc(function.__doc__ or ""),
            parameters=_plain_schema(arguments.model_json_schema()),
            function=function,
            arguments=arguments,
        )

    return make


def _problems(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, item['loc'])) or 'arguments'}: {item['msg']}" for item in error.errors())


def _plain_schema(schema: Any) -> Any:
    """Drop what costs tokens and tells a model nothing: titles, and the null branch of optional arguments."""
    if isinstance(schema, list):
        return [_plain_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {
        key: {name: _plain_schema(sub) for name, sub in value.items()} if key == "properties" else _plain_schema(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str)) and not (key == "default" and value in (None, ""))
    }
    branches = [branch for branch in plain.get("anyOf", []) if branch != {"type": "null"}]
    if len(branches) == 1:
        del plain["anyOf"]
        plain = {**branches[0], **plain}
    return plain
