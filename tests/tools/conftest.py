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
