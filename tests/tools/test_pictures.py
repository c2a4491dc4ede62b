from __future__ import annotations

import asyncio
import importlib.util
import io
import os
import struct
import time
import zlib
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.program import descendants
from tests.tools.models import image, opened, plain
from tools import pictures
from tools.pictures import MAX_SENT_BYTES, MAX_SIDE_PIXELS, Picture, PictureError, Pictures, media_type_of, size_of
from tools.shrink import fitted

FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif", "BMP": "image/bmp"}
SIZE = (40, 30)
SVG = b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"><rect width="1"/></svg>'


def decoders() -> list[int]:
    """The processes that decode now."""

    def decodes(pid: int) -> bool:
        try:
            return b"shrink.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:  # gone
            return False

    return [pid for pid in descendants(os.getpid()) if decodes(pid)]


def fit(data: bytes) -> Picture:
    return asyncio.run(Pictures({}).fit(data))


def refused(data: bytes) -> str:
    with pytest.raises(PictureError) as caught:
        fit(data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is huge."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


@pytest.fixture
def no_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def without(name: str, *more: Any) -> ModuleSpec | None:
        return None if name == "PIL" else found(name, *more)

    monkeypatch.setattr("importlib.util.find_spec", without)


# What it is


@pytest.mark.parametrize("kind", FORMATS)
def test_the_kind_is_told_by_the_bytes(kind: str) -> None:
    assert media_type_of(image(kind)) == FORMATS[kind]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("GIF", {}),
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("JPEG", {"exif": b"Exif\0\0" + b"x" * 99}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"icc_profile": b"x" * 200}),
    ],
)
def test_the_size_is_read_off_the_header(kind: str, options: dict[str, Any]) -> None:
    assert size_of(image(kind, (321, 123), **options)) == (321, 123)


@given(st.sampled_from(list(FORMATS)), st.integers(0, 200), st.binary(max_size=40))
def test_any_bytes_have_a_kind_and_a_size_or_none(kind: str, length: int, rest: bytes) -> None:
    data = image(kind)[:length] + rest
    assert media_type_of(data) in {"", *FORMATS.values()}
    assert min(size_of(data)) >= 0


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "the file is empty"),
        (SVG, "SVG is a drawing"),
        (b"  <svg/>", "SVG is a drawing"),
        (b"<!DOCTYPE html><p>hi", "a web page"),
        (b'{"error": 1}', "a web page or a text"),
        (b"BM is how this text begins", "not an image"),
        (b"%PDF-1.4", "not an image"),
        pytest.param(os.urandom(64).replace(b"\xff", b"x"), "not an image", id="noise"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "not an image"),  # a format whose decoder would run another program
    ],
)
def test_what_is_no_image_is_refused(data: bytes, words: str) -> None:
    assert words in refused(data)


# What becomes of it


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_what_fits_stays_as_it_is(kind: str) -> None:
    data = image(kind)
    assert fit(data) == Picture(FORMATS[kind], data)


def test_what_models_do_not_take_becomes_png() -> None:
    made = fit(image("BMP"))
    assert (made.media_type, media_type_of(made.data), size_of(made.data)) == ("image/png", "image/png", SIZE)


def test_of_a_moving_picture_the_first_frame_is_taken() -> None:
    frames = [Image.new("RGB", SIZE, colour) for colour in ("red", "blue")]
    moving = io.BytesIO()
    frames[0].save(moving, "GIF", save_all=True, append_images=frames[1:])
    made = fit(moving.getvalue())
    assert made.media_type == "image/png"
    assert opened(made.data).convert("RGB").getpixel((3, 3)) == (255, 0, 0)


def test_a_photo_that_lies_on_its_side_is_put_upright() -> None:
    notes = Image.Exif()
    notes[0x0112] = 6
    made = fit(image("JPEG", (40, 30), exif=notes.tobytes()))
    assert (made.media_type, size_of(made.data)) == ("image/jpeg", (30, 40))


@pytest.mark.parametrize(
    ("kind", "mode"), [("PNG", "RGB"), ("PNG", "RGBA"), ("JPEG", "RGB"), ("JPEG", "CMYK"), ("BMP", "RGB")]
)
def test_what_has_too_many_pixels_is_shrunk(kind: str, mode: str) -> None:
    made = fit(image(kind, (2 * MAX_SIDE_PIXELS, 80), mode))
    assert opened(made.data).size == (MAX_SIDE_PIXELS, 40)
    assert made.media_type == media_type_of(made.data)
    assert made.media_type == ("image/jpeg" if kind == "JPEG" else "image/png")


def test_what_has_too_many_bytes_becomes_a_jpeg() -> None:
    made = fit(image("PNG", (1100, 1150), compress_level=0))
    assert (made.media_type, opened(made.data).size) == ("image/jpeg", (1100, 1150))
    assert len(made.data) <= MAX_SENT_BYTES


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "I;16", "RGBA"])
def test_every_mode_can_be_shrunk(mode: str) -> None:
    made = fit(plain("PNG", (3000, 20), mode))
    assert max(opened(made.data).size) == MAX_SIDE_PIXELS


