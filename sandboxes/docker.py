"""Commands run in containers of a Docker engine, or of Podman's compatible socket: one container for each sandbox.

A container has no mount of the host (but for volumes the user asks for), none of its environment, no capability but the
few package managers need, no way to new privileges, and limits on processes, memory and CPU where the engine can set
them. Its network is the engine's bridge, or none. Not isolated: the kernel; and the disk where the engine cannot limit
it. Whoever may talk to the engine is root on the machine: that is this program, not the containers.

A container ends by itself, and is removed by the engine, as soon as the worker that owns it is gone, for its main
process waits on a stream from there. ``sweep`` finds what that cannot end: containers that were made and never started.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import secrets
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sandboxes import processes, shell
from sandboxes.base import SandboxError, SandboxSpec
from sandboxes.container_sandbox import ContainerSandbox
from sandboxes.container_shell import ContainerShell
from sandboxes.container_stream import Connection
from sandboxes.docker_settings import Settings, SettingsError
from sandboxes.environment import DEFAULT_PATH, NAME, check_names
from sandboxes.shell_sandbox import Inside

if TYPE_CHECKING:  # the package behind them costs start-up time
    from sandboxes.docker_engine import Container, Engine
    from sandboxes.docker_images import Images

LABEL = "batch-runner"  # on every container; the names of the others begin with it
RUN, ROLLOUT, OWNER_PID, OWNER_START, MACHINE = (
    f"{LABEL}.{name}" for name in ("run", "rollout", "owner-pid", "owner-start", "machine")
)
WORKSPACE = "/workspace"  # the first folder where neither sample, user nor image names one
TMP = "/tmp"  # noqa: S108 (the container's own)
DEFAULT_HOST = "unix:///var/run/docker.sock"
CONNECT_SECONDS = 5.0


class DockerBackend:
    """See the ImageBackend protocol."""

    name = "docker"
    takes_images = True

    def __init__(self) -> None:
        self._connections: dict[tuple[int, str], tuple[Engine, Images]] = {}  # by process and host
        self._connecting = threading.Lock()

    def unavailable(self) -> str:
        """See the protocol."""
        try:
            Settings.from_environment(os.environ)
        except SettingsError as error:
            return str(error)
        if reason := _no_socket():
            return reason
        from sandboxes import docker_engine  # noqa: PLC0415 (costs start-up time)

        return docker_engine.probe()

    async def ensure_image(self, image: str) -> None:
        """See the ImageBackend protocol."""
        _, images = await asyncio.to_thread(self._connect)
        await images.ensure(image or _settings().image)

    async def open(self, spec: SandboxSpec) -> ContainerSandbox:
        """See the protocol. The first folder is ``spec.cwd``, $TERMINAL_CWD, or the image's own; it is made."""
        settings = _settings()
        settings = replace(settings, network=settings.network and spec.network)
        check_names(spec)
        engine, images = await asyncio.to_thread(self._connect)
        image = await images.ensure(spec.image or settings.image)
        name = f"{LABEL}-{spec.rollout_id}-{secrets.token_hex(4)}"
        launch = partial(engine.launch, image.name, name, _labels(spec), settings)
        container = await engine.call(launch, undo=engine.discard)
        remove = partial(_remove, engine, container)
        folders = _first_folders(spec.cwd, settings.cwd, image.cwd)
        container_shell = ContainerShell(partial(_execute, engine, container), image.variables, folders)
        try:
            await container_shell.open()
        except (SandboxError, asyncio.CancelledError) as error:
            container_shell.close()
            words = container.last_words()
            await asyncio.shield(asyncio.ensure_future(remove()))
            if isinstance(error, SandboxError) and words:
                raise SandboxError(f"{error} ({words})") from error
            raise
        of_image = {name: value for name, value in image.variables.items() if NAME.fullmatch(name)}
        variables = {"PATH": DEFAULT_PATH, "TMPDIR": TMP, **of_image, "HOME": container_shell.home}
        inside = Inside({**variables, **settings.variables, **spec.env}, container_shell.folder)
        return ContainerSandbox(self.name, container_shell, inside, remove)

    def sweep(self) -> int:
        """See the protocol."""
        try:
            engine, _ = self._connect()
            found = engine.labelled(LABEL)
        except SandboxError:  # no engine, or none that may be used: nothing of ours is there
            return 0
        return sum(engine.remove(container_id) for container_id, labels in found.items() if _owner_is_dead(labels))

    def _connect(self) -> tuple[Engine, Images]:
        """Return this process's connection to the engine. Blocks. Raises SandboxError."""
        key = (os.getpid(), os.environ.get("DOCKER_HOST", ""))
        with self._connecting:
            if key not in self._connections:
                if reason := _no_socket():
                    raise SandboxError(reason)
                from sandboxes import docker_engine, docker_images  # noqa: PLC0415 (costs start-up time)

                engine = docker_engine.Engine()
                self._connections[key] = (engine, docker_images.Images(engine))
            return self._connections[key]


async def _execute(engine: Engine, container: Container, arguments: Sequence[str]) -> Connection:
    return await engine.call(partial(engine.execute, container.id, arguments), undo=lambda made: made.socket.close())


async def _remove(engine: Engine, container: Container) -> None:
    try:
        await engine.call(partial(engine.remove, container.id))
    finally:
        container.lifeline.close()


def _settings() -> Settings:
    try:
        return Settings.from_environment(os.environ)
    except SettingsError as error:
        raise SandboxError(str(error)) from error


def _no_socket() -> str:
    """Say that no engine listens on the unix socket; "" when one does, or when it is another kind of socket."""
    scheme, _, path = (os.environ.get("DOCKER_HOST") or DEFAULT_HOST).partition("://")
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


def _first_folders(of_sample: str, of_user: str, of_image: str) -> list[str]:
    """Return shell words for the folders where commands may start, the best first."""
    usual = [path for path in (of_user, of_image) if path not in ("", "/")] or [WORKSPACE]
    if of_sample == "~" or of_sample.startswith("~/"):
        return [f'"$HOME"{shell.quote(of_sample[1:])}']
    if of_sample:
        return [shell.quote(posixpath.join(usual[0], of_sample))]
    return [*map(shell.quote, [*usual, WORKSPACE]), '"$HOME"', TMP, "/"]


def _labels(spec: SandboxSpec) -> dict[str, str]:
    me = processes.process(os.getpid())
    return {
        LABEL: "sandbox",
        RUN: spec.run_name,
        ROLLOUT: spec.rollout_id,
        OWNER_PID: str(os.getpid()),
        OWNER_START: str(me.start_ticks if me else 0),
        MACHINE: _machine(),
    }


def _machine() -> str:
    """Return what tells where an owner's pid means something: this boot, this pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _owner_is_dead(labels: dict[str, str]) -> bool:
    if labels.get(MACHINE) != _machine() or not labels.get(OWNER_PID, "").isdecimal():
        return False
    owner = processes.process(int(labels[OWNER_PID]))
    return owner is None or str(owner.start_ticks) != labels.get(OWNER_START)
