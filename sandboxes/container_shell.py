"""The resident shell of a container, and the lanes its commands run in.

All that is needed of the container's engine is a function that starts a process in the container and returns the
connection to its multiplexed streams; all that is needed of the image is a POSIX ``sh`` with ``mkdir``, ``mkfifo`` and
``cat``. Resident and lanes that commands kill, stop or dig away are replaced, as long as the container itself lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

from sandboxes import shell
from sandboxes.base import SandboxError
from sandboxes.command_shell import ANSWER_SECONDS, START_SECONDS, CommandShell
from sandboxes.container_job import LaneJob
from sandboxes.container_lane import SCRIPT, SETTLING_SECONDS, Lane
from sandboxes.container_stream import ContainerStream, ProcessStreams
from sandboxes.environment import NAME
from sandboxes.output import Collector

Connect = Callable[[Sequence[str]], Awaitable[ProcessStreams]]  # program and arguments → its streams; SandboxError

CHANNEL_MOUNT = "/run/channel"  # where the container must have a small tmpfs that anybody can write to
CHANNEL = f"{CHANNEL_MOUNT}/shell"
COMPLAINT_BYTES = 4000
_ENGINES_VARIABLES = ("HOSTNAME", "LC_ALL", "TERM", "container")
MAX_HELD = 8  # lanes held by children of ended commands; who writes to an older one gets SIGPIPE

# Arguments: channel folder, name of a script, slot. The script comes as the first line of stdin, in the words of
# printf, so that lists of processes do not show it.
_BOOT = r"""mkdir -p -m 700 "$1" && IFS= read -r text && printf %b "$text" >"$1/$2" && exec sh "$1/$2" "$1" "$3" """

# In front of the resident's own text: a better shell where there is one, the image's variables out of the way (they
# come back with every command's state, HOME is unset there), the first folder.
_PRELUDE = r"""
shell=$(command -v bash || command -v sh)
[ -n "$BASH_VERSION" ] || case $shell in *bash) exec "$shell" "$0" "$@" ;; esac
unset {names}
LC_ALL=C
for folder in {folders}; do
    [ -d "$folder" ] || mkdir -p "$folder"
    cd "$folder" && break
    folder=
