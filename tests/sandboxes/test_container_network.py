"""Listening in the network of another process, as root and as a user whose engine is rootless."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandboxes.container_network import listen_inside, problem
from tests.sandboxes.support import wait_until

ROOT = Path(__file__).parents[2]
NOBODY = 65534
PYTHON = "/usr/bin/python3"  # one that every user may run
LISTEN = """
import sys
from sandboxes.container_network import listen_inside
with listen_inside(int(sys.argv[1]), 4000) as listener:
    print(listener.getsockname())
"""


@contextmanager
def apart(*spaces: str, uid: int = 0) -> Iterator[int]:
    """Have a process in name spaces of its own; its pid."""
    unshare = shutil.which("unshare") or pytest.skip("unshare is not installed")
    words = [str(unshare), *spaces, "sh", "-c", "echo ready; exec sleep 60"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, user=uid) as process:
        try:
            assert process.stdout
            if process.stdout.readline() != "ready\n":
                pytest.skip("this machine makes no name spaces for users")
            yield process.pid
        finally:
            process.kill()


def listen_as_nobody(pid: int) -> subprocess.CompletedProcess[str]:
    if not Path(PYTHON).exists():
        pytest.skip(f"{PYTHON} is not there")
    words = ["setpriv", "--reuid", str(NOBODY), "--clear-groups", "--bounding-set=-all", PYTHON, "-c", LISTEN, str(pid)]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False, timeout=30)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
class TestAsRoot:
    def test_a_network_of_its_own(self) -> None:
        with apart("--net") as pid:
            assert wait_until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n")
            with listen_inside(pid, 4000) as listener:
                listening = Path(f"/proc/{pid}/net/tcp").read_text(encoding="ascii")
            assert listener
            assert "0100007F:0FA0" in listening
            assert "0100007F:0FA0" not in Path("/proc/self/net/tcp").read_text(encoding="ascii")

    def test_one_that_is_the_hosts(self) -> None:
        with apart("--uts") as pid, pytest.raises(OSError, match="no network of its own"):
            listen_inside(pid, 4000)

    def test_a_process_that_is_gone(self) -> None:
        with pytest.raises(OSError, match="No such file"):
            listen_inside(999_999_999, 4000)

    def test_a_user_enters_what_is_the_users(self) -> None:
        with apart("--net", "--user", "--map-root-user", uid=NOBODY) as pid:
            ended = listen_as_nobody(pid)
        assert ended.stdout == "('127.0.0.1', 4000)\n", ended.stderr

    def test_a_user_cannot_enter_what_is_roots(self) -> None:
        with apart("--net") as pid:
            ended = listen_as_nobody(pid)
        assert "not permitted" in ended.stderr or "Permission denied" in ended.stderr


def test_an_engine_on_another_machine() -> None:
    assert problem("tcp://engine.example:2375").startswith("it needs an engine on this machine")
