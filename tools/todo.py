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


def _known_status(status: Any) -> Any:
    return status if status in STATUSES else "pending"


class _Item(BaseModel):  # no docstring: it would go into the schema the model is shown
    model_config = ConfigDict(coerce_numbers_to_str=True)

    id: str
    content: str = ""
    status: Annotated[Status, BeforeValidator(_known_status)] = "pending"


@dataclass
class TodoList:
    """One rollout's list, in the order in which items came."""

    items: dict[str, _Item] = field(default_factory=dict)


@tool("todo")
async def todo(
    context: ToolContext,
    todos: Annotated[list[_Item] | None, Field(description="Leave out to read the list")] = None,
    merge: Annotated[bool, Field(description="Update by id and append, instead of replacing the list")] = False,
) -> JsonObject:
    """Keep the task list of a job of several steps: write the steps first, then mark each as you go."""
    current = context.state(TodoList)
    if todos is not None:
        items = dict(current.items) if merge else {}
        for item in todos:
            items[item.id] = _updated(items.get(item.id), item)
        if len(items) > MAX_ITEMS:
            raise ToolError(f"a list holds at most {MAX_ITEMS} items, not {len(items)}; nothing was changed")
        current.items = items
    counts = Counter(item.status for item in current.items.values())
    return {
        "todos": [item.model_dump() for item in current.items.values()],
        "summary": {"total": len(current.items), **{status: counts[status] for status in STATUSES}},
    }


def _updated(known: _Item | None, item: _Item) -> _Item:
    """Return ``known`` with what ``item`` says, or ``item`` where nothing was known; the content bounded."""
    merged = known.model_copy(update=item.model_dump(exclude_unset=True)) if known else item
    if len(merged.content) > MAX_CONTENT_CHARS:
        return merged.model_copy(update={"content": merged.content[: MAX_CONTENT_CHARS - len(_CUT)] + _CUT})
    return merged
