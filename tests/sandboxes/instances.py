"""What the tests of instances share: a program that stands in for Apptainer, and a look at what it was told."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandboxes.docker_settings import DEFAULT_IMAGE

SCRIPT = Path(__file__).with_name("apptainer.sh")
NEEDS = ("bash", "bwrap", "nsenter", "setpriv", "setsid")


@dataclass(frozen=True)
class StandIn:
    """An installation with its images and instances."""

    root: Path

    @classmethod
    def install(cls, root: Path, name: str = "apptainer") -> StandIn:
        """Put it into a folder, with the default image; skip the test where it cannot work."""
        if os.geteuid() != 0:
            pytest.skip("only root can enter the namespaces of the stand-in for Apptainer")
        if missing := [program for program in NEEDS if not shutil.which(program)]:
            pytest.skip(f"the stand-in for Apptainer needs {', '.join(missing)}")
        for folder in ("bin", "images", "instances", "cache"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(SCRIPT, root / "bin" / name)
        stand_in = cls(root)
        stand_in.add_image(f"docker://{DEFAULT_IMAGE}")
        return stand_in

    def use(self, patch: pytest.MonkeyPatch) -> StandIn:
        """Have the backend find it, and nothing of the user's settings."""
        for name in [name for name in os.environ if name.startswith(("TERMINAL_", "APPTAINER", "SINGULARITY"))]:
            patch.delenv(name)
        patch.setenv("PATH", f"{self.root / 'bin'}:{os.environ['PATH']}")
        patch.setenv("TERMINAL_SCRATCH_DIR", str(self.root / "cache"))
        return self

    def add_image(self, source: str, variables: str = "") -> None:
        """Have an image that can be built; ``variables``: shell text that exports them."""
        (self.root / "images" / source.replace("/", "%")).write_text(f"{variables}\n")

    def switch(self, name: str, text: str = "") -> None:
        """Change how it behaves; the script has the names."""
        (self.root / name).write_text(text)

    def instances(self) -> list[str]:
        """Return the names of the instances that run."""
        return sorted(path.name for path in (self.root / "instances").iterdir())

    def lines(self, name: str) -> list[str]:
        """Return what it has written down: "log", its command lines; "builds"; "environment"."""
        path = self.root / name
        return path.read_text().splitlines() if path.exists() else []
