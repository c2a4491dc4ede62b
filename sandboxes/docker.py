"""Commands run in containers of a Docker engine, or of Podman's compatible socket: one container for each sandbox.

A container has no mount of the host (but for volumes the user asks for), none of its environment, no capability but the
few package managers need, no way to new privileges, and limits on processes, memory and CPU where the engine can set
them. Its network is a bridge on which containers do not reach each other (with Podman they do), or none, or none but a
proxy of ours on its loopback that lets through what the user listed. Not isolated: the kernel; and the disk where the
engine cannot limit it. Whoever may talk to the engine is root on the machine: that is this program, not the containers.

A container ends by itself, and is removed by the engine, as soon as the worker that owns it is gone, for its main
process waits on a stream from there. ``sweep`` finds what that cannot end: containers that were made and never started.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sandboxes import docker_owners
from sandboxes.base import SandboxError, SandboxSpec, Tell, tell_nobody
from sandboxes.container_inside import first_folders, inside
from sandboxes.container_network import problem as network_problem
from sandboxes.container_sandbox import ContainerSandbox
from sandboxes.container_shell import ContainerShell
from sandboxes.container_stream import Connection
from sandboxes.docker_capacity import available_mb, capacity
from sandboxes.docker_settings import Settings, SettingsError, read_settings
from sandboxes.environment import check_names
from sandboxes.image_notes import locked
from sandboxes.proxy import Proxy

if TYPE_CHECKING:  # the package behind them costs start-up time
    from sandboxes.docker_engine import Container, Engine
    from sandboxes.docker_images import Images

DEFAULT_HOST = "unix:///var/run/docker.sock"
CONNECT_SECONDS = 5.0
PROXY_PORT = 3128  # on the loopback of a container whose network is limited
PROXY = f"http://127.0.0.1:{PROXY_PORT}"
PROXY_VARIABLES = {
    **{name: PROXY for scheme in ("http", "https", "all") for name in (f"{scheme}_proxy", f"{scheme}_proxy".upper())},
    **dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1,::1"),
}


class DockerBackend:
    """See the ImageBackend and BoundedBackend protocols."""

    name = "docker"
    takes_images = True

    def __init__(self) -> None:
        self._connections: dict[tuple[int, str], tuple[Engine, Images]] = {}  # by process and host
        self._connecting = threading.Lock()
        self._uses: set[tuple[int, str, bool]] = set()  # by process, host, and whether containers have a network
        self._chosen = False  # to make sandboxes, in this process or one that it starts

    def unavailable(self) -> str:
        """See the protocol."""
        try:
            settings = Settings.from_environment(os.environ)
        except SettingsError as error:
            return str(error)
        if reason := _no_socket(_host()):
            return reason
        if settings.allowed and (reason := network_problem(_host())):
            return f"TERMINAL_DOCKER_NETWORK={settings.allowed.text} cannot be enforced: {reason}"
        reason = _no_engine(_host())
        self._chosen = not reason
        return reason

    def max_sandboxes(self) -> int:
        """See the BoundedBackend protocol. $TERMINAL_MAX_CONTAINERS, or what the memory bears."""
        settings = read_settings()
        if settings.max_containers:
            return settings.max_containers
        engine, _ = self._connect(_host())
        return capacity(available_mb(engine.info.get("MemTotal") or 0), settings.memory_mb)

    async def ensure_image(self, image: str, tell: Tell = tell_nobody) -> None:
        """See the ImageBackend protocol."""
        _, images = await asyncio.to_thread(self._connect, _host())
        await images.ensure(image or read_settings().image, tell)

    async def open(self, spec: SandboxSpec) -> ContainerSandbox:
        """See the protocol. The first folder is ``spec.cwd``, $TERMINAL_CWD, or the image's own; it is made."""
        settings = read_settings()
        if not spec.network:
            settings = replace(settings, network=False, allowed=None)
        check_names(spec)
        engine, images = await asyncio.to_thread(self._connect_to_use, _host(), settings)
        image = await images.ensure(spec.image or settings.image)
        name = f"{docker_owners.LABEL}-{spec.rollout_id}-{secrets.token_hex(4)}"
        launch = partial(engine.launch, image.name, name, docker_owners.labels(spec), settings)
        container = await engine.call(launch, undo=engine.discard)
        proxy = Proxy(settings.allowed) if settings.allowed else None
        remove = partial(_remove, engine, container, proxy)
        folders = first_folders(spec.cwd, settings.cwd, image.cwd)
        container_shell = ContainerShell(partial(_execute, engine, container), image.variables, folders)
        try:
            if proxy:
                listen = partial(engine.listen_inside, container.id, PROXY_PORT)
                await proxy.start(await engine.call(listen, undo=socket.socket.close))
            await container_shell.open()
        except (SandboxError, asyncio.CancelledError) as error:
            container_shell.close()
            words = container.last_words()
            await asyncio.shield(asyncio.ensure_future(remove()))
            if isinstance(error, SandboxError) and words:
                raise SandboxError(f"{error} ({words})") from error
            raise
        of_image = {**image.variables, **(PROXY_VARIABLES if proxy else {})}
        view = inside(container_shell, of_image, {**settings.variables, **spec.env})
        return ContainerSandbox(self.name, container_shell, view, remove)

    def sweep(self) -> list[str]:
        """See the protocol. Asks the engine that is in use here, and those that dead processes have used."""
        notes = docker_owners.notes_of_the_dead()
        swept: list[str] = []
        for host in {*notes.values(), *([_host()] if self._chosen else [])}:
            try:
                went, all_gone = self._sweep_engine(host)
            except SandboxError:  # no engine, or none that may be used: another start will see to it
                continue
            swept += went
            for note in [note for note, noted in notes.items() if noted == host and all_gone]:
                note.unlink(missing_ok=True)
        return swept

    def _sweep_engine(self, host: str) -> tuple[list[str], bool]:
        """Remove what dead owners have left on one engine; tell what went, and whether that is all.

        Raises SandboxError.
        """
        if reason := _no_socket(host) or _no_engine(host):
            raise SandboxError(reason)
        engine, _ = self._connect(host)
        dead = {
            container_id: docker_owners.described(container_id, labels)
            for container_id, labels in engine.labelled(docker_owners.LABEL).items()
            if docker_owners.owner_is_dead(labels)
        }
        went = [line for container_id, line in dead.items() if engine.remove(container_id)]
        name, _ = docker_owners.network()
        with locked(host, name):
            all_gone = len(went) == len(dead) and (docker_owners.in_use(host) or engine.remove_network(name))
        return went, all_gone

    def _connect_to_use(self, host: str, settings: Settings) -> tuple[Engine, Images]:
        """Return the connection to an engine that is about to get a container. Blocks. Raises SandboxError."""
        engine, images = self._connect(host)
        use = (os.getpid(), host, settings.network)
        with self._connecting:
            if use not in self._uses:
                name, labels = docker_owners.network()
                with locked(host, name):  # nobody removes the network between the two
                    docker_owners.leave_note(host)
                    if settings.network:
                        engine.share_network(name, labels)
                self._uses.add(use)
        return engine, images

    def _connect(self, host: str) -> tuple[Engine, Images]:
        """Return this process's connection to an engine. Blocks. Raises SandboxError."""
        key = (os.getpid(), host)
        with self._connecting:
            if key not in self._connections:
                if reason := _no_socket(host):
                    raise SandboxError(reason)
                from sandboxes import docker_engine, docker_images  # noqa: PLC0415 (costs start-up time)

                engine = docker_engine.Engine(host=host)
                self._connections[key] = (engine, docker_images.Images(engine))
            return self._connections[key]


