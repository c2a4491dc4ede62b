"""What the tests of Modal share: a server that stands in for it, and a look at what it was asked."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.sandboxes.instances import StandIn

ROOT = Path(__file__).parents[2]
TOKEN = {"MODAL_TOKEN_ID": "ak-for-tests", "MODAL_TOKEN_SECRET": "as-for-tests"}


@dataclass(frozen=True)
class FakeModal:
    """A server that runs."""

    stand_in: StandIn
    port: int

    def use(self, patch: pytest.MonkeyPatch) -> FakeModal:
        """Have the backend find it, and nothing of the user's settings."""
        for name in [name for name in os.environ if name.startswith(("TERMINAL_", "MODAL_"))]:
            patch.delenv(name)
        for name, value in {**TOKEN, "MODAL_SERVER_URL": f"http://127.0.0.1:{self.port}"}.items():
            patch.setenv(name, value)
        patch.setenv("MODAL_CONFIG_PATH", "/no/such/file")
        return self

    def calls(self, name: str) -> list[dict[str, Any]]:
        """Return what it was asked under this name."""
        path = self.stand_in.root / "modal.log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [call for call in map(json.loads, lines) if call["call"] == name]

    def terminate(self, sandbox: str) -> None:
        """End a sandbox from elsewhere."""
        code = f"import modal; modal.Sandbox.from_id({sandbox!r}).terminate()"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@contextmanager
def serving(folder: Path) -> Iterator[FakeModal]:
    """Run a server for a while, or skip the test where it cannot work."""
    if not importlib.util.find_spec("modal"):
        pytest.skip("the package modal is not installed")
    stand_in = StandIn.install(folder)
    command = [sys.executable, "-m", "tests.sandboxes.modal_server", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield FakeModal(stand_in, int(process.stdout.readline()))
        assert process.stdin
        process.stdin.close()
        process.wait(20)
