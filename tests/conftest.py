from __future__ import annotations

from pathlib import Path

import pytest

from tests.program import Workplace


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)
