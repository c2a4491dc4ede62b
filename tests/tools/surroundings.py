from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator

from sandboxes.base import Sandbox, SandboxSpec
from sandboxes.local import LocalBackend
from tools.base import ToolContext, ToolLimits

_numbers = itertools.count(1)


@contextlib.asynccontextmanager
async def surroundings(limits: ToolLimits | None = None) -> AsyncIterator[ToolContext]:
    """Give a rollout's surroundings with a real sandbox, which is gone afterwards."""
    sandbox = await LocalBackend().open(SandboxSpec("test-tools", f"test-tools-{next(_numbers)}"))

    async def opened() -> Sandbox:
        return sandbox

    try:
        yield ToolContext(opened, limits or ToolLimits())
    finally:
        await sandbox.close()
