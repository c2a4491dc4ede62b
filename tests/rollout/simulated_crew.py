"""Several workers' real gates, one pacer and a simulated endpoint, played through in virtual time on a real event loop.

What ``simulated_endpoint`` leaves out: that places and rates are divided, and that workers hear and tell a little late.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from random import Random
from unittest.mock import patch

from rollout.controller import Controller, Host
from rollout.gate import Gate, Passage
from rollout.pacer import Pacer
from rollout.worker import TELL_SECONDS
from tests.rollout.simulated_endpoint import Limit

REFUSAL_SECONDS = 0.01
SANDBOX_SECONDS = 0.02
HEAR_SECONDS = 0.001


class _Clock(selectors.SelectSelector):
    """Nothing ever comes from outside: where the loop would wait, time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 2.0**20  # the same each time, and later than the real one, which defaults of fields are taken from

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nobody waits for anything any more"
        self.now += max(timeout, 0.0)
        return []


@dataclass
class Crew:
    """An endless supply of rollouts of two turns, each with a short tool."""

    limit: Limit
    workers: int
    latency: Callable[[Random], float]
    seconds: float = 60.0
    controller: Controller = field(default_factory=Controller)
    random: Random = field(default_factory=lambda: Random(1))
    answered: int = 0
    refused: int = 0
    _accepted: int = 0

    def play(self) -> Crew:
        """Play it through."""
        clock = _Clock()
        with (
            patch("time.monotonic", lambda: clock.now),
            patch("rollout.pacer.look", Host),
            asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(clock)) as runner,
        ):
            runner.run(self._play(clock.now))
        return self

    @property
    def per_second(self) -> float:
        return self.answered / self.seconds

    @property
    def refused_share(self) -> float:
        return self.refused / (self.refused + self.answered)

    async def _play(self, began_at: float) -> None:
        pacer = Pacer(self.controller)
        wake, spoke = asyncio.Event(), set[int]()
        gates: list[Gate] = []

        def tell(number: int) -> None:
            pacer.seen(number, gates[number].report())
            wake.set()

        gates += (Gate(on_refusal=partial(tell, number)) for number in range(self.workers))
        rollouts: list[set[asyncio.Task[None]]] = [set() for _ in gates]
        loop = asyncio.get_running_loop()
        tell_at = -inf
        while (now := time.monotonic()) < began_at + self.seconds:
            if now >= tell_at:
                tell_at = now + TELL_SECONDS
                for number in range(self.workers):
                    tell(number)
            counts = {number: len(tasks) for number, tasks in enumerate(rollouts)}
            for number, share in pacer.news(counts).items():
                loop.call_later(HEAR_SECONDS, partial(gates[number].pace, **share))
            while pacer.allows(sum(map(len, rollouts))):
                fullest = sorted(range(self.workers), key=lambda number: -len(rollouts[number]))
                number = min(fullest[: pacer.workers(self.workers)], key=lambda number: len(rollouts[number]))
                task = asyncio.create_task(self._rollout(gates[number], began_at))
                rollouts[number].add(task)
                if number not in spoke:
                    spoke.add(number)
                    pacer.spoke(number)
                    loop.call_soon(wake.set)
                task.add_done_callback(partial(self._over, rollouts[number], wake))
            wake.clear()
            timer = loop.call_at(tell_at, wake.set)
            await wake.wait()
            timer.cancel()
        tasks = [task for each in rollouts for task in each]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @staticmethod
    def _over(rollouts: set[asyncio.Task[None]], wake: asyncio.Event, task: asyncio.Task[None]) -> None:
        rollouts.discard(task)
        wake.set()

    async def _rollout(self, gate: Gate, began_at: float) -> None:
        await asyncio.sleep(SANDBOX_SECONDS)
        for _ in range(2):
            while True:
                with await gate.enter() as passage:
                    await self._ask(passage, time.monotonic() - began_at)
                if passage.answered:
                    break
                await gate.pause(max(passage.wait_seconds, self.random.uniform(0.5, 1.0)))
            await asyncio.sleep(0.01)

    async def _ask(self, passage: Passage, now: float) -> None:
        if self.limit.takes(now, self._accepted):
            self._accepted += 1
            try:
                await asyncio.sleep(self.latency(self.random))
            finally:
                self._accepted -= 1
            passage.answered = True
            self.answered += 1
        else:
            await asyncio.sleep(REFUSAL_SECONDS)
            passage.refused = passage.too_many = True
            passage.wait_seconds = self.limit.retry_after(now)
            self.refused += 1
