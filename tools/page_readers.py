"""Text of pages and PDF files, read by other processes: a hostile one can neither block nor fill a worker.

Owns the reader processes of a worker: started when first needed, few, used again, ended when a page takes too long or
breaks one. What text is taken is ``page_reader``'s business.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from dataclasses import dataclass
from pathlib import Path

from tools.base import JsonObject
from tools.own_time import turn
from tools.services import Settings

MAX_READERS = 2  # of a worker
READ_SECONDS = 20.0  # for one page
_MAX_PAGES = 200  # of one process: parsers leak
_MAX_ANSWER_BYTES = 64 << 20
_SCRIPT = Path(__file__).with_name("page_reader.py")
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV")


class PageError(Exception):
    """The page cannot be read; one line that says why."""


@dataclass(frozen=True)
class Page:
    """The text of a page, as Markdown where it was HTML."""

    title: str
    text: str  # may be the beginning only
    total_chars: int


class PageReaders:
    """A worker's readers; a ``Shared`` thing."""

    def __init__(self, _settings: Settings, seconds: float = READ_SECONDS) -> None:
        self._seconds = seconds
        self._slots = asyncio.Semaphore(MAX_READERS)
        self._idle: list[_Reader] = []

    async def read(self, body: bytes, *, url: str, content_type: str, charset: str) -> Page:
        """Return the text of a body. Raises PageError."""
        job = {"url": url, "content_type": content_type, "charset": charset, "bytes": len(body)}
        async with turn(self._slots):
            reader = self._idle.pop() if self._idle else await _Reader.start()
            healthy = False
            try:
                async with asyncio.timeout(self._seconds):
                    answer = await reader.ask(json.dumps(job).encode(), body)
                healthy = reader.pages < _MAX_PAGES
            except TimeoutError:
                raise PageError(f"The page could not be read within {self._seconds:g} seconds") from None
            except (asyncio.IncompleteReadError, ConnectionError):
                raise PageError("The page could not be read: it is damaged, or takes too much memory") from None
            finally:
                if healthy:
                    self._idle.append(reader)
                else:
                    await asyncio.shield(reader.end())
        if "problem" in answer:
            raise PageError(str(answer["problem"]))
        return Page(answer["title"], answer["text"], answer["total_chars"])

    async def close(self) -> None:
        """End the idle readers; busy ones end with the call that uses them."""
        while self._idle:
            await self._idle.pop().end()


@dataclass
class _Reader:
    process: Process
    pages: int = 0

    @classmethod
    async def start(cls) -> _Reader:
        env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        # -P: the script's folder is no place to import from, its files are named like other people's modules
        command = (sys.executable, "-P", str(_SCRIPT))
        return cls(await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=env))

    async def ask(self, job: bytes, body: bytes) -> JsonObject:
        """Return the answer to a job. Raises IncompleteReadError or ConnectionError when the process is gone."""
        self.pages += 1
        jobs, answers = self.process.stdin, self.process.stdout
        assert jobs  # noqa: S101 - both are pipes
        assert answers  # noqa: S101
        jobs.write(len(job).to_bytes(4) + job)
        jobs.write(body)
        await jobs.drain()
        size = int.from_bytes(await answers.readexactly(4))
        if size > _MAX_ANSWER_BYTES:
            raise ConnectionError("no reader of ours")
        answer: JsonObject = json.loads(await answers.readexactly(size))
        return answer

    async def end(self) -> None:
        """Kill the process and wait for its end."""
        if self.process.returncode is None:
            self.process.kill()
        if self.process.stdin:
            self.process.stdin.close()
        await self.process.wait()
