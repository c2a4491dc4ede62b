from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from endpoints.picture import picture
from endpoints.scripted import ScriptedEndpoint
from tests.tools.models import endpoint, image, rollout
from tests.tools.web_server import Handler, Site, page, serve
from tools import picture_urls
from tools.base import ToolError
from tools.image_gen import image_generate, missing
from tools.services import Spent

Json = dict[str, Any]
MODEL = {"IMAGE_MODEL": "brush-1"}
PNG = image("PNG")
DATA_URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


def made(served: ScriptedEndpoint, settings: Mapping[str, str] = MODEL, **arguments: Any) -> tuple[Json, bytes, Spent]:
    """Call the tool; return what the model is told, the file it is told of, and what it cost."""

    async def run() -> tuple[Json, bytes, Spent]:
        async with rollout(served.base_url, settings) as context:
            try:
                result = await image_generate(context, {"prompt": "a cat", **arguments})
            except ToolError as error:
                return {**error.details, "error": str(error)}, b"", context.spent
            sandbox = await context.open_sandbox()
            return result, await sandbox.read_file(result["image"], max_bytes=10**7), context.spent

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_urls, "PAUSES_SECONDS", (0.01, 0.01))


# An endpoint like OpenAI's


def test_an_image_is_saved_into_the_sandbox() -> None:
    usage = {"input_tokens": 7, "output_tokens": 1000, "cost": 0.04}
    with endpoint({"to": "images", "image": "", "usage": usage}) as served:
        result, data, spent = made(served)
        (asked,) = served.requests
    assert result.keys() == {"success", "image"}
    assert result["success"]
    path = Path(result["image"])
    assert (path.is_absolute(), path.parent.name, path.suffix) == (True, "generated_images", ".png")
    assert data == picture("a cat")
    assert spent == Spent(1, 7, 1000, 0, 0, 0.04)
    assert asked.path == "/v1/images/generations"
    assert asked.body == {"model": "brush-1", "prompt": "a cat", "n": 1, "size": "1536x1024"}


def test_the_path_holds_wherever_the_model_goes() -> None:
    async def run() -> bytes:
        async with rollout(served.base_url, MODEL) as context:
            sandbox = await context.open_sandbox()
            await sandbox.exec("mkdir -p 'a b' && cd 'a b'", timeout_seconds=20)
            path = (await image_generate(context, {"prompt": "a cat"}))["image"]
            assert "/a b/generated_images/" in path
            await sandbox.exec("cd /", timeout_seconds=20)
            return await sandbox.read_file(path, max_bytes=10**7)

    with endpoint({"to": "images", "image": ""}) as served:
        assert asyncio.run(run()) == picture("a cat")


@pytest.mark.parametrize(
    ("model", "ratio", "size"),
    [
        ("brush-1", "square", "1024x1024"),
        ("brush-1", " Portrait ", "1024x1536"),
        ("brush-1", "16:9", "1536x1024"),
        ("dall-e-3", "landscape", "1792x1024"),
    ],
)
def test_the_shape_becomes_a_size(model: str, ratio: str, size: str) -> None:
    with endpoint({"to": "images", "image": ""}) as served:
        assert made(served, {"IMAGE_MODEL": model}, aspect_ratio=ratio)[0]["success"]
        assert served.requests[-1].body["size"] == size


def test_a_model_with_sizes_of_its_own_chooses() -> None:
    refusal = {"to": "images", "status": 400, "error": "Invalid size: 1536x1024", "times": 1}
    with endpoint(refusal, {"to": "images", "image": ""}) as served:
        assert made(served)[0]["success"]
        assert ["size" in asked.body for asked in served.requests] == [True, False]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_the_ending_is_that_of_the_bytes(kind: str) -> None:
    data = image(kind)
    with endpoint({"to": "images", "image": base64.b64encode(data).decode()}) as served:
        result, saved, _ = made(served)
    assert saved == data
    assert result["image"].endswith({"JPEG": ".jpg"}.get(kind, f".{kind.lower()}"))


def test_a_data_url_will_do() -> None:
    with endpoint({"to": "images", "image": DATA_URL}) as served:
        assert made(served)[1] == PNG


def test_its_own_endpoint_gets_its_own_key() -> None:
    with endpoint({"content": "wrong"}) as own, endpoint({"to": "images", "image": ""}) as other:
        settings = {"IMAGE_BASE_URL": other.base_url, "IMAGE_API_KEY": "sk-brush-0123456789"}
        assert made(own, settings)[0]["success"]
        (asked,) = other.requests
    assert asked.headers["authorization"] == "Bearer sk-brush-0123456789"
    assert "model" not in asked.body


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ({"status": 401, "error": "bad key"}, "auth", "images/generations: HTTP 401: bad key"),
        ({"status": 400, "error": "Your request was rejected by our safety system"}, "content_blocked", "safety"),
        ({"status": 400, "error": "no such model"}, "model_not_found", "no such model"),
        ({"body": {"data": []}}, "bad_response", "holds no image"),
        ({"body": {"data": [{}]}}, "bad_image", "neither an image nor its address"),
        ({"body": {"data": [{"url": "file:///etc/passwd"}]}}, "bad_image", "neither an image nor its address"),
        ({"body": {"data": [{"b64_json": "abcde"}]}}, "bad_image", "no valid base64"),
        ({"image": base64.b64encode(PNG[:8]).decode()}, "bad_image", "broken or cut short"),
        ({"image": base64.b64encode(PNG[:-200]).decode()}, "bad_image", "broken or cut short"),
        ({"image": base64.b64encode(b"<svg/>").decode()}, "bad_image", "SVG"),
        ({"image": "http://127.0.0.1:9/a.png"}, "bad_image", "Blocked"),
    ],
)
def test_what_goes_wrong_is_told(line: Json, kind: str, words: str) -> None:
    with endpoint({"to": "images", "times": None, **line}) as served:
        result, _, _ = made(served)
    assert (result["success"], result["image"], result["error_type"]) == (False, None, kind)
    assert words in result["error"]


