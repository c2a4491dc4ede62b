"""The small sandbox with files, and a rollout of file tools in it."""

from __future__ import annotations

import asyncio
import shlex
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandboxes.base import ExecResult, SandboxFileError
from tests.tools.surroundings import StandIn
from tools.base import JsonObject, Tool, ToolContext, ToolError


class FileSandbox(StandIn):
    """Home is the folder itself; ``path`` is $PATH inside."""

    def __init__(self, folder: str, path: str = "") -> None:
        super().__init__(folder)
        self.path = path
        self.largest_read = 0

    async def exec(
        self, command: str, *, timeout_seconds: float, cwd: str = "", max_output_chars: int = 50_000
    ) -> ExecResult:
        path = f"PATH={shlex.quote(self.path)}" if self.path else ""
        script = f"export HOME={shlex.quote(self.folder)} {path}\n{command}"
        done = await super().exec(script, timeout_seconds=timeout_seconds, cwd=cwd, max_output_chars=10**9)
        total = len(done.output)
        if total <= max_output_chars:
            return done
        return replace(
            done, output=done.output[:max_output_chars], omitted_chars=total - max_output_chars, total_chars=total
        )

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        self.largest_read = max(self.largest_read, max_bytes)
        try:
            with Path(self.folder, path).open("rb") as file:
                return file.read(max_bytes)
        except OSError as error:
            raise SandboxFileError(f"{path}: {error.strerror}") from None

    async def write_file(self, path: str, data: bytes) -> None:
        target = Path(self.folder, path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o644
            temporary = target.with_name(f".{target.name}.new")
            temporary.write_bytes(data)
            temporary.chmod(mode)
            temporary.replace(target)
        except OSError as error:
            raise SandboxFileError(f"{path}: {error.strerror}") from None


class Rollout:
    """One rollout's file tools in a folder of its own, called one after the other."""

    def __init__(self, folder: Path, path: str = "") -> None:
        self.folder = folder
        self.sandbox = FileSandbox(str(folder), path)
        self.context = ToolContext(self._open)

    async def _open(self) -> FileSandbox:
        return self.sandbox

    def write(self, name: str, data: bytes | str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return path

    def bytes(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def call(self, tool: Tool, **arguments: Any) -> JsonObject:
        """Return the result, or ``{"error": message, **details}`` as the model is told."""

        async def called() -> JsonObject:
            try:
                return await tool(self.context, arguments)
            except ToolError as error:
                return {"error": str(error), **error.details}

        return asyncio.run(called())
