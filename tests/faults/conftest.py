from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.processes import Process, adopting_orphans, assert_gone, below_me
from tests.program import Workplace


@pytest.fixture(autouse=True)
def nothing_is_left_alive() -> Iterator[None]:
    before = {process.pid for process in below_me()}

    def mine() -> list[Process]:
        return [process for process in below_me() if process.pid not in before]

    with adopting_orphans():
        yield
        try:
            assert_gone(mine)
        finally:
            for process in mine():
                process.kill()


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    """A workplace with a folder of its own for sandboxes."""
    (tmp_path / "tmp").mkdir()
    return Workplace(tmp_path, {"TMPDIR": str(tmp_path / "tmp")})
