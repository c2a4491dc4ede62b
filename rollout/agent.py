"""The loop: ask the model, run what it calls, stop for a stated reason.

Owns when a rollout is over and what stays of it. An answer that cannot be used (cut, blank, thoughts that never close)
is asked for again a few times and then ends the rollout as partial; it is never kept, but its cost is. Every call is
answered, in order and under an id of its own; one that is cut or malformed is never run. What the endpoint or the
sandbox cannot do is a Failure; cancellation passes through.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from rollout.chat_model import ChatModel, ContextOverflowError, GateClosedError, ModelError
from rollout.messages import (
    AssistantMessage,
    Failure,
    Message,
    ToolCall,
    ToolDefinition,
    ToolMessage,
    Usage,
    UserMessage,
)
from rollout.replies import CUT, Reply
from rollout.texts import dump_json, is_blank, one_line, shown_name
from rollout.trajectory import split_thinking
from rollout.waste import counting_waste
from sandboxes.base import SandboxError

PartialReason = Literal[
    "invalid_tool_calls",
    "cut_by_token_limit",
    "unclosed_reasoning",
    "empty_replies",
    "content_filter",
    "context_overflow",
    "budget",
]
StopReason = Literal["completed", "turn_limit", "failed"] | PartialReason
Unusable = Literal["cut_by_token_limit", "unclosed_reasoning", "empty_replies"]

SUMMARY_REQUEST = (
    "You have reached the maximum number of tool-calling iterations. Do not call any more tools. "
    "Give your final response now: summarise what you have found and done so far."
)
RETRIES: dict[Unusable, int] = {"cut_by_token_limit": 1, "unclosed_reasoning": 2, "empty_replies": 3}  # per turn
MAX_STRIKES = 3  # turns in a row in which no call could be run
_MAX_NAME_CHARS = 64  # of a tool's name in an error


class Toolbox(Protocol):
    """The tools of one rollout."""

    @property
    def definitions(self) -> Sequence[ToolDefinition]:
        """The tools the model is offered."""

    def resolve(self, name: str) -> str | None:
        """Return the offered tool that a name means (case, hyphens, prefixes forgiven), or None."""

    async def run(self, call: ToolCall) -> ToolMessage:
        """Run one call of an offered tool. Raises SandboxError when the sandbox is gone."""


@dataclass(frozen=True)
class AgentLimits:
    """Bounds of one rollout's loop."""

    max_turns: int = 10  # answers with tool calls; then a summary is asked for
    max_calls_per_turn: int = 128  # further calls of the same answer are told so instead of being run
    log_prefix_chars: int = 100  # of a call's arguments or result in a log line


@dataclass(frozen=True)
class AgentResult:
    """How a rollout ended, and what was said and spent until then."""

    messages: tuple[Message, ...]
    stop_reason: StopReason
    failure: Failure | None = None
    api_calls: int = 0  # requests that returned an answer, thrown-away ones included
    usage: Usage = field(default_factory=Usage)  # of these, and of answers that could not be read
    cost_usd: float = 0.0

    @property
    def completed(self) -> bool:
        """Whether the model came to an end on its own."""
        return self.stop_reason == "completed"

    @property
    def partial(self) -> bool:
        """Whether the rollout was cut short but is kept."""
        return self.stop_reason not in ("completed", "turn_limit", "failed")


class _CutShortError(Exception):
    """The rollout ends here, as partial."""

    def __init__(self, reason: PartialReason) -> None:
        super().__init__(reason)
        self.reason: PartialReason = reason


