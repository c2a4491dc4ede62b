"""What a run adds to the program's tools: the user's own file, and MCP servers.

Read once, at the door; workers get what was found there, so that all of them have the same catalogue whatever becomes
of the files meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from model_tools import BUILT_IN, CATALOGUE, Catalogue
from tools.base import Tool
from tools.mcp_config import McpConfig, McpConfigError, read_mcp_config
from tools.mcp_tools import McpToolset, list_servers, mcp_tools, toolsets_from_json, toolsets_to_json
from tools.redact import redact
from tools.user_tools import LOAD_SECONDS, ToolsFile, ToolsFileError


class ExtrasError(ValueError):
    """A tools file or an MCP server cannot be used; one line that says which and why."""


@dataclass(frozen=True)
class Extras:
    """The additions, as values. Holds secrets: it goes nowhere but to the workers."""

    tools_file: ToolsFile | None = None
    own_tools: tuple[Tool, ...] = ()  # those of the file
    mcp: tuple[McpToolset, ...] = ()
    secrets: tuple[str, ...] = ()  # of the MCP servers; known at the door alone
    warnings: tuple[str, ...] = ()

    @classmethod
    def read(cls, tools_file: Path | None, mcp_config: Path | None, environ: Mapping[str, str]) -> Self:
        """Read the files, load the one, start the servers of the other and end them again. Raises ExtrasError."""
        config = McpConfig()
        try:
            extras = cls._loaded(ToolsFile.read(tools_file) if tools_file else None, LOAD_SECONDS)
            extras.catalogue()
            config = read_mcp_config(mcp_config, environ) if mcp_config else config
            listing = list_servers(config)
            extras = replace(extras, mcp=listing.toolsets, secrets=tuple(config.secrets()), warnings=listing.warnings)
            extras.catalogue()
        except (ToolsFileError, McpConfigError) as error:
            raise ExtrasError(redact(str(error), config.secrets())[0]) from None
        return extras

    @classmethod
    def _loaded(cls, file: ToolsFile | None, seconds: float = 0) -> Self:
        return cls(file, tuple(file.load(CATALOGUE, seconds)) if file else ())

    def catalogue(self) -> Catalogue:
        """Return the program's tools and these. Raises ToolsFileError when two have the same name."""
        try:
            return BUILT_IN.plus([*self.own_tools, *mcp_tools(self.mcp)])
        except ValueError as error:
            raise ToolsFileError(f"{self.tools_file.path if self.tools_file else 'MCP servers'}: {error}") from None

    def to_json(self) -> dict[str, Any]:
        """Return what ``from_json`` takes."""
        return {"tools_file": vars(self.tools_file) if self.tools_file else None, "mcp": toolsets_to_json(self.mcp)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Make it of what a worker is told; runs the tools file's text."""
        file = ToolsFile(**data["tools_file"]) if data["tools_file"] else None
        return replace(cls._loaded(file), mcp=toolsets_from_json(data["mcp"]))
