from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.file_sandbox import Rollout, rollout_in


@pytest.fixture
def rollout(tmp_path: Path) -> Iterator[Rollout]:
    """A rollout in a folder of its own."""
    with rollout_in(tmp_path) as opened:
        yield opened


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may be behind a proxy; the servers of the tests are not."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
