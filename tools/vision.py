"""Looking at pictures: ``vision_analyze``, and ``look`` for other tools that have one.

A picture is named by an http(s) URL, a path inside the rollout's sandbox or a data URL; never a file of the host. It is
asked about through the run's own model and endpoint unless ``VISION_MODEL`` or ``VISION_BASE_URL`` names another, whose
key is ``VISION_API_KEY``, or else what the environment holds for that host.
"""

from __future__ import annotations

import base64
from typing import Annotated

from pydantic import Field

from sandboxes.base import SandboxFileError
from tools.addresses import ALLOWED_HOSTS_VARIABLE
from tools.base import JsonObject, ToolContext, ToolError, tool
from tools.endpoint_settings import KEY_VARIABLES, endpoint_variables, named_endpoint, wrong_endpoint
from tools.picture_urls import MAX_IMAGE_BYTES, is_picture_url, picture_at, wrong_hosts
from tools.pictures import PictureError, Pictures
from tools.services import Question, Settings

ANSWER_SECONDS = 120.0
LIMIT_SECONDS = 420.0  # of a whole call: three downloads, two answers
TEMPERATURE = 0.1

_UNSEEN = "The image could not be looked at, so nothing can be said about it."


def missing(settings: Settings) -> str:
    """Say what is wrong with the settings, if anything is."""
    return wrong_hosts(settings) or wrong_endpoint("VISION", settings, needs="VISION_MODEL")


@tool(
    "vision",
    limit_seconds=lambda limits: max(limits.max_call_seconds, LIMIT_SECONDS),
    settings=(*endpoint_variables("VISION"), "VISION_MODEL", *KEY_VARIABLES, ALLOWED_HOSTS_VARIABLE),
    missing=missing,
)
async def vision_analyze(
    context: ToolContext,
    image_url: Annotated[str, Field(description="http(s) URL, file path or data URL of the image")],
    question: Annotated[str, Field(description="What to find out about it")],
) -> JsonObject:
    """Look at an image (PNG, JPEG, GIF, WebP, BMP) and answer a question about it."""
    try:
        data = await _read(context, image_url.strip())
        return {"success": True, "analysis": await look(context, data, question)}
    except (PictureError, SandboxFileError, ToolError) as error:
        raise ToolError(f"Error analyzing image: {error}", success=False, analysis=_UNSEEN) from None


async def look(context: ToolContext, image: bytes, question: str) -> str:
    """Return what a model says about an image, asking once more when it says nothing.

    Raises ToolError when there is no answer, or the bytes are no picture that can be sent.
    """
    try:
        picture = await context.services.shared(Pictures).fit(image)
    except PictureError as error:
        raise ToolError(str(error)) from None
    url = f"data:{picture.media_type};base64,{base64.b64encode(picture.data).decode()}"
    parts = [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": url}}]
    settings = context.services.settings
    asked = Question(
        messages=[{"role": "user", "content": parts}],
        model=settings.get("VISION_MODEL", ""),
        temperature=TEMPERATURE,
        timeout_seconds=ANSWER_SECONDS,
        **named_endpoint("VISION", settings),
    )
    for _ in range(2):
        if text := (await context.ask(asked)).text.strip():
            return text
    raise ToolError("the vision model said nothing, twice")


async def _read(context: ToolContext, image_url: str) -> bytes:
    """Return the image's bytes, wherever it is. Raises the errors that vision_analyze turns into its own."""
    if is_picture_url(image_url):
        return await picture_at(image_url, context.services.settings)
    path = image_url.removeprefix("file://")
    if not path:
        raise PictureError("image_url is empty")
    sandbox = await context.open_sandbox()
    data = await sandbox.read_file(path, max_bytes=MAX_IMAGE_BYTES + 1)
    if len(data) > MAX_IMAGE_BYTES:
        raise PictureError(f"the file is larger than {MAX_IMAGE_BYTES:,} bytes")
    return data
