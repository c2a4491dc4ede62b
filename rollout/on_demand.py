"""A rollout's sandbox: made when a tool first needs it, or ahead of that, and gone at the end, however that comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

from sandboxes import BACKENDS, turns
from sandboxes.base import Backend, BoundedBackend, Sandbox, SandboxSpec, has_images
from sandboxes.places import Place, PlaceQueue


@dataclass
class SandboxOnDemand:
    """One sandbox that may never be made. Where there are only so many at once it waits for its place first."""

    kind: str
    spec: SandboxSpec
    places: PlaceQueue | None = None  # of bounded backends
    started: Callable[[float], None] = lambda _seconds: None  # told how long it took to make, without the wait
    _making: asyncio.Task[Sandbox] | None = None
    _timer: asyncio.TimerHandle | None = None
    _place: Place | None = None

    def begin(self) -> None:
        """Make it in the background. What goes wrong is told to who opens it, and to nobody else."""
        if self._making is None:
            self._making = asyncio.create_task(self._make())

    def begin_later(self, seconds: float) -> None:
        """Begin in so many seconds, unless it has been closed by then."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self.begin)

    async def open(self) -> Sandbox:
        """Return it, made by now; the same one each time. Raises SandboxError."""
        self.begin()
        assert self._making is not None  # noqa: S101 - it has just begun
        return await asyncio.shield(self._making)

    async def close(self) -> None:
        """Remove it, or stop making it. It is not opened after that."""
        if self._timer:
            self._timer.cancel()
        if self._making is not None:
            self._making.cancel()
            (made,) = await asyncio.gather(self._making, return_exceptions=True)
            if not isinstance(made, BaseException):
                await made.close()
        if self._place:
            self._place.give_back()

    async def _make(self) -> Sandbox:
        backend = BACKENDS[self.kind]
        if not self.places or not isinstance(backend, BoundedBackend):
            return await self._timed(backend)
        self._place = await self.places.take()
        with ExitStack() as on_error:
            on_error.callback(self._place.give_back)
            sandbox = await self._timed(backend)
            self._place.made()
            on_error.pop_all()
        return sandbox

    async def _timed(self, backend: Backend) -> Sandbox:
        is_work_of_this_machine = not has_images(backend)
        async with turns.taken() if is_work_of_this_machine else nullcontext():
            began = time.monotonic()
            sandbox = await backend.open(self.spec)
            self.started(time.monotonic() - began)
            return sandbox
