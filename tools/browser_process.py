"""The worker's browser: one Chromium behind our own proxy, or a remote one, and a context of it for each rollout.

Chromium is started when a rollout first asks for it and once more whenever it is gone. It talks to Playwright's driver
through a pipe, no port, and ends with the driver, which ends with the worker, however that ends; its folder, if nobody
is left to remove it, goes with the next sweep of sandboxes. It gets nothing of the host's environment but a short list.

Where Chromium's own sandbox cannot work it runs without: as root, and where the kernel lets users have no namespaces.
A page that breaks out of a renderer then has the rights of this program's user.

A remote browser (``BROWSER_CDP_URL``) is not behind the proxy: there only pages that are gone to are checked, before
and after, and what a page fetches on its own is the remote side's to guard.

Imports Playwright: import it where it is used.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.async_api import Browser, BrowserContext, CDPSession, Error, Playwright, async_playwright

from sandboxes import folders
from sandboxes.base import SandboxError
from tools import browser_program as program
from tools.addresses import ALLOWED_HOSTS_VARIABLE, AllowedHosts, BlockedAddressError, resolve_public
from tools.base import ToolError
from tools.browser_places import Holder, Places
from tools.browser_proxy import Proxy, target_of
from tools.services import Settings

START_SECONDS = 25.0
CONTEXT_SECONDS = 10.0  # in which a browser that works makes a context
CLOSE_SECONDS = 2.0  # of each thing that is closed; what takes longer goes with the worker
VIEW = {"width": 1280, "height": 720}
PULSE_SECONDS = 5.0  # in which a browser that no page has brought to a halt says that it lives
# Nobody reads what pages print or what fails in them, and Playwright's driver, which serves all rollouts, chokes on it.
_SILENCE = """(() => {
    for (const name of Object.keys(console))
        if (typeof console[name] === "function" && name !== "createTask") console[name] = () => {};
    for (const kind of ["error", "unhandledrejection"]) addEventListener(kind, event => event.preventDefault());
})()"""
_NO_CHROMIUM_SANDBOX = ("No usable sandbox", "Operation not permitted", "namespace")


class BrowserError(ToolError):
    """Told to the model; the rollout goes on."""

    def __init__(self, message: str) -> None:
        super().__init__(message, success=False)


@dataclass
class _Running:
    """A browser that was started or connected to, and what it needs. All but the driver may be missing."""

    driver: Playwright
    browser: Browser | None = None
    pulse: CDPSession | None = None  # with the browser itself, no page
    pid: int = 0  # of a browser of this machine
    proxy: Proxy | None = None
    folder: folders.Folder | None = None

    async def close(self) -> None:
        if self.browser:
            await _in_time(self.browser.close())
        await _in_time(self.driver.stop())
        if self.proxy:
            await self.proxy.close()
        if self.folder:
            await asyncio.to_thread(folders.remove_tree, self.folder.root)


async def _in_time(closing: Coroutine[Any, Any, None]) -> None:
    with suppress(Error, TimeoutError):  # it is gone already, or goes with the worker
        await asyncio.wait_for(closing, CLOSE_SECONDS)


class Chromium:
    """The worker's browser."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._allowed = AllowedHosts.parse(settings.get(ALLOWED_HOSTS_VARIABLE, ""))
        self._places = Places(program.max_rollouts(settings))
        self._start: asyncio.Task[_Running] | None = None
        self._broken: asyncio.Task[_Running] | None = None  # the start of one that is of no use any more
        self._endings: set[asyncio.Task[None]] = set()
        self.is_remote = program.CDP_URL_VARIABLE in settings

    async def close(self) -> None:
        """End the browser."""
        self._places.stop()
        for ending in self._endings:
            ending.cancel()
        await asyncio.gather(*self._endings, return_exceptions=True)
        if self._start:
            with suppress(BrowserError):
                await (await self._start).close()

    async def take_place(self, holder: Holder) -> None:
        """Wait for a place among the rollouts that may have a context; ``end`` gives it back.

        Raises BrowserError when none becomes free.
        """
        try:
            await self._places.take(holder)
        except TimeoutError:
            raise BrowserError("The browser is used by too many others at the moment; try again later") from None

    def end(self, opening: asyncio.Task[BrowserContext], holder: Holder) -> asyncio.Task[None]:
        """Begin to close a context, be it still in the making; its place is free when that is done."""
        self._places.leave(holder)
        ending = asyncio.create_task(self._end(opening))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        return ending

    async def _end(self, opening: asyncio.Task[BrowserContext]) -> None:
        try:
            with suppress(Error, BrowserError, TimeoutError):  # it has gone with its browser, or will
                async with asyncio.timeout(START_SECONDS):
                    await (await opening).close()
        finally:
            self._places.closed()

    async def new_context(self) -> BrowserContext:
        """Return a context that shares nothing with others. Raises BrowserError."""
        told = ""
        for _ in range(2):
            start = self._started()
            running = await asyncio.shield(start)
            assert running.browser  # noqa: S101 - what was started has one
            try:
                async with asyncio.timeout(CONTEXT_SECONDS):
                    return await _context_of(running.browser)
            except (Error, TimeoutError) as error:
                self._broken = start  # also where it seems to be connected: its driver may be dead, or itself frozen
                told = self._first_line(error)
        raise BrowserError(f"The browser gives no page: {told}")

    async def pulse(self) -> float:
        """Return the seconds in which the browser as a whole answers; inf for none, which is killed with its flood."""
        start = self._start
        running = start.result() if start and start.done() and not start.cancelled() and not start.exception() else None
        if running is None or running.pulse is None:
            return 0.0
        asked = time.monotonic()
        try:
            async with asyncio.timeout(PULSE_SECONDS):
                await running.pulse.send("Browser.getVersion")
        except TimeoutError:
            if running.pid and self._broken is not start:
                with suppress(ProcessLookupError):
                    os.kill(running.pid, signal.SIGKILL)
            self._broken = start
            return math.inf
        except Error:  # it has died, which is told elsewhere
            return 0.0
        return time.monotonic() - asked

    async def refusal(self, url: str) -> str:
        """Say why a URL must not be gone to; "" when it may be. A name that is not found is left to the browser."""
        target = target_of(url)
        if target is None:
            return f"{url[:200]!r} is no URL with a host"
        try:
            await resolve_public(*target, self._allowed)
        except BlockedAddressError as error:
            return str(error)
        except OSError:
            return ""
        return ""

    def problem(self, url: str) -> str:
        """Say why the URL's host could not be reached when the browser last tried; "" when it could."""
        running = self._start.result() if self._start and self._start.done() and not self._start.exception() else None
        return running.proxy.problem(url) if running and running.proxy else ""

    def _started(self) -> asyncio.Task[_Running]:
        """Return the start of the browser that runs, or start one; rollouts that ask meanwhile wait for the same."""
        if self._start is None or (self._start.done() and not self._is_alive(self._start)):
            self._start = asyncio.create_task(self._restart(self._start))
        return self._start

    def _is_alive(self, start: asyncio.Task[_Running]) -> bool:
        if start is self._broken:
            return False
        browser = None if start.cancelled() or start.exception() else start.result().browser
        return browser is not None and browser.is_connected()

    async def _restart(self, before: asyncio.Task[_Running] | None) -> _Running:
        if before and not before.cancelled() and not before.exception():
            await before.result().close()
        try:
            async with asyncio.timeout(START_SECONDS), AsyncExitStack() as on_error:
                running = _Running(await async_playwright().start())
                on_error.push_async_callback(running.close)
                await (self._connect(running) if self.is_remote else self._launch(running))
                assert running.browser  # noqa: S101 - just given
                running.pulse = await running.browser.new_browser_cdp_session()
                if not self.is_remote:
                    running.pid = await _pid(running.pulse)
                on_error.pop_all()
        except (Error, OSError, SandboxError) as error:  # a time-out is an OSError
            raise BrowserError(f"The browser cannot be started: {self._first_line(error)}") from None
        return running

    async def _connect(self, running: _Running) -> None:
        url = self._settings[program.CDP_URL_VARIABLE]
        running.browser = await running.driver.chromium.connect_over_cdp(url, timeout=START_SECONDS * 1000)

    async def _launch(self, running: _Running) -> None:
        running.proxy = Proxy(self._allowed)
        await running.proxy.start()
        running.folder = await asyncio.to_thread(_folder_of, program.executable(self._settings))
        is_root = os.geteuid() == 0  # whom Chromium's sandbox refuses to serve
        try:
            running.browser = await _launched(running, sandboxed=not is_root)
        except Error as error:
            if is_root or not any(hint in str(error) for hint in _NO_CHROMIUM_SANDBOX):
                raise
            running.browser = await _launched(running, sandboxed=False)

    def _first_line(self, error: Exception) -> str:
        """Return what an error says, without the address of a remote browser: it may hold a key."""
        if isinstance(error, TimeoutError):
            return f"no answer within {START_SECONDS:g} seconds"
        if self.is_remote:
            return f"{urlsplit(self._settings[program.CDP_URL_VARIABLE]).hostname} does not answer as a browser does"
        first, *log = str(error).splitlines() or [""]
        complaints = [line.rpartition("[err]")[2].strip() for line in log if "[err]" in line]
        return f"{first[:200]}{f' ({complaints[-1][:200]})' if complaints else ''}"


