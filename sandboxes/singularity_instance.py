"""Instances of Apptainer or SingularityCE, as its command line program starts, enters and stops them.

Each is looked after by a small shell of its own on this machine: it starts the instance, waits until the worker lets go
of it or is gone, and stops the instance and removes its folder then. The program's environment is a short list, so that
nothing of the worker's enters an instance and no setting of the user's mounts the host's folders there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from sandboxes import folders, processes
from sandboxes.base import SandboxError
from sandboxes.container_inside import DOORSTEP
from sandboxes.container_shell import CHANNEL_MOUNT
from sandboxes.container_stream import ContainerStream
from sandboxes.docker_settings import Settings
from sandboxes.environment import DEFAULT_PATH
from sandboxes.piped_streams import PipedStreams

PROGRAMS = ("apptainer", "singularity")
NAME_PREFIX = "batch-runner."
START_SECONDS = 120
STOP_SECONDS = 30
TIMED_OUT = "124"  # what timeout says
LIST_SECONDS = 10
MAX_PROCESSES = 512
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")  # for package managers, of root alone
HOME_MOUNT = "/run/home"  # HOME where the image has none that can be written to
_SETTINGS = re.compile(
    r"PATH|HOME|USER|LOGNAME|TMPDIR|XDG_RUNTIME_DIR|DBUS_SESSION_BUS_ADDRESS"
    r"|(APPTAINER|SINGULARITY)_(CACHEDIR|TMPDIR|CONFIGDIR)"
)
# Set by the program itself, or by the shell that tells of them.
_NOT_OF_THE_IMAGE = re.compile(
    r"(APPTAINER|SINGULARITY)_\w+|PROMPT_COMMAND|PS1|USER_PATH|HOME|HOSTNAME|PWD|OLDPWD|SHLVL|TERM|_"
)

_ITS_LIBRARIES = "/.singularity.d/libs"

# Arguments: seconds to start, seconds to stop, folder, name, program, its arguments for the start.
_KEEPER = """start=$1 stop=$2 folder=$3 channel=$4 name=$5 program=$6; shift 6
exec 3>&1 >"$folder/log" 2>&1
timeout -k 5 "$start" "$program" "$@" </dev/null 3>&-
echo $? >&3
cat >/dev/null
timeout -k 5 "$stop" "$program" instance stop --force "$name" </dev/null 3>&-
rm -rf "$folder" "$channel" || { chmod -R u+rwX "$folder"; sleep 0.1; rm -rf "$folder" "$channel"; }
"""


@dataclass(frozen=True)
class Options:
    """What not every machine allows: tried with all of it, and then with less."""

    overlay: bool  # a folder to write to, else a small piece of memory
    limits: bool  # of memory, processors and processes


ATTEMPTS = (Options(True, True), Options(True, False), Options(False, True), Options(False, False))


def program() -> str:
    """Return the path of the program, "" where there is none."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), "")


def program_environment() -> dict[str, str]:
    """Return the little the program needs of the worker's environment."""
    return {"PATH": DEFAULT_PATH, **{name: value for name, value in os.environ.items() if _SETTINGS.fullmatch(name)}}


