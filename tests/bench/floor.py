"""What one-tool rollouts cannot do without: two chat completions by bare aiohttp and one ``bash -c`` each.

python -m tests.bench.floor BASE_URL ROLLOUTS [IN_FLIGHT]
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import aiohttp

from toolsets import KNOWN_TOOLS

IN_FLIGHT = 32
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in KNOWN_TOOLS]


async def rollout(session: aiohttp.ClientSession, base_url: str, gate: asyncio.Semaphore, number: int) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"say hello, number {number}"}]
    async with gate:
        for role in ("tool", ""):
            body = {"model": "bench", "messages": messages, "tools": TOOLS}
            async with session.post(f"{base_url}/chat/completions", json=body) as response:
                await response.json()
            if role:
                pipe = asyncio.subprocess.PIPE
                process = await asyncio.create_subprocess_exec("bash", "-c", "echo hello", stdout=pipe)
                await process.communicate()
                messages += [{"role": "assistant", "content": ""}, {"role": role, "content": "hello"}]


async def main(base_url: str, rollouts: int, in_flight: int) -> None:
    gate = asyncio.Semaphore(in_flight)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(rollout(session, base_url, gate, number) for number in range(rollouts)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else IN_FLIGHT))