done
printf '%s\n' "${{HOME:-/}}" "$folder"
set -- "$1" "$shell" ""
"""


class ContainerResident:
    """The hand on a resident shell in a container."""

    def __init__(self, on_death: Callable[[], None]) -> None:
        self.alive = True
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._stream = ContainerStream(self._on_output, self._on_complaint, self.let_go)
        self._line = b""
        self._answers: deque[asyncio.Future[str]] = deque()
        self._complaint = b""

    async def open(self, streams: ProcessStreams, script: bytes) -> tuple[str, str]:
        """Start it on a process of the container; return its HOME and the first folder.

        Raises SandboxError, also when no folder can be had.
        """
        await self._stream.connect(streams)
        answers = [self._expect(), self._expect()]
        self._stream.send(script)
        home = folder = ""
        try:
            async with asyncio.timeout(START_SECONDS):
                home, folder = [await answer for answer in answers]
        except TimeoutError:
            pass
        finally:
            if not folder:
                self.let_go()
        if not folder:
            complaint = (self._complaint + self._line).decode("utf-8", "replace").strip()
            raise SandboxError(f"the sandbox did not start: {complaint or 'no answer'}")
        return home, folder

    def send(self, line: str) -> None:
        """See the protocol."""
        self.send_bytes(f"{line}\n".encode())

    def send_bytes(self, lines: bytes) -> None:
        """Tell it whole lines."""
        if self.alive:
            self._stream.send(lines)

    async def answers(self, seconds: float) -> bool:
        """See the protocol."""
        if not self.alive:
            return False
        answer = self._expect()
        self.send("ping")
        try:
            async with asyncio.timeout(seconds):
                return await answer == "pong"
        except TimeoutError:
            return False

    def put_down(self) -> None:
        """See the protocol. A stopped one stays where it is, for nothing outside can reach it."""
        self.let_go()

    def let_go(self) -> None:
        """See the protocol."""
        if not self.alive:
            return
        self.alive = False
        self._stream.close()
        while self._answers:
            self._answer("")
        self._on_death()

    def _expect(self) -> asyncio.Future[str]:
        answer: asyncio.Future[str] = self._loop.create_future()
        self._answers.append(answer)
        return answer

    def _answer(self, line: str) -> None:
        answer = self._answers.popleft() if self._answers else None
        if answer and not answer.done():
            answer.set_result(line)

    def _on_output(self, data: bytes) -> None:
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._answer(shell.decode_name(line))

    def _on_complaint(self, data: bytes) -> None:
        self._complaint = (self._complaint + data)[:COMPLAINT_BYTES]


class ContainerShell(CommandShell[LaneJob, ContainerResident]):
    """A resident shell and its lanes."""

    def __init__(self, connect: Connect, image_variables: Iterable[str], first_folders: Iterable[str]) -> None:
        """Take what starts processes in the container, the names of the image's variables, and shell words.

        The words are folders; the first one that is there or can be made is where commands start.
        """
        super().__init__()
        self.home = self.folder = "/"  # as the resident told them
        self._connect = connect
        names = {*_ENGINES_VARIABLES, *image_variables} - {"PATH", "HOME"}
        unset = " ".join(sorted(name for name in names if NAME.fullmatch(name)))
        prelude = _PRELUDE.format(names=unset, folders=" ".join(first_folders))
        self._script = escaped(shell.encode(prelude + shell.RESIDENT)) + b"\n"
        self._lanes: list[Lane] = []
        self._numbers = itertools.count(1)
        self._lane_changed = asyncio.Event()

    async def open(self) -> None:
        """Start the resident and a first lane. Raises SandboxError."""
        done = await asyncio.gather(self.ensure_alive(), self._new_lane(), return_exceptions=True)
        for problem in done:
            if isinstance(problem, BaseException):
                raise problem
        self._lanes[0].reserved = False

    async def start_resident(self) -> ContainerResident:
        """See CommandShell."""
        streams = await self._boot(f"{next(self._numbers)}.resident")
        resident = ContainerResident(self.on_death)
        home, folder = await resident.open(streams, self._script)
        if not self._resident:
            self.home, self.folder = home, folder
        for lane in self._lanes:
            lane.texts.clear()  # who knows what the last one still wrote
        return resident

    async def run(
        self, command: bytes, state: bytes, collector: Collector, *, stdin: bool = False, keep: bool = False
    ) -> LaneJob:
        """See CommandShell."""
        lane = await self._ready_lane()
        job = lane.begin(collector, stdin=stdin)
        self._jobs.add(job)
        texts = {
            "save": shell.encode(shell.save(CHANNEL)),
            f"{lane.slot}.state": shell.begin(CHANNEL, lane.slot, state, keep=keep),
            f"{lane.slot}.cmd": command,
        }
        lines = b"".join(_put(name, text) for name, text in texts.items() if lane.texts.get(name) != text)
        lane.texts = texts
        source = f"{CHANNEL}/{lane.slot}.in" if stdin else "/dev/null"
        lines += f"run {lane.slot} {source} {'keep' if keep else 'drop'} {lane.mark}\n".encode()
        if self._resident:
            self._resident.send_bytes(lines)
        return job

    def close(self) -> None:
        """See CommandShell."""
        super().close()
        for lane in list(self._lanes):
            lane.close()

    async def _ready_lane(self) -> Lane:
        """Return a lane that can be had now, beside a resident that lives."""
        while True:
            lane = await self._reserve()
            try:
                await self.ensure_alive()
            finally:
                lane.reserved = False
            if lane.usable:
                return lane

    async def _reserve(self) -> Lane:
        """Return a lane that nobody else will take."""
        lane = self._free_lane()
        if not lane and any(lane.is_settling for lane in self._lanes):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLING_SECONDS):
                    while not (lane := self._free_lane()):
                        self._lane_changed.clear()
                        await self._lane_changed.wait()
        if not lane:
            try:
                lane = await self._new_lane()
            except SandboxError:
                if not await self._end_children():
                    raise
                lane = await self._new_lane()
        lane.reserved = True
        return lane

    async def _end_children(self) -> bool:
        """Kill what ended commands left running: where nothing can be started any more they may be too many."""
        held = [lane for lane in self._lanes if lane.is_held]
        for lane in held:
            self.send(f"kill {lane.held_by[0]} {lane.held_by[1]}")
        return bool(held and self._resident and await self._resident.answers(ANSWER_SECONDS))

    def _free_lane(self) -> Lane | None:
        return next((lane for lane in self._lanes if lane.is_free), None)

    async def _new_lane(self) -> Lane:
        """Open a lane; it is reserved."""
        lane = Lane(next(self._numbers), self.job_started, self._on_lane_change)
        lane.reserved = True
        await lane.open(await self._boot(f"{lane.slot}.lane", str(lane.slot)), escaped(SCRIPT.encode()) + b"\n")
        self._lanes.append(lane)
        if self._closed:
            lane.close()
            raise SandboxError("the sandbox is closed")
        return lane

    async def _boot(self, script_name: str, slot: str = "") -> ProcessStreams:
        if self._closed:
            raise SandboxError("the sandbox is closed")
        return await self._connect(["/bin/sh", "-c", _BOOT, "sh", CHANNEL, script_name, slot])

    def _on_lane_change(self, lane: Lane) -> None:
        held = [lane for lane in self._lanes if lane.is_held]
        if not lane.usable and not lane.job and not lane.is_held:
            self._dispose(lane)
        elif len(held) > MAX_HELD:
            self._dispose(held[0])
        self._jobs = {lane.job for lane in self._lanes if lane.job}
        self._lane_changed.set()

    def _dispose(self, lane: Lane) -> None:
        if lane in self._lanes:
            self._lanes.remove(lane)
            if lane.stream.is_open:  # else its script has ended, and its pid may be another's
                self.send(f"kill {lane.pid} {lane.pid}")
            lane.close()


def escaped(data: bytes) -> bytes:
    """Return any bytes as text without line ends and outer blanks, which the shells' ``printf %b`` turns back."""
    text = data.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\0", b"\\0000")
    for blank in (b" ", b"\t"):
        octal = b"\\0%03o" % blank[0]
        if text.startswith(blank):
            text = octal + text[1:]
        if text.endswith(blank):
            text = text[:-1] + octal
    return text


def _put(name: str, text: bytes) -> bytes:
    return f"put {name} - ".encode() + escaped(text) + b"\n"