def words(output: str) -> str:
    """Return what the program complained of, without what it said on the way there."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith(("FATAL:", "ERROR:"))]
    return " ".join(" ".join(fatal or lines[-3:]).split())[:1000]


class Instance:
    """One instance. It is gone, with its folder, soon after ``stop`` or after the end of this process."""

    def __init__(self, folder: folders.Folder, run_name: str) -> None:
        self.folder = folder
        self.name = f"{NAME_PREFIX}{re.sub(r'[^A-Za-z0-9_-]', '-', run_name)[:64]}.{folder.root.name}"
        self._program = program()
        self._programs: list[PipedStreams] = []  # those that may run
        self._keeper_program: PipedStreams | None = None
        self._told = b""
        self._news = asyncio.Event()
        self._gone = asyncio.Event()
        self._keeper = ContainerStream(self._on_news, self._on_news, self._on_gone)

    async def start(self, image: str, settings: Settings, options: Options) -> str:
        """Start it; return what the program says against that, "" when it runs. Raises SandboxError."""
        (self.folder.root / "overlay").mkdir()
        arguments = [
            *("/bin/sh", "-c", _KEEPER, "sh", str(START_SECONDS), str(STOP_SECONDS)),
            *(str(self.folder.root), str(self.folder.channel), self.name),
            *(self._program, "instance", "start", *_isolation(self.folder), *_wishes(settings, options, self.folder)),
            *(image, self.name),
        ]
        self._keeper_program = self._launch(arguments)
        connecting = asyncio.ensure_future(self._keeper.connect(self._keeper_program))
        try:
            await asyncio.shield(connecting)
        except asyncio.CancelledError:
            await connecting  # it takes no time, and nothing could be stopped without
            raise
        await self._news.wait()
        code = self._told.decode("ascii", "replace").strip()
        if code == TIMED_OUT:
            raise SandboxError(f"no instance of {image}: it did not start within {START_SECONDS} s")
        return "" if code == "0" else words(self._log()) or f"exit code {code or 'unknown'}"

    async def execute(self, arguments: Iterable[str]) -> PipedStreams:
        """Start a process in it. Raises SandboxError."""
        door = [self._program, "exec", "--cleanenv", f"instance://{self.name}"]
        return self._launch([*door, "/bin/sh", "-c", DOORSTEP, HOME_MOUNT, *arguments])

    async def variables(self) -> dict[str, str]:
        """Return the variables of its processes: the image's, and what the program adds. Raises SandboxError."""
        told, complaint, ended = bytearray(), bytearray(), asyncio.Event()
        stream = ContainerStream(told.extend, complaint.extend, ended.set)
        try:
            async with asyncio.timeout(START_SECONDS):
                await stream.connect(await self.execute(["cat", "/proc/self/environ"]))
                await ended.wait()
        except TimeoutError:
            raise SandboxError(f"the sandbox did not start: no answer for {START_SECONDS} s") from None
        finally:
            stream.close()
        if not told:
            raise SandboxError(f"the sandbox did not start: {words(complaint.decode('utf-8', 'replace'))}")
        entries = bytes(told).decode("utf-8", "surrogateescape").split("\0")
        return dict(entry.split("=", 1) for entry in entries if "=" in entry)

    async def stop(self, seconds: float = STOP_SECONDS + 10) -> None:
        """Stop it and remove its folder. What takes longer its keeper does alone."""
        if not self._programs:
            return
        # Its last command may hold its pipes open when somebody has killed it.
        killed = self._keeper_program is not None and self._keeper_program.has_ended()
        if killed or not self._keeper.is_open:
            await asyncio.to_thread(self._stop_alone)
        self._keeper.end_input()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._gone.wait()
        if self._gone.is_set():
            await asyncio.to_thread(self._end_programs)

    def _launch(self, arguments: list[str]) -> PipedStreams:
        self._programs = [started for started in self._programs if not started.has_ended()]
        self._programs.append(PipedStreams(arguments, program_environment()))
        return self._programs[-1]

    def _stop_alone(self) -> None:
        _run("instance", "stop", "--force", self.name, seconds=STOP_SECONDS)
        self.folder.remove()

    def _end_programs(self) -> None:
        for started in self._programs:
            started.put_down()
        processes.reap_orphans()  # the instance's own first process among them

    def _log(self) -> str:
        try:
            return (self.folder.root / "log").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def _on_news(self, data: bytes) -> None:
        self._told += data
        self._news.set()

    def _on_gone(self) -> None:
        self._news.set()
        self._gone.set()


def of_image(variables: dict[str, str]) -> dict[str, str]:
    """Return those of a process's variables that are the image's own."""
    kept = {name: value for name, value in variables.items() if not _NOT_OF_THE_IMAGE.fullmatch(name)}
    libraries = [path for path in kept.pop("LD_LIBRARY_PATH", "").split(":") if path not in ("", _ITS_LIBRARIES)]
    return kept | ({"LD_LIBRARY_PATH": ":".join(libraries)} if libraries else {})


def stop_left_overs() -> list[str]:
    """Stop the instances of this user whose owners are dead; return their names. Blocks."""
    names = [name for name in _names() if folders.is_left_over(name.rpartition(".")[2])]
    return [name for name in names if _run("instance", "stop", "--force", name, seconds=STOP_SECONDS) is not None]


def _names() -> list[str]:
    try:
        listed = json.loads(_run("instance", "list", "--json", seconds=LIST_SECONDS) or "{}")
    except ValueError:
        return []
    names = (str(item.get("instance", "")) for item in listed.get("instances") or ())
    return [name for name in names if name.startswith(NAME_PREFIX)]


def _run(*arguments: str, seconds: float) -> str | None:
    """Run the program; return what it wrote, None when it failed."""
    try:
        done = subprocess.run(
            [program() or PROGRAMS[0], *arguments],
            env=program_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _isolation(folder: folders.Folder) -> list[str]:
    """Return options that are never left out."""
    capabilities = ["--no-privs", "--add-caps", ",".join(f"CAP_{name}" for name in CAPABILITIES)]
    return [
        *("--containall", "--no-home", "--hostname", "sandbox", *(capabilities if os.geteuid() == 0 else ())),
        *("--workdir", str(folder.tmp), "--scratch", CHANNEL_MOUNT, "--scratch", HOME_MOUNT),
    ]


def _wishes(settings: Settings, options: Options, folder: folders.Folder) -> list[str]:
    """Return options that depend on what the user wants, and on what the machine allows."""
    words = [*(() if settings.network else ("--net", "--network", "none"))]
    words += [word for volume in settings.volumes for word in ("--bind", volume)]
    words += ["--overlay", str(folder.root / "overlay")] if options.overlay else ["--writable-tmpfs"]
    if options.limits:
        words += ["--pids-limit", str(MAX_PROCESSES)]
        words += ["--memory", f"{settings.memory_mb}M"] if settings.memory_mb else []
        words += ["--cpus", f"{settings.cpus:g}"] if settings.cpus else []
    return words
