"""Run as a script: a picture on stdin, one that models take on stdout.

``shrink.py MAX_BYTES MAX_SIDE MAX_PIXELS SECONDS`` writes one line of JSON and the bytes: ``{"media_type": ...}``, with
nothing behind it when the picture is good as it is, or ``{"error": ...}`` with a few words. The whole picture is
decoded, so one that is cut or broken is found out here. Only the five formats below are read, never one whose decoder
runs other programs. It imports nothing of ours.
"""

from __future__ import annotations

import io
import json
import resource
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_MEMORY_BYTES = 2_000_000_000
QUALITIES = (88, 75, 60)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_KEPT_MODES = ("RGB", "L", "RGBA", "LA")
_ORIENTATION = 0x0112  # the EXIF tag; 1 is upright


def main(words: list[str]) -> int:
    """Do it, within bounds of memory and processor time."""
    max_bytes, max_side, max_pixels, seconds = map(int, words)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    data = sys.stdin.buffer.read()
    try:
        head, made = fitted(data, max_bytes, max_side, max_pixels)
    except MemoryError:
        head, made = {"error": "too large to be decoded"}, b""
    except ImportError as error:
        head, made = {"error": f"Pillow cannot be loaded: {error}"}, b""
    sys.stdout.buffer.write(json.dumps(head).encode() + b"\n" + made)
    return 0


def fitted(data: bytes, max_bytes: int, max_side: int, max_pixels: int) -> tuple[dict[str, str], bytes]:
    """Return the line to write, and the new picture, or b"" when the old one will do or there is an error."""
    from PIL import Image, ImageOps  # noqa: PLC0415 - after the bounds are set

    Image.MAX_IMAGE_PIXELS = None  # the bound is ours
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                return {"error": f"{width}x{height} pixels are too many; at most {max_pixels:,} are decoded"}, b""
            kind, still = image.format or "", not getattr(image, "is_animated", False)
            upright = _is_upright(image)
            fits = kind != "BMP" and still and upright and max(width, height) <= max_side and len(data) <= max_bytes
            if fits:
                image.load()
                return {"media_type": f"image/{kind.lower()}"}, b""
            return _remade(image if upright else ImageOps.exif_transpose(image), kind, max_bytes, max_side)
    except (OSError, ValueError, SyntaxError, EOFError, TypeError, KeyError, IndexError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        if "cannot identify" in reason:  # then comes where the bytes lie in memory
            reason = "its header makes no sense"
        return {"error": f"the image is broken or cut short: {reason or type(error).__name__}"}, b""


def _remade(image: Image, kind: str, max_bytes: int, max_side: int) -> tuple[dict[str, str], bytes]:
    """Return the first frame within the bounds: as PNG, unless it was a photo or that is too much."""
    small = _in_8_bits(image) if image.mode.startswith("I") else image
    if small.mode not in _KEPT_MODES:
        small = small.convert("RGBA" if small.has_transparency_data else "RGB")
    small.thumbnail((max_side, max_side))  # a JPEG is decoded no larger than needed
    if kind != "JPEG" and len(made := _saved(small, "PNG")) <= max_bytes:
        return {"media_type": "image/png"}, made
    flat = _on_white(small)
    while True:
        for quality in QUALITIES:
            if len(made := _saved(flat, "JPEG", quality=quality)) <= max_bytes:
                return {"media_type": "image/jpeg"}, made
        flat = flat.resize((max(flat.width // 2, 1), max(flat.height // 2, 1)))


def _in_8_bits(image: Image) -> Image:
    """Return a grey picture of 16 bits a pixel in 8: by itself, Pillow would make all shades above 255 white."""
    grey = image.convert("I").point(lambda shade: shade * (1 / 257)).convert("L")
    grey.info.pop("transparency", None)  # one of the old shades
    return grey


def _is_upright(image: Image) -> bool:
    try:
        return bool(image.getexif().get(_ORIENTATION, 1) == 1)
    except (OSError, ValueError, SyntaxError, TypeError, KeyError):  # broken notes are no broken picture
        return True


def _saved(image: Image, kind: str, **options: int) -> bytes:
    made = io.BytesIO()
    image.save(made, kind, **options)
    return made.getvalue()


def _on_white(image: Image) -> Image:
    """Return it without transparency, which JPEG has not."""
    from PIL import Image as Images  # noqa: PLC0415

    if image.mode in ("RGB", "L"):
        return image
    seen = image.convert("RGBA")
    white = Images.new("RGBA", seen.size, "white")
    white.alpha_composite(seen)
    return white.convert("RGB")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
