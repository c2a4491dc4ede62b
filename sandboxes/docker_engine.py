"""The connection to one Docker engine, or to Podman's compatible socket, through the ``docker`` package.

Its methods block; ``call`` runs them in threads, a bounded number at a time. What goes wrong is a SandboxError with the
engine's own words. This module imports the package, which takes a moment: import it where an engine is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import docker
import requests
from docker import errors as docker_errors
from docker.utils import kwargs_from_env
from urllib3 import exceptions as urllib3_errors

from sandboxes.base import SandboxError
from sandboxes.container_network import listen_inside
from sandboxes.container_shell import CHANNEL_MOUNT
from sandboxes.container_stream import HEADER_BYTES, Connection
from sandboxes.docker_settings import Settings

T = TypeVar("T")

API_SECONDS = 60  # for one answer of a busy engine
PROBE_SECONDS = 5
PULL_SECONDS = 1800  # an image may be large
SILENCE_SECONDS = 300  # of a pull: no layer comes nearer
REMOVAL_SECONDS = 10.0  # for a removal that somebody else has begun
NETWORK_SECONDS = 2.0  # for the last containers on a network that goes
BUSY_SECONDS = 0.05  # between two looks whether it has ended
UNDO_SECONDS = 2.0  # what somebody who is cancelled waits for
MAX_CALLS = 8  # at the same time, of one process
MAX_PROCESSES = 512
SHARED_MEMORY = "1g"
# What package managers need: they hand files and themselves to other users, and end the helpers they started so.
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")

# The container's main process only waits for its stdin to end, that is, for the worker to be gone.
_WAIT = "trap '' HUP INT QUIT TERM USR1 USR2 ALRM; exec cat >/dev/null"
_KEPT_APART = {"com.docker.network.bridge.enable_icc": "false"}
# What engines cannot always do, by their complaint. It is left out then.
_OPTIONAL = {"storage-opt": "StorageOpt", "storage option": "StorageOpt", "init binary not found": "Init"}


@dataclass(frozen=True)
class Container:
    """A container that runs. It ends, and is removed, when ``lifeline`` is closed."""

    id: str
    lifeline: socket.socket

    def last_words(self) -> str:
        """Return what its main process complained of so far."""
        try:
            frames = self.lifeline.recv(4096)
        except BlockingIOError:
            return ""
        return frames[HEADER_BYTES:].decode("utf-8", "replace").strip()


class Engine:
    """One engine. Raises SandboxError when there is none that answers."""

    def __init__(self, timeout_seconds: int = API_SECONDS, host: str = "") -> None:
        """``host``: as in $DOCKER_HOST, which is the default."""
        environ = {**os.environ, "DOCKER_HOST": host} if host else os.environ
        with _engine_errors("no Docker engine answers"):
            self._api = _Client(version="auto", timeout=timeout_seconds, **kwargs_from_env(environ))
            # The package has a pool for each path it asked for; connections that wait there are of no use to anybody.
            self._api.headers["Connection"] = "close"
            self.info: dict[str, Any] = self._api.info()
            version = self._api.version()
        self.platform = f"{version['Os']}/{version['Arch']}"
        self._is_podman = any("podman" in part["Name"].lower() for part in version.get("Components") or ())
        self._network: tuple[str, dict[str, str]] = ("", {})  # name ("" = the engine's default) and labels
        self._pool = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="docker")
        self._left_out: set[str] = set()  # of what is optional

    def close(self) -> None:
        """Let go of threads and connections."""
        self._pool.shutdown(wait=False)
        self._api.close()

    async def call(self, function: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Run a blocking function in a thread.

        When the caller is cancelled meanwhile the function does not run any more, or ``undo`` is run on what it
        returned; that is waited for, but not for long.
        """
        running = self._pool.submit(function)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if undo and not running.cancel():
                undone = self._pool.submit(_undo, running, undo)
                await asyncio.wait([asyncio.wrap_future(undone)], timeout=UNDO_SECONDS)
            raise

    def launch(self, image: str, name: str, labels: dict[str, str], settings: Settings) -> Container:
        """Make a container and start it. Raises SandboxError, with nothing left behind."""
        try:
            return self._launch(image, name, labels, settings)
        except SandboxError as error:
            network = self._network[0]
            if not network or network not in str(error):
                raise
            self.share_network(*self._network)  # the user has removed it, or there are two of that name
            return self._launch(image, name, labels, settings)

    def _launch(self, image: str, name: str, labels: dict[str, str], settings: Settings) -> Container:
        with _engine_errors(f"no container of {image}"), contextlib.ExitStack() as on_error:
            on_error.callback(self.remove, name)  # its id may never be told
            container_id = self._create(image, name, labels, self._host_options(settings))
            attached = self._api.attach_socket(container_id, {"stdin": 1, "stderr": 1, "stream": 1})
            lifeline = _connection(attached).socket
            on_error.callback(lifeline.close)
            self._api.start(container_id)
            on_error.pop_all()
        return Container(container_id, lifeline)

    def discard(self, container: Container) -> None:
        """Remove a container that nobody wants any more."""
        self.remove(container.id)
        container.lifeline.close()

    def execute(self, container_id: str, arguments: Sequence[str]) -> Connection:
        """Start a process in a container. Raises SandboxError."""
        with _engine_errors("the sandbox is gone"):
            process = self._api.exec_create(container_id, list(arguments), stdin=True)
            return _connection(self._api.exec_start(process["Id"], socket=True))

    def listen_inside(self, container_id: str, port: int) -> socket.socket:
        """Listen on a running container's loopback. Raises SandboxError."""
        with _engine_errors("the sandbox cannot be given its way out"):
            pid = self._api.inspect_container(container_id)["State"]["Pid"]
            return listen_inside(pid, port)

    def remove(self, container_id: str, *, may_come: bool = False) -> bool:
        """Remove a container with all that is in it; tell whether it is gone, and surely.

        The id may be its name. One that ``may_come`` is waited for: the engine has been asked to make it.
        """
        deadline = time.monotonic() + REMOVAL_SECONDS
        while time.monotonic() < deadline:
            try:
                self._api.remove_container(container_id, force=True, v=True)
                may_come = False
            except docker_errors.APIError as error:
                is_not_there = error.status_code == HTTPStatus.NOT_FOUND or "no such container" in _words(error).lower()
                if is_not_there and not may_come:
                    return True
                time.sleep(BUSY_SECONDS)  # it ends already, by itself, or is not made yet
            except _ENGINE_ERRORS:
                return False  # so is the engine, and when it is back others will see to it
        return False

    def labelled(self, label: str) -> dict[str, dict[str, str]]:
        """Return the labels of all containers that have this one, by id. Raises SandboxError."""
        with _engine_errors("the engine lists no containers"):
            found = self._api.containers(all=True, filters={"label": label})
        return {item["Id"]: item["Labels"] for item in found}

    def share_network(self, name: str, labels: dict[str, str]) -> None:
        """Put containers that have a network on a bridge of ours, where they do not reach each other.

        Podman has no such bridges: its containers stay on its default one. Raises SandboxError.
        """
        if self._is_podman:
            return
        with _engine_errors("no network for containers"):
            if not self._networks(name):
                self._api.create_network(name, driver="bridge", options=_KEPT_APART, labels=labels)
            for double in self._networks(name)[1:]:  # engines allow that, and then no container can be put on either
                with contextlib.suppress(docker_errors.APIError):
                    self._api.remove_network(double)
        self._network = (name, labels)

    def _networks(self, name: str) -> list[str]:
        """Return the ids of the bridges of this name, the oldest first."""
        found = [network for network in self._api.networks(names=[name]) if network["Name"] == name]
        return [network["Id"] for network in sorted(found, key=lambda network: (network["Created"], network["Id"]))]

    def remove_network(self, name: str) -> bool:
        """Remove such a bridge, after containers that are about to end; tell whether it is gone."""
        deadline = time.monotonic() + NETWORK_SECONDS
        while True:
            try:
                for network_id in [] if self._is_podman else self._networks(name):
                    self._api.remove_network(network_id)
            except _ENGINE_ERRORS:
                if time.monotonic() > deadline:
                    return False
                time.sleep(BUSY_SECONDS)
            else:
                return True

    def image(self, name: str) -> dict[str, Any] | None:
        """Return what the engine knows about an image it has; None when it has none. Raises SandboxError."""
        try:
            known: dict[str, Any] = self._api.inspect_image(name)  # type: ignore[no-untyped-call]
        except docker_errors.ImageNotFound:
            return None
        except _ENGINE_ERRORS as error:
            words = _words(error)
            raise (image_error if "invalid reference" in words else SandboxError)(f"{name}: {words}") from error
        return known

    def pull(self, name: str, hear: Callable[[dict[str, Any]], None]) -> str:
        """Get an image from its registry, with the credentials of the user's docker config; return the complaint.

        ``hear`` gets what the engine says meanwhile: status, id of a layer, progressDetail {current, total} in bytes. A
        pull that stands still or takes too long is given up: the engine ends it when nobody listens any more.
        """
        patience = _Patience()
        try:
            with contextlib.closing(self._api.pull(name, stream=True, decode=True)) as messages:
                for message in messages:
                    if complaint := str(message.get("error", "")) or patience.complaint(message):
                        return complaint
                    hear(message)
        except (requests.ReadTimeout, urllib3_errors.ReadTimeoutError):
            return _STANDS_STILL.format(SILENCE_SECONDS)
        except (*_ENGINE_ERRORS, urllib3_errors.HTTPError) as error:
            return _words(error)
        return ""

    def try_out(self, image: str) -> str:
        """Run an image's shell for a moment; return the complaint, "" when it runs."""
        try:
            made = self._api.create_container(image, entrypoint=["/bin/sh", "-c", ":"], command=[])
            with contextlib.ExitStack() as stack:
                stack.callback(self.remove, made["Id"])
                self._api.start(made["Id"])
                ended = self._api.wait(made["Id"], timeout=API_SECONDS)
                return self._api.logs(made["Id"]).decode("utf-8", "replace").strip() if ended["StatusCode"] else ""
        except _ENGINE_ERRORS as error:
            return _words(error)

    def _create(self, image: str, name: str, labels: dict[str, str], options: dict[str, Any]) -> str:
        host = self._api.create_host_config(**options)
        for option in self._left_out:
            host.pop(option, None)
        while True:
            try:
                created = self._api.create_container(
                    image,
                    entrypoint=["/bin/sh", "-c", _WAIT],
                    command=[],
                    name=name,
                    hostname="sandbox",
                    working_dir="/",
                    stdin_open=True,
                    labels=labels,
                    host_config=host,
                    healthcheck={"test": ["NONE"]},
                    stop_signal="SIGKILL",  # who stops it need not wait
                    use_config_proxy=False,  # it would bring variables of the host
                )
            except docker_errors.APIError as error:
                refused = next((option for complaint, option in _OPTIONAL.items() if complaint in _words(error)), "")
                if host.pop(refused, None) is None:
                    raise
                self._left_out.add(refused)
            except requests.ReadTimeout:
                self.remove(name, may_come=True)
                raise
            else:
                return str(created["Id"])

    def _host_options(self, settings: Settings) -> dict[str, Any]:
        info = self.info
        options: dict[str, Any] = {
            "auto_remove": True,
            "init": True,
            "cap_drop": ["ALL"],
            "cap_add": list(CAPABILITIES),
            "security_opt": ["no-new-privileges"],
            "shm_size": SHARED_MEMORY,
            "tmpfs": {CHANNEL_MOUNT: "mode=1777,size=16m,nosuid,nodev,noexec"},
            "log_config": {"Type": "none"},
            "binds": list(settings.volumes) or None,
            "network_mode": self._network[0] or None if settings.network else "none",
        }
        if info.get("PidsLimit"):
            options["pids_limit"] = MAX_PROCESSES
        if settings.cpus and info.get("CpuCfsQuota"):
            options["nano_cpus"] = int(min(settings.cpus, info.get("NCPU") or settings.cpus) * 1e9)
        if settings.memory_mb and info.get("MemoryLimit"):
            options["mem_limit"] = settings.memory_mb << 20
            if info.get("SwapLimit"):
                options["memswap_limit"] = settings.memory_mb << 20
        if settings.disk_mb and ["Backing Filesystem", "extfs"] not in (info.get("DriverStatus") or []):
            options["storage_opt"] = {"size": f"{settings.disk_mb}m"}
        return options


