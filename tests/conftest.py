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
    Path(tempfile.tempdir).chmod(0o755)  # some tests run as another user  # noqa: S103
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)

settings.register_profile("here", deadline=None)  # a busy machine is no fault
settings.load_profile("here")


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)
