"""The original's variables for containers, read at the door."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sandboxes import BACKENDS
from sandboxes.base import SandboxError, has_images
from sandboxes.docker import DockerBackend
from sandboxes.docker_owners import in_use, notes_of_the_dead
from sandboxes.docker_settings import DEFAULT_IMAGE, Settings, SettingsError
from tests.sandboxes.containers import SPEC

ROOT = Path(__file__).parents[2]


def test_defaults() -> None:
    assert Settings.from_environment({}) == Settings(
        image="nikolaik/python-nodejs:python3.11-nodejs20",
        cpus=1,
        memory_mb=5120,
        disk_mb=51200,
        network=True,
        allowed=None,
        max_containers=0,
        volumes=(),
        variables={},
        cwd="",
    )


def test_empty_is_the_default() -> None:
    names = ("DOCKER_IMAGE", "CONTAINER_CPU", "DOCKER_NETWORK", "DOCKER_ENV", "CWD")
    assert Settings.from_environment({f"TERMINAL_{name}": " " for name in names}) == Settings.from_environment({})
    assert Settings.from_environment({}).image == DEFAULT_IMAGE


def test_all_of_them() -> None:
    environ = {
        "TERMINAL_DOCKER_IMAGE": "debian:12",
        "TERMINAL_CONTAINER_CPU": "0.5",
        "TERMINAL_CONTAINER_MEMORY": "512",
        "TERMINAL_CONTAINER_DISK": "0",
        "TERMINAL_DOCKER_NETWORK": "False",
        "TERMINAL_MAX_CONTAINERS": "7",
        "TERMINAL_DOCKER_VOLUMES": '["/data:/data:ro"]',
        "TERMINAL_DOCKER_FORWARD_ENV": '["LANG", "NOT_THERE"]',
        "TERMINAL_DOCKER_ENV": '{"A": "b c", "N": 3}',
        "TERMINAL_CWD": "/srv/app",
        "LANG": "C.UTF-8",
    }
    assert Settings.from_environment(environ) == Settings(
        image="debian:12",
        cpus=0.5,
        memory_mb=512,
        disk_mb=0,
        network=False,
        allowed=None,
        max_containers=7,
        volumes=("/data:/data:ro",),
        variables={"LANG": "C.UTF-8", "A": "b c", "N": "3"},
        cwd="/srv/app",
    )


def test_a_list_of_hosts_is_no_network_but_for_them() -> None:
    settings = Settings.from_environment({"TERMINAL_DOCKER_NETWORK": " docs.example, *.example.com "})
    assert not settings.network
    assert settings.allowed
    assert settings.allowed.permits("docs.example", 443)
    assert not settings.allowed.permits("example.com", 443)


@pytest.mark.parametrize(
    "path", [".", "proj", "~/x", "/home/me/proj", "/Users/me", "C:\\proj", "C:/proj", "\\\\host\\a"]
)
def test_folders_of_the_host_are_ignored(path: str) -> None:
    assert Settings.from_environment({"TERMINAL_CWD": path}).cwd == ""


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("TERMINAL_CONTAINER_CPU", "two", "TERMINAL_CONTAINER_CPU=two must be a number, 0 or more"),
        ("TERMINAL_CONTAINER_CPU", "-1", "must be a number, 0 or more"),
        ("TERMINAL_CONTAINER_MEMORY", "5g", "TERMINAL_CONTAINER_MEMORY=5g must be a number"),
        ("TERMINAL_CONTAINER_MEMORY", "nan", "must be a number"),
        ("TERMINAL_CONTAINER_DISK", "inf", "must be a number"),
        ("TERMINAL_DOCKER_NETWORK", "perhaps", "TERMINAL_DOCKER_NETWORK=perhaps must be true or false"),
        ("TERMINAL_DOCKER_NETWORK", "docs.example,ho st", "TERMINAL_DOCKER_NETWORK: 'ho st' is neither a host name"),
        ("TERMINAL_MAX_CONTAINERS", "many", "TERMINAL_MAX_CONTAINERS=many must be a number"),
        ("TERMINAL_DOCKER_VOLUMES", "/data:/data", "TERMINAL_DOCKER_VOLUMES must be JSON"),
        ("TERMINAL_DOCKER_VOLUMES", '{"a": 1}', "must be a JSON list of texts"),
        ("TERMINAL_DOCKER_FORWARD_ENV", '["A B"]', "'A B' cannot be the name of a variable"),
        ("TERMINAL_DOCKER_ENV", "[1]", "must be a JSON object of texts"),
        ("TERMINAL_DOCKER_ENV", '{"A-B": "x"}', "'A-B' cannot be the name of a variable"),
    ],
)
def test_what_cannot_be_is_one_clear_error(
    name: str, value: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_environment({name: value})
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    monkeypatch.setenv(name, value)
    assert DockerBackend().unavailable() == str(caught.value)
    with pytest.raises(SandboxError, match=name):
        asyncio.run(DockerBackend().open(SPEC))


def test_where_nothing_can_be_left_no_engine_is_asked(tmp_path: Path) -> None:
    """Not even the package that could ask is loaded: every start of every run sweeps."""
    code = "import sys; from sandboxes import BACKENDS; print(BACKENDS['docker'].sweep(), 'docker' in sys.modules)"
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert ended.stdout == "[] False\n"


def test_an_engine_that_is_not_there_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead process has left a note of it; the note stays until the engine has answered."""
    leave = "from sandboxes.docker_owners import leave_note; leave_note('unix:///no/such.sock')"
    subprocess.run([sys.executable, "-c", leave], cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, check=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert list(notes_of_the_dead().values()) == ["unix:///no/such.sock"]
    assert not in_use("unix:///no/such.sock")
    assert DockerBackend().sweep() == []
    assert len(notes_of_the_dead()) == 1


class TestWithoutAnEngine:
    def test_no_socket(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DOCKER_HOST", "unix:///no/such.sock")
        backend = DockerBackend()
        reason = "no Docker engine answers at /no/such.sock (No such file or directory); start Docker or Podman"
        assert backend.unavailable().startswith(reason)
        assert backend.sweep() == []
        with pytest.raises(SandboxError, match="no Docker engine answers"):
            asyncio.run(backend.open(SPEC))

    def test_a_socket_without_an_engine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket(socket.AF_UNIX) as nobody:
            nobody.bind(str(tmp_path / "socket"))
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/socket")
        assert "Connection refused" in DockerBackend().unavailable()

    def test_nobody_listens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
        assert "no Docker engine answers" in DockerBackend().unavailable()
        assert DockerBackend().sweep() == []

    @pytest.mark.parametrize(("name", "value"), [("DOCKER_HOST", "ssh://me@there"), ("DOCKER_TLS_VERIFY", "1")])
    def test_sockets_that_cannot_be_used(self, name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
        monkeypatch.setenv(name, value)
        assert "a unix or a plain tcp socket" in DockerBackend().unavailable()


def test_it_is_a_backend_with_images() -> None:
    assert has_images(BACKENDS["docker"])
    assert not has_images(BACKENDS["local"])
