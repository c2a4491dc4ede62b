from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sandboxes.base import Sandbox
from tools.base import JsonObject, ToolContext, ToolError
from tools.todo import MAX_CONTENT_CHARS, MAX_ITEMS, todo


async def no_sandbox() -> Sandbox:
    raise AssertionError("a sandbox was asked for")


class Rollout:
    def __init__(self) -> None:
        self.context = ToolContext(no_sandbox)

    def todo(self, **arguments: Any) -> JsonObject:
        return asyncio.run(todo(self.context, arguments))


def item(key: str, content: str = "c", status: str = "pending") -> dict[str, str]:
    return {"id": key, "content": content, "status": status}


def test_an_empty_list_is_read() -> None:
    assert Rollout().todo() == {
        "todos": [],
        "summary": {"total": 0, "pending": 0, "in_progress": 0, "completed": 0, "cancelled": 0},
    }


def test_a_list_is_replaced_and_read_back() -> None:
    rollout = Rollout()
    rollout.todo(todos=[item("old")])
    written = rollout.todo(todos=[item("1", "look"), item("2", "leap", "in_progress"), item("3", "x", "cancelled")])
    assert written["todos"] == [item("1", "look"), item("2", "leap", "in_progress"), item("3", "x", "cancelled")]
    assert written["summary"] == {"total": 3, "pending": 1, "in_progress": 1, "completed": 0, "cancelled": 1}
    assert rollout.todo() == rollout.todo(todos=None) == written
    assert rollout.todo(todos=[])["todos"] == []


def test_merge_updates_by_id_and_appends() -> None:
    rollout = Rollout()
    rollout.todo(todos=[item("1", "look"), item("2", "leap")])
    merged = rollout.todo(todos=[{"id": "2", "status": "completed"}, item("3", "rest")], merge=True)
    assert merged["todos"] == [item("1", "look"), item("2", "leap", "completed"), item("3", "rest")]
    renamed = rollout.todo(todos=[{"id": "1", "content": "look twice"}], merge="true")
    assert renamed["todos"][0] == item("1", "look twice")


def test_what_models_write_is_understood() -> None:
    rollout = Rollout()
    assert rollout.todo(todos='[{"id": 1, "content": "look", "status": "done"}]')["todos"] == [item("1", "look")]
    assert rollout.todo(todos=[{"id": "1", "status": ["odd"]}])["todos"] == [item("1", "")]
    assert rollout.todo(todos=[item("1", "first"), item("1", "second")])["todos"] == [item("1", "second")]


def test_of_a_list_what_makes_sense_is_kept() -> None:
    rollout = Rollout()
    odd = [item("1", "look"), 7, None, "leap", ["x"], {"content": "no id"}, {"id": None}, {"id": True}, {"id": {}}]
    written = rollout.todo(todos=[*odd, {"id": "2", "content": None, "status": None}, {"id": 3, "content": 4}])
    assert written["todos"] == [item("1", "look"), item("2", ""), item("3", "4")]
    assert rollout.todo(todos=[{"id": "1", "content": ["x"]}, {"id": "2", "status": {}}])["todos"] == [
        item("1", ""),
        item("2", ""),
    ]


@pytest.mark.parametrize("status", ["done", None, 7, ["completed"], ""])
def test_a_merge_with_what_is_no_status_or_no_text_leaves_the_old(status: Any) -> None:
    rollout = Rollout()
    rollout.todo(todos=[item("1", "look", "completed")])
    said = {"content": None, "status": status}
    merged = rollout.todo(todos=[{"id": "1", **said}, {"id": "2", **said}], merge=True)
    assert merged["todos"] == [item("1", "look", "completed"), item("2", "")]


@pytest.mark.parametrize("todos", ["look", {"id": "1"}, [{"content": "no id"}], [7]])
def test_what_is_no_list_of_items_is_refused_and_changes_nothing(todos: Any) -> None:
    rollout = Rollout()
    rollout.todo(todos=[item("1")])
    with pytest.raises(ToolError, match="Invalid arguments for todo: todos"):
        rollout.todo(todos=todos)
    assert rollout.todo()["todos"] == [item("1")]


def test_the_list_is_bounded() -> None:
    rollout = Rollout()
    full = [item(str(number)) for number in range(MAX_ITEMS)]
    rollout.todo(todos=full)
    with pytest.raises(ToolError, match="at most 256 items, not 257; nothing was changed"):
        rollout.todo(todos=[item("one more")], merge=True)
    assert len(rollout.todo()["todos"]) == MAX_ITEMS
    content = rollout.todo(todos=[item("1", "x" * 5000)])["todos"][0]["content"]
    assert len(content) == MAX_CONTENT_CHARS
    assert content.endswith("x… [truncated]")


def test_rollouts_share_nothing() -> None:
    mine, yours = Rollout(), Rollout()
    mine.todo(todos=[item("1")])
    assert yours.todo()["todos"] == []
