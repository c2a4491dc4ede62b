"""What a worker says of sandboxes that are closed, whatever comes of that."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from rollout import worker
from rollout.wire import FrameBuffer
from rollout.worker import Worker


async def hangs() -> None:
    await asyncio.sleep(600)


async def breaks() -> None:
    raise OSError(28, "No space left on device")


async def told(close: Callable[[], Coroutine[Any, Any, None]]) -> list[dict[str, Any]]:
    ours, theirs = socket.socketpair()
    with ours:
        reader, writer = await asyncio.open_connection(sock=theirs)
        session: Any = SimpleNamespace(close=close, sample=SimpleNamespace(index=7))
        await Worker(reader, writer)._close(session)
        writer.close()
        await writer.wait_closed()
        return [frame.header for frame in FrameBuffer().feed(ours.recv(1 << 16))]


@pytest.mark.parametrize(
    ("close", "level", "words"),
    [
        (hangs, "warning", "the sandbox of prompt 7 is not gone after 0 s; --clean removes what stays of it"),
        (breaks, "trace", "No space left on device"),
    ],
)
def test_a_sandbox_that_does_not_go_is_told_and_no_longer_waited_for(
    monkeypatch: pytest.MonkeyPatch, close: Callable[[], Coroutine[Any, Any, None]], level: str, words: str
) -> None:
    monkeypatch.setattr(worker, "CLOSING_SECONDS", 0.1)
    log, closed = asyncio.run(told(close))
    assert (log["type"], log["level"], closed["type"]) == ("log", level, "closed")
    assert words in log["text"]