@pytest.mark.parametrize("options", [{}, {"transparency": 257}])
def test_the_shades_of_a_picture_of_16_bits_stay(options: dict[str, Any]) -> None:
    width = 2 * MAX_SIDE_PIXELS
    row = b"".join((x * 65_535 // width).to_bytes(2, "little") for x in range(width))
    made = io.BytesIO()
    Image.frombytes("I;16", (width, 80), row * 80).save(made, "PNG", **options)
    seen = opened(fit(made.getvalue()).data)
    assert (seen.mode, seen.size) == ("L", (MAX_SIDE_PIXELS, 40))
    shades = [seen.getpixel((MAX_SIDE_PIXELS * part // 8, 20)) for part in range(8)]
    assert shades == pytest.approx([255 * part // 8 for part in range(8)], abs=2)
    assert "transparency" not in seen.info


def test_a_large_picture_of_16_bits_can_be_shrunk() -> None:
    made = fit(plain("PNG", (10_000, 10_000), "I;16"))
    assert max(opened(made.data).size) == MAX_SIDE_PIXELS


def test_bytes_that_do_not_shrink_are_made_smaller_until_they_fit() -> None:
    head, made = fitted(image("PNG", (400, 400)), 20_000, 2000, 10**9)
    assert head == {"media_type": "image/jpeg"}
    assert len(made) <= 20_000


@pytest.mark.parametrize("kind", FORMATS)
def test_a_picture_that_is_cut_short_is_refused(kind: str) -> None:
    data = image(kind, (200, 200))
    assert "broken or cut short" in refused(data[: len(data) // 2])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_head_alone_is_refused(kind: str) -> None:
    assert refused(image(kind)[:30])


def test_bombs_are_refused_before_they_are_decoded() -> None:
    started = time.monotonic()
    assert "pixels are too many" in refused(bomb(60_000, 60_000))
    assert "pixels are too many" in refused(plain("PNG", (20_000, 6_000), "1"))
    assert time.monotonic() - started < 5


def test_a_bomb_within_the_bounds_is_decoded_within_them() -> None:
    made = fit(plain("PNG", (4_000, 4_000), "1"))
    assert opened(made.data).size == (MAX_SIDE_PIXELS, MAX_SIDE_PIXELS)


def test_the_one_who_decodes_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "DECODE_SECONDS", 0.01)
    assert refused(image("PNG", (1000, 1000))) == "it took longer than 0.01 seconds to decode"
    assert not decoders()


def test_who_stops_waiting_leaves_no_process() -> None:
    async def run() -> None:
        task = asyncio.create_task(Pictures({}).fit(image("PNG", (1500, 1500))))
        while not decoders():  # noqa: ASYNC110 - a process sets no event
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not decoders()

    asyncio.run(run())


def test_others_are_served_meanwhile() -> None:
    async def run() -> None:
        shop = Pictures({})
        work = asyncio.create_task(shop.fit(plain("PNG", (4_000, 4_000), "1")))
        longest, before = 0.0, time.monotonic()
        while not work.done():
            await asyncio.sleep(0.005)
            longest, before = max(longest, time.monotonic() - before), time.monotonic()
        await work
        assert longest < 0.5

    asyncio.run(run())


# Without Pillow


@pytest.mark.usefixtures("no_pillow")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_without_pillow_what_fits_goes(kind: str) -> None:
    data = image(kind)
    assert fit(data) == Picture(FORMATS[kind], data)


@pytest.mark.usefixtures("no_pillow")
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (image("BMP"), "image/bmp must be converted first, for which Pillow is missing; install Pillow: pip install"),
        (plain("PNG", (3000, 10)), "too large to be sent (3000x10 pixels, "),
        (image("PNG", (1200, 1200)), "too large to be sent (1200x1200 pixels, "),
        (image("PNG")[:12], "its header names no size"),
        (image("JPEG")[:12], "its header names no size"),
        (SVG, "SVG"),
    ],
)
def test_without_pillow_what_does_not_fit_says_so(data: bytes, words: str) -> None:
    assert words in refused(data)


def checked(data: bytes) -> str:
    async def run() -> str:
        try:
            return await Pictures({}).check(data)
        except PictureError as error:
            return str(error)

    return asyncio.run(run())


BROKEN = "the image is broken or cut short"


@pytest.mark.parametrize("kind", FORMATS)
def test_only_what_can_be_decoded_is_a_picture(kind: str) -> None:
    whole = image(kind)
    assert checked(whole) == FORMATS[kind]
    assert checked(whole[: len(whole) // 2]).startswith(BROKEN)
    assert checked(whole[:12]).startswith((BROKEN, "not an image"))


@pytest.mark.usefixtures("no_pillow")
def test_without_pillow_the_header_must_name_a_size() -> None:
    whole = {kind: image(kind) for kind in FORMATS}
    assert [checked(data) for data in whole.values()] == [FORMATS[kind] for kind in whole]
    assert checked(whole["PNG"][:8]).startswith(BROKEN)
    assert checked(whole["JPEG"][:4]).startswith(BROKEN)
