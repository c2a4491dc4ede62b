"""The toolset browser: pages of the web, looked at and acted on by reference.

Owns what the model is shown and told; the page is ``browser_session``'s, the program ``browser_process``'s, and what it
may reach ``browser_proxy``'s to say. Only http and https are gone to, never a file of the host. Failures are
``{"success": false, "error": text}``. What a page says reaches the model as text and is no instruction of ours.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from tools import browser_program, vision
from tools.base import JsonObject, ToolContext, ToolError, ToolLimits, tool
from tools.pictures import PictureError
from tools.services import Settings

if TYPE_CHECKING:
    from playwright.async_api import Locator, Page

    from tools.browser_session import BrowserSession

LIMIT_SECONDS = 60.0  # of a call
VISION_LIMIT_SECONDS = 300.0  # with the answers of a vision model
SCROLL_PIXELS = 500
MAX_IMAGES = 50
_SCREENSHOT_SECONDS = 15.0
_SCREENSHOT_QUALITY = 80  # percent, JPEG
_URL_CHARS = 500
_TEXT_CHARS = 200

_LIST_IMAGES = """(images, most) => [images.length, images.slice(0, most).map(
    image => [image.currentSrc || image.src, image.alt, image.naturalWidth, image.naturalHeight])]"""
_REF = re.compile(r"(?:\[?ref=|@)?((?:f\d+)?e\d+)\]?")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?!\d+(?:[/?#]|$))")  # host:port is none
_KEYS = {
    "enter": "Enter",
    "return": "Enter",
    "tab": "Tab",
    "esc": "Escape",
    "escape": "Escape",
    "space": "Space",
    "backspace": "Backspace",
    "delete": "Delete",
    "home": "Home",
    "end": "End",
    "pageup": "PageUp",
    "pagedown": "PageDown",
    "up": "ArrowUp",
    "down": "ArrowDown",
    "left": "ArrowLeft",
    "right": "ArrowRight",
    "ctrl": "Control",
    "cmd": "Meta",
}
_BOT_TITLES = (
    "just a moment",
    "access denied",
    "attention required",
    "are you a robot",
    "verify you are human",
    "captcha",
)
_BOT_WARNING = "The site may take this for a robot and hide its content; another source may help"

Ref = Annotated[str, Field(description='Reference from the snapshot, such as "@e12"')]


def _limit(_limits: ToolLimits) -> float:
    return LIMIT_SECONDS


def _vision_limit(limits: ToolLimits) -> float:
    return max(limits.max_call_seconds, VISION_LIMIT_SECONDS)


def _vision_missing(settings: Settings) -> str:
    return browser_program.missing(settings) or vision.missing(settings)


_browser_tool = tool(
    "browser", limit_seconds=_limit, settings=browser_program.SETTINGS, missing=browser_program.missing
)


@_browser_tool
async def browser_navigate(
    context: ToolContext, url: Annotated[str, Field(description="http or https URL")]
) -> JsonObject:
    """Open a web page and return its snapshot, in which elements have references. Other browser tools need it first."""
    address = _web_address(url)
    session = await _session(context)
    assert session.chromium  # noqa: S101 - just given
    if refusal := await session.chromium.refusal(address):
        raise _failed(refusal)
    warning = await session.go(address)
    place = await session.place()
    if any(words in place["title"].lower() for words in _BOT_TITLES):
        warning["bot_detection_warning"] = _BOT_WARNING
    seen = await session.snapshot(full=False)
    return session.result(**place, **warning, snapshot=seen.text, element_count=seen.element_count)


@_browser_tool
async def browser_snapshot(
    context: ToolContext,
    full: Annotated[bool, Field(description="All of the page, not only what is near the view")] = False,
) -> JsonObject:
    """Return the page as text: roles, names and references of its elements, frames included."""
    session = await _session(context)
    seen = await session.snapshot(full=full)
    return session.result(**await session.place(), snapshot=seen.text, element_count=seen.element_count)


@_browser_tool
async def browser_click(context: ToolContext, ref: Ref) -> JsonObject:
    """Click an element."""
    session = await _session(context)
    before = session.url

    async def clicking(page: Page) -> None:
        await (await _element(page, ref)).click(timeout=_action_milliseconds())

    await session.do(clicking)
    return session.result(clicked=_shown_ref(ref), **_moved(session, before))


@_browser_tool
async def browser_type(
    context: ToolContext, ref: Ref, text: Annotated[str, Field(description="For a list, the option to choose")]
) -> JsonObject:
    """Put text into a field in place of what is there, or choose an option of a list."""
    session = await _session(context)
    before = session.url
    typed = text

    async def typing(page: Page) -> None:
        nonlocal typed
        element = await _element(page, ref)
        kind = await element.evaluate("e => e.tagName + ' ' + e.type", timeout=_action_milliseconds())
        if kind == "INPUT password":
            typed = "***"
        if str(kind).startswith("SELECT"):
            await element.select_option(text, timeout=_action_milliseconds())
        else:
            await element.fill(text, timeout=_action_milliseconds())

    await session.do(typing)
    return session.result(typed=typed, element=_shown_ref(ref), **_moved(session, before))


@_browser_tool
async def browser_scroll(context: ToolContext, direction: Literal["up", "down"]) -> JsonObject:
    """Scroll the page by most of a screen. A snapshot of a long page begins at the view."""
    session = await _session(context)

    async def scrolling(page: Page) -> None:
        size = page.viewport_size or {"width": 0, "height": 0}
        await page.mouse.move(size["width"] / 2, size["height"] / 2)
        await page.mouse.wheel(0, SCROLL_PIXELS if direction == "down" else -SCROLL_PIXELS)

    await session.do(scrolling)
    return session.result(scrolled=direction)


@_browser_tool
async def browser_back(context: ToolContext) -> JsonObject:
    """Go back to the page before."""
    session = await _session(context)
    before = session.url
    await session.do(lambda page: page.go_back(wait_until="commit", timeout=_action_milliseconds()))
    if session.url == before:
        raise _failed("There is no page before this one")
    return session.result(url=session.url)


@_browser_tool
async def browser_press(
    context: ToolContext, key: Annotated[str, Field(description='Such as "Enter", "Tab" or "Control+a"')]
) -> JsonObject:
    """Press a key; it goes to the element that was typed into or clicked last."""
    session = await _session(context)
    before = session.url
    if not key:
        raise _failed('No key is named; name one, such as "Enter"')
    parts = (key.strip() or "Space").split("+") if key != "+" else ["+"]
    written = "+".join(_KEYS.get(part.lower(), part) for part in parts)
    await session.do(lambda page: page.keyboard.press(written))
    return session.result(pressed=key, **_moved(session, before))


@_browser_tool
async def browser_close(context: ToolContext) -> JsonObject:
    """Close the browser and forget its cookies; browser_navigate opens it anew."""
    session = await _session(context)
    await session.close()
    return session.result(closed=True)


@_browser_tool
async def browser_get_images(context: ToolContext) -> JsonObject:
    """List the images of the page: URL, description, size."""
    session = await _session(context)

    async def listing(page: Page) -> Any:
        return await page.locator("img").evaluate_all(_LIST_IMAGES, MAX_IMAGES)

    found = await session.act(listing, LIMIT_SECONDS / 3)
    images, count = _images(found)
    return session.result(images=images, count=count)


@tool(
    "browser",
    limit_seconds=_vision_limit,
    settings=(*browser_program.SETTINGS, *vision.vision_analyze.settings),
    missing=_vision_missing,
)
async def browser_vision(
    context: ToolContext, question: Annotated[str, Field(description="What to find out about the page")]
) -> JsonObject:
    """Have a vision model look at the page as it is on the screen. For what the snapshot does not tell."""
    session = await _session(context)

    async def shooting(page: Page) -> bytes:
        return await page.screenshot(
            type="jpeg", quality=_SCREENSHOT_QUALITY, timeout=_SCREENSHOT_SECONDS * 1000, scale="css"
        )

    picture = await session.act(shooting, _SCREENSHOT_SECONDS + 3)
    try:
        analysis = await vision.look(context, picture, question)
    except (PictureError, ToolError) as error:
        raise _failed(f"The screenshot could not be looked at: {error}") from None
    return session.result(analysis=analysis)


BROWSER_TOOLS = (
    browser_navigate,
    browser_snapshot,
    browser_click,
    browser_type,
    browser_scroll,
    browser_back,
    browser_press,
    browser_close,
    browser_get_images,
    browser_vision,
)


async def _session(context: ToolContext) -> BrowserSession:
    session_class, chromium_class = await asyncio.to_thread(_classes)
    session = context.state(session_class)
    session.chromium = context.services.shared(chromium_class)
    return session


def _classes() -> tuple[type[BrowserSession], type[Any]]:
    from tools.browser_process import Chromium  # noqa: PLC0415 - optional, and a third of a second
    from tools.browser_session import BrowserSession  # noqa: PLC0415

    return BrowserSession, Chromium


def _failed(message: str) -> ToolError:
    return ToolError(message, success=False)


def _web_address(url: str) -> str:
    """Return the URL with a scheme. Raises ToolError unless it is one of the web."""
    address = url.strip()
    scheme = _SCHEME.match(address)
    if scheme is None:
        return f"https://{address.removeprefix('//')}"
    if scheme[1].lower() not in ("http", "https"):
        raise _failed(f"Blocked: only http and https pages can be opened, not {scheme[1].lower()[:20]}:")
    return address


async def _element(page: Page, ref: str) -> Locator:
    """Return the element of the last snapshot that is meant. Raises ToolError."""
    found = _REF.fullmatch(ref.strip())
    if not found:
        raise _failed(f"{ref[:50]!r} is no reference; take one from browser_snapshot, such as @e12")
    element = page.locator(f"aria-ref={found[1]}")
    if not await element.count():
        raise _failed(f"There is no element {_shown_ref(ref)} (any more); take a new browser_snapshot")
    return element


def _shown_ref(ref: str) -> str:
    found = _REF.fullmatch(ref.strip())
    return f"@{found[1]}" if found else ref


def _action_milliseconds() -> float:
    from tools.browser_session import ACTION_SECONDS  # noqa: PLC0415 - imported by now

    return ACTION_SECONDS * 1000


def _moved(session: BrowserSession, before: str) -> JsonObject:
    return {} if session.url == before else {"url": session.url}


def _images(found: Any) -> tuple[list[JsonObject], int]:
    """Return what a page's script said of its images, of which nothing can be relied on."""
    match found:
        case [int(count), list(images)]:
            return [_image(image) for image in images[:MAX_IMAGES]], count
    return [], 0


def _short(src: str) -> str:
    """Return an image's URL, without the image where it is all in there."""
    kind, comma, data = src.partition(",")
    if comma and kind.lower().startswith("data:"):
        size = len(data) * 3 // 4 - data[-2:].count("=") if kind.lower().endswith(";base64") else len(data)
        return f"{kind[:_TEXT_CHARS]},…({size} bytes)"
    return f"{src[:_URL_CHARS]}… [{len(src)} characters]" if len(src) > _URL_CHARS else src


def _image(image: Any) -> JsonObject:
    match image:
        case [str(src), str(alt), int(width), int(height)]:
            return {"src": _short(src), "alt": alt[:_TEXT_CHARS], "width": width, "height": height}
    return {"src": "", "alt": "", "width": 0, "height": 0}