class _Client(docker.APIClient):
    """The package's client, but for a limit where it would wait for ever, which it does for whatever a pull says."""

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        """See ``requests.Session``; the limit is that of one silence, not of the whole answer."""
        limited = {**kwargs, "timeout": kwargs.get("timeout") or SILENCE_SECONDS}
        return super().request(*args, **limited)


class _Patience:
    """How long a pull is listened to. Some engines say the same again and again of a layer that does not come."""

    def __init__(self) -> None:
        self._began = self._came_nearer = time.monotonic()
        self._said: dict[Any, dict[str, Any]] = {}  # by layer, what was said of it last

    def complaint(self, message: dict[str, Any]) -> str:
        """Take what the engine says; return why the pull is to be given up, or ""."""
        now, layer = time.monotonic(), message.get("id")
        if self._said.get(layer) != message:
            self._said[layer], self._came_nearer = message, now
        if now - self._came_nearer > SILENCE_SECONDS:
            return _STANDS_STILL.format(SILENCE_SECONDS)
        return f"it did not come within {PULL_SECONDS} s" if now - self._began > PULL_SECONDS else ""


def probe(host: str = "") -> str:
    """Say why the engine at ``host``, or at $DOCKER_HOST, cannot be used; "" when it can."""
    host = host or os.environ.get("DOCKER_HOST", "")
    if host.startswith("ssh://") or os.environ.get("DOCKER_TLS_VERIFY"):
        return "sandbox docker needs an engine on a unix or a plain tcp socket; change DOCKER_HOST"
    try:
        Engine(PROBE_SECONDS, host).close()
    except SandboxError as error:
        return f"{error}; start Docker or Podman, or set DOCKER_HOST"
    return ""


