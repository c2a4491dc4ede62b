"""Commands run on this machine as this user: this isolates nothing.

A rollout gets a working folder, HOME and TMPDIR of its own, an environment without the host's variables, and sessions
and process groups that end with it. It can read and change whatever this user can: other files, other processes, other
sandboxes, the network (``SandboxSpec.network`` has no effect), and the environment of other processes through /proc.
The guard refuses commands that are plainly meant to harm the host; it is a net for accidents, not a wall.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

from sandboxes import environment, folders, processes, shell
from sandboxes.base import SandboxError, SandboxSpec
from sandboxes.folders import Folder
from sandboxes.guard import exported, guard, is_shell
from sandboxes.host_sandbox import HostSandbox, Plan
from sandboxes.resident import launch
from sandboxes.shell_sandbox import Inside


class LocalBackend:
    """See the Backend protocol."""

    name = "local"
    takes_images = False

    def __init__(self, command_shell: str = "") -> None:
        """``command_shell``: a path; "" for bash where there is one, else sh."""
        self._command_shell = command_shell

    def unavailable(self) -> str:
        """See the protocol."""
        return "" if Path("/proc/self/stat").exists() else "sandbox local needs Linux with a mounted /proc"

    async def open(self, spec: SandboxSpec) -> HostSandbox:
        """See the protocol. An absolute ``spec.cwd`` must be there; a relative one is made in the working folder."""
        with folders.fresh() as folder:
            sandbox = HostSandbox(self._plan(folder, spec))
        await sandbox.open()
        return sandbox

    def sweep(self) -> list[str]:
        """See the protocol."""
        return folders.sweep()

    def _plan(self, folder: Folder, spec: SandboxSpec) -> Plan:
        command_shell = self._command_shell or shutil.which("bash") or "/bin/sh"
        channel = str(folder.channel)
        resident = [command_shell, "-c", shell.RESIDENT, "resident", channel, command_shell, str(folder.root)]
        real_home = os.path.expanduser("~")  # noqa: PTH111 (Path.expanduser raises where there is none)
        inside = Inside(
            variables=environment.variables(spec, home=str(folder.home), tmp=str(folder.tmp)),
            workspace=_first_folder(folder, spec.cwd),
            refuse=lambda command, cwd, saved: guard(
                command, home=real_home, cwd=cwd, variables=exported(saved.decode("utf-8", "replace"))
            ),
            reads_commands=is_shell,
        )
        return Plan(
            kind=self.name,
            folder=folder,
            inside=inside,
            channel=channel,
            launch=partial(launch, resident, {"HOME": str(folder.home)}),  # by which its processes are found
            destroy=partial(_destroy, folder),
            restartable=True,
        )


def _first_folder(folder: Folder, cwd: str) -> str:
    path = folder.home / cwd[2:] if cwd == "~" or cwd.startswith("~/") else folder.workspace / cwd
    try:
        if cwd and not cwd.startswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        os.listdir(path)  # noqa: PTH208 (whether it can be done is all that counts)
    except OSError as error:
        raise SandboxError(f"working folder {cwd} cannot be used: {error.strerror}") from error
    return str(path)


def _destroy(folder: Folder, residents: list[subprocess.Popen[bytes]]) -> None:
    processes.kill_all(folder.root, [resident.pid for resident in residents])
