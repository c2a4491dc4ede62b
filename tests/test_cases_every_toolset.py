"""Every toolset in the program as its users have it: a scripted model calls each tool, a real one each toolset."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from endpoints.launch import start_endpoint
from endpoints.script import ScriptedReply
from endpoints.scripted import ScriptedEndpoint
from rollout.rows import KEYS
from tests.endpoints.embedded_model import PATIENCE_SECONDS, politely, why_not
from tests.program import Ended, Json, Workplace, answer, call, reply, responses, terminal
from tests.tools.browser_site import Pages, Site, serving
from tests.tools.browsing import needs_chromium
from toolsets import KNOWN_TOOLS

OWN_TOOLSETS = ("web", "vision", "image_gen", "terminal", "file", "moa", "browser", "code_execution", "todo")
ADDED_TOOLSETS = ("games", "mcp_shop")
PROMPT = "use everything"
MERGING = "Several models have answered"
TOOLS_FILE = """
import asyncio

from tools.base import ToolContext, tool


@tool("games")
async def roll_dice(context: ToolContext) -> dict:
    '''Roll the dice.'''
    await asyncio.sleep(0.3)
    return {"rolled": [6, 4]}
"""
MCP_SERVER = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("shop")


@server.tool()
def price(item: str) -> str:
    '''Look up what an item costs.'''
    return f"{item}: 7 coins"


server.run("stdio")
"""
FOUND = {"results": [{"title": "Tea", "url": "http://tea.example/", "content": "A hot drink"}]}
PAGES: Pages = {
    "/search": json.dumps(FOUND),
    "/tea": "<title>Tea</title><p>Tea is a drink that is made of leaves and of water which is hot, not boiling.</p>",
    "/": "<title>Shop</title><form action=/found><input aria-label=Search name=q><button>Find</button></form>",
    "/found": "<title>Found</title><h1>Three teas</h1><img src=/pixel.png alt=leaf><p style='height:3000px'></p>",
}
USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "cost": 0.001}  # of the run's model
OTHER_USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "cost": 0.25}
PICTURE_USAGE = {"input_tokens": 4, "output_tokens": 50, "cost": 0.5}
OTHERS = [
    reply(to="auxiliary", prompt="What is shown?", content="a red cat", usage=OTHER_USAGE),
    reply(to="auxiliary", prompt="What do cats want?", content="food", usage=OTHER_USAGE),
    reply(to="auxiliary", prompt=MERGING, content="food and sleep", usage=OTHER_USAGE),
    reply(to="auxiliary", prompt="How many teas?", content="three", usage=OTHER_USAGE),
    reply(to="images", image="", usage=PICTURE_USAGE),
]
AUXILIARY_ANSWERS = 1 + 4 + 1  # about a picture, of three models and the one that merges, about a page
CODE = """
from hermes_tools import read_file, terminal, web_search
print(web_search("tea")["data"]["web"][0]["title"], read_file("tea.txt")["content"], terminal("echo hi")["output"])
"""


def calls(site: Site) -> list[ScriptedReply]:
    """Call every tool there is, in an order in which all go well."""
    steps: list[tuple[str, Json]] = [
        ("todo", {"todos": [{"id": "1", "content": "everything", "status": "in_progress"}]}),
        ("web_search", {"query": "tea"}),
        ("web_extract", {"urls": [site.url("/tea")]}),
        ("write_file", {"path": "tea.txt", "content": "green\n"}),
        ("patch", {"mode": "replace", "path": "tea.txt", "old_string": "green", "new_string": "black"}),
        ("read_file", {"path": "tea.txt"}),
        ("search_files", {"pattern": "black"}),
        ("process", {"action": "list"}),
        ("execute_code", {"code": CODE}),
        ("image_generate", {"prompt": "a red cat"}),
        ("terminal", {"command": "cp generated_images/image_*.png cat.png"}),
        ("vision_analyze", {"image_url": "cat.png", "question": "What is shown?"}),
        ("mixture_of_agents", {"user_prompt": "What do cats want?"}),
        ("browser_navigate", {"url": site.url()}),
        ("browser_type", {"ref": "@e3", "text": "tea"}),
        ("browser_click", {"ref": "@e4"}),
        ("browser_snapshot", {}),
        ("browser_vision", {"question": "How many teas?"}),
        ("browser_get_images", {}),
        ("browser_scroll", {"direction": "down"}),
        ("browser_press", {"key": "Home"}),
        ("browser_back", {}),
        ("browser_close", {}),
        ("roll_dice", {}),
        ("mcp_shop_price", {"item": "tea"}),
    ]
    return [call(name, arguments, usage=USAGE) for name, arguments in steps]


