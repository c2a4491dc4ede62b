"""Images: looked for once each, however many samples and workers want them, and pulled where they are missing.

Workers of one run agree through a lock file for each image, in which a failure is left for those who waited, and for
those who come later in the same run. Processes that started after a failure try again.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import BoundedSemaphore
from typing import IO, Any

from sandboxes import folders, processes
from sandboxes.base import SandboxError
from sandboxes.docker_engine import Engine, image_error

PULL_SECONDS = 1800  # an image may be large
MAX_CHECKS = 64  # at the same time, of one process: most of them only look, or wait for others
MAX_PULLS = 4


@dataclass(frozen=True)
class Image:
    """What is to be known about an image that is there."""

    name: str
    variables: dict[str, str]
    cwd: str  # the image's own first folder; "" or "/" when it has none


class Images:
    """The images of one engine, as one process knows them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pool = ThreadPoolExecutor(MAX_CHECKS, thread_name_prefix="image")
        self._pulls = BoundedSemaphore(MAX_PULLS)
        self._checks: dict[str, Future[Image]] = {}

    async def ensure(self, name: str) -> Image:
        """Have the image here, pulled if need be. Raises SandboxError, for the image's sake or the engine's."""
        check = self._checks.get(name)
        if check is None or _is_no_verdict(check):
            check = self._checks[name] = self._pool.submit(self._check, name)
        try:
            async with asyncio.timeout(PULL_SECONDS):
                return await asyncio.shield(asyncio.wrap_future(check))
        except TimeoutError:
            raise image_error(f"{name}: it did not come within {PULL_SECONDS} s") from None

    def _check(self, name: str) -> Image:
        known = self._engine.image(name)
        if known is None:
            with _locked(name) as notes:
                known = self._engine.image(name) or self._pull(name, notes)
        image = Image(
            name=name,
            variables=dict(item.split("=", 1) for item in known["Config"].get("Env") or () if "=" in item),
            cwd=known["Config"].get("WorkingDir") or "",
        )
        platform = f"{known['Os']}/{known['Architecture']}"
        if platform != self._engine.platform and (complaint := self._engine.try_out(name)):
            raise image_error(f"{name}: it is for {platform}, the engine runs {self._engine.platform}: {complaint}")
        return image

    def _pull(self, name: str, notes: IO[str]) -> dict[str, Any]:
        complaint = _noted(notes)
        if not complaint:
            with self._pulls:
                complaint = self._engine.pull(name)
        known = None if complaint else self._engine.image(name)
        if known is None:
            complaint = complaint or "it was pulled, and the engine does not know it"
            notes.seek(0)
            notes.truncate()
            json.dump({"at": _seconds_since_boot(), "complaint": complaint}, notes)
            raise image_error(f"{name}: {complaint}")
        return known


def _is_no_verdict(check: Future[Image]) -> bool:
    """Tell whether a check failed for the engine's sake: then it is made again."""
    error = check.exception() if check.done() else None
    return isinstance(error, SandboxError) and error.kind == "sandbox"


@contextmanager
def _locked(name: str) -> Iterator[IO[str]]:
    """Keep other processes from looking after the same image meanwhile; yield what was noted about it."""
    key = hashlib.sha256(f"{os.environ.get('DOCKER_HOST', '')}\0{name}".encode(errors="surrogatepass")).hexdigest()
    folder = folders.base() / "images"
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / key).open("a+", encoding="utf-8") as notes:
        fcntl.flock(notes, fcntl.LOCK_EX)  # gone with the file, however the process ends
        yield notes


def _noted(notes: IO[str]) -> str:
    """Return the complaint of a pull that failed since this process began."""
    notes.seek(0)
    try:
        note = json.load(notes)
    except ValueError:  # nothing, or torn
        return ""
    me = processes.process(os.getpid())
    began = (me.start_ticks + 1) / os.sysconf("SC_CLK_TCK") if me else _seconds_since_boot()  # the next whole tick
    return str(note["complaint"]) if began <= note["at"] <= _seconds_since_boot() else ""


def _seconds_since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
