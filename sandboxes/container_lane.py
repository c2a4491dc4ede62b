"""A lane: one slot of a resident shell in a container, whose FIFOs are pumped through a stream of their own.

Nothing of the host is seen inside, so what the resident takes from and puts into its channel's FIFOs (see ``shell``)
is carried by a small script, one process of the container for each lane: the command's output on its stdout, the
command's frames on its stderr, and what is sent to it to the command's stdin. A lane serves one command after the
other, as long as each lets go of its FIFOs.

In the output, marks tell what the order of streams cannot: ``m``, from the command's watcher, when the command has
ended, for its children may go on writing; ``e`` when nobody can write any more. Among the frames are ``r``, the pid of
the script when it is ready, ``z`` when nobody can write frames any more, and ``i`` when nobody reads stdin any more.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator

from sandboxes import shell
from sandboxes.base import SandboxError
from sandboxes.command_shell import START_SECONDS
from sandboxes.container_job import LaneJob
from sandboxes.container_stream import ContainerStream, ProcessStreams
from sandboxes.output import Collector

SETTLING_SECONDS = 0.05  # from a command's end to that of its pumps, as a rule
DISCARD_PAUSE_SECONDS = 0.02  # between reads of output that nobody wants
COMPLAINT_BYTES = 4000

# Arguments: channel folder, slot. The first line of stdin is the mark. Once a command has read its stdin to the end, or
# closed it, the lane ends when the other two FIFOs do; one is opened for a moment, to wake whom waits for a writer.
SCRIPT = r"""
channel=$1 slot=$2
IFS= read -r mark && mkfifo "$channel/$slot.out" "$channel/$slot.ctl" "$channel/$slot.in" || exit
exec 3<&0 4>&2 2>/dev/null </dev/null
pump() { # kind of FIFO, what to say when it ends
    until [ -e "$channel/$slot.end" ]; do
        cat "$channel/$slot.$1" || break
        printf "$2"
    done
}
pump ctl 'z\000' >&4 &
frames=$!
{
    cat <&3 >"$channel/$slot.in"
    : >"$channel/$slot.end"
    printf 'i\000' >"$channel/$slot.ctl"
    : <>"$channel/$slot.out"
} &
exec 3<&-
printf 'r%s\000' $$ >&4
pump out "\\000${mark}e"
wait "$frames"
kill -KILL -$$
"""


class Lane:
    """One lane. It can be had by a command when neither another one nor the children of one hold it."""

    def __init__(self, slot: int, on_started: Callable[[LaneJob], None], on_change: Callable[[Lane], None]) -> None:
        """``on_started``: a command has started; ``on_change``: it may be free, held or of no use any more."""
        self.slot = slot
        self.mark = secrets.token_hex(8)
        self.pid = 0
        self.texts: dict[str, bytes] = {}  # what the files of the slot hold
        self.job: LaneJob | None = None
        self.held_by = (0, 0)  # the last command's pid and its watcher's, where it is held
        self.reserved = False
        self.usable = True  # for another command
        self.stream = ContainerStream(self._on_output, self._on_frames, self._on_end)
        self._loop = asyncio.get_running_loop()
        self._on_started = on_started
        self._on_change = on_change
        self._ready: asyncio.Future[bool] = self._loop.create_future()
        self._settled_at = 0.0
        self._complaint = b""
        self._marks = Marks(f"\0{self.mark}".encode())
        self._frame = b""
        self._output_open = False  # somebody may still write output
        self._frames_open = False

    async def open(self, streams: ProcessStreams, first_lines: bytes) -> None:
        """Start it on the streams of a process that waits for ``SCRIPT``. Raises SandboxError."""
        await self.stream.connect(streams)
        self.stream.send(first_lines + f"{self.mark}\n".encode())
        try:
            async with asyncio.timeout(START_SECONDS):
                if await self._ready:
                    return
        except TimeoutError:
            pass
        finally:
            if not self.pid:
                self.stream.close()
        complaint = self._complaint.decode("utf-8", "replace").strip()
        raise SandboxError(f"the sandbox did not start: {complaint or 'no answer'}")

    @property
    def is_free(self) -> bool:
        """Whether a command can have it."""
        return self.usable and not (self.reserved or self.job or self._output_open)

    @property
    def is_held(self) -> bool:
        """Whether a command has ended whose children have not."""
        return self.job is None and self._output_open

    @property
    def is_settling(self) -> bool:
        """Whether it may well be free in a moment."""
        return self.usable and self._loop.time() < self._settled_at

    def begin(self, collector: Collector, *, stdin: bool) -> LaneJob:
        """Get ready for a command that is about to be started."""
        self.reserved = False
        self._output_open = self._frames_open = True
        self.usable = not stdin  # what one command leaves unread is not for the next
        self.stream.pace_anew()
        self.job = LaneJob(self.stream, collector, self._on_job_change, stdin=stdin)
        return self.job

    def close(self) -> None:
        """Let go of it; a command in it is lost."""
        self.stream.close()
        self._on_end()

    def _on_output(self, data: bytes) -> None:
        if not self.pid:
            self._complain(data)
        for piece, mark in self._marks.split(data):
            if self.job and not self.job.ended.is_set():
                self.job.take_output(piece)
            elif piece:
                self.stream.pause(DISCARD_PAUSE_SECONDS)
            if mark and self.job:
                self.job.output_complete()
            if mark == b"e":
                self._output_open = False
                self._review()

    def _on_frames(self, data: bytes) -> None:
        if not self.pid:
            self._complain(data)
        *whole, self._frame = (self._frame + data).split(b"\0")
        if len(self._frame) > shell.MAX_FRAME_BYTES:
            self._frame = b"?"
        for frame in whole:
            self._take_frame(frame)

    def _take_frame(self, frame: bytes) -> None:
        if not self.pid:
            if frame[:1] == b"r" and frame[1:].isdigit() and not self._ready.done():
                self.pid = int(frame[1:])
                self._ready.set_result(True)
        elif frame == b"z":
            self._frames_open = False
            if self.job:
                self.job.frames_ended()
            self._review()
        elif frame == b"i":
            if self.job:
                self.job.stdin_ended()
        elif self.job:
            self.job.take_frame(frame + b"\0")

    def _on_end(self) -> None:
        if not self._ready.done():
            self._ready.set_result(False)
        self.usable = self._output_open = self._frames_open = False
        if self.job:
            self.job.release()
        self._review()

    def _on_job_change(self, job: LaneJob) -> None:
        if not job.ended.is_set():
            self._on_started(job)
            return
        self._settled_at = self._loop.time() + SETTLING_SECONDS
        if job.frames.pid:
            self._review()
        else:
            self.close()  # it never began: what the lane needs inside is not there any more

    def _review(self) -> None:
        if self.job and self.job.ended.is_set() and not self._frames_open:
            self.usable = self.usable and not self.job.lost  # its shell may still be there, and speak
            self.held_by = (self.job.frames.pid, self.job.frames.parent)
            self.job = None
        self._on_change(self)

    def _complain(self, data: bytes) -> None:
        self._complaint = (self._complaint + data)[:COMPLAINT_BYTES]


class Marks:
    """Finds the marks in a lane's output, wherever the pieces it comes in are cut."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._rest = b""

    def split(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield what stands before each mark and the mark's last byte, and at last what follows with no mark."""
        data = self._rest + data
        size = len(self._mark)
        while (at := data.find(self._mark)) >= 0 and len(data) > at + size:
            yield data[:at], data[at + size : at + size + 1]
            data = data[at + size + 1 :]
        begun = next((length for length in range(size, 0, -1) if data.endswith(self._mark[:length])), 0)
        self._rest = data[len(data) - begun :]
        yield data[: len(data) - begun], b""
