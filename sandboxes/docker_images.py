"""Images: looked for once each, however many samples and workers want them, and pulled where they are missing.

Workers of one run agree on who pulls through ``image_notes``. No time limit counts the wait for others' pulls, and an
image that is there does not wait for them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import BoundedSemaphore
from typing import Any, Generic, TypeVar

from sandboxes.base import SandboxError, Tell, tell_nobody
from sandboxes.docker_engine import Engine, image_error
from sandboxes.image_notes import Notes, from_a_thread, locked

T = TypeVar("T")

MAX_LOOKS = 16  # at the same time, of one process: whether an image is there
MAX_MISSING = 64  # that are taken care of: most of them wait for others
MAX_PULLS = 4
PROGRESS_SECONDS = 10.0  # between two lines about a pull


@dataclass(frozen=True)
class Image:
    """What is to be known about an image that is there."""

    name: str
    variables: dict[str, str]
    cwd: str  # the image's own first folder; "" or "/" when it has none


class Images:
    """The images of one engine, as one process knows them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._there: _Once[Image | None] = _Once(ThreadPoolExecutor(MAX_LOOKS, thread_name_prefix="image"))
        self._missing: _Once[Image] = _Once(ThreadPoolExecutor(MAX_MISSING, thread_name_prefix="missing-image"))
        self._pulls = BoundedSemaphore(MAX_PULLS)

    async def ensure(self, name: str, tell: Tell = tell_nobody) -> Image:
        """Have the image here, pulled if need be. Raises SandboxError, for the image's sake or the engine's."""
        there = await self._there.result(name, partial(self._look, name))
        return there or await self._missing.result(name, partial(self._get, name, from_a_thread(tell)))

    def _look(self, name: str) -> Image | None:
        known = self._engine.image(name)
        return self._checked(name, known) if known else None

    def _get(self, name: str, tell: Tell) -> Image:
        with locked(os.environ.get("DOCKER_HOST", ""), name) as notes:
            known = self._engine.image(name) or self._pull(name, notes, tell)
        return self._checked(name, known)

    def _checked(self, name: str, known: dict[str, Any]) -> Image:
        """Return an image that the engine knows. Raises SandboxError when it cannot be run."""
        image = Image(
            name=name,
            variables=dict(item.split("=", 1) for item in known["Config"].get("Env") or () if "=" in item),
            cwd=known["Config"].get("WorkingDir") or "",
        )
        platform = f"{known['Os']}/{known['Architecture']}"
        if platform != self._engine.platform and (complaint := self._engine.try_out(name)):
            raise image_error(f"{name}: it is for {platform}, the engine runs {self._engine.platform}: {complaint}")
        return image

    def _pull(self, name: str, notes: Notes, tell: Tell) -> dict[str, Any]:
        complaint = notes.complaint()
        if not complaint:
            with self._pulls:
                complaint = self._engine.pull(name, Progress(name, tell).hear)
        known = None if complaint else self._engine.image(name)
        if known is None:
            complaint = complaint or "it was pulled, and the engine does not know it"
            notes.leave(complaint)
            raise image_error(f"{name}: {complaint}")
        tell(f"image {name} is here")
        return known


@dataclass
class _Once(Generic[T]):
    """Work that is done once for each image, in threads, until there is a verdict."""

    pool: ThreadPoolExecutor
    done: dict[str, Future[T]] = field(default_factory=dict)

    async def result(self, name: str, work: Callable[[], T]) -> T:
        """Return what the work comes to, or came to. Raises SandboxError."""
        known = self.done.get(name)
        if known is None or _is_no_verdict(known):
            known = self.done[name] = self.pool.submit(work)
        return await asyncio.shield(asyncio.wrap_future(known))


class Progress:
    """Tells how far a pull is: at its start, and every so often."""

    def __init__(self, name: str, tell: Tell) -> None:
        self._name = name
        self._tell = tell
        self._layers: dict[str, tuple[int, int]] = {}  # bytes that are here, and all, of each layer that says so
        self._told_at = time.monotonic()
        tell(f"pulling image {name}")

    def hear(self, message: dict[str, Any]) -> None:
        """Take what the engine says."""
        layer, detail = str(message.get("id", "")), message.get("progressDetail") or {}
        if message.get("status") == "Downloading" and detail.get("total"):
            self._layers[layer] = (detail.get("current", 0), detail["total"])
        elif message.get("status") == "Download complete" and layer in self._layers:
            self._layers[layer] = (self._layers[layer][1],) * 2
        if self._layers and time.monotonic() - self._told_at >= PROGRESS_SECONDS:
            self._told_at = time.monotonic()
            here, total = (sum(sizes) / 1e6 for sizes in zip(*self._layers.values(), strict=True))
            self._tell(f"pulling image {self._name}: {here:,.0f} of {total:,.0f} MB")


def _is_no_verdict(check: Future[T]) -> bool:
    """Tell whether a check failed for the engine's sake: then it is made again."""
    error = check.exception() if check.done() else None
    return isinstance(error, SandboxError) and error.kind == "sandbox"