@pytest.mark.parametrize(
    ("usage", "spent"),
    [
        ({"input_tokens": "many", "output_tokens": -3, "cost": float("inf")}, Spent(1)),
        ({"input_tokens": 10**400, "output_tokens": 10**13, "cost": 5e9}, Spent(1)),
        ({"input_tokens": True, "output_tokens": [3], "cost": True}, Spent(1)),
        ({"input_tokens": "7", "output_tokens": 3.0, "cost": "0.04"}, Spent(1, 7, 3, cost_usd=0.04)),
        ({"prompt_tokens": 7, "completion_tokens": 3}, Spent(1, 7, 3)),
    ],
)
def test_an_images_cost_is_read_as_any_other(usage: Json, spent: Spent) -> None:
    body = {"data": [{"b64_json": base64.b64encode(PNG).decode()}], "usage": usage}
    with endpoint({"to": "images", "body": body}) as served:
        result, _, counted = made(served)
    assert result["success"], result
    assert counted == spent


def test_a_folder_that_cannot_be_written_is_told() -> None:
    async def run() -> Json:
        async with rollout(served.base_url, MODEL) as context:
            await (await context.open_sandbox()).write_file("generated_images", b"a file is in the way")
            with pytest.raises(ToolError) as caught:
                await image_generate(context, {"prompt": "a cat"})
            return caught.value.details

    with endpoint({"to": "images", "image": ""}) as served:
        assert asyncio.run(run()) == {"success": False, "image": None, "error_type": "file"}


# FAL, by its documented wire format


def fal(answer: Handler, **more: str) -> tuple[Json, bytes, list[tuple[str, str, Any]]]:
    """Ask a server that speaks as FAL; return the result, the file, and what was asked: path, key, body."""
    asked: list[tuple[str, str, Any]] = []

    async def run() -> tuple[Json, bytes]:
        async def noting(request: web.Request) -> web.StreamResponse:
            asked.append((request.path, request.headers["Authorization"], await request.json()))
            return await answer(request)

        pages = {"/fal-ai/flux-2/klein/9b": noting, "/own/model": noting, "/files/a.png": page(PNG)}
        async with serve(pages) as site:
            site_of.append(site)
            settings = {"FAL_KEY": "fal-id:secret", "FAL_BASE_URL": site.url()[:-1], **more}
            async with rollout("http://127.0.0.1:9/v1", settings) as context:
                try:
                    result = await image_generate(context, {"prompt": "a cat", "aspect_ratio": "portrait"})
                except ToolError as error:
                    return {**error.details, "error": str(error)}, b""
                sandbox = await context.open_sandbox()
                return result, await sandbox.read_file(result["image"], max_bytes=10**7)

    site_of: list[Site] = []
    return *asyncio.run(run()), asked


def fal_image(request: web.Request) -> Json:
    url = f"http://{request.host}/files/a.png"
    return {"images": [{"url": url, "width": 40, "height": 30, "content_type": "image/png"}], "seed": 1}


async def fal_answer(request: web.Request) -> web.StreamResponse:
    return web.json_response(fal_image(request))


async def fal_one_image(request: web.Request) -> web.StreamResponse:
    return web.json_response({"image": fal_image(request)["images"][0]})


async def fal_refusal(_request: web.Request) -> web.StreamResponse:
    return web.json_response({"detail": "User is locked. Reason: Exhausted balance."}, status=403)


def test_fal_makes_an_image_that_is_fetched() -> None:
    result, data, asked = fal(fal_answer, WEB_ALLOWED_HOSTS="127.0.0.1")
    assert result["success"]
    assert data == PNG
    body = {"prompt": "a cat", "image_size": "portrait_16_9", "num_images": 1}
    assert asked == [("/fal-ai/flux-2/klein/9b", "Key fal-id:secret", body)]


def test_fals_other_models_and_forms() -> None:
    result, data, asked = fal(fal_one_image, WEB_ALLOWED_HOSTS="127.0.0.1", FAL_MODEL="own/model")
    assert (result["success"], data, asked[0][0]) == (True, PNG, "/own/model")


def test_fals_image_is_fetched_under_the_guard() -> None:
    result, _, _ = fal(fal_answer)
    assert (result["error_type"], "Blocked" in result["error"]) == ("bad_image", True)


def test_fals_refusal_is_told_without_the_key() -> None:
    result, _, asked = fal(fal_refusal)
    assert "HTTP 403: User is locked. Reason: Exhausted balance." in result["error"]
    assert len(asked) == 1
    assert "secret" not in str(result)


# Which of them


def test_it_needs_to_be_set_up() -> None:
    assert missing({}) == "set IMAGE_MODEL (and IMAGE_BASE_URL unless it is at the run's endpoint), or FAL_KEY"
    assert missing({"OPENAI_API_KEY": "sk"})
    assert missing(MODEL) == missing({"FAL_KEY": "k"}) == missing({"IMAGE_BASE_URL": "http://a/v1"}) == ""
    assert "must be http" in missing({"IMAGE_BASE_URL": "a/v1", "FAL_KEY": "k"})
    assert "must be http" in missing({"FAL_BASE_URL": "fal.run", "FAL_KEY": "k"})


def test_the_images_endpoint_wins_over_fal() -> None:
    with endpoint({"to": "images", "image": ""}) as served:
        assert made(served, {**MODEL, "FAL_KEY": "k", "FAL_BASE_URL": "http://127.0.0.1:9"})[0]["success"]
