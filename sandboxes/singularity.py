"""Commands run in instances of Apptainer or SingularityCE: one instance for each sandbox, no daemon, no root needed.

An instance has processes, IPC and a host name of its own, an empty home and tmp, no file of the host but what the
program's own configuration binds (/etc/hosts and the like) and volumes the user asks for, and none of the host's
environment. What commands write goes to a folder that is removed at the end, or, where the machine cannot lay that over
the image, to a small piece of memory. Limits on memory, processors and processes hold where the program can set them.
The network is the host's, or none.

Not isolated: the kernel; the disk, which is shared without limits; with the network on, the host's loopback. A runner
that is root is root inside, with few capabilities. What can be called root inside for others (fakeroot) is not used.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from dataclasses import replace

from sandboxes import folders, singularity_instance
from sandboxes.base import SandboxError, SandboxSpec, Tell, tell_nobody
from sandboxes.container_inside import first_folders, inside
from sandboxes.container_sandbox import ContainerSandbox
from sandboxes.container_shell import ContainerShell
from sandboxes.docker_capacity import available_mb, capacity
from sandboxes.docker_settings import DEFAULT_IMAGE, Settings, read_settings
from sandboxes.environment import check_names
from sandboxes.singularity_images import Images
from sandboxes.singularity_instance import ATTEMPTS, Instance, Options, of_image

PROBE_SECONDS = 5.0
UNDO_SECONDS = 2.0  # what somebody who is cancelled waits for


class SingularityBackend:
    """See the ImageBackend protocol."""

    name = "singularity"
    takes_images = True

    def __init__(self) -> None:
        self._images = Images()
        self._options: Options | None = None  # what this machine allows, once that is known
        self._variables: dict[str, dict[str, str]] = {}  # of processes, by image

    def unavailable(self) -> str:
        """See the protocol."""
        try:
            read_settings(self.name)
        except SandboxError as error:
            return str(error)
        program = singularity_instance.program()
        if not program:
            return "sandbox singularity needs apptainer or singularity on PATH; install Apptainer (apptainer.org)"
        try:
            tried = subprocess.run(
                [program, "--version"],
                env=singularity_instance.program_environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PROBE_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{program} does not work here ({error}); install Apptainer (apptainer.org)"
        complaint = singularity_instance.words(tried.stderr.decode("utf-8", "replace"))
        return f"{program} does not work here ({complaint}); install it anew" if tried.returncode else ""

    def max_sandboxes(self) -> int:
        """See the BoundedBackend protocol. $TERMINAL_MAX_CONTAINERS, or what the memory bears."""
        settings = read_settings(self.name)
        return settings.max_containers or capacity(available_mb(0), settings.memory_mb)

    async def ensure_image(self, image: str, tell: Tell = tell_nobody) -> None:
        """See the ImageBackend protocol."""
        await self._images.ensure(image or _default_image(), tell)

    async def open(self, spec: SandboxSpec) -> ContainerSandbox:
        """See the protocol. The first folder is ``spec.cwd``, $TERMINAL_CWD, or /workspace; it is made if it may be."""
        settings = read_settings(self.name)
        settings = replace(settings, network=settings.network and spec.network)
        check_names(spec)
        image = await self._images.ensure(spec.image or _default_image())
        instance = await self._start(image, spec.run_name, settings)
        container_shell: ContainerShell | None = None
        try:
            if image not in self._variables:
                self._variables[image] = await instance.variables()
            variables = self._variables[image]
            wanted = first_folders(spec.cwd, settings.cwd, "")
            container_shell = ContainerShell(instance.execute, variables, wanted)
            await container_shell.open()
        except (SandboxError, asyncio.CancelledError):
            if container_shell:
                container_shell.close()
            await asyncio.shield(asyncio.ensure_future(instance.stop(UNDO_SECONDS)))
            raise
        view = inside(container_shell, of_image(variables), {**settings.variables, **spec.env})
        return ContainerSandbox(self.name, container_shell, view, instance.stop)

    def sweep(self) -> list[str]:
        """See the protocol."""
        stopped = singularity_instance.stop_left_overs() if singularity_instance.program() else []
        for name in stopped:
            folders.remove(name.rpartition(".")[2])
        return [*(f"instance {name}" for name in stopped), *folders.sweep()]

    async def _start(self, image: str, run_name: str, settings: Settings) -> Instance:
        """Start an instance, with all this machine allows. Raises SandboxError."""
        complaint = ""
        for options in (self._options,) if self._options else ATTEMPTS:
            with folders.fresh() as folder:
                instance = Instance(folder, run_name)
                try:
                    complaint = await instance.start(image, settings, options)
                except (SandboxError, asyncio.CancelledError):
                    await asyncio.shield(asyncio.ensure_future(instance.stop(UNDO_SECONDS)))
                    raise
            if not complaint:
                self._options = options
                return instance
            await instance.stop()
        raise SandboxError(f"no instance of {image}: {complaint}")


def _default_image() -> str:
    return os.environ.get("TERMINAL_SINGULARITY_IMAGE", "").strip() or f"docker://{DEFAULT_IMAGE}"
