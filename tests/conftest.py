from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from tests.program import Workplace

if WORKER := os.environ.get("PYTEST_XDIST_WORKER"):  # several at once: none sweeps the folders of another's sandboxes
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix=f"tests-{WORKER}-")
    Path(tempfile.tempdir).chmod(0o755)  # some tests run as another user
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)

settings.register_profile("here", deadline=None)  # a busy machine is no fault
settings.load_profile("here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of the embedded model's tests: they take longest, and others may run beside them."""
    first = {item.path for item in items if item.get_closest_marker("model")}
    items.sort(key=lambda item: item.path not in first)


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)
