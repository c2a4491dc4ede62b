"""Which Chromium there is on this machine, and how it is told to start. Nothing here starts it.

Asked at the door of every run: nothing is imported and no program run to answer.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
from pathlib import Path

from tools.addresses import ALLOWED_HOSTS_VARIABLE, AllowedHosts
from tools.services import Settings

CDP_URL_VARIABLE = "BROWSER_CDP_URL"
EXECUTABLE_VARIABLE = "BROWSER_EXECUTABLE"
MAX_ROLLOUTS_VARIABLE = "BROWSER_MAX_ROLLOUTS"
DEFAULT_MAX_ROLLOUTS = 16  # of a worker that have a browser context at the same time
SETTINGS = (CDP_URL_VARIABLE, EXECUTABLE_VARIABLE, MAX_ROLLOUTS_VARIABLE, ALLOWED_HOSTS_VARIABLE)

INSTALL_PACKAGE = "install Playwright: pip install 'batch-runner[browser]'"
INSTALL_PROGRAM = (
    "no Chromium was found: install one (apt-get install chromium-headless-shell, or playwright install chromium), "
    f"or name one in {EXECUTABLE_VARIABLE}"
)
HEADLESS_SHELL = "/usr/lib/chromium/chromium-headless-shell"  # Debian's; what PATH has by this name stays its parent
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_MAX_DATA_KIB = 3 * 1024 * 1024  # memory that one of Chromium's processes may have for itself; it crashes beyond
_MAX_SCRIPT_MIB = 512  # of a page's scripts; the page crashes beyond
_SOCKET_FOLDER_CHARS = 60  # Chromium makes a socket in there, whose path may have 107
_INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "FONTCONFIG_PATH", "FONTCONFIG_FILE")


def missing(settings: Settings) -> str:
    """Say why the browser cannot be used here and what to do about it; "" when it can."""
    if importlib.util.find_spec("playwright") is None:
        return INSTALL_PACKAGE
    if problem := _bad_setting(settings):
        return problem
    if settings.get(CDP_URL_VARIABLE) or executable(settings):
        return ""
    named = settings.get(EXECUTABLE_VARIABLE)
    return f"{EXECUTABLE_VARIABLE}={named} is no program that can be run" if named else INSTALL_PROGRAM


def _bad_setting(settings: Settings) -> str:
    number = settings.get(MAX_ROLLOUTS_VARIABLE, "1")
    if not (number.isascii() and number.isdecimal() and int(number) > 0):
        return f"{MAX_ROLLOUTS_VARIABLE}={number} must be a number of 1 or more"
    scheme = settings.get(CDP_URL_VARIABLE, "http:").partition(":")[0]
    if scheme not in ("http", "https", "ws", "wss"):
        return f"{CDP_URL_VARIABLE} must be an http, https, ws or wss URL"
    try:
        AllowedHosts.parse(settings.get(ALLOWED_HOSTS_VARIABLE, ""))
    except ValueError as error:
        return str(error)
    return ""


def max_rollouts(settings: Settings) -> int:
    """Return how many rollouts of a worker may have the browser at the same time."""
    return int(settings.get(MAX_ROLLOUTS_VARIABLE, DEFAULT_MAX_ROLLOUTS))


def executable(settings: Settings) -> str:
    """Return the program to start: the settings' own, Playwright's own, or one of the system's; "" for none.

    Where Chromium is there without its windows too, it is that one, which starts in half the time.
    """
    if named := settings.get(EXECUTABLE_VARIABLE):
        return shutil.which(named) or ""
    return _of_playwright() or next(filter(None, map(shutil.which, (HEADLESS_SHELL, *_NAMES))), "")


def _of_playwright() -> str:
    """Return the Chromium that `playwright install chromium` left for just this version of Playwright."""
    spec = importlib.util.find_spec("playwright")
    folder = os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or "~/.cache/ms-playwright"
    try:
        listed = Path(spec.origin or "").parent / "driver" / "package" / "browsers.json" if spec else Path()
        browsers = json.loads(listed.read_bytes())["browsers"]
        (revision,) = [browser["revision"] for browser in browsers if browser["name"] == "chromium"]
        found = sorted(Path(folder).expanduser().glob(f"chromium-{revision}/chrome-linux*/chrome"))
    except (OSError, RuntimeError, ValueError, KeyError):
        return ""
    return str(found[0]) if found else ""


def launcher(program: str, profile: Path) -> str:
    """Return a shell script that starts the program with the arguments it gets, a private profile and its limits."""
    # The last of two --user-data-dir counts. Playwright's own would outlive a kill -9 of everybody.
    return (
        f"#!/bin/sh\nulimit -c 0\nulimit -d {_MAX_DATA_KIB}\n"
        f'exec {shlex.quote(program)} "$@" --user-data-dir={shlex.quote(str(profile))}\n'
    )


def environment(home: Path, tmp: Path) -> dict[str, str]:
    """Return the browser's environment: nothing of the host's but a short list."""
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    short = tmp if len(str(tmp)) <= _SOCKET_FOLDER_CHARS else Path("/tmp")  # noqa: S108 - Chromium makes a private one in it
    return {**inherited, "HOME": str(home), "TMPDIR": str(short), "XDG_RUNTIME_DIR": str(tmp)}


def flags() -> list[str]:
    """Return what is asked of Chromium beside what Playwright asks: no way past the proxy, bounded scripts."""
    return [
        "--disable-quic",  # UDP goes past proxies
        "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
        "--webrtc-ip-handling-policy=disable_non_proxied_udp",
        "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",  # names are the proxy's to look up
        f"--js-flags=--max-old-space-size={_MAX_SCRIPT_MIB}",
        "--disable-gpu",
        "--mute-audio",
    ]
