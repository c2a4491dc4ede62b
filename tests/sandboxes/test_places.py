"""So many places at once over several processes, whatever becomes of who holds them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from sandboxes import folders, places
from sandboxes.base import SandboxError
from sandboxes.places import PlaceQueue
from tests.sandboxes.support import descriptors

ROOT = Path(__file__).parents[2]
HOLDER = """
import asyncio, sys
from pathlib import Path
from sandboxes.places import PlaceQueue

async def main():
    queue = PlaceQueue(Path(sys.argv[1]))
    held = [await queue.take() for _ in range(int(sys.argv[2]))]
    print("held", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def holder(folder: Path, number: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", HOLDER, str(folder), str(number)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)


async def tries(queue: PlaceQueue, seconds: float) -> bool:
    """Tell whether a place is given within so long; it is given back."""
    try:
        place = await asyncio.wait_for(queue.take(), seconds)
    except TimeoutError:
        return False
    place.give_back()
    return True


def test_so_many_and_no_more() -> None:
    async def main(folder: Path) -> int:
        queues = [PlaceQueue(folder) for _ in range(4)]  # as of so many workers
        now = most = 0

        async def rollout(number: int) -> None:
            nonlocal now, most
            place = await queues[number % 4].take()
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.005)
            now -= 1
            place.give_back()

        await asyncio.gather(*map(rollout, range(100)))
        return most

    before = descriptors()
    with places.offered(3) as folder:
        assert asyncio.run(main(folder)) == 3
    assert not folder.exists()
    assert descriptors() == before


def test_only_so_many_are_made_at_once() -> None:
    async def main(folder: Path) -> None:
        first, second = await asyncio.gather(PlaceQueue(folder).take(), PlaceQueue(folder).take())
        assert not await tries(PlaceQueue(folder), 0.2)
        first.made()
        third = await asyncio.wait_for(PlaceQueue(folder).take(), 10)
        assert not await tries(PlaceQueue(folder), 0.2)
        second.give_back()
        fourth = await asyncio.wait_for(PlaceQueue(folder).take(), 10)
        for each in (first, third, fourth):
            each.give_back()

    with places.offered(10, made_at_once=2) as folder:
        asyncio.run(main(folder))


def test_who_dies_gives_back() -> None:
    async def main(folder: Path, process: subprocess.Popen[str]) -> None:
        queue = PlaceQueue(folder)
        assert not await tries(queue, 0.3)
        process.kill()
        assert await tries(queue, 10)

    with places.offered(2) as folder, holder(folder, 2) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        asyncio.run(main(folder, process))


def test_who_waits_no_more_is_passed_over() -> None:
    async def main(folder: Path) -> None:
        first, second = PlaceQueue(folder), PlaceQueue(folder)
        place = await first.take()
        waiting = [asyncio.create_task(queue.take()) for queue in (first, second) for _ in range(3)]
        await asyncio.sleep(0.1)
        for each in waiting[:-1]:
            each.cancel()
        place.give_back()
        got = await asyncio.wait_for(waiting[-1], 10)
        got.give_back()
        assert await tries(first, 10)

    with places.offered(1) as folder:
        asyncio.run(main(folder))


def test_after_the_run() -> None:
    async def main(folder: Path) -> None:
        with pytest.raises(SandboxError, match="no place for a sandbox can be had"):
            await PlaceQueue(folder).take()

    with places.offered(1) as folder:
        pass
    asyncio.run(main(folder))


def test_the_run_ends_while_somebody_waits() -> None:
    async def main() -> None:
        with places.offered(1) as folder:
            held = await PlaceQueue(folder).take()
            waiting = asyncio.create_task(PlaceQueue(folder).take())
            await asyncio.sleep(0.1)
        with pytest.raises(SandboxError, match="no place for a sandbox can be had"):
            await asyncio.wait_for(waiting, 10)
        held.give_back()

    asyncio.run(main())


def test_a_dead_runs_folder_is_swept() -> None:
    code = "from sandboxes import places\nwith places.offered(1) as folder: print(folder, flush=True); input()"
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout
        folder = Path(process.stdout.readline().strip())
        assert folder.name not in str(folders.sweep())
        process.kill()
    assert f"folder {folders.base() / folder.name}" in folders.sweep()
    assert not folder.exists()
