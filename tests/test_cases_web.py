"""The web toolset as a run has it: a scripted model, and pages and a search service on loopback."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from aiohttp import web

from endpoints.scripted import ScriptedEndpoint
from tests.program import Ended, Played, Workplace, answer, call, ending, play, processes_with, results, script
from tests.tools import pdf_files
from tests.tools.web_server import page, redirect, serve

PROSE = "Tea is a drink that is made of leaves and of water which is hot but does not boil. "
BLOCKED = "Blocked: URL targets a private or internal network address"
PAGES = {
    "/search": page('{"results": [{"title": "Tea", "url": "http://tea.example/", "content": "<b>Hot</b>"}]}'),
    "/tea": page(f"<html><head><title>Tea</title></head><body><p>{PROSE * 2}</p></body></html>"),
    "/tea.pdf": page(pdf_files.written("Steep for four minutes"), "application/pdf"),
    "/inside": redirect("http://169.254.169.254/latest/meta-data/"),
}


def readers_of(place: Workplace) -> list[int]:
    """The processes that read pages for a run in this folder."""
    return [pid for pid in processes_with("page_reader.py") if Path(f"/proc/{pid}/cwd").resolve() == place.path]


def test_a_model_searches_and_reads(place: Workplace) -> None:
    async def work() -> Played:
        async with serve(PAGES) as site:
            place.env = {"WEB_ALLOWED_HOSTS": "127.0.0.1", "SEARXNG_URL": site.url()}
            wanted = [site.url("/tea"), site.url("/tea.pdf"), site.url("/inside"), "http://192.168.7.7/"]
            lines = [
                call("web_search", {"query": "tea", "limit": 3}),
                call("web_extract", {"urls": wanted}),
                call("web_extract", {"urls": ["http://10.0.0.1/"]}),
                answer("a drink"),
            ]
            return await asyncio.to_thread(play, place, {"what is tea?": lines}, distribution="minimal")

    played = asyncio.run(work())
    assert played.ended.code == 0, played.ended
    row = played.row("what is tea?")
    found, read, refused = results(row)
    assert found == {
        "success": True,
        "data": {"web": [{"title": "Tea", "url": "http://tea.example/", "description": "Hot", "position": 1}]},
    }
    assert [item["content"] for item in read["results"]] == [
        (PROSE * 2).strip(),
        "[Page 1]\nSteep for four minutes",
        "",
        "",
    ]
    assert [item["error"] for item in read["results"]] == [None, None, BLOCKED, BLOCKED]
    assert refused["error"] == "Content was inaccessible or not found"
    assert row["toolsets_used"] == ["web"]
    assert row["tool_stats"]["web_search"] == {"count": 1, "success": 1, "failure": 0}
    assert row["tool_stats"]["web_extract"] == {"count": 2, "success": 1, "failure": 1}
    assert readers_of(place) == []


def test_an_interrupt_does_not_wait_for_the_web(place: Workplace) -> None:
    async def work() -> tuple[Ended, float]:
        asked = asyncio.Event()

        async def hang(_request: web.Request) -> web.StreamResponse:
            asked.set()
            await asyncio.Event().wait()
            return web.Response()

        async with serve({**PAGES, "/hang": hang}) as site:
            place.env = {"WEB_ALLOWED_HOSTS": "127.0.0.1"}
            place.dataset(["read"])
            lines = {"read": [call("web_extract", {"urls": [site.url("/tea"), site.url("/hang")]}), answer("x")]}
            with (
                ScriptedEndpoint(script(lines)) as endpoint,
                ending(place.start(endpoint.base_url, distribution="minimal")) as process,
            ):
                await asyncio.wait_for(asked.wait(), 30)
                started = time.monotonic()
                os.kill(process.pid, signal.SIGINT)
                ended = await asyncio.to_thread(place.ended, process)
                return ended, time.monotonic() - started

    ended, seconds = asyncio.run(work())
    assert ended.code == 130, ended
    assert seconds < 10
    assert readers_of(place) == []
