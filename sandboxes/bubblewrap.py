"""Commands run behind bubblewrap: a read-only system, private home, tmp and working folder, processes of their own.

Inside there are /home/user, /tmp and the working folder (/workspace, or the sample's own) to write to; the host's
programs and libraries to read; a small choice of /etc; own processes, IPC and host name; no capabilities and no way to
new ones. The host's homes, projects, sockets, processes and environment are not there. The network is the host's,
loopback included, unless ``SandboxSpec.network`` is False.

Not isolated: the kernel; memory, CPU and disk, which are shared without limits. A runner that is root shares two things
more: the number of processes is not limited either, and what root alone may read of the system can be read inside.
"""

from __future__ import annotations

import asyncio
import functools
import os
import platform
import posixpath
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from sandboxes import environment, folders, shell, view
from sandboxes.base import SandboxError, SandboxSpec
from sandboxes.folders import Folder
from sandboxes.host_sandbox import HostSandbox, Plan
from sandboxes.resident import launch, wait
from sandboxes.shell_sandbox import Inside

HOME = "/home/user"
WORKSPACE = "/workspace"
TMP = "/tmp"  # noqa: S108 (the sandbox's own)
CHANNEL = "/run/channel"
MAX_PROCESSES = 1024
END_SECONDS = 5.0  # for a sandbox to end by itself
PROBE_SECONDS = 5.0

