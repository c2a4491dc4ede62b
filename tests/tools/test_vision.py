from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import web

from endpoints.scripted import ScriptedEndpoint
from tests.tools.models import endpoint, image, opened, plain, rollout
from tests.tools.web_server import Handler, page, redirect, serve
from tools import picture_urls
from tools.base import ToolError
from tools.vision import look, missing, vision_analyze

Json = dict[str, Any]
CAT = {"content": "<think>fur</think>a cat", "usage": {"prompt_tokens": 9, "completion_tokens": 2, "cost": 0.25}}
PNG = image("PNG")
ALLOWED = {"WEB_ALLOWED_HOSTS": "127.0.0.1"}


def analyze(
    served: ScriptedEndpoint,
    image_url: str,
    *,
    files: Mapping[str, bytes] | None = None,
    settings: Mapping[str, str] | None = None,
) -> Json:
    """Call the tool in a sandbox with these files; a failure is what the model would be told."""

    async def run() -> Json:
        async with rollout(served.base_url, settings) as context:
            sandbox = await context.open_sandbox()
            for name, data in (files or {}).items():
                await sandbox.write_file(name, data)
            try:
                result = await vision_analyze(context, {"image_url": image_url, "question": "what is it?"})
            except ToolError as error:
                result = {**error.details, "error": str(error)}
            return {**result, "spent": context.spent}

    return asyncio.run(run())


def sent_image(served: ScriptedEndpoint) -> tuple[str, bytes]:
    """The image of the last question: its media type and bytes."""
    text, shown = served.requests[-1].body["messages"][0]["content"]
    assert text == {"type": "text", "text": "what is it?"}
    head, _, body = shown["image_url"]["url"].partition(",")
    return head.removeprefix("data:").removesuffix(";base64"), base64.b64decode(body)


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("path", ["a.png", "./a.png", "~/a.png", "sub/a picture.png"])
def test_a_file_of_the_sandbox_is_looked_at(path: str) -> None:
    with endpoint(CAT) as served:
        result = analyze(served, path, files={path: PNG})
        assert sent_image(served) == ("image/png", PNG)
    spent = result.pop("spent")
    assert result == {"success": True, "analysis": "a cat"}
    assert (spent.requests, spent.prompt_tokens, spent.completion_tokens, spent.cost_usd) == (1, 9, 2, 0.25)


def test_a_file_url_is_a_file_of_the_sandbox() -> None:
    with endpoint(CAT) as served:
        assert analyze(served, "file://~/a.png", files={"~/a.png": PNG})["success"]


def test_the_question_goes_out_as_it_should() -> None:
    with endpoint(CAT) as served:
        analyze(served, data_url(PNG))
        body = served.requests[-1].body
    assert (body["model"], body["temperature"]) == ("some/model", 0.1)
    assert body.keys() == {"model", "temperature", "messages"}


def test_a_large_image_is_shrunk() -> None:
    with endpoint(CAT) as served:
        assert analyze(served, "a.bmp", files={"a.bmp": plain("BMP", (4000, 100))})["success"]
        kind, data = sent_image(served)
    assert (kind, opened(data).size) == ("image/png", (2048, 51))


@pytest.mark.parametrize(
    ("image_url", "data"),
    [
        (data_url(PNG), PNG),
        (data_url(PNG).rstrip("="), PNG),
        (f"  {data_url(PNG)}\n".replace("image/png", ""), PNG),
        ("data:image/gif," + "".join(f"%{byte:02x}" for byte in image("GIF")), None),
    ],
)
def test_a_data_url_is_looked_at(image_url: str, data: bytes | None) -> None:
    with endpoint(CAT) as served:
        assert analyze(served, image_url)["success"]
        assert data is None or sent_image(served) == ("image/png", data)


def fetched(*handlers: Handler, settings: Mapping[str, str] = ALLOWED) -> tuple[Json, int]:
    """Look at what a web server gives, the last for ever; return the result and how often it was asked."""

    left = [*handlers]

    async def in_turn(request: web.Request) -> web.StreamResponse:
        return await (left.pop(0) if len(left) > 1 else left[0])(request)

    async def run() -> tuple[Json, int]:
        async with serve({"/a.png": in_turn}) as site, rollout(served.base_url, settings) as context:
            try:
                result = await vision_analyze(context, {"image_url": site.url("/a.png"), "question": "what is it?"})
            except ToolError as error:
                result = {**error.details, "error": str(error)}
            return result, len(site.requests)

    with endpoint(CAT) as served:
        return asyncio.run(run())


def status(number: int) -> Handler:
    async def handler(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=number)

    return handler


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_urls, "PAUSES_SECONDS", (0.01, 0.01))


def test_an_image_of_the_web_is_fetched() -> None:
    assert fetched(page(PNG, "text/plain")) == ({"success": True, "analysis": "a cat"}, 1)
    assert fetched(status(503), status(429), page(PNG))[0]["success"]


def test_what_cannot_be_fetched_is_told() -> None:
    result, count = fetched(status(404))
    assert "HTTP 404" in result["error"]
    assert count == 1
    result, count = fetched(status(503))
    assert "HTTP 503" in result["error"]
    assert count == 3


