"""How many containers a machine bears."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandboxes.docker import DockerBackend
from sandboxes.docker_capacity import available_mb, capacity


@pytest.mark.parametrize(
    ("available", "limit", "containers"),
    [
        (22_000, 5120, 38),
        (22_000, 0, 38),
        (8_000, 1024, 70),
        (8_000, 128, 112),  # each needs something, however small its limit
        (1_000_000, 512, 256),
        (300, 5120, 1),
        (0, 5120, 1),
    ],
)
def test_capacity(available: float, limit: float, containers: int) -> None:
    assert capacity(available, limit) == containers


def test_an_engine_here_has_what_is_available_here() -> None:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    total, available = (int(line.split()[1]) for line in lines[:3:2])
    assert available_mb(total * 1024) == pytest.approx(available / 1024, rel=0.2)
    assert available_mb(0) == pytest.approx(available / 1024, rel=0.2)


def test_an_engine_elsewhere_has_what_it_has() -> None:
    assert available_mb(1 << 50) == 1 << 30


def test_what_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMINAL_MAX_CONTAINERS", "3")
    assert DockerBackend().max_sandboxes() == 3
