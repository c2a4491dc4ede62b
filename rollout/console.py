"""The one printer: log lines and progress on stderr, the report on stdout, everything in the run's log file.

It outlives its terminal: characters the encoding lacks are escaped, and a stream that is closed ends the printing, not
the run. Secrets are masked before anything leaves.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, TextIO

from tqdm import tqdm

from rollout.files import explained, open_regular
from tools.redact import redact

PLAIN_PROGRESS_SECONDS = 30.0  # without a terminal: a line so often


@dataclass
class Console:
    """Where a run's words go. ``quiet`` prints nothing, for use as a library; the log file is written all the same."""

    verbose: bool = False
    quiet: bool = False
    secrets: tuple[str, ...] = ()  # masked wherever they stand, like all that is key-shaped
    log_file: IO[bytes] | None = None
    progress: Progress | None = None

    @contextmanager
    def logging_to(self, path: Path) -> Iterator[None]:
        """Keep everything in the run's log file, and the traceback of what ends the block. Raises RunDirError."""
        with explained(f"write {path}"):
            self.log_file = os.fdopen(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)
        try:
            yield
        finally:
            if error := sys.exception():
                self.log("trace", "".join(traceback.format_exception(error)))
            self.log_file.close()
            self.log_file = None

    def log(self, level: str, text: str) -> None:
        """Print a line (``call`` and ``debug`` lines only when verbose) and keep it in the log file."""
        text, _ = redact(text, self.secrets)
        if self.log_file:
            stamp = datetime.now(UTC).astimezone().isoformat(timespec="milliseconds")
            line = f"{stamp} {level} {text}\n".encode(errors="backslashreplace")
            with suppress(OSError):  # a full disk is dealt with where the rows are written, not here
                self.log_file.write(line)
        wanted = self.verbose if level in ("call", "debug") else level != "trace"
        if wanted and not self.quiet:
            prefix = "" if level in ("info", "call", "debug") else f"{level}: "
            self._print(prefix + text)

    def answer(self, text: str) -> bool:
        """Print what was asked for on stdout; False, and a line on stderr, when it could not be written.

        A reader that goes away (``| head``) has had what it wanted.
        """
        problem = say(text, sys.stdout)
        if problem:
            self.log("error", f"cannot write to standard output: {problem}")
        return not problem

    def _print(self, line: str) -> None:
        if self.progress:
            self.progress.hide()
        say(line, sys.stderr)
        if self.progress:
            self.progress.show()


@dataclass
class Progress:
    """How far the run is: a bar on a terminal, else a line every so often."""

    total: int
    done: int = 0
    started: float = field(default_factory=time.monotonic)
    told: float = field(default_factory=time.monotonic)
    bar: tqdm[Any] | None = None

    @classmethod
    def start(cls, total: int) -> Progress:
        """Show it."""
        progress = cls(total)
        if is_terminal(sys.stderr):
            with suppress(OSError, ValueError):
                progress.bar = tqdm(total=total, unit="prompt", dynamic_ncols=True, smoothing=0.05)
        return progress

    def advance(self, count: int, words: str) -> None:
        """Tell that ``count`` more prompts ended, or that time goes by; ``words`` says how it stands."""
        self.done += count
        if self.bar is not None:
            with suppress(OSError, ValueError):
                self.bar.set_postfix_str(words, refresh=not count)
                self.bar.update(count)
        elif time.monotonic() - self.told >= PLAIN_PROGRESS_SECONDS:
            self.told = time.monotonic()
            minutes = (self.told - self.started) / 60
            say(f"{self.done}/{self.total} prompts after {minutes:.1f} min: {words}", sys.stderr)

    def hide(self) -> None:
        """Make room for a line."""
        if self.bar is not None:
            with suppress(OSError, ValueError):
                self.bar.clear()

    def show(self) -> None:
        """Come back after a line."""
        if self.bar is not None:
            with suppress(OSError, ValueError):
                self.bar.refresh()

    def close(self) -> None:
        """Leave the last state standing."""
        if self.bar is not None:
            with suppress(OSError, ValueError):
                self.bar.close()


def is_terminal(stream: TextIO | None) -> bool:
    """Tell whether somebody may be looking, at a line that is wide enough for anything."""
    try:
        return stream is not None and os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):  # no terminal, or closed
        return False


def say(text: str, stream: TextIO | None) -> str:
    """Print a line, whatever the stream's encoding and state; return why it is lost, "" where nobody misses it."""
    if stream is None:
        return ""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    safe = text.encode(encoding, errors="backslashreplace").decode(encoding)
    try:
        print(safe, file=stream, flush=True)
    except (OSError, ValueError) as error:  # the reader went away, or the disk is full, or it is closed
        with suppress(OSError, ValueError), Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())  # or the interpreter would try again at exit, and complain
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            return error.strerror or str(error)
    return ""


def fill_closed_streams() -> None:
    """Put the null device where stdin, stdout or stderr is closed, lest a file of the run gets their numbers."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:  # noqa: PLR2004 - stderr's number
        pass
    os.close(handle)