def test_private_addresses_are_refused() -> None:
    result, count = fetched(page(PNG), settings={})
    assert "Blocked: URL targets a private or internal network address" in result["error"]
    assert (result["success"], count) == (False, 0)
    assert "Blocked" in fetched(redirect("http://169.254.169.254/latest/meta-data"))[0]["error"]


def test_a_web_page_is_no_image() -> None:
    assert "a web page" in fetched(page("<!DOCTYPE html><p>sign in"))[0]["error"]


@pytest.mark.parametrize(
    ("image_url", "words"),
    [
        ("none.png", "No such file"),
        ("", "image_url is empty"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,abcde", "no valid base64"),
        ("data:image/svg+xml,%3Csvg%20xmlns='x'/%3E", "SVG is a drawing"),
        (data_url(PNG[:40]), "broken or cut short"),
        ("http://", "no host|could not be fetched|not a valid URL|only http and https"),
    ],
)
def test_what_cannot_be_looked_at_is_told(image_url: str, words: str) -> None:
    with endpoint(CAT) as served:
        result = analyze(served, image_url)
        assert not served.requests
    assert result["success"] is False
    assert result["error"].startswith("Error analyzing image: ")
    assert any(word.lower() in result["error"].lower() for word in words.split("|")), result["error"]
    assert result["analysis"]


def test_a_file_beyond_the_bound_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.vision.MAX_IMAGE_BYTES", 1000)
    with endpoint(CAT) as served:
        assert "larger than 1,000 bytes" in analyze(served, "a.png", files={"a.png": image("PNG")})["error"]


def test_files_of_the_host_are_out_of_reach(tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("host")
    (outside / "a.png").write_bytes(PNG)

    async def run() -> Any:
        async with rollout(served.base_url) as context:
            opened_with = []
            sandbox = await context.open_sandbox()

            class Watching:
                async def read_file(self, path: str, *, max_bytes: int) -> bytes:
                    opened_with.append(path)
                    return await sandbox.read_file("none", max_bytes=max_bytes)

            async def watched() -> Any:
                return Watching()

            context.open_sandbox = watched
            with pytest.raises(ToolError):
                await vision_analyze(context, {"image_url": f"{outside}/a.png", "question": "?"})
            return opened_with

    with endpoint(CAT) as served:
        assert asyncio.run(run()) == [f"{outside}/a.png"]  # the sandbox, and nobody else, was asked for it
        assert not served.requests


# The model


def test_nothing_said_is_asked_again_once() -> None:
    with endpoint({"content": "", "reasoning": "hm", "times": 1}, CAT) as served:
        result = analyze(served, data_url(PNG))
        assert (result["analysis"], result["spent"].requests) == ("a cat", 2)
    with endpoint({"content": "<think>hm</think>"}) as served:
        assert "said nothing, twice" in analyze(served, data_url(PNG))["error"]
        assert len(served.requests) == 2


def test_a_refusal_is_told() -> None:
    with endpoint({"status": 400, "error": "this model takes no images", "times": None}) as served:
        result = analyze(served, data_url(PNG))
    assert result["error"] == "Error analyzing image: some/model: HTTP 400: this model takes no images scripted"
    assert result["success"] is False


def test_another_model_is_asked_with_its_own_key() -> None:
    with endpoint({"content": "wrong"}) as own, endpoint(CAT) as other:
        settings = {"VISION_MODEL": "eyes", "VISION_BASE_URL": other.base_url, "VISION_API_KEY": "sk-eyes-0123456789"}
        assert analyze(own, data_url(PNG), settings=settings)["analysis"] == "a cat"
        assert not own.requests
        (asked,) = other.requests
    assert (asked.body["model"], asked.headers["authorization"]) == ("eyes", "Bearer sk-eyes-0123456789")


def test_another_model_of_the_runs_endpoint() -> None:
    with endpoint(CAT) as own:
        analyze(own, data_url(PNG), settings={"VISION_MODEL": "eyes", "VISION_API_KEY": "sk-of-nobody"})
        (asked,) = own.requests
    assert asked.body["model"] == "eyes"
    assert "sk-of-nobody" not in asked.headers["authorization"]


def test_settings_that_make_no_sense_are_told() -> None:
    assert missing({}) == ""
    assert missing({"VISION_MODEL": "eyes"}) == ""
    assert missing({"VISION_MODEL": "eyes", "VISION_BASE_URL": "https://a/v1"}) == ""
    assert missing({"VISION_BASE_URL": "https://a/v1"}).startswith("VISION_BASE_URL needs VISION_MODEL")
    assert "is no host" in missing({"WEB_ALLOWED_HOSTS": "a/b"})
    assert "must be http" in missing({"VISION_MODEL": "eyes", "VISION_BASE_URL": "localhost:8000"})


def test_other_tools_can_look_at_their_pictures() -> None:
    async def run() -> tuple[str, str]:
        async with rollout(served.base_url) as context:
            said = await look(context, PNG, "what is it?")
            with pytest.raises(ToolError) as caught:
                await look(context, b"no picture", "what is it?")
            return said, str(caught.value)

    with endpoint(CAT) as served:
        assert asyncio.run(run()) == ("a cat", "not an image: only PNG, JPEG, GIF, WebP and BMP are understood")