async def _execute(engine: Engine, container: Container, arguments: Sequence[str]) -> Connection:
    return await engine.call(partial(engine.execute, container.id, arguments), undo=lambda made: made.socket.close())


async def _remove(engine: Engine, container: Container, proxy: Proxy | None) -> None:
    if proxy:
        proxy.close()
    try:
        await engine.call(partial(engine.remove, container.id))
    finally:
        container.lifeline.close()


def _host() -> str:
    return os.environ.get("DOCKER_HOST") or DEFAULT_HOST


def _no_socket(host: str) -> str:
    """Say that no engine listens on a unix socket; "" when one does, or when it is another kind of socket."""
    scheme, _, path = host.partition("://")
    if scheme not in ("unix", "http+unix"):
        return ""
    try:
        with socket.socket(socket.AF_UNIX) as trial:
            trial.settimeout(CONNECT_SECONDS)
            trial.connect(path)
    except OSError as error:
        complaint = error.strerror or str(error)
        return f"no Docker engine answers at {path} ({complaint}); start Docker or Podman, or set DOCKER_HOST"
    return ""


def _no_engine(host: str) -> str:
    """Say that no engine answers there within a few seconds; "" when one does."""
    from sandboxes import docker_engine  # noqa: PLC0415 (costs start-up time)

    return docker_engine.probe(host)
