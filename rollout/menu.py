"""What ``--list_distributions`` prints: the distributions, each toolset's chance, and what is missing here.

With ``--tools_file`` or ``--mcp_config`` it also tells of the toolsets these add; MCP servers are started for that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from model_tools import missing_tools, tool_settings
from rollout.extras import Extras
from rollout.preflight import unavailable_toolsets
from toolsets import DISTRIBUTIONS


def distributions_text(typed: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> str:
    """Return the text; ``typed`` are the flags. Raises ExtrasError."""
    tools_file, mcp_config = (Path(typed[name]) if name in typed else None for name in ("tools_file", "mcp_config"))
    catalogue = Extras.read(tools_file, mcp_config, environ).catalogue()
    unavailable = unavailable_toolsets(missing_tools(tool_settings(environ, catalogue), catalogue), catalogue)

    def note(toolset: str) -> str:
        return f"   not available here: {unavailable[toolset]}" if toolset in unavailable else ""

    blocks = []
    for name, distribution in sorted(DISTRIBUTIONS.items()):
        chances = distribution.probabilities.items()
        lines = [f"  {toolset:<12} : {percent:g}% chance{note(toolset)}" for toolset, percent in chances]
        blocks.append("\n".join([f"{name}: {distribution.description}", *lines]))
    if catalogue.added_toolsets:
        names = [(toolset, catalogue.toolsets[toolset].tools) for toolset in catalogue.added_toolsets]
        lines = [f"  {toolset:<12} : {', '.join(tools)}{note(toolset)}" for toolset, tools in names]
        blocks.append("\n".join(["Added, with every draw unless a distribution file names them:", *lines]))
    return "\n\n".join(blocks)
