"""Making pictures: ``image_generate``, over an OpenAI-compatible images endpoint or FAL.

``IMAGE_MODEL`` and ``IMAGE_BASE_URL`` (either will do: the address is the run's own endpoint unless another is named)
choose the first, else ``FAL_KEY`` the second. The picture is saved into the rollout's sandbox and told by its path. A
picture that comes as a URL is fetched under the address guard, as any other.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from pydantic import Field

from sandboxes.base import SandboxFileError
from tools.addresses import ALLOWED_HOSTS_VARIABLE
from tools.base import JsonObject, ToolContext, ToolError, tool
from tools.endpoint_settings import KEY_VARIABLES, endpoint_variables, named_endpoint, wrong_endpoint
from tools.picture_urls import decoded_base64, is_picture_url, picture_at, wrong_hosts
from tools.pictures import PictureError, Pictures
from tools.services import AuxiliaryError, Post, Settings

ANSWER_SECONDS = 180.0
LIMIT_SECONDS = 600.0  # of a whole call: two requests, three downloads
PWD_SECONDS = 30.0
FOLDER = "generated_images"
FAL_BASE_URL = "https://fal.run"
FAL_MODEL = "fal-ai/flux-2/klein/9b"

_SHAPES = ("landscape", "square", "portrait")
_SIZES = {"landscape": "1536x1024", "square": "1024x1024", "portrait": "1024x1536"}
_DALL_E_3_SIZES = {"landscape": "1792x1024", "square": "1024x1024", "portrait": "1024x1792"}
_FAL_SIZES = {"landscape": "landscape_16_9", "square": "square_hd", "portrait": "portrait_16_9"}


def missing(settings: Settings) -> str:
    """Say what has to be set."""
    if _is_openai(settings):
        return wrong_hosts(settings) or wrong_endpoint("IMAGE", settings)
    if "FAL_KEY" in settings:
        return wrong_hosts(settings) or wrong_endpoint("FAL", settings)
    return "set IMAGE_MODEL (and IMAGE_BASE_URL unless it is at the run's endpoint), or FAL_KEY"


@tool(
    "image_gen",
    limit_seconds=lambda limits: max(limits.max_call_seconds, LIMIT_SECONDS),
    settings=(
        *endpoint_variables("IMAGE"),
        "IMAGE_MODEL",
        *("FAL_KEY", "FAL_MODEL", "FAL_BASE_URL"),
        *KEY_VARIABLES,
        ALLOWED_HOSTS_VARIABLE,
    ),
    missing=missing,
)
async def image_generate(
    context: ToolContext,
    prompt: Annotated[str, Field(description="What the image shows, in detail")],
    aspect_ratio: Annotated[str, Field(json_schema_extra={"enum": list(_SHAPES)})] = "landscape",
) -> JsonObject:
    """Make an image from a description. Returns the path of the file."""
    shape = aspect_ratio.strip().lower()
    shape = shape if shape in _SHAPES else "landscape"
    try:
        ask = _ask_openai if _is_openai(context.services.settings) else _ask_fal
        made = await ask(context, prompt, shape)
        path = await _saved(context, await _bytes_of(made, context.services.settings))
    except AuxiliaryError as error:
        raise _failed(error, error.kind) from None
    except PictureError as error:
        raise _failed(error, "bad_image") from None
    except SandboxFileError as error:
        raise _failed(error, "file") from None
    return {"success": True, "image": path}


def _is_openai(settings: Settings) -> bool:
    return "IMAGE_MODEL" in settings or "IMAGE_BASE_URL" in settings


def _failed(error: Exception, kind: str) -> ToolError:
    return ToolError(f"Error generating image: {error}", success=False, image=None, error_type=kind)


async def _ask_openai(context: ToolContext, prompt: str, shape: str) -> JsonObject:
    """Return what the endpoint says of the picture: {b64_json} or {url}. Raises AuxiliaryError."""
    settings = context.services.settings
    model = settings.get("IMAGE_MODEL", "")
    sizes = _DALL_E_3_SIZES if "dall-e-3" in model else _SIZES
    body = {"prompt": prompt, "n": 1, "size": sizes[shape], **({"model": model} if model else {})}

    async def ask() -> JsonObject:
        post = Post("images/generations", body, timeout_seconds=ANSWER_SECONDS, **named_endpoint("IMAGE", settings))
        return await _answer(context, post)

    try:
        answer = await ask()
    except AuxiliaryError as error:
        if error.kind != "bad_request" or "size" not in str(error):
            raise
        del body["size"]  # a model with sizes of its own; one is better than none
        answer = await ask()
    return _first(answer.get("data"))


async def _ask_fal(context: ToolContext, prompt: str, shape: str) -> JsonObject:
    """Return what FAL says of the picture: {url, ...}. Raises AuxiliaryError."""
    settings = context.services.settings
    post = Post(
        settings.get("FAL_MODEL", FAL_MODEL),
        {"prompt": prompt, "image_size": _FAL_SIZES[shape], "num_images": 1},
        base_url=settings.get("FAL_BASE_URL", FAL_BASE_URL),
        api_key=settings["FAL_KEY"],
        key_scheme="Key",
        timeout_seconds=ANSWER_SECONDS,
    )
    answer = await _answer(context, post)
    return _first(answer.get("images") or [answer.get("image")])


async def _answer(context: ToolContext, post: Post) -> JsonObject:
    """Return what is answered, and count what it cost. Raises AuxiliaryError."""
    posted = await context.services.endpoints.post(post)
    context.spent += posted.spent
    return posted.body


def _first(items: Any) -> JsonObject:
    item = items[0] if isinstance(items, list) and items else None
    if not isinstance(item, dict):
        raise AuxiliaryError("the answer holds no image", "bad_response")
    return item


async def _bytes_of(made: JsonObject, settings: Settings) -> bytes:
    """Return the file. Raises PictureError."""
    encoded, url = made.get("b64_json"), made.get("url")
    if isinstance(encoded, str) and encoded:
        return decoded_base64(encoded)
    if isinstance(url, str) and is_picture_url(url):
        return await picture_at(url, settings)
    raise PictureError("the answer holds neither an image nor its address")


async def _saved(context: ToolContext, data: bytes) -> str:
    """Write it into the sandbox; return the path. Raises PictureError, SandboxFileError, SandboxError."""
    ending = (await context.services.shared(Pictures).check(data)).rpartition("/")[2].replace("jpeg", "jpg")
    name = f"{FOLDER}/image_{hashlib.sha256(data).hexdigest()[:12]}.{ending}"
    sandbox = await context.open_sandbox()
    here = (await sandbox.exec_plain("pwd", timeout_seconds=PWD_SECONDS)).output.strip()
    path = f"{here.rstrip('/')}/{name}" if here.startswith("/") and "\n" not in here else name
    await sandbox.write_file(path, data)
    return path
