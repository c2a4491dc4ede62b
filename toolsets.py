"""The menu: toolset → tool names; distributions; the seeded draw. Pure data: nothing here can run a tool.

A toolset is a name for tools that belong together. A distribution gives each toolset a probability in percent; a draw
flips each on its own and depends on the seed and the sample alone, never on order, workers or resume.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

KNOWN_TOOLS = (  # every tool of the catalogue, built or not: the columns of a row's tool_stats, in this order
    "web_search",
    "web_extract",
    "vision_analyze",
    "image_generate",
    "terminal",
    "process",
    "read_file",
    "write_file",
    "patch",
    "search_files",
    "mixture_of_agents",
    "browser_navigate",
    "browser_snapshot",
    "browser_click",
    "browser_type",
    "browser_scroll",
    "browser_back",
    "browser_press",
    "browser_close",
    "browser_get_images",
    "browser_vision",
    "execute_code",
    "todo",
)
EVERYTHING = ("all", "*")  # names that stand for every toolset


@dataclass(frozen=True)
class Toolset:
    """Tools that belong together, and the toolsets it takes in."""

    description: str
    tools: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()


TOOLSETS: dict[str, Toolset] = {
    "web": Toolset("Search the web and read pages", ("web_search", "web_extract")),
    "search": Toolset("Search the web, without reading pages", ("web_search",)),
    "vision": Toolset("Look at images", ("vision_analyze",)),
    "image_gen": Toolset("Make images", ("image_generate",)),
    "terminal": Toolset("Run commands and background processes", ("terminal", "process")),
    "file": Toolset("Read, write, patch and search files", ("read_file", "write_file", "patch", "search_files")),
    "moa": Toolset("Ask several models and merge their answers", ("mixture_of_agents",)),
    "browser": Toolset("Drive a web browser", tuple(tool for tool in KNOWN_TOOLS if tool.startswith("browser_"))),
    "code_execution": Toolset("Run Python that calls the other tools", ("execute_code",)),
    "todo": Toolset("Keep a list of what is to be done", ("todo",)),
    "debugging": Toolset("Find and mend faults", ("terminal", "process"), ("web", "file")),
    "safe": Toolset("Everything that runs no commands", (), ("web", "vision", "image_gen")),
}


def tools_of(names: Iterable[str], toolsets: Mapping[str, Toolset] = TOOLSETS) -> tuple[str, ...]:
    """Return the tools of the named toolsets and all they include, each once.

    In the order of KNOWN_TOOLS, tools that are not of the program behind them, by name. ``all`` and ``*`` stand for
    every toolset; a toolset that includes itself does no harm. Raises ValueError for a name that is none.
    """
    found: set[str] = set()
    seen: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in EVERYTHING:
            pending.extend(toolsets)
        elif name in toolsets:
            found.update(toolsets[name].tools)
            pending.extend(toolsets[name].includes)
        else:
            raise ValueError(f"unknown toolset {name!r}; choose from {', '.join(toolsets)}, all")
    return (*(tool for tool in KNOWN_TOOLS if tool in found), *sorted(found.difference(KNOWN_TOOLS)))


class DistributionError(ValueError):
    """The user named a distribution that does not exist, or a file that is none: one line that says what is allowed."""


@dataclass(frozen=True)
class Distribution:
    """Toolset → probability in percent, 0 to 100."""

    name: str
    description: str
    probabilities: dict[str, float]
    always: tuple[str, ...] = ()  # toolsets that come with every draw and take no part in it

    @property
    def toolsets(self) -> tuple[str, ...]:
        """All it names."""
        return (*self.probabilities, *self.always)


def _named(name: str, description: str, **probabilities: float) -> Distribution:
    return Distribution(name, description, probabilities)


_THE_SEVEN = ("web", "vision", "image_gen", "terminal", "file", "moa", "browser")
DISTRIBUTIONS: dict[str, Distribution] = {
    distribution.name: distribution
    for distribution in (
        _named("default", "All seven toolsets, all the time", **dict.fromkeys(_THE_SEVEN, 100)),
        _named("image_gen", "Making and judging images", image_gen=90, vision=90, web=55, terminal=45, moa=10),
        _named("research", "Searching and reading the web", web=90, browser=70, vision=50, moa=40, terminal=10),
        _named(
            "science",
            "Computing and the web",
            web=94,
            terminal=94,
            file=94,
            vision=65,
            browser=50,
            image_gen=15,
            moa=10,
        ),
        _named("development", "Writing software", terminal=80, file=80, moa=60, web=30, vision=10),
        _named("safe", "No terminal and no files", web=80, browser=70, vision=60, image_gen=60, moa=50),
        _named("balanced", "All seven toolsets, each half of the time", **dict.fromkeys(_THE_SEVEN, 50)),
        _named("minimal", "The web and nothing else", web=100),
        _named("terminal_only", "Commands and files", terminal=100, file=100),
        _named("terminal_web", "Commands, files and the web", terminal=100, file=100, web=100),
        _named("creative", "Images, with some web", image_gen=90, vision=90, web=30),
        _named("reasoning", "Several models' opinions, few other tools", moa=90, web=30, terminal=20),
        _named("browser_use", "The browser, helped by search and vision", browser=100, web=80, vision=70),
        _named("browser_only", "The browser and nothing else", browser=100),
        _named("browser_tasks", "Browser tasks, rarely anything else", browser=97, terminal=15, vision=12),
        _named(
            "terminal_tasks",
            "Terminal tasks, helped by web and browser",
            terminal=97,
            file=97,
            web=97,
            browser=75,
            vision=50,
            image_gen=10,
        ),
        _named(
            "mixed_tasks",
            "Browser and terminal tasks together",
            browser=92,
            terminal=92,
            file=92,
            web=35,
            vision=15,
            image_gen=15,
        ),
    )
}


def load_distribution(name_or_path: str, toolsets: Mapping[str, Toolset] = TOOLSETS) -> Distribution:
    """Return a distribution by its name, or read one from a JSON file.

    The file holds ``{"description": text, "toolsets": {toolset: percent}}``; ``name`` may be given and is the file's
    own name otherwise, ``probabilities`` is taken for ``toolsets``. Its toolsets must be among ``toolsets``. Raises
    DistributionError.
    """
    if name_or_path in DISTRIBUTIONS:
        return DISTRIBUTIONS[name_or_path]
    path = Path(name_or_path)
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        if name_or_path.endswith(".json") or "/" in name_or_path:
            raise DistributionError(f"distribution {name_or_path}: {error.strerror}") from None
        choices = ", ".join(DISTRIBUTIONS)
        message = f"unknown distribution {name_or_path!r}; choose from {choices}, or name a JSON file"
        raise DistributionError(message) from None
    except (ValueError, RecursionError) as error:
        raise DistributionError(f"distribution {name_or_path}: not JSON: {error}") from None
    try:
        return _distribution(data, path.stem, toolsets)
    except DistributionError as error:
        raise DistributionError(f"distribution {name_or_path}: {error}") from None


def draw(distribution: Distribution, seed: int, sample_key: str) -> tuple[str, ...]:
    """Flip each toolset on its own; when none came up, take the likeliest. ``sample_key`` stands for the sample."""
    # bytes, because a prompt may hold half a surrogate pair; for any other text the draw is that of the text itself
    chance = Random(f"{seed}:{sample_key}".encode("utf-8", "surrogatepass"))  # noqa: S311 - repeatable on purpose
    names = sorted(distribution.probabilities)
    drawn = tuple(name for name in names if chance.random() * 100 < distribution.probabilities[name])
    drawn = drawn or (max(names, key=lambda name: distribution.probabilities[name]),)
    return (*drawn, *distribution.always)


def _distribution(data: Any, default_name: str, toolsets: Mapping[str, Toolset]) -> Distribution:
    shape = '{"description": text, "toolsets": {toolset: percent}}'
    if not isinstance(data, dict):
        raise DistributionError(f"must be a JSON object like {shape}")
    unknown = sorted(data.keys() - {"name", "description", "toolsets", "probabilities"})
    if unknown:
        raise DistributionError(f"unknown key {unknown[0]!r}; the file is like {shape}")
    for key in ("name", "description"):
        if not isinstance(data.get(key, ""), str):
            raise DistributionError(f"{key!r} must be text")
    probabilities = data.get("toolsets", data.get("probabilities"))
    if not isinstance(probabilities, dict) or not probabilities:
        raise DistributionError(f'"toolsets" must be an object of toolset and percent, like {shape}')
    for toolset, percent in probabilities.items():
        _check_probability(toolset, percent, toolsets)
    if not any(probabilities.values()):
        raise DistributionError("every probability is 0; at least one must be above")
    return Distribution(data.get("name") or default_name, data.get("description", ""), probabilities)


def _check_probability(toolset: str, percent: Any, toolsets: Mapping[str, Toolset]) -> None:
    if toolset not in toolsets and toolset not in EVERYTHING:
        raise DistributionError(f"unknown toolset {toolset!r}; choose from {', '.join(toolsets)}, all")
    is_number = isinstance(percent, int | float) and not isinstance(percent, bool)
    if not is_number or not 0 <= percent <= 100:  # noqa: PLR2004 - percent
        raise DistributionError(f"the probability of {toolset!r} must be a number from 0 to 100, not {percent!r}")
