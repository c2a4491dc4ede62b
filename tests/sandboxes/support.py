"""What the tests of sandboxes share: opening one for a moment, and looking at the host's processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from sandboxes import BACKENDS
from sandboxes.base import Backend, ExecResult, Sandbox, SandboxSpec
from sandboxes.local import LocalBackend

T = TypeVar("T")
SPEC = SandboxSpec(run_name="tests", rollout_id="r1")
KINDS = [*BACKENDS]
HOST_KINDS = ["bubblewrap", "local"]  # those that run on this machine's own files
SHELLS = [*KINDS, "local with dash", "local with busybox", "docker with busybox"]  # bash is what the others find
MINUTE = 60.0


def backend(kind: str) -> Backend:
    """Return the backend of a name, or skip the test with the reason why there is none."""
    if kind in BACKENDS:
        if reason := BACKENDS[kind].unavailable():
            pytest.skip(reason)
        return BACKENDS[kind]
    if kind == "docker with busybox":
        return BACKENDS["docker"]
    name = kind.rpartition(" ")[2]
    program = shutil.which(name)
    if not program:
        pytest.skip(f"{name} is not installed")
    if name == "busybox":
        link = Path(os.environ["TEST_LINKS"], "sh")
        if not link.is_symlink():
            link.symlink_to(program)
        program = str(link)
    return LocalBackend(program)


def run(kind: str, body: Callable[[Sandbox], Awaitable[T]], spec: SandboxSpec = SPEC) -> T:
    """Run ``body`` with a sandbox that is closed afterwards."""
    return in_sandbox(backend(kind), spec, body)


def in_sandbox(chosen: Backend, spec: SandboxSpec, body: Callable[[Sandbox], Awaitable[T]]) -> T:
    """Run ``body`` with a backend's sandbox that is closed afterwards."""

    async def main() -> T:
        sandbox = await chosen.open(spec)
        try:
            return await body(sandbox)
        finally:
            await sandbox.close()

    return asyncio.run(main())


def exec_all(kind: str, *commands: str, timeout_seconds: float = 20, spec: SandboxSpec = SPEC) -> list[ExecResult]:
    """Run commands one after the other in one sandbox."""

    async def body(sandbox: Sandbox) -> list[ExecResult]:
        return [await sandbox.exec(command, timeout_seconds=timeout_seconds) for command in commands]

    return run(kind, body, spec)


def outputs(kind: str, *commands: str, spec: SandboxSpec = SPEC) -> list[str]:
    """Run commands one after the other in one sandbox; return what they wrote."""
    return [result.output for result in exec_all(kind, *commands, spec=spec)]


def descriptors() -> int:
    """Return how many file descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def running(mark: str) -> list[int]:
    """Return the pids of the host's processes that have ``mark`` among their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if mark.encode() in arguments:
                found.append(int(entry.name))
    return found


async def until(condition: Callable[[], bool], seconds: float = 5) -> bool:
    """Wait for something to become true while the event loop runs; tell whether it has."""
    return await asyncio.to_thread(wait_until, condition, seconds)


def wait_until(condition: Callable[[], bool], seconds: float = 5) -> bool:
    """Wait for something to become true; tell whether it has."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