def equip(place: Workplace) -> Workplace:
    """Put a file of tools and an MCP server there."""
    (place.path / "mine.py").write_text(TOOLS_FILE, encoding="utf-8")
    (place.path / "shop.py").write_text(MCP_SERVER, encoding="utf-8")
    servers = {"shop": {"command": sys.executable, "args": [str(place.path / "shop.py")]}}
    (place.path / "mcp.json").write_text(json.dumps({"mcpServers": servers}), encoding="utf-8")
    return place


def distribution(place: Workplace, *toolsets: str) -> str:
    """Write a file in which these are drawn, always."""
    text = json.dumps({"toolsets": dict.fromkeys(toolsets, 100)})
    (place.path / "drawn.json").write_text(text, encoding="utf-8")
    return "drawn.json"


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with serving(PAGES) as serving_site:
        yield serving_site


def use_everything(place: Workplace, site: Site) -> Ended:
    equip(place).dataset([PROMPT])
    place.env = {"WEB_ALLOWED_HOSTS": site.host, "SEARXNG_URL": site.url(), "IMAGE_MODEL": "brush"}
    with ScriptedEndpoint([*calls(site), answer("done", usage=USAGE), *OTHERS]) as endpoint:
        return place.run(
            endpoint.base_url,
            distribution=distribution(place, *OWN_TOOLSETS),
            tools_file="mine.py",
            mcp_config="mcp.json",
            max_turns=40,
        )


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory, site: Site) -> tuple[Workplace, Ended]:
    place = Workplace(tmp_path_factory.mktemp("used"))
    return place, use_everything(place, site)


def row_of(used: tuple[Workplace, Ended]) -> Json:
    place, ended = used
    assert ended.code == 0, ended
    (row,) = place.trajectories()
    return row


@pytest.mark.browser
@needs_chromium[1]
def test_every_tool_is_offered_and_does_its_job(used: tuple[Workplace, Ended], site: Site) -> None:
    row = row_of(used)
    assert row["completed"]
    assert sorted(row["toolsets_used"]) == sorted((*OWN_TOOLSETS, *ADDED_TOOLSETS))
    said = [(response["name"], response["content"]) for response in responses(row)]
    assert [name for name, _ in said] == [line.tool_calls[0].name for line in calls(site)]
    assert row["tool_stats"] == {name: {"count": 1, "success": 1, "failure": 0} for name in KNOWN_TOOLS}, said
    assert not any(row["tool_error_counts"].values())
    result = dict(said)
    assert result["web_search"]["data"]["web"][0]["title"] == "Tea"
    assert result["web_extract"]["results"][0]["content"].startswith("Tea is a drink")
    assert result["read_file"]["content"] == "1|black"
    assert (result["execute_code"]["status"], result["execute_code"]["tool_calls_made"]) == ("success", 3)
    assert result["execute_code"]["output"] == "Tea 1|black hi\n\n"
    assert result["vision_analyze"]["analysis"] == "a red cat"
    assert result["mixture_of_agents"]["response"] == "food and sleep"
    assert result["browser_click"]["url"] == site.url("/found?q=tea")
    assert "Three teas" in result["browser_snapshot"]["snapshot"]
    assert result["browser_vision"]["analysis"] == "three"
    assert (result["roll_dice"], result["mcp_shop_price"]) == ({"rolled": [6, 4]}, {"result": "tea: 7 coins"})
    statistics = used[0].json("statistics.json")["tool_statistics"]
    called = {name for name, counts in statistics.items() if counts["success"] == counts["count"] == 1}
    assert called == {*KNOWN_TOOLS, "roll_dice", "mcp_shop_price"}


