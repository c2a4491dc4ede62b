"""What an engine that is slow, or whose registries are, does to who asks it. It is made up, and no Docker is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from sandboxes import docker_engine, docker_images
from sandboxes.base import SandboxError
from sandboxes.docker_engine import Engine
from sandboxes.docker_images import Images
from sandboxes.docker_settings import Settings
from tests.sandboxes.engine import STILL, FakeEngine, fake_engine
from tests.sandboxes.support import until


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    with fake_engine() as fake:
        monkeypatch.setenv("DOCKER_HOST", fake.host)
        yield fake


@pytest.fixture
def engine(fake: FakeEngine) -> Iterator[Engine]:
    engine = Engine(1, fake.host)
    yield engine
    fake.closing.set()
    engine.close()


def layer(current: int, status: str = "Downloading") -> dict[str, Any]:
    return {"status": status, "id": "a", "progressDetail": {"current": current, "total": 100}}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_engine, "SILENCE_SECONDS", 0.4)


@pytest.mark.usefixtures("impatient")
class TestAPullThatStandsStill:
    @pytest.mark.parametrize(
        "said", [[], [layer(1), STILL], [layer(1)] * 20, [layer(1), {"status": "Waiting", "id": "b"}] * 10]
    )
    def test_is_given_up(self, fake: FakeEngine, engine: Engine, said: list[dict[str, Any]]) -> None:
        if said:
            fake.pulls["x:1"] = said
        complaint = engine.pull("x:1", lambda _: None)
        assert complaint == "its pull stood still for 0.4 s; its registry, or the way there, does not answer"
        assert fake.images == set()

    def test_is_let_go_of(self, fake: FakeEngine, engine: Engine) -> None:
        fake.pulls["x:1"] = [layer(1), STILL]
        assert engine.pull("x:1", lambda _: None)
        assert asyncio.run(until(lambda: fake.let_go == ["x:1"]))

    def test_makes_room(self, fake: FakeEngine, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(docker_images, "MAX_PULLS", 1)
        fake.pulls |= {"still:1": [layer(1), STILL], "good:1": [layer(100)]}

        async def main() -> list[Any]:
            images = Images(engine)
            still = asyncio.create_task(images.ensure("still:1"))
            await until(lambda: fake.pulling == ["still:1"])
            return list(await asyncio.gather(still, images.ensure("good:1"), return_exceptions=True))

        still, good = asyncio.run(main())
        assert isinstance(still, SandboxError)
        assert still.kind == "image_unavailable"
        assert "stood still" in str(still)
        assert good.cwd == "/w"


@pytest.mark.usefixtures("impatient")
def test_a_pull_that_comes_nearer_may_take_its_time(fake: FakeEngine, engine: Engine) -> None:
    fake.pulls["x:1"] = [layer(current) for current in range(20)]
    assert engine.pull("x:1", lambda _: None) == ""
    assert fake.images == {"x:1"}


def test_but_not_for_ever(fake: FakeEngine, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_engine, "PULL_SECONDS", 0.3)
    fake.pulls["x:1"] = [layer(current) for current in range(100)]
    assert engine.pull("x:1", lambda _: None) == "it did not come within 0.3 s"


def test_an_engine_that_goes_while_it_pulls_is_told(fake: FakeEngine, engine: Engine) -> None:
    fake.pulls["x:1"] = [layer(1), STILL]

    def hear(_: dict[str, Any]) -> None:
        fake.closing.set()

    assert engine.pull("x:1", hear)


def test_the_wait_for_others_pulls_is_no_fault_of_an_image(
    fake: FakeEngine, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_engine, "PULL_SECONDS", 0.5)
    monkeypatch.setattr(docker_images, "PULL_SECONDS", 0.5, raising=False)  # where it was counted before
    monkeypatch.setattr(docker_images, "MAX_PULLS", 1)
    names = [f"x:{number}" for number in range(8)]
    fake.pulls = {name: [layer(current) for current in range(3)] for name in names}

    async def main() -> list[Any]:
        return await asyncio.gather(*map(Images(engine).ensure, names))

    assert [image.name for image in asyncio.run(main())] == names


def test_an_image_that_is_there_does_not_wait_for_pulls(fake: FakeEngine, engine: Engine) -> None:
    fake.images.add("there:1")

    async def main() -> None:
        images = Images(engine)
        missing = [asyncio.create_task(images.ensure(f"x:{number}")) for number in range(100)]
        await until(lambda: len(fake.pulling) == docker_images.MAX_PULLS)
        async with asyncio.timeout(5):
            assert (await images.ensure("there:1")).variables == {"A": "b"}
        fake.closing.set()
        await asyncio.gather(*missing, return_exceptions=True)

    asyncio.run(main())


def test_a_container_whose_creation_is_not_waited_for_is_removed(fake: FakeEngine, engine: Engine) -> None:
    fake.create_seconds, fake.made_after = 30, 3
    launch = partial(engine.launch, "x:1", "my-name", {}, Settings.from_environment({}))
    with pytest.raises(SandboxError, match=r"no container of x:1: .*timed out"):
        launch()
    assert fake.asked[:4] == ["POST /create", *["DELETE /my-name"] * 3]
    assert fake.made_after < 0  # it was there, and is gone
