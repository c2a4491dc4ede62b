from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import engines
from tests.sandboxes import containers
from tests.sandboxes.instances import StandIn
from tests.sandboxes.remote import FakeModal, serving
from tests.sandboxes.support import KINDS, SHELLS

CONTAINERS = {"docker": engines.TOOLS, "docker with busybox": engines.BUSYBOX}


MARKS: dict[str, Any] = {
    **dict.fromkeys(CONTAINERS, pytest.mark.docker),
    "modal": pytest.mark.slow,
    "singularity": pytest.mark.slow,
}


def _marked(kinds: list[str]) -> list[Any]:
    return [pytest.param(kind, marks=MARKS.get(kind, ())) for kind in kinds]


def _prepared(request: pytest.FixtureRequest, patch: pytest.MonkeyPatch) -> str:
    kind: str = request.param
    if kind in CONTAINERS:
        containers.use("docker", patch, CONTAINERS[kind])
    if kind == "singularity":
        StandIn.install(Path(os.environ["TEST_LINKS"], "apptainer")).use(patch)
    if kind == "modal":
        request.getfixturevalue("fake_modal").use(patch)
    return kind


@pytest.fixture(scope="session", autouse=True)
def _links() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_LINKS", folder)
        yield


@pytest.fixture(scope="session")
def fake_modal() -> Iterator[FakeModal]:
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as fake:
        yield fake


@pytest.fixture(params=["docker", "podman"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    containers.use(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch) -> None:
    containers.use("docker", monkeypatch)


@pytest.fixture(params=_marked(KINDS))
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return _prepared(request, monkeypatch)


@pytest.fixture(params=_marked(SHELLS))
def any_shell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return _prepared(request, monkeypatch)