def _folder_of(executable: str) -> folders.Folder:
    """Make the browser's folder, with the script that starts it. Raises SandboxError, OSError."""
    with folders.fresh() as folder:
        script = _script(folder)
        script.write_text(program.launcher(executable, folder.workspace / "profile"), encoding="utf-8")
        script.chmod(0o700)
    return folder


def _script(folder: folders.Folder) -> Path:
    return folder.channel / "chromium"


async def _pid(pulse: CDPSession) -> int:
    """Return the number of the browser's main process."""
    told = await pulse.send("SystemInfo.getProcessInfo")
    return next((int(process["id"]) for process in told["processInfo"] if process["type"] == "browser"), 0)


async def _context_of(browser: Browser) -> BrowserContext:
    context = await browser.new_context(
        accept_downloads=False,
        service_workers="block",
        viewport={"width": VIEW["width"], "height": VIEW["height"]},
    )
    await context.add_init_script(_SILENCE)
    return context


async def _launched(running: _Running, *, sandboxed: bool) -> Browser:
    assert running.folder  # noqa: S101 - made just before
    assert running.proxy  # noqa: S101
    return await running.driver.chromium.launch(
        executable_path=_script(running.folder),
        chromium_sandbox=sandboxed,
        env=dict(program.environment(running.folder.home, running.folder.tmp)),
        proxy={"server": f"http://127.0.0.1:{running.proxy.port}", "bypass": "<-loopback>"},
        args=program.flags(),
        # Playwright would switch off how Chromium bounds what pages open, and how often they move about in history.
        ignore_default_args=["--disable-popup-blocking", "--disable-ipc-flooding-protection"],
        handle_sigint=False,
        handle_sigterm=False,
        handle_sighup=False,
        timeout=START_SECONDS * 1000,
    )
