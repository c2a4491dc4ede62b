"""What one-tool rollouts cannot do without: two chat completions by bare aiohttp and one ``bash -c`` each.

    python -m tests.bench.floor BASE_URL ROLLOUTS [IN_FLIGHT] [TURNS]

With TURNS, every rollout is so many completions and a last one instead, and no tool does anything.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import aiohttp

from toolsets import KNOWN_TOOLS

IN_FLIGHT = 32
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in KNOWN_TOOLS]


async def rollout(session: aiohttp.ClientSession, base_url: str, number: int, turns: int) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"say hello, number {number}"}]
    for role in (*["tool"] * max(turns, 1), ""):
        body = {"model": "bench", "messages": messages, "tools": TOOLS}
        async with session.post(f"{base_url}/chat/completions", json=body) as response:
            answer = await response.json()
        if role:
            messages += [answer["choices"][0]["message"], {"role": role, "content": await tool(turns)}]


async def tool(turns: int) -> str:
    if turns:
        return '{"todos": [], "summary": {"total": 0, "pending": 0}}'
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("bash", "-c", "echo hello", stdout=pipe)
    output, _ = await process.communicate()
    return output.decode()


async def main(base_url: str, rollouts: int, in_flight: int = IN_FLIGHT, turns: int = 0) -> None:
    gate = asyncio.Semaphore(in_flight)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def bounded(number: int) -> None:
            async with gate:
                await rollout(session, base_url, number, turns)

        await asyncio.gather(*map(bounded, range(rollouts)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
