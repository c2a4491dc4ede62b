"""What the tests of containers share: an engine to use, a look at its containers, images made for one test."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import docker
import pytest

from sandboxes.base import ExecResult, Sandbox, SandboxSpec
from sandboxes.docker import DockerBackend
from tests import engines
from tests.sandboxes.support import in_sandbox

T = TypeVar("T")
SPEC = SandboxSpec(run_name="tests", rollout_id=f"r-{os.getpid()}")  # others may test on the same machine
VARIABLES = ("TERMINAL_", "DOCKER_")


def use(engine: str, patch: pytest.MonkeyPatch, image: str = engines.TOOLS) -> None:
    """Have the backend use an engine, or skip the test where it does not run or has not got the image."""
    for name in [name for name in os.environ if name.startswith(VARIABLES)]:
        patch.delenv(name)
    if not engines.answers(engine):
        pytest.skip(f"{engine} does not run; python -m tests.engines start")
    with api(engine) as client:
        if not any(image in (item["RepoTags"] or ()) for item in client.images()):
            pytest.skip(f"{engine} has not got the image {image}; python -m tests.engines start")
    patch.setenv("DOCKER_HOST", engines.HOSTS[engine])
    patch.setenv("TERMINAL_DOCKER_IMAGE", image)
    if engine == "podman":  # its containers start twice as fast so
        patch.setenv("TERMINAL_DOCKER_NETWORK", "false")


@contextmanager
def api(engine: str = "docker") -> Iterator[docker.APIClient]:
    with closing(engines.client(engine)) as client:
        yield client


def run(body: Callable[[Sandbox], Awaitable[T]], backend: DockerBackend | None = None, **changes: Any) -> T:
    """Run ``body`` with a sandbox that is closed afterwards."""
    return in_sandbox(backend or DockerBackend(), replace(SPEC, **changes), body)


def exec_all(*commands: str, timeout_seconds: float = 20, **changes: Any) -> list[ExecResult]:
    """Run commands one after the other in one sandbox."""

    async def body(sandbox: Sandbox) -> list[ExecResult]:
        return [await sandbox.exec(command, timeout_seconds=timeout_seconds) for command in commands]

    return run(body, **changes)


def output(*commands: str, **changes: Any) -> str:
    """Run commands one after the other in one sandbox; return what the last one wrote."""
    return exec_all(*commands, **changes)[-1].output


def ours(engine: str = "docker", rollout: str = SPEC.rollout_id) -> list[str]:
    """Return the ids of the containers of the tests' rollout."""
    with api(engine) as client:
        found = client.containers(all=True, filters={"label": f"batch-runner.rollout={rollout}"})
    return [item["Id"] for item in found]


def inspected(engine: str = "docker") -> dict[str, Any]:
    """Return what the engine says about the one container of the tests' rollout."""
    (container,) = ours(engine)
    with api(engine) as client:
        found: dict[str, Any] = client.inspect_container(container)
    return found


@contextmanager
def image(
    name: str, layer: bytes, config: Mapping[str, Any] | None = None, architecture: str = "", engine: str = "docker"
) -> Iterator[str]:
    """Have an image for a while."""
    engines.load(engine, engines.image_archive(name, layer, config, architecture))
    try:
        yield name
    finally:
        with api(engine) as client:
            client.remove_image(name, force=True)
