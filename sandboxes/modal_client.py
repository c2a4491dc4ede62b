"""Sandboxes of Modal, through its ``modal`` package, which this module imports: import it where they are needed.

What goes wrong is a SandboxError with Modal's own words. Every call has a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import modal
from grpclib.exceptions import StreamTerminatedError

from sandboxes.base import SandboxError, Tell, tell_nobody
from sandboxes.container_inside import DOORSTEP, TMP
from sandboxes.docker_settings import Settings
from sandboxes.modal_streams import RemoteStreams

APP = "batch-runner"
CALL_SECONDS = 60
CREATE_SECONDS = 300
TERMINATE_SECONDS = 15
BUILD_SECONDS = 1800
LIFETIME_SECONDS = 24 * 3600  # the longest there is; see ``ALIVE``
UNFED_SECONDS = 300  # a sandbox that nobody has fed for so long ends by itself
ERRORS = (modal.Error, StreamTerminatedError, OSError)

# The main process. It takes a file away now and then, and ends when that has not come back: then the owner is gone.
_MAIN = """mkdir -p -m 700 "${0%/*}" && : >"$0"
while sleep "$1" && rm "$0" 2>/dev/null; do :; done
"""


class Account:
    """What one process knows of the account: its app, and the images that are there."""

    def __init__(self) -> None:
        self._images: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Task[modal.Image]] = {}

    async def ensure(self, name: str, tell: Tell = tell_nobody) -> modal.Image:
        """Have an image at Modal, built of a registry's if need be; asked for once. Raises SandboxError."""
        key = (asyncio.get_running_loop(), name)
        task = self._images.get(key)
        if task is None or _is_no_verdict(task):
            tell(f"looking for image {name} at Modal, where it is built the first time")
            task = self._images[key] = asyncio.create_task(_build(name))
        return await asyncio.shield(task)

    async def create(self, image: modal.Image, tags: dict[str, str], settings: Settings, alive: str) -> modal.Sandbox:
        """Make a sandbox that lives while the file ``alive`` is renewed. Raises SandboxError."""
        async with _errors("no sandbox", CREATE_SECONDS):
            return await modal.Sandbox.create.aio(
                *("/bin/sh", "-c", _MAIN, alive, str(UNFED_SECONDS)),
                app=await app(),
                image=image,
                tags=tags,
                timeout=LIFETIME_SECONDS,
                cpu=(settings.cpus, settings.cpus) if settings.cpus else None,
                memory=(settings.memory_mb, settings.memory_mb) if settings.memory_mb else None,
                block_network=not settings.network,
            )


async def execute(sandbox: modal.Sandbox, arguments: Sequence[str]) -> RemoteStreams:
    """Start a process in a sandbox. Raises SandboxError."""
    async with _errors("the sandbox is gone", CALL_SECONDS):
        process = await sandbox.exec.aio("/bin/sh", "-c", DOORSTEP, TMP, *arguments, text=False)
    return RemoteStreams(process, ERRORS)


async def variables(sandbox: modal.Sandbox) -> dict[str, str]:
    """Return the variables of a sandbox's processes. Raises SandboxError."""
    async with _errors("the sandbox did not start", CALL_SECONDS):
        process = await sandbox.exec.aio("cat", "/proc/self/environ", text=False)
        told = await process.stdout.read.aio()
    entries = told.decode("utf-8", "surrogateescape").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


async def terminate(sandbox: modal.Sandbox) -> bool:
    """End a sandbox; tell whether that was heard. One that did not hear it ends when nobody feeds it any more."""
    try:
        async with _errors("it does not end", TERMINATE_SECONDS):
            await sandbox.terminate.aio()
            detach: Any = sandbox.detach  # of which the package's types say nothing
            await detach.aio()
    except SandboxError:
        return False
    return True


async def app() -> modal.App:
    """Return the app that all our sandboxes belong to. Raises what the package raises."""
    return await modal.App.lookup.aio(APP, create_if_missing=True)


async def probe(seconds: float) -> str:
    """Say why the account cannot be used; "" when it can."""
    try:
        async with _errors("Modal cannot be used", seconds):
            await app()
    except SandboxError as error:
        return str(error)
    return ""


async def tagged(tags: dict[str, str], seconds: float) -> list[tuple[modal.Sandbox, dict[str, str]]]:
    """Return the living sandboxes that have these tags, with all tags of each. Raises SandboxError."""
    async with _errors("Modal lists no sandboxes", seconds):
        app_id = (await app()).app_id
        found = [sandbox async for sandbox in modal.Sandbox.list.aio(app_id=app_id, tags=tags)]
        return [(sandbox, await sandbox.get_tags.aio()) for sandbox in found]


async def _build(name: str) -> modal.Image:
    async with _errors("Modal cannot be used", BUILD_SECONDS):
        ours = await app()
        try:
            return await modal.Image.from_registry(name).build.aio(ours)
        except (modal.exception.RemoteError, modal.exception.InvalidError, modal.exception.NotFoundError) as error:
            words = " ".join(str(error).split())
            raise SandboxError(f"Modal image not available: {name}: {words}", kind="image_unavailable") from error


def _is_no_verdict(task: asyncio.Task[modal.Image]) -> bool:
    """Tell whether a build failed for another reason than the image: then it is made again."""
    if not task.done():
        return False
    error = None if task.cancelled() else task.exception()
    return task.cancelled() or (isinstance(error, SandboxError) and error.kind == "sandbox")


@contextlib.asynccontextmanager
async def _errors(what: str, seconds: float) -> AsyncIterator[None]:
    """Turn what goes wrong between here and Modal, or takes too long, into a SandboxError."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise SandboxError(f"{what}: no answer for {seconds:.0f} s") from error
    except ERRORS as error:
        raise SandboxError(f"{what}: {' '.join(str(error).split()) or type(error).__name__}") from error
