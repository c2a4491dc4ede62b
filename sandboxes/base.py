"""What a sandbox is: the place where one rollout's commands run and its files live.

A backend is one file beside this one and one line in ``sandboxes/__init__.py``. It owns the life of its sandboxes and
nothing else: no model, no batch, no row is known here. What a backend does not isolate, its own docstring says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeGuard, runtime_checkable

BackgroundStatus = Literal["running", "exited"]
DEFAULT_OUTPUT_CHARS = 50_000  # what one command may bring back; the original's cap
BACKGROUND_BUFFER_CHARS = 200_000  # what is kept of a background process's output, newest last


class SandboxError(Exception):
    """The sandbox cannot be made, or is gone: the rollout cannot go on.

    ``kind`` is ``"sandbox"``, or ``"image_unavailable"`` when the image cannot be had; the message holds the engine's
    own words.
    """

    def __init__(self, message: str, kind: Literal["sandbox", "image_unavailable"] = "sandbox") -> None:
        super().__init__(message)
        self.kind: Literal["sandbox", "image_unavailable"] = kind


class SandboxFileError(Exception):
    """A file operation failed inside a healthy sandbox (missing, a folder, no permission): told to the model."""


class CommandRefused(Exception):  # noqa: N818 (a refusal is no error: the tool's status is "blocked")
    """The command would harm the host and was not run; the message says why. Only ``local`` refuses commands."""


@dataclass(frozen=True)
class SandboxSpec:
    """What one rollout asks of its sandbox."""

    run_name: str  # for names and labels
    rollout_id: str  # unique among all runs of the machine; [A-Za-z0-9_-]+
    image: str = ""  # container image; "" = the backend's default
    cwd: str = ""  # first working folder; "" = the backend's default
    network: bool = True  # False: no network inside, where the backend can do that
    env: dict[str, str] = field(default_factory=dict)  # extra variables inside


@dataclass(frozen=True)
class ExecResult:
    """The end of one command. A non-zero exit code is a result, not an error."""

    output: str  # stdout and stderr as they came, merged, valid text; 40 % head and 60 % tail when it was too long
    exit_code: int  # 124 on a time-out, 128 + n after signal n
    timed_out: bool = False
    omitted_chars: int = 0  # left out between head and tail; ``output`` holds a notice with this number
    total_chars: int = 0  # what the command wrote in all


class BackgroundProcess(Protocol):
    """A process that was started in the background and lives no longer than its sandbox."""

    command: str
    cwd: str
    pid: int  # as seen inside the sandbox
    started_at: float  # seconds since the epoch

    def status(self) -> BackgroundStatus:
        """Tell whether it still runs."""

    def exit_code(self) -> int | None:
        """Return the exit code, or None while it runs."""

    def output(self) -> str:
        """Return the newest output, at most ``BACKGROUND_BUFFER_CHARS`` characters of valid text."""

    async def wait(self, timeout_seconds: float) -> bool:
        """Wait for its end, at most so long; True when it has ended."""

    async def write(self, data: bytes) -> None:
        """Write to its stdin. Raises SandboxFileError when stdin is closed or the process has ended."""

    async def close_stdin(self) -> None:
        """End its stdin."""

    async def kill(self) -> None:
        """Kill it and its whole process group; returns once it is gone."""


class Sandbox(Protocol):
    """One rollout's place to work. All methods raise SandboxError when the sandbox itself is gone."""

    kind: str  # the backend's name, as in --sandbox

    async def exec(
        self,
        command: str,
        *,
        timeout_seconds: float,
        cwd: str = "",
        max_output_chars: int = DEFAULT_OUTPUT_CHARS,
    ) -> ExecResult:
        """Run a POSIX shell command to its end.

        The working folder and exported variables persist to the next call; ``cwd`` overrides the folder for this call
        alone. stdin is empty. Children left in the background do not hold the call. On a time-out the process group is
        killed and what was written so far comes back with exit code 124.
        """

    async def exec_plain(
        self, command: str, *, timeout_seconds: float, max_output_chars: int = DEFAULT_OUTPUT_CHARS
    ) -> ExecResult:
        """Run a command that is a tool's own, as ``exec`` does, but under the variables that the sandbox began with.

        Where PATH or HOME lead by now is the model's business: it starts in the current folder, and nothing persists.
        """

    async def start(self, command: str, *, cwd: str = "") -> BackgroundProcess:
        """Start a command in the background, with a stdin that can be written to."""

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """Return a file's first ``max_bytes`` bytes, exactly.

        Relative paths start at the current folder, ``~`` at home. Raises SandboxFileError (no such file, a folder, a
        device, no permission).
        """

    async def write_file(self, path: str, data: bytes) -> None:
        """Replace a file atomically, keeping its mode; parents are made. Raises SandboxFileError."""

    async def close(self) -> None:
        """End every process and remove every trace. Never raises; may be called twice."""


class Backend(Protocol):
    """A kind of sandbox."""

    name: str
    takes_images: bool

    def unavailable(self) -> str:
        """Say why it cannot be used here and what to do about it; "" when it can. Takes at most a few seconds."""

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """Make a sandbox. Raises SandboxError."""

    def sweep(self) -> list[str]:
        """Remove what dead runs left behind, and nothing else; returns a line about each sandbox that went."""


@runtime_checkable
class BoundedBackend(Backend, Protocol):
    """A kind of sandbox of which this machine bears only so many at once."""

    def max_sandboxes(self) -> int:
        """Return how many, for a whole run, 1 or more; called at the door. May take a few seconds."""


Tell = Callable[[str], None]  # takes a line for the user


def tell_nobody(_line: str) -> None:
    """Stand where nobody wants to know."""


class ImageBackend(Backend, Protocol):
    """A kind of sandbox that runs images."""

    async def ensure_image(self, image: str, tell: Tell = tell_nobody) -> None:
        """Have an image here before it is needed, pulled if need be; "" is the backend's default image.

        However many samples and workers ask, it is looked for once; ``tell`` of the one that makes it come hears how
        far that is, in the event loop. Raises SandboxError of kind ``image_unavailable``,
        or of kind ``sandbox`` when it is the engine that fails.
        """


def has_images(backend: Backend) -> TypeGuard[ImageBackend]:
    """Tell whether a kind of sandbox runs images; each rollout asks, and isinstance takes long with protocols."""
    return hasattr(backend, "ensure_image")