@pytest.mark.browser
@needs_chromium[1]
def test_what_other_models_cost_is_counted(used: tuple[Workplace, Ended], site: Site) -> None:
    row = row_of(used)
    answers = len(calls(site)) + 1
    assert row["api_calls"] == answers + AUXILIARY_ANSWERS + 1
    assert row["metadata"]["usage"]["prompt_tokens"] == 100 * answers + 7 * AUXILIARY_ANSWERS + 4
    assert row["metadata"]["usage"]["completion_tokens"] == 10 * answers + 3 * AUXILIARY_ANSWERS + 50
    cost = 0.001 * answers + 0.25 * AUXILIARY_ANSWERS + 0.5
    assert row["metadata"]["cost_usd"] == pytest.approx(cost)
    assert f"Cost: ${cost:.4f} " in used[1].stdout


# A row of a machine that has nothing of it

EXTRAS = ("ddgs", "trafilatura", "lxml_html_clean", "pypdf", "PIL", "playwright", "mcp")
WITHOUT_EXTRAS = f"""
import sys
from importlib.machinery import PathFinder


class Poor(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {EXTRAS} else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Poor
"""


def use_nothing(place: Workplace) -> Json:
    """Run in the same distribution where nothing is installed and nothing is set up."""
    place.dataset([PROMPT])
    (place.path / "sitecustomize.py").write_text(WITHOUT_EXTRAS, encoding="utf-8")
    place.env = {"PYTHONPATH": str(place.path), "BROWSER_EXECUTABLE": "/no/such/browser"}
    with ScriptedEndpoint([terminal("echo hi"), answer("hi")]) as endpoint:
        ended = place.run(endpoint.base_url, distribution=distribution(place, *OWN_TOOLSETS))
        tools = [tool["function"]["name"] for tool in endpoint.requests[0].body["tools"]]
    assert ended.code == 0, ended
    for toolset in ("web", "browser", "image_gen"):
        assert f"toolset {toolset} is not available: " in ended.stderr
    assert not [name for name in tools if name.startswith(("web_", "browser_", "image_", "mcp_"))]
    (row,) = place.trajectories()
    return row


