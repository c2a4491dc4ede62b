"""Turns at this machine's processors: who is first, and who holds nobody up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sandboxes import turns
from sandboxes.base import SandboxSpec
from sandboxes.local import LocalBackend
from sandboxes.turns import AT_ONCE, SHORT_SECONDS

MANY = 10 * AT_ONCE
MINUTE = 60


def running(main: Callable[[], Awaitable[None]]) -> None:
    async def within_a_minute() -> None:
        async with asyncio.timeout(MINUTE):
            await main()

    asyncio.run(within_a_minute())


def test_they_are_had_in_the_order_in_which_they_were_asked_for() -> None:
    had: list[int] = []

    async def work(number: int) -> None:
        async with turns.taken():
            had.append(number)
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(*map(work, range(MANY)))

    running(main)
    assert had == list(range(MANY))


def test_what_turns_out_long_holds_nobody_up() -> None:
    async def main() -> None:
        held = [await turns.take() for _ in range(AT_ONCE)]
        began = asyncio.get_running_loop().time()
        async with turns.taken():
            waited = asyncio.get_running_loop().time() - began
        assert waited >= SHORT_SECONDS / 2
        for turn in held:
            turn.give_back()
        free = [await turns.take() for _ in range(AT_ONCE)]  # given back once each
        late = asyncio.create_task(turns.take())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not late.done()
        free[0].give_back()
        (await late).give_back()

    running(main)


def test_who_gives_up_waiting_takes_no_turn_along() -> None:
    async def main() -> None:
        held = [await turns.take() for _ in range(AT_ONCE)]
        waiting = [asyncio.create_task(turns.take()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        held.pop().give_back()
        (await waiting[1]).give_back()
        (await waiting[2]).give_back()
        assert waiting[0].cancelled()

    running(main)


def test_commands_that_sleep_are_begun_all_the_same() -> None:
    """Many more than there are turns: all of them sleep at the same time."""

    async def main() -> None:
        backend, number = LocalBackend(), 3 * AT_ONCE
        sandboxes = [await backend.open(SandboxSpec("tests", f"turns-{each}")) for each in range(number)]
        began = asyncio.get_running_loop().time()
        ended = await asyncio.gather(*(each.exec("sleep 2; echo hello", timeout_seconds=MINUTE) for each in sandboxes))
        assert [result.output for result in ended] == ["hello\n"] * number
        assert asyncio.get_running_loop().time() - began < 2 * (number / AT_ONCE)
        await asyncio.gather(*(each.close() for each in sandboxes))

    running(main)
