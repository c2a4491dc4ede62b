from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.program import Workplace

settings.register_profile("here", deadline=None)  # a busy machine is no fault
settings.load_profile("here")


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)
