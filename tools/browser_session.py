"""One rollout's browser: its context, the page it looks at, and what happens there meanwhile.

Promises that every call ends in time and that no page ends the rollout: one that hangs, crashes or floods the browser
with requests is closed and the model told, a browser that died is started again, pages
that nobody uses make room for others. Dialogs are dismissed, downloads and
file choosers refused, new tabs followed; each is told with the next result, as ``events``.

Imports Playwright: import it where it is used.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from playwright.async_api import BrowserContext, Dialog, Download, Error, FileChooser, Frame, Page, Request
from playwright.async_api import TimeoutError as SlowError

from tools.base import JsonObject
from tools.browser_page import TEXT_CHARS, explained, is_of_page, passwords
from tools.browser_process import CLOSE_SECONDS, BrowserError, Chromium
from tools.browser_snapshot import Snapshot, shown

NAVIGATION_SECONDS = 20.0  # until a server answers
LOAD_SECONDS = 5.0  # more, for the page to be complete; after that it is looked at as it is
ACTION_SECONDS = 10.0  # for an element to become usable and be acted on
SNAPSHOT_SECONDS = 15.0
PROBE_SECONDS = 3.0  # in which a page that lives says something
SLOW_PULSE_SECONDS = 1.0  # a browser that needs longer has too much to do
SETTLE_SECONDS = 0.25  # after an action, for what it sets off to begin
MAX_TABS = 8
MAX_DIALOGS = 20  # within one call; a page that asks more often is a trap
MAX_EVENTS = 10
MAX_STARTS = 1_000  # of requests, frames, sockets and workers within START_SECONDS; a page that makes more floods
START_SECONDS = 2.0
MAX_URL_CHARS = 2_000
_SCHEMES = ("http:", "https:", "about:", "blob:", "data:", "chrome-error:")
_FAILED_PAGE = "chrome-error:"
_CRASHED = "The page crashed and was closed; it may need too much memory"
_FLOODED = "The page asked for more at once than the browser can bear, and was closed"
_HUNG = "The page does not answer and was closed; open it again or go elsewhere"
_IDLE = (
    "The page was closed and its cookies forgotten, for nothing was done with it for a while; "
    "open it again with browser_navigate"
)
_BUSY = "The browser is busy with other pages; try again"
_GONE = "The browser is gone and will be started again; open the page again"
_INTERRUPTED = re.compile(r'Navigation to "(.*?)" is interrupted by another navigation to "(.*?)"')
T = TypeVar("T")


class BrowserSession:
    """Made without arguments, as a rollout's state; give it the worker's browser before the first call."""

    def __init__(self) -> None:
        self.chromium: Chromium | None = None
        self._opening: asyncio.Task[BrowserContext] | None = None
        self._page: Page | None = None
        self._crashed: set[Page] = set()
        self._failed_url = ""  # the last one that a page was to go to and could not
        self._events: list[str] = []
        self._dialogs = 0  # since the call began
        self._still = asyncio.Event()  # set while no page is on its way to another one
        self._calls = asyncio.Lock()
        self._used_at = time.monotonic()  # when the last one ended
        self._was_idle = False  # for too long, until it is told to go somewhere
        self._starts: list[float] = []  # when the last ones of what pages make began
        self._drops: set[asyncio.Task[None]] = set()

    async def close(self) -> bool:
        """Close the context, now, or later when that takes long; True when there was one."""
        self._was_idle = False
        ending = self._end()
        if ending:
            await asyncio.wait([ending], timeout=CLOSE_SECONDS)
        return ending is not None

    def idle_seconds(self) -> float:
        """Return for how long nothing was done here; 0.0 while something is, and where there is nothing to close."""
        return time.monotonic() - self._used_at if self._opening and not self._calls.locked() else 0.0

    def give_up(self) -> None:
        """Begin to close the context, for being idle: the next call is told, unless it goes somewhere."""
        self._was_idle = True
        self._end()

    def _end(self) -> asyncio.Task[None] | None:
        task, self._opening, self._page = self._opening, None, None
        if task is None or self.chromium is None:
            return None
        self._crashed.clear()
        return self.chromium.end(task, self)

    async def act(self, work: Callable[[Page], Awaitable[T]], seconds: float) -> T:
        """Do something with the page. Raises BrowserError, after closing a page that hangs or has crashed."""
        async with self._in_use():
            page = await self._current()
            self._dialogs = 0
            try:
                async with asyncio.timeout(seconds):
                    return await work(page)
            except TimeoutError:
                raise await self._hung(page) from None
            except SlowError as error:
                if not await self._answers(page):
                    raise await self._hung(page) from None
                raise BrowserError(explained(error)) from None
            except Error as error:
                raise await self._failed(page, error) from None

    @asynccontextmanager
    async def _in_use(self) -> AsyncIterator[None]:
        async with self._calls:
            try:
                yield
            finally:
                self._used_at = time.monotonic()

    async def go(self, url: str) -> JsonObject:
        """Go to a URL that was checked; tell when the page is still loading. Raises BrowserError."""
        assert self.chromium  # noqa: S101 - given before the first call
        self._failed_url = ""
        self._was_idle = False
        self._forget_crash()  # of the page before
        try:
            is_loaded = await self.act(lambda page: _gone_to(page, url), NAVIGATION_SECONDS + 2 * LOAD_SECONDS)
        except BrowserError as error:
            reason = self.chromium.problem(self._failed_url)
            await self._leave()
            raise BrowserError(reason or str(error)) from None
        await self.check_place()
        return {} if is_loaded else {"warning": "The page is still loading; this is what there is so far"}

    async def do(self, work: Callable[[Page], Awaitable[Any]]) -> None:
        """Do something as a user would, and wait until what it sets off has settled."""
        self._failed_url = ""
        self._still.set()
        await self.act(work, ACTION_SECONDS + PROBE_SECONDS)
        await asyncio.sleep(SETTLE_SECONDS)
        with suppress(TimeoutError):  # it is looked at as it is
            await asyncio.wait_for(self._still.wait(), LOAD_SECONDS)
        await self.act(_loaded, 3 * LOAD_SECONDS)
        try:
            await self.check_place(stays=True)
        except BrowserError as error:
            raise BrowserError(f"{error}; {await self._return()}") from None

    async def check_place(self, *, stays: bool = False) -> None:
        """Leave a page where nobody should be, unless the caller does. Raises BrowserError that says why."""
        page = await self._current()
        url = page.url
        assert self.chromium  # noqa: S101 - there is a page
        reason = ""
        if not url.startswith(_SCHEMES):
            reason = f"Blocked: {url[:100]} is no web page"
        elif url.startswith(_FAILED_PAGE):
            failed = self._failed_url or "the page"
            reason = self.chromium.problem(failed) or f"{failed[:TEXT_CHARS]} could not be loaded"
        elif url.startswith("http") and self.chromium.is_remote:
            reason = await self.chromium.refusal(url)
        if reason and not stays:
            await self._leave()
        if reason:
            raise BrowserError(reason)

    async def _return(self) -> str:
        """Leave a page where nobody should be for the one before; say where the browser is then."""
        assert self.chromium  # noqa: S101 - there is a page
        page = await self._current()
        if any(other is not page and self._is_usable(other) for other in page.context.pages):
            await self._drop(page)
            return "its tab was closed"
        if not self.chromium.is_remote:  # there, the page before could be back where it must not be unseen
            with suppress(BrowserError):
                await self.act(_gone_back, ACTION_SECONDS + LOAD_SECONDS)
                if self.url.startswith("http"):
                    return "the browser went back to the page before"
        await self._leave()
        return "the page was closed; open it again or go elsewhere"

    async def _leave(self) -> None:
        """Leave a page on which nobody should be, and what it was about to load."""
        with suppress(BrowserError):  # it was closed then
            await self.act(lambda page: _gone_to(page, "about:blank"), ACTION_SECONDS)

    async def snapshot(self, *, full: bool) -> Snapshot:
        """Return the page as text. Raises BrowserError."""

        async def taken(page: Page) -> tuple[str, list[str]]:
            if not await page.locator("body, frameset").count():  # Playwright would wait for one
                return "", []
            raw = await page.aria_snapshot(mode="ai", boxes=True, timeout=SNAPSHOT_SECONDS * 1000)
            return raw, await passwords(page) if "textbox" in raw else []

        raw, hidden = await self.act(taken, SNAPSHOT_SECONDS + 2 * PROBE_SECONDS)
        return await asyncio.to_thread(shown, raw, full=full, passwords=hidden)

    async def place(self) -> JsonObject:
        """Return the page's URL and title."""
        title = await self.act(lambda page: page.title(), PROBE_SECONDS)
        return {"url": self.url, "title": title[:TEXT_CHARS]}

    @property
    def url(self) -> str:
        """Where the page is; "" when there is none."""
        return self._page.url[:MAX_URL_CHARS] if self._page else ""

    def result(self, **values: Any) -> JsonObject:
        """Return a result, with what has happened since the last one."""
        events, self._events = self._events, []
        return {"success": True, **values, **({"events": events} if events else {})}

    def told(self) -> str:
        """Return what has happened since the last result, for the text of an error."""
        events, self._events = self._events, []
        return "".join(f"; {event}" for event in events)

    async def _current(self) -> Page:
        """Return the page to work with: the newest tab that is alive. Raises BrowserError."""
        assert self.chromium  # noqa: S101 - given before the first call
        context = await self._context(self.chromium)
        if self._page is None or not self._is_usable(self._page):
            alive = [page for page in context.pages if self._is_usable(page)]
            try:
                async with asyncio.timeout(ACTION_SECONDS):
                    self._page = alive[-1] if alive else await context.new_page()
            except (Error, TimeoutError):
                await self.close()
                raise BrowserError(_GONE) from None
            if self._forget_crash():
                raise BrowserError(f"{_CRASHED}{self.told()}")
        return self._page

    def _forget_crash(self) -> bool:
        """Tell whether a page crashed since the last result, once."""
        crashed = _CRASHED in self._events
        self._events = [event for event in self._events if event != _CRASHED]
        return crashed

    def _is_usable(self, page: Page) -> bool:
        return not page.is_closed() and page not in self._crashed

    async def _context(self, chromium: Chromium) -> BrowserContext:
        if self._opening and self._opening.done() and self._opening.exception():
            await self.close()
        if self._was_idle:
            raise BrowserError(_IDLE)
        if self._opening is None:
            await chromium.take_place(self)
            self._opening = asyncio.create_task(self._opened(chromium))
        return await asyncio.shield(self._opening)

    async def _opened(self, chromium: Chromium) -> BrowserContext:
        context = await chromium.new_context()
        context.on("page", self._follow)
        context.on("page", self._close_surplus)
        context.on("dialog", self._dismiss)
        context.on("request", self._note_request)
        context.on("requestfailed", self._note_failure)
        return context

    def _follow(self, page: Page) -> None:
        if len(page.context.pages) > MAX_TABS:
            return
        if self._page is not None and self._is_usable(self._page):
            self._tell("a new tab opened and is the page now")
        self._page = page
        self._still.set()
        for kind in ("frameattached", "websocket", "worker"):
            page.on(kind, lambda _: self._count(page))
        page.on("framenavigated", self._note_arrival)
        page.on("crash", self._note_crash)
        page.on("download", self._refuse_download)
        page.on("filechooser", self._refuse_file)

    async def _close_surplus(self, page: Page) -> None:
        if page is not self._page and len(page.context.pages) > MAX_TABS:
            self._tell(f"a new tab was closed again: there are {MAX_TABS} already")
            with suppress(Error):  # it has gone itself
                await page.close()

    async def _dismiss(self, dialog: Dialog) -> None:
        with suppress(Error):  # its page is gone
            if dialog.type == "beforeunload":  # to dismiss that is to stay
                await dialog.accept()
                return
            self._dialogs += 1
            self._tell(f"a dialog was dismissed ({dialog.type}): {dialog.message[:TEXT_CHARS]}")
            if self._dialogs > MAX_DIALOGS and dialog.page:
                self._crashed.add(dialog.page)
                await dialog.page.close()
            else:
                await dialog.dismiss()

    def _note_request(self, request: Request) -> None:
        if is_of_page(request, if_unknown=False):
            self._still.clear()
        with suppress(Error):  # of a tab that has just been opened none can tell
            self._count(request.frame.page)

    def _count(self, page: Page) -> None:
        """Count what a page makes, and close one that makes too much: the browser has others to serve."""
        now = time.monotonic()
        self._starts.append(now)
        if len(self._starts) <= MAX_STARTS:
            return
        if now - self._starts[0] <= START_SECONDS and self._is_usable(page):
            self._tell(_FLOODED)
            self._crashed.add(page)
            drop = asyncio.create_task(self._drop(page))
            self._drops.add(drop)
            drop.add_done_callback(self._drops.discard)
        self._starts.clear()

    def _note_arrival(self, frame: Frame) -> None:
        if frame.parent_frame is None:
            self._still.set()

    def _note_failure(self, request: Request) -> None:
        if is_of_page(request, if_unknown=True):
            self._still.set()
            if request.failure != "net::ERR_ABORTED":
                self._failed_url = request.url

    def _note_crash(self, page: Page) -> None:
        if page not in self._crashed:
            self._crashed.add(page)
            self._tell(_CRASHED)

    def _refuse_download(self, download: Download) -> None:
        name, url = download.suggested_filename[:100], download.url[:TEXT_CHARS]
        self._tell(f"a download was refused: {name} from {url}; use another tool to fetch it")

    def _refuse_file(self, _chooser: FileChooser) -> None:
        self._tell("the page asked for a file; files cannot be uploaded")

    def _tell(self, event: str) -> None:
        if event not in self._events and len(self._events) < MAX_EVENTS:
            self._events.append(event)

    async def _answers(self, page: Page) -> bool:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await page.title()
        except (Error, TimeoutError):
            return False
        return True

    async def _hung(self, page: Page) -> BrowserError:
        """Close a page that does not answer, unless it is the browser: that may be any other page's fault."""
        assert self.chromium  # noqa: S101 - there is a page
        pulse = await self.chromium.pulse()
        if pulse == math.inf:
            await self.close()
            return BrowserError(_GONE + self.told())
        if pulse > SLOW_PULSE_SECONDS:
            return BrowserError(_BUSY + self.told())
        await self._drop(page)
        return BrowserError(_HUNG + self.told())

    async def _failed(self, page: Page, error: Error) -> BrowserError:
        if self._forget_crash() or "crashed" in str(error):
            await self._drop(page)
            return BrowserError(f"{_CRASHED}{self.told()}")
        browser = page.context.browser
        is_gone = browser is not None and not browser.is_connected()
        if is_gone or ("has been closed" in str(error) and self._is_usable(page)):
            await self.close()
            return BrowserError(_GONE)
        if not self._is_usable(page):
            return BrowserError(f"The page was closed meanwhile{self.told()}")
        return BrowserError(explained(error) + self.told())

    async def _drop(self, page: Page) -> None:
        """Close a page that is of no use any more; where even that hangs, all of the rollout's."""
        self._crashed.add(page)
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await page.close()
        except (Error, TimeoutError):
            await self.close()


async def _loaded(page: Page) -> bool:
    """Wait until the page is complete, but not for long; tell whether it is."""
    try:
        await page.wait_for_load_state("domcontentloaded", timeout=LOAD_SECONDS * 1000)
        await page.wait_for_load_state("load", timeout=LOAD_SECONDS * 1000)
    except SlowError:
        return False
    return True


async def _gone_back(page: Page) -> None:
    await page.go_back(wait_until="domcontentloaded", timeout=ACTION_SECONDS * 1000)


async def _gone_to(page: Page, url: str) -> bool:
    """Go there, and tell whether all of it is loaded."""
    for is_last_try in (False, False, True):
        try:
            await page.goto(url, wait_until="commit", timeout=NAVIGATION_SECONDS * 1000)
            break
        except SlowError:
            raise BrowserError(f"There was no answer within {NAVIGATION_SECONDS:g} seconds") from None
        except Error as error:
            interrupted = _INTERRUPTED.search(str(error))
            if interrupted is None or is_last_try:
                raise
            # The page before was about to go somewhere else, or its own failure was still to be shown.
            await asyncio.sleep(SETTLE_SECONDS)
            if interrupted[1] == interrupted[2]:
                break
    return await _loaded(page)
