"""The README says what is so: its commands run, its tables and examples are the program's own."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from endpoints.script import load_script
from endpoints.scripted import ScriptedEndpoint
from rollout.flags import FLAGS, REQUIRED, default_of, text_of
from tests.endpoints.embedded_model import politely
from tests.program import ROOT, Workplace, answer, ending, terminal

README = (ROOT / "README.md").read_text(encoding="utf-8")
MINUTES_10 = 600
FEW = 1  # of the prompts, for the small model: the gate has little time


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


SETUP, TESTS, *FOR_REAL = blocks("sh")


def test_the_flag_table_is_the_programs() -> None:
    rows = re.findall(r"^\| `--(\w+)` \| (.*?) \| (.*?) \|$", README, re.MULTILINE)
    said = {name: (default, text) for name, default, text in rows}
    flags = [name for name in FLAGS if name != "help"]
    assert said == {name: ("required" if name in REQUIRED else default_of(name), text_of(name)) for name in flags}


def test_every_file_of_the_house_is_drawn() -> None:
    (house,) = (block for block in blocks("text") if "batch_runner.py" in block and "toolsets.py" in block)
    for path in [*ROOT.glob("rollout/*.py"), *ROOT.glob("tools/*.py")]:
        if not path.stem.startswith("__") and path.parent.name == "rollout":
            assert re.search(rf"\b{path.stem}\b", house), path.name
    for room in ("batch_runner.py", "toolsets.py", "model_tools.py", "tools/", "sandboxes/", "endpoints/", "tests/"):
        assert room in house


@pytest.mark.parametrize(
    "command", [line for block in FOR_REAL for line in block.splitlines() if "batch_runner.py" in line]
)
def test_commands_for_real_run_against_a_stand_in(command: str, place: Workplace) -> None:
    (place.path / "data").mkdir()
    shutil.copy(ROOT / "data" / "prompts.jsonl", place.path / "data")
    program, script, *flags = shlex.split(command)
    assert (program, script) == ("python", "batch_runner.py")
    with ScriptedEndpoint([terminal("echo hello"), answer("done")]) as endpoint:
        words = [sys.executable, str(ROOT / "batch_runner.py"), *flags, f"--base_url={endpoint.base_url}"]
        ended = subprocess.run(words, cwd=place.path, env=place.environ(), capture_output=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    if "run_name" in command:
        assert len(place.trajectories("my_first_run")) == 10


def test_the_scripted_example_is_a_script(tmp_path: Path) -> None:
    (example,) = (block for block in blocks("json") if '"status"' in block)
    path = tmp_path / "script.jsonl"
    path.write_text(example, encoding="utf-8")
    load_script(path)


def test_the_json_of_the_first_screen() -> None:
    prompt, *_ = blocks("json")
    lines = (ROOT / "data" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    assert prompt.strip() in lines
    assert len([json.loads(line) for line in lines]) == 10


def test_the_library_example(place: Workplace) -> None:
    (place.path / "data").mkdir()
    shutil.copy(ROOT / "data" / "prompts.jsonl", place.path / "data")
    example = next(block for block in blocks("python") if "BatchRunner" in block)
    with ScriptedEndpoint([terminal("echo hello"), answer("done")]) as endpoint:
        example = example.replace('run_name="my_run"', f'run_name="my_run", base_url="{endpoint.base_url}"')
        env = {**place.environ(), "PYTHONPATH": str(ROOT)}
        words = [sys.executable, "-c", example]
        ended = subprocess.run(words, cwd=place.path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout.startswith("0 "), ended.stderr


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(2 * MINUTES_10)
def test_the_first_command_from_nothing(tmp_path: Path) -> None:
    """What a newcomer copies, in a clone of its own, with a new virtual environment; with the shortest prompt."""
    clone = tmp_path / "clone"
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in files:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, clone / name)
    prompts = clone / "data" / "prompts.jsonl"
    lines = prompts.read_text(encoding="utf-8").splitlines(keepends=True)
    prompts.write_text("".join(sorted(lines, key=len)[:FEW]), encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    env["PIP_NO_COMPILE"] = "1"  # what is imported is compiled anyway
    pipe = subprocess.PIPE
    with politely():
        process = subprocess.Popen(["sh", "-c", SETUP], cwd=clone, env=env, stdout=pipe, stderr=pipe, text=True)
    with ending(process):
        stdout, stderr = process.communicate(timeout=2 * MINUTES_10)
    assert process.returncode == 0, stdout + stderr
    rows = Workplace(clone).trajectories("my_first_run")
    assert len(rows) == FEW
    for row in rows:
        assert row["completed"]
        assert row["tool_stats"]["terminal"]["count"] + row["tool_stats"]["write_file"]["count"] > 0
    assert f"Run my_first_run: {FEW} sample" in stdout


def test_the_tests_command_is_what_ci_runs() -> None:
    assert "python -m pytest" in TESTS
    assert "python -m pytest -q -m " in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
