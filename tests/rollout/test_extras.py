from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from model_tools import BUILT_IN
from rollout.extras import Extras, ExtrasError
from rollout.menu import distributions_text
from tests.program import ROOT

TOOLS = """
from pathlib import Path
from tools.base import ToolContext, tool

with Path(__file__).with_name("loads").open("a") as file:
    file.write("x")

@tool("games")
async def roll(context: ToolContext) -> dict:
    return {"rolled": 4}
"""


@pytest.fixture(autouse=True)
def path_as_it_was() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture
def tools_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(TOOLS, encoding="utf-8")
    return path


@pytest.fixture
def mcp_config(tmp_path: Path) -> Path:
    words = [str(ROOT / "tests" / "tools" / "mcp_hostile.py"), "plain"]
    server = {"command": sys.executable, "args": words, "env": {"TOKEN": "${MINE}"}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"x": server}}), encoding="utf-8")
    return tmp_path / "mcp.json"


def test_nothing_is_added() -> None:
    nothing = Extras.read(None, None, {})
    assert nothing == Extras()
    assert nothing.catalogue() == BUILT_IN
    assert Extras.from_json(nothing.to_json()) == nothing


def test_workers_have_the_catalogue_of_the_door(tools_file: Path, mcp_config: Path) -> None:
    door = Extras.read(tools_file, mcp_config, {"MINE": "hunter2hunter2"})
    assert (tools_file.parent / "loads").read_text() == "x"
    assert door.secrets == ("hunter2hunter2",)
    tools_file.write_text("1 / 0", encoding="utf-8")
    mcp_config.unlink()
    worker = Extras.from_json(json.loads(json.dumps(door.to_json())))
    assert list(worker.catalogue().tools) == list(door.catalogue().tools) == [*BUILT_IN.tools, "roll", "mcp_x_work"]
    assert worker.catalogue().toolsets == door.catalogue().toolsets
    assert worker.catalogue().added_toolsets == ("games", "mcp_x")


def test_no_secret_is_in_what_is_told(mcp_config: Path) -> None:
    text = mcp_config.read_text(encoding="utf-8").replace('"plain"', '"broken"')
    mcp_config.write_text(text, encoding="utf-8")  # this one says a password on stderr
    with pytest.raises(ExtrasError, match=r"the secret is hun\*\*\*, and no database is there"):
        Extras.read(None, mcp_config, {"MINE": "hunter2hunter2"})


def test_names_that_are_taken_are_told_with_the_file(tools_file: Path) -> None:
    tools_file.write_text(TOOLS.replace("roll(", "terminal("), encoding="utf-8")
    with pytest.raises(ExtrasError, match=r"mine.py: tool 'terminal' cannot be told from tool 'terminal'"):
        Extras.read(tools_file, None, {})


def test_the_menu_tells_of_what_is_added(tools_file: Path, mcp_config: Path) -> None:
    plain = distributions_text({}, {})
    more = distributions_text({"tools_file": str(tools_file), "mcp_config": str(mcp_config)}, {"MINE": "x"})
    heading = "Added, with every draw unless a distribution file names them:"
    assert more == f"{plain}\n\n{heading}\n  games        : roll\n  mcp_x        : mcp_x_work"
