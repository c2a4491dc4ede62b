"""Images are looked for once, before they are needed, and what is wrong with one is told in the engine's words."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from endpoints.scripted import ScriptedEndpoint
from sandboxes import docker_images
from sandboxes.base import SandboxError
from sandboxes.docker import DockerBackend
from sandboxes.docker_images import Progress
from tests import engines
from tests.program import Workplace, answer, terminal
from tests.sandboxes.containers import api, image, ours, output, use
from tests.sandboxes.registry import Registry, basic, serving

pytestmark = pytest.mark.docker
ROOT = Path(__file__).parents[2]
FOREIGN = "riscv64"


@pytest.fixture(autouse=True)
def _docker(monkeypatch: pytest.MonkeyPatch) -> None:
    use("docker", monkeypatch, engines.BUSYBOX)


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serving() as registry:
        yield registry
        with api() as client:
            for item in client.images():
                for tag in item["RepoTags"] or ():
                    if tag.startswith(f"127.0.0.1:{registry.port}/"):
                        client.remove_image(tag, force=True)


def ensured(*names: str, backend: DockerBackend | None = None) -> list[BaseException | None]:
    """Ask for images side by side; return what each came to."""
    asked = backend or DockerBackend()

    async def main() -> list[BaseException | None]:
        return await asyncio.gather(*map(asked.ensure_image, names), return_exceptions=True)

    return asyncio.run(main())


def refusal(name: str, backend: DockerBackend | None = None) -> str:
    (error,) = ensured(name, backend=backend)
    assert isinstance(error, SandboxError)
    assert error.kind == "image_unavailable"
    return str(error)


class TestThatAreThere:
    def test_nothing_is_pulled(self) -> None:
        assert ensured(engines.BUSYBOX, engines.TOOLS, "") == [None] * 3

    def test_on_podman(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use("podman", monkeypatch)
        assert ensured(engines.BUSYBOX, engines.TOOLS) == [None] * 2

    def test_by_digest(self) -> None:
        with api() as client:
            (item,) = client.images(engines.BUSYBOX)
        assert ensured(item["Id"]) == [None]


class TestThatArePulled:
    def test_and_run(self, registry: Registry) -> None:
        name = registry.add("some/image:1", engines.busybox_layer())
        assert ensured(name) == [None]
        assert output("echo hi", image=name) == "hi\n"
        assert registry.asked["some/image:1"] in (1, 2)  # the engine asks with HEAD or GET

    def test_once_for_many_samples(self, registry: Registry) -> None:
        name = registry.add("some/image:1", engines.busybox_layer())
        registry.pause_seconds = 0.3
        assert ensured(*[name] * 20) == [None] * 20
        assert registry.asked["some/image:1"] in (1, 2)

    def test_and_that_is_told_to_who_watches(self, registry: Registry, place: Workplace) -> None:
        name = registry.add("some/image:1", engines.busybox_layer())
        place.dataset([{"prompt": "a", "image": name}, {"prompt": "b", "image": name}])
        with ScriptedEndpoint([terminal("echo hi"), answer("done")]) as endpoint:
            ended = place.run(endpoint.base_url, sandbox="docker")
        assert ended.code == 0, ended.stderr
        told = [line for line in ended.stderr.splitlines() if name in line]
        assert told == [f"pulling image {name}", f"image {name} is here"]

    def test_once_for_many_workers(self, registry: Registry) -> None:
        name = registry.add("some/image:1", engines.busybox_layer())
        registry.pause_seconds = 1
        assert workers(3, name) == ["there"] * 3
        assert registry.asked["some/image:1"] in (1, 2)

    def test_with_the_users_credentials(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with serving("private") as registry:
            name = registry.add("some/image:1", engines.busybox_layer())
            assert "no basic auth credentials" in refusal(name)
            auth = basic("user", "private").removeprefix("Basic ")
            config = {"auths": {f"127.0.0.1:{registry.port}": {"auth": auth}}}
            (tmp_path / "config.json").write_text(json.dumps(config))
            monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
            assert workers(1, name) == ["there"]  # one that started after the failure
            with api() as client:
                client.remove_image(name, force=True)


class TestThatCannotBeHad:
    def test_the_registry_does_not_know_it(self, registry: Registry) -> None:
        name = registry.reference("no/such:1")
        reason = refusal(name)
        assert reason.startswith(f"Docker image not available: {name}: ")
        assert "manifest unknown" in reason

    def test_asked_once_for_many_samples(self, registry: Registry) -> None:
        name = registry.reference("no/such:1")
        backend = DockerBackend()
        errors = ensured(*[name] * 20, backend=backend)
        assert {str(error) for error in errors} == {refusal(name, backend)}
        assert registry.asked["no/such:1"] <= 2

    def test_asked_once_for_many_workers(self, registry: Registry) -> None:
        name = registry.reference("no/such:1")
        registry.pause_seconds = 2  # they all have started meanwhile
        assert all("manifest unknown" in told for told in workers(3, name))
        assert registry.asked["no/such:1"] <= 2

    def test_the_next_run_asks_again(self, registry: Registry) -> None:
        name = registry.reference("late/image:1")
        assert "manifest unknown" in workers(1, name)[0]
        registry.add("late/image:1", engines.busybox_layer())
        assert workers(1, name) == ["there"]

    def test_no_registry(self) -> None:
        assert "connection refused" in refusal("127.0.0.1:1/no/such:1")

    @pytest.mark.parametrize("name", ["UPPER/case", "a b", "-x", "image:", "é"])
    def test_no_name(self, name: str) -> None:
        assert refusal(name).startswith(f"Docker image not available: {name}: ")

    def test_no_sandbox_is_made(self, registry: Registry) -> None:
        with pytest.raises(SandboxError, match="manifest unknown") as caught:
            output("true", image=registry.reference("no/such:1"))
        assert caught.value.kind == "image_unavailable"
        assert ours() == []

    def test_others_are_not_affected(self, registry: Registry) -> None:
        bad, good = ensured(registry.reference("no/such:1"), engines.BUSYBOX)
        assert (isinstance(bad, SandboxError), good) == (True, None)

    def test_another_platform(self) -> None:
        foreign = engines.busybox_layer()
        with image("localhost/batch-runner-tests/foreign:1", broken(foreign), architecture=FOREIGN) as name:
            reason = refusal(name)
        assert f"it is for linux/{FOREIGN}, the engine runs linux/" in reason
        assert "exec format error" in reason

    def test_an_image_without_a_shell(self) -> None:
        layer = engines.skeleton()
        layer.file("hello", b"hello")
        with image("localhost/batch-runner-tests/bare:1", layer.data()) as name, pytest.raises(SandboxError) as caught:
            output("true", image=name)
        assert "/bin/sh" in str(caught.value)
        assert ours() == []


def broken(layer: bytes) -> bytes:
    """Return a layer whose programs are for a machine that is not this one."""
    elf = b"\x7fELF\x02\x01\x01"
    at = layer.index(elf)
    machine = at + 18  # e_machine; 243 is RISC-V
    return layer[:machine] + b"\xf3\x00" + layer[machine + 2 :]


def test_how_far_a_pull_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_images, "PROGRESS_SECONDS", 0.0)
    told: list[str] = []
    progress = Progress("big:1", told.append)
    for message in (
        {"status": "Pulling from big", "id": "1"},
        {"status": "Pulling fs layer", "progressDetail": {}, "id": "a"},
        {"status": "Downloading", "progressDetail": {"current": 10_000_000, "total": 100_000_000}, "id": "a"},
        {"status": "Downloading", "progressDetail": {"current": 25_000_000, "total": 60_000_000}, "id": "b"},
        {"status": "Download complete", "progressDetail": {}, "id": "a"},
        {"status": "Download complete", "id": "never seen"},
        {"stream": "podman says it so"},
    ):
        progress.hear(message)
    assert told[:4] == [
        "pulling image big:1",
        "pulling image big:1: 10 of 100 MB",
        "pulling image big:1: 35 of 160 MB",
        "pulling image big:1: 125 of 160 MB",
    ]
    monkeypatch.setattr(docker_images, "PROGRESS_SECONDS", 60.0)
    before = len(told)
    progress.hear({"status": "Downloading", "progressDetail": {"current": 1, "total": 2}, "id": "c"})
    assert len(told) == before


WORKER = """
import asyncio, sys
from sandboxes.base import SandboxError
from sandboxes.docker import DockerBackend

try:
    asyncio.run(DockerBackend().ensure_image(sys.argv[1]))
    print("there")
except SandboxError as error:
    print(error)
"""


def workers(count: int, name: str) -> list[str]:
    """Ask for an image in processes of their own; return what each was told."""
    started = [
        subprocess.Popen([sys.executable, "-c", WORKER, name], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for _ in range(count)
    ]
    return [worker.communicate(timeout=60)[0].strip() for worker in started]
