"""A rollout's surroundings with a real sandbox and endpoints that answer."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

from PIL import Image

from endpoints.script import ScriptedReply
from endpoints.scripted import ScriptedEndpoint
from rollout.auxiliary import AuxiliaryModels
from tests.rollout.asking import KEY, LIMITS, config
from tests.tools.surroundings import surroundings
from tools.base import ToolContext
from tools.services import Services

Json = dict[str, Any]


def endpoint(*lines: Json) -> ScriptedEndpoint:
    return ScriptedEndpoint([ScriptedReply.model_validate(line) for line in lines])


@contextlib.asynccontextmanager
async def rollout(base_url: str, settings: Mapping[str, str] | None = None) -> AsyncIterator[ToolContext]:
    """Give the surroundings of a rollout whose run asks ``base_url``."""
    models = AuxiliaryModels(config(base_url), KEY, settings or {}, LIMITS)
    services = Services(settings or {}, models=models, endpoints=models, base_url=base_url, model="some/model")
    async with surroundings() as context:
        context.services = services
        try:
            yield context
        finally:
            await context.close()
            await services.close()
            await models.close()


def image(kind: str, size: tuple[int, int] = (40, 30), mode: str = "RGB", **options: Any) -> bytes:
    """Make an image of noise, which no format makes much smaller."""
    width, height = size
    made = io.BytesIO()
    bands = len(Image.new(mode, (1, 1)).getbands())
    Image.frombytes(mode, size, os.urandom(width * height * bands)).save(made, kind, **options)
    return made.getvalue()


def plain(kind: str, size: tuple[int, int], mode: str = "L", **options: Any) -> bytes:
    """Make an image of one colour, which is small however large it is."""
    made = io.BytesIO()
    Image.new(mode, size).save(made, kind, **options)
    return made.getvalue()


def opened(data: bytes) -> Image.Image:
    shown = Image.open(io.BytesIO(data))
    shown.load()
    return shown