class Agent:
    """One conversation as it grows, and what it has cost so far. ``log`` gets a line per call and per result."""

    def __init__(
        self,
        prompt: str,
        model: ChatModel,
        toolbox: Toolbox,
        limits: AgentLimits,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.messages: list[Message] = [UserMessage(prompt)]
        self.model = model
        self.toolbox = toolbox
        self.limits = limits
        self.log = log
        self.ids: set[str] = set()
        self.strikes = 0
        self.api_calls = 0
        self.usage = Usage()
        self.cost_usd = 0.0

    async def run(self) -> AgentResult:
        """Work on the prompt until the model is done or a limit is met."""
        try:
            with counting_waste(self.pay):
                return self.result(await self.turns())
        except _CutShortError as end:
            return self.result(end.reason)
        except ContextOverflowError:
            return self.result("context_overflow")
        except GateClosedError:
            return self.out_of_budget()
        except (ModelError, SandboxError) as error:
            return self.failed(Failure(error.kind, str(error)))

    async def turns(self) -> StopReason:
        """Go through the turns."""
        for _ in range(self.limits.max_turns):
            answer = await self.ask()
            if not answer.tool_calls:
                return "completed"
            await self.answer_calls(answer.tool_calls)
        await self.summarise()
        return "turn_limit"

    async def summarise(self) -> None:
        """Ask once, without tools, for a last word; one that cannot be used, or that a server refuses, is left out."""
        self.messages.append(UserMessage(SUMMARY_REQUEST))
        try:
            reply = await self.reply(())
        except ModelError as error:
            if error.kind != "bad_request":
                raise
            self.note("no summary:", str(error))  # all that came before was taken, and is worth keeping
            return
        if not _unusable(reply):
            self.take(reply)

    async def ask(self) -> AssistantMessage:
        """Add the model's next message, asking again while its answers cannot be used."""
        seen: Counter[Unusable] = Counter()
        while True:
            reply = await self.reply(self.toolbox.definitions)
            unusable = _unusable(reply)
            if not unusable:
                break
            seen[unusable] += 1
            if seen[unusable] > RETRIES[unusable]:
                raise _CutShortError(unusable)
        return self.take(reply)

    def take(self, reply: Reply) -> AssistantMessage:
        """Add an answer to the conversation; one that is no whole one ends it."""
        message = reply.message
        if (calls := tuple(map(self.settled, message.tool_calls))) != message.tool_calls:
            message = replace(message, tool_calls=calls)
        self.messages.append(message)
        if reply.finish_reason == "length":
            raise _CutShortError("cut_by_token_limit")
        if reply.finish_reason == "content_filter":
            raise _CutShortError("content_filter")
        return message

    async def reply(self, tools: Sequence[ToolDefinition]) -> Reply:
        """Return the model's next answer, whatever it is worth, and note its cost."""
        reply = await self.model.complete(self.messages, tools)
        self.api_calls += 1
        self.pay(reply.usage, reply.cost_usd)
        if not tools:  # calls are of no use then, though some servers let a model make them
            reply = replace(reply, message=replace(reply.message, tool_calls=()))
        if reply.finish_reason == "content_filter" and (reply.message.tool_calls or is_blank(_said(reply.message))):
            raise ModelError("content_blocked", "the endpoint's content filter withheld the answer")
        return reply

    def pay(self, usage: Usage, cost_usd: float) -> None:
        """Note what an answer cost, whatever it is worth."""
        self.usage += usage
        self.cost_usd += cost_usd

    def settled(self, call: ToolCall) -> ToolCall:
        """Return the call under an id of its own and, where it means an offered tool, that tool's name."""
        call_id, number = call.id, len(self.ids)
        while not call_id or call_id in self.ids:
            call_id = f"{call.id or 'call'}_{number}"
            number += 1
        self.ids.add(call_id)
        name = self.toolbox.resolve(call.name) or call.name
        return call if (call_id, name) == (call.id, call.name) else replace(call, id=call_id, name=name)

    async def answer_calls(self, calls: Sequence[ToolCall]) -> None:
        """Run what can be run, in order, and say of the rest why it was not."""
        ran = 0
        for number, call in enumerate(calls):
            name = shown_name(call.name, _MAX_NAME_CHARS)
            self.note(f"-> {name}", call.arguments)
            error = self.error_of(call, number)
            if error:
                result = ToolMessage(call.id, call.name, json.dumps({"error": error}, ensure_ascii=False))
            else:
                ran += 1
                result = await self.toolbox.run(call)
            self.messages.append(result)
            self.note(f"<- {name}", result.content)
        self.strikes = 0 if ran else self.strikes + 1
        if self.strikes == MAX_STRIKES:
            raise _CutShortError("invalid_tool_calls")

    def error_of(self, call: ToolCall, number: int) -> str:
        """Return why a call must not be run, in words for the model; "" when it may."""
        if self.toolbox.resolve(call.name) is None:
            names = ", ".join(tool.name for tool in self.toolbox.definitions)
            return f"Unknown tool {one_line(call.name, _MAX_NAME_CHARS)!r}. Available tools: {names or 'none'}."
        if call.problem:
            return f"Invalid arguments for {call.name}: {call.problem}. Nothing was run; send one JSON object."
        if number >= self.limits.max_calls_per_turn:
            return f"Not run: only {self.limits.max_calls_per_turn} calls are taken per turn. Send it again if needed."
        return ""

    def note(self, what: str, value: Any) -> None:
        """Write one log line."""
        if self.log:
            text = value if isinstance(value, str) else dump_json(value)
            self.log(f"{what} {one_line(text, self.limits.log_prefix_chars)}")

    def failed(self, failure: Failure) -> AgentResult:
        """Return how it stands, cut off by a failure; may be called from outside while ``run`` is cancelled."""
        return self.result("failed", failure)

    def out_of_budget(self) -> AgentResult:
        """Return what there is when no more is asked; without any answer that is nothing to keep."""
        if any(isinstance(message, AssistantMessage) for message in self.messages):
            return self.result("budget")
        return self.failed(Failure("interrupted", "the run's budget was used up before there was an answer"))

    def result(self, stop_reason: StopReason, failure: Failure | None = None) -> AgentResult:
        """Return what there is; a request for a summary that was never answered is no part of it."""
        asked_in_vain = len(self.messages) > 1 and isinstance(self.messages[-1], UserMessage)
        messages = tuple(self.messages[:-1] if asked_in_vain else self.messages)
        return AgentResult(messages, stop_reason, failure, self.api_calls, self.usage, self.cost_usd)


def _unusable(reply: Reply) -> Unusable | None:
    message = reply.message
    unclosed = _unclosed(message.content)
    blank = not message.tool_calls and is_blank(_said(message))
    if any(call.problem == CUT for call in message.tool_calls):
        return "cut_by_token_limit"
    if reply.finish_reason == "length" and (message.tool_calls or unclosed or blank):
        return "cut_by_token_limit"
    if unclosed:
        return "unclosed_reasoning"
    return "empty_replies" if blank else None


def _unclosed(content: str) -> bool:
    """Tell whether a thought never ends. A <think> counts in front only: further on it may be the text's subject."""
    if content.lstrip().startswith("<think>") and "</think>" not in content:
        return True
    return content.rfind("<REASONING_SCRATCHPAD>") > content.rfind("</REASONING_SCRATCHPAD>")


def _said(message: AssistantMessage) -> str:
    """Return the text without its thoughts, as it will be saved."""
    return split_thinking(message.content, native=message.reasoning)[0]
