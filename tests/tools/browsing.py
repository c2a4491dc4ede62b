"""Rollouts with a real browser, called one tool after the other as a model would."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from model_tools import Toolbox, offered
from sandboxes.base import Sandbox, SandboxError
from tests.tools.browser_site import Site
from tools import browser_program
from tools.base import JsonObject, ToolContext
from tools.calls import ToolCall
from tools.services import Models, NoModels, Services

T = TypeVar("T")
needs_chromium = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(browser_program.missing({})), reason=browser_program.missing({})),
]


async def no_sandbox() -> Sandbox:
    raise SandboxError("the browser needs no sandbox")


@dataclass
class Rollout:
    """One rollout's browser tools."""

    runner: asyncio.Runner
    context: ToolContext
    toolbox: Toolbox = field(init=False)

    def __post_init__(self) -> None:
        self.toolbox = Toolbox(offered(["browser"]), self.context)

    async def calling(self, name: str, **arguments: Any) -> JsonObject:
        message = await self.toolbox.run(ToolCall("c", f"browser_{name}", arguments))
        result: JsonObject = json.loads(message.content)
        return result

    def call(self, name: str, **arguments: Any) -> JsonObject:
        return self.runner.run(self.calling(name, **arguments))

    def open(self, url: str) -> JsonObject:
        """Go there, which must go well."""
        result = self.call("navigate", url=url)
        assert result["success"], result
        return result

    def click(self, page: JsonObject, name: str) -> JsonObject:
        return self.call("click", ref=ref_of(page, name))

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def close(self) -> None:
        self.runner.run(self.context.close())


@dataclass
class Worker:
    """A worker's browser."""

    runner: asyncio.Runner
    services: Services
    site: Site

    @contextlib.contextmanager
    def rollout(self) -> Iterator[Rollout]:
        opened = Rollout(self.runner, ToolContext(no_sandbox, services=self.services))
        try:
            yield opened
        finally:
            opened.close()


@contextlib.contextmanager
def working(site: Site, settings: Mapping[str, str] | None = None, models: Models | None = None) -> Iterator[Worker]:
    """A worker that may reach the site."""
    services = Services({"WEB_ALLOWED_HOSTS": site.host, **(settings or {})}, models or NoModels())
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "*")
        try:
            yield Worker(runner, services, site)
        finally:
            runner.run(services.close())


def ref_of(page: JsonObject, name: str) -> str:
    """The reference of the element of this name."""
    (line,) = [line for line in page["snapshot"].splitlines() if f'"{name}"' in line]
    found = re.search(r"\[ref=(\w+)\]", line)
    assert found, line
    return f"@{found[1]}"
