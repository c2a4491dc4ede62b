"""Whoever is killed while pages are open, no browser is left alive."""

from __future__ import annotations

import time

from endpoints.scripted import ScriptedEndpoint
from tests.faults.processes import GONE_SECONDS, assert_gone, below_me, sandboxes, workers
from tests.program import Workplace, call, ending, processes_with, wait_until
from tests.tools.browser_site import serving
from tests.tools.browsing import needs_chromium

pytestmark = needs_chromium


def pages(place: Workplace) -> list[int]:
    """The main processes of this place's browsers."""
    return processes_with(f"--user-data-dir={place.path / 'tmp'}")


def test_no_browser_outlives_a_killed_program(place: Workplace) -> None:
    place.dataset(["one", "two", "three", "four"])
    with serving({}) as site, ScriptedEndpoint([call("browser_navigate", {"url": site.url("/silent")})]) as endpoint:
        place.env["WEB_ALLOWED_HOSTS"] = site.host
        flags = {"distribution": "browser_only", "num_workers": 2, "concurrency": 2}
        with ending(place.start(endpoint.base_url, **flags)) as process:
            wait_until(lambda: site.requests.count("/silent") == 4, "all browse")
            assert len(pages(place)) >= 2
            process.kill()
            process.communicate()
        killed_at = time.monotonic()
        wait_until(lambda: not pages(place), "the browsers are gone", GONE_SECONDS)
        assert_gone(below_me, killed_at + GONE_SECONDS - time.monotonic())
    assert not sandboxes(place)
    assert not list((place.path / "tmp").glob("playwright*"))


def test_no_browser_outlives_a_killed_worker(place: Workplace) -> None:
    place.dataset(["one"])
    with serving({}) as site:
        place.env["WEB_ALLOWED_HOSTS"] = site.host
        replies = [call("browser_navigate", {"url": site.url("/silent")})]
        with (
            ScriptedEndpoint(replies) as endpoint,
            ending(place.start(endpoint.base_url, distribution="browser_only")),
        ):
            wait_until(lambda: site.asked("/silent"), "it browses")
            (worker,) = workers()
            browsers = pages(place)
            worker.kill()
            wait_until(lambda: not {*pages(place)} & {*browsers}, "its browser is gone", GONE_SECONDS)
