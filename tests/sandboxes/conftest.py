from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

from tests.sandboxes.support import KINDS, SHELLS


@pytest.fixture(scope="session", autouse=True)
def _links() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_LINKS", folder)
        yield


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=SHELLS)
def any_shell(request: pytest.FixtureRequest) -> str:
    return str(request.param)