# From the best to the least that systems allow: a user of its own that can make no new ones; one that can; none.
_USERS = (
    ("--unshare-user", "--uid", "1000", "--gid", "1000", "--disable-userns"),
    ("--unshare-user", "--uid", "1000", "--gid", "1000"),
    (),
)
_ISOLATION = (
    *("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"),
    *("--new-session", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"),
)

# Outside, above bwrap: removes the folders when the inside has ended, whoever brought that about.
_JANITOR = """private=$1 channel=$2; shift 2
"$@"
exec >/dev/null 2>&1 </dev/null
rm -rf "$private" "$channel" || { chmod -R u+rwX "$private"; rm -rf "$private"; }
"""


class BubblewrapBackend:
    """See the Backend protocol."""

    name = "bubblewrap"
    takes_images = False

    def unavailable(self) -> str:
        """See the protocol."""
        try:
            _users()
        except SandboxError as error:
            return str(error)
        return ""

    async def open(self, spec: SandboxSpec) -> HostSandbox:
        """See the protocol. The working folder appears at ``spec.cwd``; in the system's folders it must be there."""
        users = await asyncio.to_thread(_users)
        with folders.fresh() as folder:
            sandbox = HostSandbox(_plan(self.name, folder, spec, users))
        await sandbox.open()
        return sandbox

    def sweep(self) -> list[str]:
        """See the protocol."""
        return folders.sweep()


@functools.cache
def _users() -> Sequence[str]:
    """Find out which isolation of users works here by trying. Raises SandboxError when bwrap does not work at all."""
    if not shutil.which("bwrap"):
        raise SandboxError("bubblewrap is not installed (bwrap is not on PATH); install the package bubblewrap")
    complaint = ""
    for users in _USERS:
        complaint = _try(users)
        if not complaint:
            return users
    raise SandboxError(f"bwrap does not work here ({complaint}); it needs user namespaces, or to be installed setuid")


def _try(users: Sequence[str]) -> str:
    """Start and end a sandbox; return what bwrap says against it."""
    with folders.fresh() as folder:
        try:
            tried = subprocess.run(
                [*_bwrap(users, folder, WORKSPACE, network=True), "/bin/sh", "-c", ":"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PROBE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no answer for {PROBE_SECONDS:.0f} s"
        finally:
            folder.remove()
    return "" if tried.returncode == 0 else tried.stderr.strip() or f"exit code {tried.returncode}"


def _bwrap(users: Sequence[str], folder: Folder, workspace: str, *, network: bool) -> list[str]:
    """Return bwrap with all its options; what it is to run comes after them."""
    passwd, group = folder.root / "passwd", folder.root / "group"
    uid, gid = (1000, 1000) if users else (os.getuid(), os.getgid())
    passwd.write_text(f"root:x:0:0::/:/bin/sh\nuser:x:{uid}:{gid}::{HOME}:/bin/sh\n")
    group.write_text(f"root:x:0:\nuser:x:{gid}:\n")
    binds = ((folder.home, HOME), (folder.tmp, TMP), (folder.workspace, workspace))
    read_only = ((folder.channel, CHANNEL), (passwd, "/etc/passwd"), (group, "/etc/group"))
    return [
        *("bwrap", *users, *_ISOLATION, *(() if network else ("--unshare-net",))),
        *view.host_view(os.environ.get("PATH", environment.DEFAULT_PATH)).arguments,
        *(*view.proc_arguments(), "--dev", "/dev", "--dir", "/var", "--symlink", TMP, "/var/tmp"),  # noqa: S108 (inside)
        *(word for outside, inside in binds for word in ("--bind", str(outside), inside)),
        *(word for outside, inside in read_only for word in ("--ro-bind", str(outside), inside)),
        *("--remount-ro", "/", "--setenv", "HOME", HOME, "--chdir", "/", "--"),
    ]


def _plan(kind: str, folder: Folder, spec: SandboxSpec, users: Sequence[str]) -> Plan:
    workspace, first_folder = _places(spec.cwd)
    variables = environment.variables(spec, home=HOME, tmp=TMP)
    variables["PATH"] = spec.env.get("PATH", view.host_view(variables["PATH"]).path)
    if posixpath.commonpath((workspace, first_folder)) == workspace:
        Path(folder.workspace, posixpath.relpath(first_folder, workspace)).mkdir(parents=True, exist_ok=True)
    command_shell = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"
    resident = _limited([command_shell, "-c", shell.RESIDENT, "resident", CHANNEL, command_shell, ""], users)
    bwrap = _bwrap(users, folder, workspace, network=spec.network)
    return Plan(
        kind=kind,
        folder=folder,
        inside=Inside(variables, first_folder),
        channel=CHANNEL,
        launch=partial(launch, _watched(folder, [*bwrap, *resident]), {"HOME": str(folder.home)}),
        destroy=_destroy,
        restartable=False,
    )


def _limited(command: list[str], users: Sequence[str]) -> list[str]:
    """Limit the number of processes where that counts the sandbox's own only: in a user namespace, since Linux 5.14."""
    version = [int(number) for number in re.findall(r"\d+", platform.release())[:2]]
    if not users or os.getuid() == 0 or version < [5, 14]:
        return command
    limit = f'ulimit -u {MAX_PROCESSES} 2>/dev/null || ulimit -p {MAX_PROCESSES}; exec "$@"'
    return ["/bin/sh", "-c", limit, "sh", *command]


def _watched(folder: Folder, command: list[str]) -> list[str]:
    return ["/bin/sh", "-c", _JANITOR, "sh", str(folder.root), str(folder.channel), *command]


def _places(cwd: str) -> tuple[str, str]:
    """Return where the private working folder appears, and where commands start. Raises SandboxError."""
    if cwd == "~" or cwd.startswith("~/"):
        cwd = HOME + cwd[1:]
    first = posixpath.normpath(posixpath.join(WORKSPACE, cwd))
    if view.in_system(first):
        if not Path(first).is_dir():
            raise SandboxError(f"working folder {cwd} does not exist")
        return WORKSPACE, first
    if first in (HOME, TMP) or first.startswith(f"{WORKSPACE}/"):
        return WORKSPACE, first
    return first, first


def _destroy(residents: list[subprocess.Popen[bytes]]) -> None:
    for janitor in residents:
        try:
            wait(janitor, END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(janitor.pid, signal.SIGKILL)  # bwrap's parent gone, the inside dies with it
            wait(janitor)
