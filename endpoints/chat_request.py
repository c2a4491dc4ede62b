"""A chat completion as a client asks for it, checked at the door: what is not named here is ignored."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

JsonObject = dict[str, Any]


class BadRequestError(ValueError):
    """The request makes no sense; the message is one line and says why."""


class _Asked(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Function(_Asked):
    """A tool as the model is to be shown it."""

    name: str
    description: str | None = None
    parameters: JsonObject | None = None  # JSON schema of the arguments


class ToolDefinition(_Asked):
    """An entry of ``tools``."""

    function: Function


class CalledFunction(_Asked):
    """A call's name and arguments: JSON text, an object, or nothing."""

    name: str
    arguments: str | JsonObject | None = None

    @property
    def arguments_text(self) -> str:
        """The arguments as JSON text."""
        if isinstance(self.arguments, str):
            return self.arguments if self.arguments.strip() else "{}"
        return json.dumps(self.arguments or {}, ensure_ascii=False)


class Call(_Asked):
    """An entry of a message's ``tool_calls``."""

    function: CalledFunction


class ChatMessage(_Asked):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[JsonObject] | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None

    @property
    def text(self) -> str:
        """The content's text; parts that are no text are left out."""
        if isinstance(self.content, list):
            return "".join(str(part.get("text", "")) for part in self.content)
        return self.content or ""


class NamedFunction(_Asked):
    """The function of a ``tool_choice`` that names one."""

    name: str


class NamedTool(_Asked):
    """A ``tool_choice`` that names a function."""

    function: NamedFunction


class ChatRequest(_Asked):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[ToolDefinition] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    reasoning_effort: str | None = None
    stream: Literal[False] | None = None
    n: Literal[1] | None = None

    @property
    def offered(self) -> dict[str, Function]:
        """The tools the model may call, by name; empty when it may call none."""
        functions = {tool.function.name: tool.function for tool in self.tools or []}
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return {name: functions[name]} if name in functions else {}
        return {} if self.tool_choice == "none" else functions

    @property
    def has_calls(self) -> bool:
        """Whether tools have been called in the conversation, be they offered any more or not."""
        return any(message.tool_calls for message in self.messages)

    @property
    def wants_call(self) -> bool:
        """Whether text alone is no answer."""
        return isinstance(self.tool_choice, NamedTool) or self.tool_choice == "required"


def parse_request(body: bytes) -> ChatRequest:
    """Read a request's body. Raises BadRequestError."""
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise BadRequestError(f"{where}: {problem['msg']}" if where else problem["msg"]) from None
    if any(_holds_image(message.content) for message in request.messages):
        raise BadRequestError("messages: this model reads text alone, and cannot see images")
    if request.wants_call and not request.offered:
        raise BadRequestError("tool_choice asks for a call of a tool that is not among the tools")
    return request


def _holds_image(content: str | list[JsonObject] | None) -> bool:
    return isinstance(content, list) and any("image" in str(part.get("type")) for part in content)
