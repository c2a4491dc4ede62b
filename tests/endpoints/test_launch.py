from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from endpoints.launch import EndpointError, check_endpoint, listens_here, start_endpoint
from tests.program import ROOT

PATIENCE_SECONDS = 60.0
HAS_ENGINE = importlib.util.find_spec("xllamacpp") is not None


def script(folder: Path, *lines: Any) -> str:
    """Write a script and return its base_url."""
    path = folder / "replies.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return f"scripted:{path}"


def answer(base_url: str) -> str:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"Content-Type": "application/json"})  # noqa: S310 - ours
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:  # noqa: S310 - ours
        text: str = json.load(response)["choices"][0]["message"]["content"]
    return text


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_a_scripted_endpoint_is_started_and_closed(tmp_path: Path) -> None:
    told: list[str] = []
    endpoint = start_endpoint(script(tmp_path, {"content": "six"}), "m", tmp_path / "run.log", told.append)
    assert endpoint is not None
    assert answer(endpoint.base_url) == "six"
    assert (endpoint.max_in_flight, endpoint.death(), told) == (None, "", [])
    endpoint.close()
    assert not is_running(endpoint.process.pid)
    endpoint.close()  # twice does no harm


@pytest.mark.parametrize("base_url", ["https://openrouter.ai/api/v1", "http://127.0.0.1:8000/v1", "embedded.example"])
def test_other_endpoints_are_not_ours(base_url: str, tmp_path: Path) -> None:
    assert check_endpoint(base_url, "m") == ""
    assert start_endpoint(base_url, "m", tmp_path / "run.log", print) is None


def test_the_model_of_a_script_is_the_users(tmp_path: Path) -> None:
    assert check_endpoint(script(tmp_path, {"content": "x"}), "gpt-x") == "gpt-x"


@pytest.mark.parametrize(
    ("lines", "words"),
    [(None, "No such file"), (["x"], "replies.jsonl:1: must be a JSON object"), ([{"contents": 1}], 'key "contents"')],
)
def test_a_script_that_will_not_do_is_told_at_the_door(lines: list[Any] | None, words: str, tmp_path: Path) -> None:
    base_url = f"scripted:{tmp_path / 'replies.jsonl'}" if lines is None else script(tmp_path, *lines)
    with pytest.raises(EndpointError, match=words) as at_the_door:
        check_endpoint(base_url, "m")
    assert "\n" not in str(at_the_door.value)
    with pytest.raises(EndpointError) as from_the_child:
        start_endpoint(base_url, "m", tmp_path / "run.log", print)
    assert str(from_the_child.value) == str(at_the_door.value)


def test_a_child_that_dies_without_a_word(tmp_path: Path) -> None:
    broken = {**os.environ, "PYTHONHOME": str(tmp_path / "nowhere")}
    with pytest.raises(EndpointError, match="the scripted endpoint did not start; the run's log says why"):
        start_endpoint(script(tmp_path, {"content": "x"}), "m", tmp_path / "run.log", print, broken)
    assert "Python" in (tmp_path / "run.log").read_text(encoding="utf-8")


def test_the_log_is_added_to(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("before\n", encoding="utf-8")
    endpoint = start_endpoint(script(tmp_path, {"content": "x"}), "m", log, print)
    assert endpoint is not None
    endpoint.close()
    assert log.read_text(encoding="utf-8").startswith("before\n")


def test_its_death_is_told(tmp_path: Path) -> None:
    endpoint = start_endpoint(script(tmp_path, {"content": "x"}), "m", tmp_path / "run.log", print)
    assert endpoint is not None
    endpoint.process.kill()
    endpoint.process.wait()
    assert endpoint.death() == "the endpoint's process has died (exit code -9); the run's log may say why"
    endpoint.close()


def test_files_in_the_users_folder_do_not_get_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json.py", "runpy.py", "endpoints.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    script(tmp_path, {"content": "six"})
    endpoint = start_endpoint("scripted:replies.jsonl", "m", tmp_path / "run.log", print)
    assert endpoint is not None
    assert answer(endpoint.base_url) == "six"
    endpoint.close()


PARENT = """
import pathlib, sys, time
sys.path.insert(0, sys.argv[1])
from endpoints.launch import start_endpoint
endpoint = start_endpoint(sys.argv[2], "m", pathlib.Path(sys.argv[3]), print)
print(endpoint.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_parent(number: signal.Signals, tmp_path: Path) -> None:
    words = [str(ROOT), script(tmp_path, {"content": "x"}), str(tmp_path / "run.log")]
    with subprocess.Popen([sys.executable, "-c", PARENT, *words], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.send_signal(number)
    assert wait_until(lambda: not is_running(pid))


def test_ctrl_c_is_not_its_business(tmp_path: Path) -> None:
    endpoint = start_endpoint(script(tmp_path, {"content": "six"}), "m", tmp_path / "run.log", print)
    assert endpoint is not None
    endpoint.process.send_signal(signal.SIGINT)
    assert answer(endpoint.base_url) == "six"
    endpoint.close()


def test_nothing_heavy_is_imported_by_the_parent() -> None:
    code = "import sys, endpoints.launch; print({'openai', 'aiohttp', 'xllamacpp'} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout == "set()\n"


@pytest.mark.skipif(HAS_ENGINE, reason="xllamacpp is installed")
def test_embedded_without_the_extra_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match=r"needs the extra .embedded.: pip install .*\[embedded\]"):
        check_endpoint("embedded", "m")
    model = tmp_path / "own.gguf"
    model.write_bytes(b"GGUF")
    with pytest.raises(EndpointError, match="the engine xllamacpp cannot be loaded"):
        start_endpoint("embedded", str(model), tmp_path / "run.log", print)


@pytest.mark.parametrize(
    ("base_url", "here"),
    [
        ("scripted:replies.jsonl", True),
        ("embedded", True),
        ("http://127.0.0.1:8000/v1", True),
        ("http://localhost/v1", True),
        ("http://[::1]:8000/v1", True),
        ("http://10.0.0.7:8000/v1", False),
        ("https://openrouter.ai/api/v1", False),
    ],
)
def test_which_endpoints_only_this_machine_reaches(base_url: str, here: bool) -> None:
    assert listens_here(base_url) is here