_STANDS_STILL = "its pull stood still for {} s; its registry, or the way there, does not answer"
_ENGINE_ERRORS = (docker_errors.DockerException, requests.RequestException, OSError)


def image_error(complaint: str) -> SandboxError:
    """Return the error of a sample whose image cannot be had; the complaint begins with the image's name."""
    return SandboxError(f"Docker image not available: {complaint}", kind="image_unavailable")


@contextlib.contextmanager
def _engine_errors(what: str) -> Iterator[None]:
    """Turn what goes wrong between here and the engine into a SandboxError."""
    try:
        yield
    except docker_errors.ImageNotFound as error:
        raise image_error(_words(error)) from error
    except _ENGINE_ERRORS as error:
        raise SandboxError(f"{what}: {_words(error)}") from error


def _words(error: Exception) -> str:
    """Return what the engine said, or what kept it from that."""
    if isinstance(error, docker_errors.APIError) and error.explanation:
        explanation = error.explanation
        return explanation.decode("utf-8", "replace") if isinstance(explanation, bytes) else str(explanation)
    inner = next((item for item in error.args if isinstance(item, Exception)), None)
    return _words(inner) if inner else str(error)


def _undo(running: Future[T], undo: Callable[[T], object]) -> None:
    with contextlib.suppress(SandboxError):  # then there is nothing to undo
        undo(running.result())


def _connection(stream: Any) -> Connection:
    """Take the socket out of the package's hands, with what it has read too much."""
    response = stream._response  # noqa: SLF001 (kept there by the package so that the socket stays open)
    inner = stream._sock  # noqa: SLF001 (a copy of its descriptor would not end with ours)
    inner.settimeout(0)  # what follows must not wait
    early = bytes(response.raw._fp.fp.peek())  # noqa: SLF001 (the only way to it)
    connection = socket.socket(fileno=inner.detach())
    response.close()
    connection.setblocking(False)
    return Connection(connection, early)
