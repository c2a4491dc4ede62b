"""A rollout of file tools in a real sandbox, called one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sandboxes.base import Sandbox, SandboxSpec
from sandboxes.local import LocalBackend
from tools.base import JsonObject, Tool, ToolContext, ToolError

_numbers = itertools.count(1)


class Rollout:
    """The sandbox starts in ``folder``, which is its home as well."""

    def __init__(self, runner: asyncio.Runner, sandbox: Sandbox, folder: Path) -> None:
        self.folder = folder
        self.sandbox = sandbox
        self.forget()
        self._runner = runner

    def forget(self) -> None:
        """Let the tools begin anew."""

        async def opened() -> Sandbox:
            return self.sandbox

        self.context = ToolContext(opened)

    def write(self, name: str, data: bytes | str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return path

    def bytes(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def shell(self, command: str) -> str:
        return self._runner.run(self.sandbox.exec(command, timeout_seconds=20)).output

    def call(self, tool: Tool, **arguments: Any) -> JsonObject:
        """Return the result, or ``{"error": message, **details}`` as the model is told."""

        async def called() -> JsonObject:
            try:
                return await tool(self.context, arguments)
            except ToolError as error:
                return {"error": str(error), **error.details}

        return self._runner.run(called())


@contextlib.contextmanager
def rollout_in(folder: Path, programs: str = "") -> Iterator[Rollout]:
    """Open a sandbox; ``programs`` is its $PATH, where that is not the usual one."""
    env = {"HOME": str(folder), **({"PATH": programs} if programs else {})}
    spec = SandboxSpec("test-files", f"test-files-{next(_numbers)}", cwd=str(folder), env=env)
    with asyncio.Runner() as runner:
        sandbox = runner.run(LocalBackend().open(spec))
        try:
            yield Rollout(runner, sandbox, folder)
        finally:
            runner.run(sandbox.close())
