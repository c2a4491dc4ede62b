from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests import engines
from tests.sandboxes import containers
from tests.sandboxes.support import KINDS, SHELLS

CONTAINERS = {"docker": engines.TOOLS, "docker with busybox": engines.BUSYBOX}


def _marked(kinds: list[str]) -> list[Any]:
    return [pytest.param(kind, marks=pytest.mark.docker if kind in CONTAINERS else ()) for kind in kinds]


def _prepared(kind: str, patch: pytest.MonkeyPatch) -> str:
    if kind in CONTAINERS:
        containers.use("docker", patch, CONTAINERS[kind])
    return kind


@pytest.fixture(scope="session", autouse=True)
def _links() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_LINKS", folder)
        yield


@pytest.fixture(params=_marked(KINDS))
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return _prepared(request.param, monkeypatch)


@pytest.fixture(params=_marked(SHELLS))
def any_shell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return _prepared(request.param, monkeypatch)
