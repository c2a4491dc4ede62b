"""What Playwright says of a page, put so that it can be used: requests, errors, and what must not be shown.

Imports Playwright: import it where it is used.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from playwright.async_api import Error, Frame, Page, Request
from playwright.async_api import TimeoutError as SlowError

TEXT_CHARS = 300  # of what a page says, in what is told of it
_FRAME_SECONDS = 3.0  # in which a frame that lives says something
_VALUES = "fields => fields.map(field => field.value)"


def is_of_page(request: Request, *, if_unknown: bool) -> bool:
    """Tell whether a whole page was to be loaded by it; of a tab that has just been opened none can tell."""
    if not request.is_navigation_request():
        return False
    try:
        return request.frame.parent_frame is None
    except Error:
        return if_unknown


async def passwords(page: Page) -> list[str]:
    """Return what is in the page's password fields, which is for nobody to read."""

    async def of(frame: Frame) -> Any:
        with suppress(Error, TimeoutError):  # a frame that has gone or hangs shows nothing either
            async with asyncio.timeout(_FRAME_SECONDS):
                return await frame.locator("input[type=password]").evaluate_all(_VALUES)
        return []

    found = await asyncio.gather(*map(of, page.frames))
    return [value for values in found if isinstance(values, list) for value in values if isinstance(value, str)]


def explained(error: Error) -> str:
    """Return what the model can use of an error's text."""
    lines = str(error).splitlines() or ["unknown error"]
    if covering := next((line.strip(" -") for line in lines if "intercepts pointer events" in line), ""):
        return f"The element is covered: {covering[:TEXT_CHARS]}"
    if "Download is starting" in lines[0]:
        return "This is a file, not a page, and downloads are refused; use another tool to fetch it"
    first = lines[0].partition(": ")[2] or lines[0]  # in front stands the name of a method
    if isinstance(error, SlowError):
        state = next((line.strip(" -") for line in reversed(lines) if "element is not" in line), "")
        return f"It took too long{f' ({state[:TEXT_CHARS]})' if state else f': {first[:TEXT_CHARS]}'}"
    return first[:TEXT_CHARS]