def shape(value: Any) -> Any:
    """The keys and types of a value, all the way down."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json.loads(text) for text in sorted({json.dumps(shape(item)) for item in value})]
    return type(value).__name__


@pytest.mark.browser
@needs_chromium[1]
@pytest.mark.filterwarnings("default")  # datasets has its own
def test_rows_are_alike_whatever_is_installed(used: tuple[Workplace, Ended], place: Workplace) -> None:
    rich, poor = row_of(used), use_nothing(place)
    assert tuple(rich) == tuple(poor) == KEYS
    assert shape(rich) == shape(poor)
    datasets = pytest.importorskip("datasets")
    files = [str(each.run_dir() / "trajectories.jsonl") for each in (used[0], place)]
    loaded = [load(datasets, place.path, [file]) for file in files]
    assert loaded[0].features == loaded[1].features
    assert load(datasets, place.path, files).to_list() == [rich, poor]


def load(datasets: Any, folder: Path, files: list[str]) -> Any:
    return datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(folder / "cache"))


# A real model, a small one: one toolset at a time, since reading what many tools are like takes it minutes


@dataclass(frozen=True)
class Task:
    """What a toolset is asked for, and what must be in the result of one of its tools. SITE is a site on loopback."""

    prompt: str
    tool: str
    result: str


ADDING = {"games": {"tools_file": "mine.py"}, "mcp_shop": {"mcp_config": "mcp.json"}}
ONE_TURN = {"max_total_tokens": 1}  # the budget is used up by then: what is asked for is the call, no last word
WORK_SECONDS = 0.5  # of tools that have time: the end of the budget is known before their result is
AT_WORK_ELSEWHERE = ("terminal", "file")  # the README's first command has the same model use these
TASKS = {
    "web": Task("Search the web for green tea. What is the first result?", "web_search", "A hot drink"),
    "vision": Task("Look at the image http://SITE/pixel.png. What is shown?", "vision_analyze", "a red cat"),
    "image_gen": Task("Make an image of a red cat. Where is the file?", "image_generate", "generated_images/image_"),
    "moa": Task("Ask several models what cats want most. What do they say?", "mixture_of_agents", "a red cat"),
    "browser": Task("Open the page http://SITE/tea in the browser. What is its title?", "browser_navigate", "Tea"),
    "code_execution": Task(
        "Run this Python script: import time; time.sleep(1); print(17 * 23). What does it print?", "execute_code", "391"
    ),
    "todo": Task("Make a todo list with two tasks: buy milk, bake bread.", "todo", "milk"),
    "games": Task("Roll the dice. What came up?", "roll_dice", "[6, 4]"),
    "mcp_shop": Task("What does tea cost in the shop?", "mcp_shop_price", "7 coins"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of the embedded model, started once."""
    if reason := why_not():
        pytest.skip(reason)
    with politely():
        endpoint = start_endpoint("embedded", "", tmp_path_factory.mktemp("embedded") / "log", print)
    assert endpoint is not None
    yield endpoint.base_url
    endpoint.close()


@pytest.fixture(scope="module")
def others() -> Iterator[str]:
    """The base URL of the models that the tools ask."""
    lines = [
        reply(to="auxiliary", content="a red cat", delay_seconds=WORK_SECONDS),
        reply(to="images", image="", delay_seconds=WORK_SECONDS),
    ]
    with ScriptedEndpoint(lines) as endpoint:
        yield endpoint.base_url


def test_every_toolset_has_a_task() -> None:
    assert sorted((*TASKS, *AT_WORK_ELSEWHERE)) == sorted((*OWN_TOOLSETS, *ADDED_TOOLSETS))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_SECONDS)
@pytest.mark.parametrize(
    "toolset", [pytest.param(name, marks=needs_chromium if name == "browser" else ()) for name in TASKS]
)
def test_a_small_model_calls_every_toolset(place: Workplace, toolset: str, model: str, others: str, site: Site) -> None:
    task = TASKS[toolset]
    equip(place).dataset([task.prompt.replace("SITE", site.host)])
    place.env = {
        "WEB_ALLOWED_HOSTS": site.host,
        "SEARXNG_URL": site.url("/late"),
        "IMAGE_BASE_URL": others,
        "VISION_BASE_URL": others,
        "VISION_MODEL": "eyes",
        "MOA_BASE_URL": others,
        "MOA_REFERENCE_MODELS": "one,two",
    }
    flags = {"distribution": distribution(place, toolset), **ADDING.get(toolset, {}), "max_tokens": 120, **ONE_TURN}
    ended = place.ended(place.start(model, **flags), PATIENCE_SECONDS)
    assert ended.code in (0, 1), ended  # the last word may have been asked for before the budget was noticed
    (row,) = place.trajectories()
    assert row["toolsets_used"] == [toolset]
    told = [json.dumps(response["content"]) for response in responses(row) if response["name"] == task.tool]
    assert any(task.result in text for text in told), row["conversations"]
    if toolset in OWN_TOOLSETS:
        assert row["tool_stats"][task.tool]["success"] >= 1
