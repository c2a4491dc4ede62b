"""The todo list: what the model wants to remember to do. It lives and dies with the rollout and touches no sandbox."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tools.base import JsonObject, ToolContext, ToolError, tool

Status = Literal["pending", "in_progress", "completed", "cancelled"]
STATUSES = get_args(Status)
MAX_ITEMS = 256
MAX_CONTENT_CHARS = 4000
_CUT = "… [truncated]"


def _sensible(item: Any) -> Any:
    """Return an item without the fields that make no sense, which leaves them as they are; None for what is no item."""
    if not isinstance(item, dict) or not _is_text(item.get("id")):
        return None
    return {name: value for name, value in item.items() if (value in STATUSES if name == "status" else _is_text(value))}


def _is_text(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


class _Item(BaseModel):  # no docstring: it would go into the schema the model is shown
    model_config = ConfigDict(coerce_numbers_to_str=True)

    id: str
    content: str = ""
    status: Status = "pending"


@dataclass
class TodoList:
    """One rollout's list, in the order in which items came."""

    items: dict[str, _Item] = field(default_factory=dict)


@tool("todo")
async def todo(
    context: ToolContext,
    todos: Annotated[
        list[Annotated[_Item | None, BeforeValidator(_sensible)]] | None,
        Field(description="Leave out to read the list"),
    ] = None,
    merge: Annotated[bool, Field(description="Update by id and append, instead of replacing the list")] = False,
) -> JsonObject:
    """Keep the task list of a job of several steps: write the steps first, then mark each as you go."""
    current = context.state(TodoList)
    if todos is not None:
        items = dict(current.items) if merge else {}
        for item in _only_items(todos):
            items[item.id] = _updated(items.get(item.id), item)
        if len(items) > MAX_ITEMS:
            raise ToolError(f"a list holds at most {MAX_ITEMS} items, not {len(items)}; nothing was changed")
        current.items = items
    counts = Counter(item.status for item in current.items.values())
    return {
        "todos": [item.model_dump() for item in current.items.values()],
        "summary": {"total": len(current.items), **{status: counts[status] for status in STATUSES}},
    }


def _only_items(todos: list[_Item | None]) -> list[_Item]:
    """Leave out what is no item, unless nothing else is there. Raises ToolError."""
    items = [item for item in todos if item]
    if todos and not items:
        raise ToolError("Invalid arguments for todo: todos: none of them is an object with an id; nothing was changed")
    return items


def _updated(known: _Item | None, item: _Item) -> _Item:
    """Return ``known`` with what ``item`` says, or ``item`` where nothing was known; the content bounded."""
    merged = known.model_copy(update=item.model_dump(exclude_unset=True)) if known else item
    if len(merged.content) > MAX_CONTENT_CHARS:
        return merged.model_copy(update={"content": merged.content[: MAX_CONTENT_CHARS - len(_CUT)] + _CUT})
    return merged
