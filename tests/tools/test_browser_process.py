"""The worker's Chromium: how it is started, shared, lost, started again and ended."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.program import processes_with, wait_until
from tests.tools.browser_site import Pages, Site, serving
from tests.tools.browsing import Worker, needs_chromium, working
from tools import browser_program
from tools.base import JsonObject
from tools.browser_process import Chromium
from tools.browser_session import BrowserSession

pytestmark = needs_chromium

BLOCKED = "Blocked: URL targets a private or internal network address"
GONE = {"success": False, "error": "The browser is gone and will be started again; open the page again"}
PAGES: Pages = {
    "/": "<title>Home</title><p>hello",
    "/link": "<title>Link</title><a href=http://localhost:1234>Inside</a>",
}


@pytest.fixture
def site() -> Iterator[Site]:
    with serving(PAGES) as serving_site:
        yield serving_site


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where browsers live, this test's own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def browsers(folder: Path) -> list[int]:
    """The main processes of the browsers there; their children are of a type."""
    return [
        pid
        for pid in processes_with(f"--user-data-dir={folder}")
        if b"--type=" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def test_one_browser_serves_all_and_leaves_nothing(site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret-of-the-host")
    with working(site) as worker:
        with worker.rollout() as one, worker.rollout() as other:
            assert not browsers(folder)

            async def both() -> None:
                pages = await asyncio.gather(*(each.calling("navigate", url=site.url()) for each in (one, other)))
                assert [page["title"] for page in pages] == ["Home", "Home"]

            one.wait(both())
            (pid,) = browsers(folder)
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            assert b"secret-of-the-host" not in environ
            assert f"HOME={folder}".encode() in environ
            limits = Path(f"/proc/{pid}/limits").read_text(encoding="ascii")
            assert re.search(rf"Max data size +{3 * 1024**3} ", limits)
        assert len(browsers(folder)) == 1
    wait_until(lambda: not processes_with(str(folder)), "the browser is gone", 5)
    assert not list(folder.glob("batch-runner-*/*"))


def test_a_browser_that_died_is_told_and_started_again(site: Site, folder: Path) -> None:
    with working(site) as worker, worker.rollout() as one, worker.rollout() as other:
        for rollout in (one, other):
            rollout.open(site.url())
        for which in ("browser", "driver"):
            (pid,) = browsers(folder)
            os.kill(pid if which == "browser" else parent_of(pid), signal.SIGKILL)
            wait_until(lambda: not processes_with(f"--user-data-dir={folder}"), "it is dead", 5)
            for rollout in (one, other):
                told = [rollout.call("snapshot") for _ in range(2)]
                assert told[0] in (GONE, {"success": False, "error": "The page was closed meanwhile"})
                assert told[1] == GONE or told[1]["url"] == "about:blank"
                assert rollout.open(site.url())["title"] == "Home"
            assert len(browsers(folder)) == 1
            assert len(list(folder.glob("batch-runner-*/*"))) == 1


FLOODS = {
    "history": "setInterval(() => { for (let i = 0; i < 100; i++) history.pushState({}, '', '?' + i) }, 10)",
    "place": "let i = 0; setInterval(() => { for (let k = 0; k < 100; k++) location.hash = i++ }, 10)",
    "reload": "location.reload()",
    "console": "const s = 'x'.repeat(1e5); setInterval(() => { for (let i = 0; i < 200; i++) console.log(s) }, 5)",
    "errors": "setInterval(() => { for (let i = 0; i < 2000; i++) setTimeout(() => { throw i }) }, 5)",
    "requests": "setInterval(() => { for (let i = 0; i < 40; i++) fetch('/' + i) }, 5)",
    "dialogs": "setTimeout(() => { for (;;) alert(1) }, 100)",
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_page_that_floods_disturbs_nobody_else(flood: str) -> None:
    pages = {**PAGES, "/flood": f"<title>Flood</title><p>p<script>{FLOODS[flood]}</script>"}
    with serving(pages) as site, working(site) as worker, worker.rollout() as bad, worker.rollout() as good:
        assert good.open(site.url())["title"] == "Home"

        async def both() -> tuple[JsonObject, list[JsonObject]]:
            flooding = asyncio.create_task(bad.calling("navigate", url=site.url("/flood")))
            await asyncio.sleep(1.0)
            seen = [
                await good.calling("snapshot"),
                await good.calling("navigate", url=site.url()),
                await good.calling("scroll", direction="down"),
            ]
            return await flooding, seen

        flooded, seen = good.wait(asyncio.wait_for(both(), 60))
        lost = [each for each in seen if not each["success"]]
        if lost:  # a machine that is busy with other things can lose the browser to that many requests, and says so
            assert (flood, lost[0]) == ("requests", GONE), seen
        elif flood == "requests":
            told = "The page asked for more at once than the browser can bear, and was closed"
            assert told in str([flooded, bad.call("snapshot")])
        for rollout in (good, bad):
            rollout.call("snapshot")  # who has lost the browser is told once
            assert rollout.open(site.url())["title"] == "Home"


def test_a_silent_browser_is_not_blamed_on_the_page_that_waits(site: Site, folder: Path) -> None:
    quick = {"browser_session.SNAPSHOT": 0.5, "browser_session.PROBE": 0.3, "browser_process.PULSE": 1.0}
    with working(site) as worker, worker.rollout() as one, worker.rollout() as other:
        for rollout in (one, other):
            rollout.open(site.url())
        (pid,) = browsers(folder)
        os.kill(pid, signal.SIGSTOP)
        with pytest.MonkeyPatch.context() as patch:
            for name, seconds in quick.items():
                patch.setattr(f"tools.{name}_SECONDS", seconds)
            assert one.call("snapshot") == GONE
        wait_until(lambda: not browsers(folder), "it is killed", 5)
        assert other.call("snapshot")["error"] in (GONE["error"], "The page was closed meanwhile")
        for rollout in (one, other):
            assert rollout.open(site.url())["title"] == "Home"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(") ")[2].split()[1])


def test_a_bounded_number_of_rollouts_has_the_browser(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.browser_places.WAIT_SECONDS", 0.3)
    with working(site, {"BROWSER_MAX_ROLLOUTS": "1"}) as worker:
        for after_seconds in (0.0, 0.1, 0.5, 0.0, 0.05, 1.0):  # the browser is started meanwhile, and is there later
            with worker.rollout() as rollout:
                rollout.wait(cancelled(rollout.calling("navigate", url=site.url("/silent")), after_seconds))
            wait_until(lambda: rollout.wait(all_free(worker, 1)), "a cancelled rollout has given back its place")
        with worker.rollout() as one, worker.rollout() as other:
            one.open(site.url())
            told = "The browser is used by too many others at the moment; try again later"
            assert other.call("navigate", url=site.url()) == {"success": False, "error": told}
            assert one.call("close")["closed"]
            assert other.open(site.url())["title"] == "Home"
            opening = other.context.state(BrowserSession)._opening
            assert opening
            browser = opening.result().browser
            assert browser
            assert len(browser.contexts) == 1


IDLE = {
    "success": False,
    "error": "The page was closed and its cookies forgotten, for nothing was done with it for a while; "
    "open it again with browser_navigate",
}


def test_pages_that_nobody_uses_make_room_for_others(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.browser_places.IDLE_SECONDS", 0.3)
    with working(site, {"BROWSER_MAX_ROLLOUTS": "2"}) as worker:
        with worker.rollout() as one, worker.rollout() as two, worker.rollout() as three:
            for rollout in (one, two):
                rollout.open(site.url())
            one.wait(asyncio.sleep(0.4))
            assert one.call("snapshot")["title"] == "Home"  # nobody waits
            assert three.open(site.url())["title"] == "Home"
            assert one.call("snapshot")["title"] == "Home"  # it was used later than the other
            for name, arguments in (("snapshot", {}), ("click", {"ref": "e1"}), ("back", {}), ("get_images", {})):
                assert two.call(name, **arguments) == IDLE
            assert two.open(site.url("/link"))["title"] == "Link"
            assert three.call("snapshot") == IDLE  # for that one was the longest idle by then
            assert three.call("close")["closed"]
        wait_until(lambda: one.wait(all_free(worker, 2)), "all places are given back")


def test_pages_that_nobody_uses_for_long_are_closed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.browser_places.MAX_IDLE_SECONDS", 0.5)
    with working(site, {"BROWSER_MAX_ROLLOUTS": "1"}) as worker, worker.rollout() as rollout:
        rollout.open(site.url())
        wait_until(lambda: rollout.wait(all_free(worker, 1)), "it is closed")
        assert rollout.call("snapshot") == IDLE
        assert rollout.open(site.url())["title"] == "Home"


def test_a_dead_browsers_idle_pages_give_back_their_place(
    site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.browser_places.IDLE_SECONDS", 0.1)
    with working(site, {"BROWSER_MAX_ROLLOUTS": "1"}) as worker, worker.rollout() as one, worker.rollout() as other:
        one.open(site.url())
        (pid,) = browsers(folder)
        os.kill(pid, signal.SIGKILL)
        assert other.open(site.url())["title"] == "Home"
        assert one.call("snapshot") == IDLE


async def all_free(worker: Worker, number: int) -> bool:
    await asyncio.sleep(0.01)
    return worker.services.shared(Chromium)._places.free == number


async def cancelled(work: Coroutine[None, None, JsonObject], after_seconds: float) -> None:
    call = asyncio.create_task(work)
    await asyncio.sleep(after_seconds)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


def test_what_is_no_browser_is_told(site: Site, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho a library is missing >&2; exit 1\n", encoding="utf-8")
    broken.chmod(0o755)
    with working(site, {"BROWSER_EXECUTABLE": str(broken)}) as worker, worker.rollout() as rollout:
        result = rollout.call("navigate", url=site.url())
        assert result["success"] is False
        assert result["error"].startswith("The browser cannot be started: ")
        assert result["error"].endswith("(a library is missing)")


@contextmanager
def remote_browser(folder: Path) -> Iterator[str]:
    """A browser that listens, as services offer them; give its address."""
    profile = folder / "remote"
    words = [browser_program.executable({}), "--headless", "--no-sandbox", "--remote-debugging-port=0"]
    env = browser_program.environment(folder, folder)
    process = subprocess.Popen(
        [*words, f"--user-data-dir={profile}"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        port = profile / "DevToolsActivePort"
        wait_until(lambda: port.exists() and port.read_text(encoding="ascii").strip(), "it listens", 20)
        yield f"http://127.0.0.1:{port.read_text(encoding='ascii').split()[0]}"
    finally:
        process.kill()
        process.wait()
        wait_until(lambda: not processes_with(str(profile)), "it is gone", 10)


def test_a_remote_browser_is_used_and_where_it_goes_is_checked(site: Site, tmp_path: Path) -> None:
    with (
        serving(PAGES) as private,
        remote_browser(tmp_path) as address,
        working(site, {"BROWSER_CDP_URL": address}) as worker,
        worker.rollout() as rollout,
    ):
        assert rollout.open(site.url())["title"] == "Home"
        for url, left_at in ((private.url(), site.url()), (site.url(f"/redirect?{private.url()}"), "about:blank")):
            assert rollout.call("navigate", url=url) == {"success": False, "error": BLOCKED}
            assert rollout.call("snapshot")["url"] == left_at
        assert rollout.open(site.url())["title"] == "Home"


def test_a_remote_browser_that_is_not_there_is_told_without_its_key(site: Site) -> None:
    settings = {"BROWSER_CDP_URL": "ws://127.0.0.1:9/devtools?token=very-secret"}
    with working(site, settings) as worker, worker.rollout() as rollout:
        result = rollout.call("navigate", url=site.url())
        assert result["error"] == "The browser cannot be started: 127.0.0.1 does not answer as a browser does"


def test_nothing_is_started_for_who_never_asks() -> None:
    async def unused() -> None:
        chromium = Chromium({})
        assert chromium.problem("http://example.org/") == ""
        await chromium.close()

    asyncio.run(unused())


def test_a_session_that_never_opened_closes() -> None:
    assert asyncio.run(BrowserSession().close()) is False
