"""Commands run in sandboxes of Modal: on machines of theirs, in gVisor, against the account of whoever runs this.

A sandbox has nothing of this machine, and none of its environment: no file, no variable, no token of the account. Its
processors and memory are limited; its network is theirs, or none. TERMINAL_DOCKER_VOLUMES and TERMINAL_CONTAINER_DISK
mean nothing there. What it costs is between the user and Modal; one ends with its rollout, and by itself a few minutes
after its owner is gone. ``sweep`` ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sandboxes import docker_owners
from sandboxes.base import SandboxError, SandboxSpec, Tell, tell_nobody
from sandboxes.container_inside import first_folders, inside
from sandboxes.container_sandbox import ContainerSandbox
from sandboxes.container_shell import CHANNEL, ContainerShell
from sandboxes.docker_settings import DEFAULT_IMAGE, read_settings
from sandboxes.environment import check_names

if TYPE_CHECKING:  # the package behind it costs start-up time
    import modal

    from sandboxes.modal_client import Account

PROBE_SECONDS = 10.0
SWEEP_SECONDS = 30.0
MAX_SANDBOXES = 100
FEED_SECONDS = 60.0  # between two signs of life for a sandbox
ALIVE = "alive"  # the file that is one, in the channel folder
TOKEN = ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET")
# Modal's own, and those of the shell that tells of them.
_NOT_OF_THE_IMAGE = re.compile(r"MODAL_\w+|HOME|HOSTNAME|PWD|OLDPWD|SHLVL|TERM|_")


class ModalBackend:
    """See the ImageBackend protocol."""

    name = "modal"
    takes_images = True

    def __init__(self) -> None:
        self._accounts: dict[int, Account] = {}  # by process
        self._variables: dict[str, dict[str, str]] = {}  # of processes, by image

    def unavailable(self) -> str:
        """See the protocol."""
        try:
            read_settings(self.name)
        except SandboxError as error:
            return str(error)
        if not importlib.util.find_spec("modal"):
            return 'sandbox modal needs the package modal; pip install -e ".[modal]"'
        if not _has_credentials():
            return f"sandbox modal needs an account; run modal token new, or set {' and '.join(TOKEN)}"
        from sandboxes import modal_client  # noqa: PLC0415 (costs start-up time)

        return asyncio.run(modal_client.probe(PROBE_SECONDS))

    def max_sandboxes(self) -> int:
        """See the BoundedBackend protocol. $TERMINAL_MAX_CONTAINERS, or what small accounts have."""
        return read_settings(self.name).max_containers or MAX_SANDBOXES

    async def ensure_image(self, image: str, tell: Tell = tell_nobody) -> None:
        """See the ImageBackend protocol. Modal itself sees to it that an image is built once."""
        await self._account().ensure(image or _default_image(), tell)

    async def open(self, spec: SandboxSpec) -> ContainerSandbox:
        """See the protocol. The first folder is ``spec.cwd``, $TERMINAL_CWD, or /workspace; it is made."""
        from sandboxes import modal_client  # noqa: PLC0415 (costs start-up time)

        settings = read_settings(self.name)
        settings = replace(settings, network=settings.network and spec.network)
        check_names(spec)
        image = spec.image or _default_image()
        account = self._account()
        built = await account.ensure(image)
        sandbox = await account.create(built, _tags(docker_owners.labels(spec)), settings, f"{CHANNEL}/{ALIVE}")
        container_shell: ContainerShell | None = None
        try:
            if image not in self._variables:
                self._variables[image] = await modal_client.variables(sandbox)
            variables = self._variables[image]
            wanted = first_folders(spec.cwd, settings.cwd, "")
            container_shell = ContainerShell(partial(modal_client.execute, sandbox), variables, wanted)
            await container_shell.open()
        except (SandboxError, asyncio.CancelledError):
            if container_shell:
                container_shell.close()
            await asyncio.shield(asyncio.ensure_future(modal_client.terminate(sandbox)))
            raise
        of_user = {**_harmless(settings.variables), **spec.env}
        view = inside(container_shell, _of_image(variables), of_user)
        feeding = asyncio.create_task(_feed(container_shell))
        return ContainerSandbox(self.name, container_shell, view, partial(_remove, sandbox, feeding))

    def sweep(self) -> list[str]:
        """See the protocol."""
        return asyncio.run(_sweep()) if importlib.util.find_spec("modal") and _has_credentials() else []

    def _account(self) -> Account:
        """Return this process's connection to the account. Raises SandboxError."""
        if os.getpid() not in self._accounts:
            from sandboxes import modal_client  # noqa: PLC0415 (costs start-up time)

            self._accounts[os.getpid()] = modal_client.Account()
        return self._accounts[os.getpid()]


async def _feed(container_shell: ContainerShell) -> None:
    """Show a sandbox that its owner lives, as long as that is so."""
    while True:
        try:
            await container_shell.ensure_alive()
        except SandboxError:  # the next command will tell
            return
        container_shell.send(f"put {ALIVE} - {ALIVE}")
        await asyncio.sleep(FEED_SECONDS)


async def _remove(sandbox: modal.Sandbox, feeding: asyncio.Task[None]) -> None:
    from sandboxes import modal_client  # noqa: PLC0415 (costs start-up time)

    feeding.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await feeding
    await modal_client.terminate(sandbox)


async def _sweep() -> list[str]:
    from sandboxes import modal_client  # noqa: PLC0415 (costs start-up time)

    ours = _tags({docker_owners.MACHINE: docker_owners.machine()})
    swept = []
    try:
        for sandbox, tags in await modal_client.tagged(ours, SWEEP_SECONDS):
            found = {**tags, docker_owners.MACHINE: docker_owners.machine()}
            if docker_owners.owner_is_dead(found) and await modal_client.terminate(sandbox):
                swept.append(docker_owners.described(sandbox.object_id, found).replace("container", "modal sandbox", 1))
    except SandboxError:  # no Modal: what is there ends by itself
        return swept
    return swept


def _tags(labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels as tags, whose values are short and plain; what tells the machine only need be told apart."""
    machine = hashlib.sha256(labels[docker_owners.MACHINE].encode()).hexdigest()[:32]
    plain = {name: re.sub(r"[^A-Za-z0-9._-]", "-", value)[:63] for name, value in labels.items()}
    return {**plain, docker_owners.MACHINE: machine}


def _of_image(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not _NOT_OF_THE_IMAGE.fullmatch(name)}


def _harmless(variables: Mapping[str, str]) -> dict[str, str]:
    """Leave out the account's token, even where the user forwards it."""
    return {name: value for name, value in variables.items() if name not in TOKEN}


def _has_credentials() -> bool:
    usual = os.path.expanduser("~/.modal.toml")  # noqa: PTH111 (never raises)
    return all(os.environ.get(name) for name in TOKEN) or Path(os.environ.get("MODAL_CONFIG_PATH") or usual).exists()


def _default_image() -> str:
    return os.environ.get("TERMINAL_MODAL_IMAGE", "").strip() or DEFAULT_IMAGE
