"""The ``mcpServers`` file: which MCP servers a run has, as values.

Owns the file's shape, the ``${VAR}`` that may stand in it, and what of it is secret. Everything wrong is an
McpConfigError of one line that names the server and the key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|SESSION", re.IGNORECASE)
_SECRET_CHARS = 8  # shorter ones are found in ordinary text
_NAME_CHARS = 32
# What other programs write into such files and this one has no use for.
_IGNORED = ("disabled", "description", "autoApprove", "alwaysAllow", "timeout")


class McpConfigError(ValueError):
    """The file cannot be used; one line."""


class StdioServer(BaseModel):
    """A server that is a program of this machine, spoken to on its stdin and stdout."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    type: Literal["stdio"] = "stdio"
    command: Annotated[str, Field(min_length=1)]
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    cwd: str = ""  # "": this process's


class HttpServer(BaseModel):
    """A server spoken to over streamable HTTP."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    type: Literal["http"] = "http"
    url: Annotated[str, Field(pattern="^https?://[^/]+")]
    headers: dict[str, str] = {}


McpServer = StdioServer | HttpServer


@dataclass(frozen=True)
class McpConfig:
    """The servers of a file, in its order, ``${VAR}`` filled in: it holds secrets."""

    servers: tuple[McpServer, ...] = ()

    def secrets(self) -> list[str]:
        """Return the texts in it that must not be seen in a row or a log."""
        found = {text for server in self.servers for text in _secrets(server)}
        return sorted(text for text in found if len(text) >= _SECRET_CHARS)


def read_mcp_config(path: Path, environ: Mapping[str, str]) -> McpConfig:
    """Return the servers of a file, without those that are ``disabled``. Raises McpConfigError."""
    try:
        return McpConfig(tuple(_servers(json.loads(path.read_text(encoding="utf-8-sig")), environ)))
    except OSError as error:
        raise McpConfigError(f"--mcp_config={path}: {error.strerror}") from None
    except McpConfigError as error:
        raise McpConfigError(f"--mcp_config={path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise McpConfigError(f"--mcp_config={path} is not JSON: {error}") from None


def plain_name(name: str, max_chars: int) -> str:
    """Return a name in the characters that endpoints take in tools' names."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name).strip("_")[:max_chars]


def _servers(data: Any, environ: Mapping[str, str]) -> Iterator[McpServer]:
    servers = data.get("mcpServers") if isinstance(data, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise McpConfigError('must be a JSON object like {"mcpServers": {name: {"command": ...} or {"url": ...}}}')
    names: dict[str, str] = {}
    for name, values in servers.items():
        place = f"server {name!r}"
        if not isinstance(values, dict):
            raise McpConfigError(f"{place} must be an object with a command or a url")
        plain = plain_name(name, _NAME_CHARS)
        if not plain or plain in names:
            what = f"cannot be told from server {names[plain]!r}" if plain else "has no letter or digit in its name"
            raise McpConfigError(f"{place} {what}; give it another name")
        names[plain] = name
        if not values.get("disabled"):
            yield _server(place, plain, {key: value for key, value in values.items() if key not in _IGNORED}, environ)


def _server(place: str, name: str, values: dict[str, Any], environ: Mapping[str, str]) -> McpServer:
    if ("command" in values) == ("url" in values):
        raise McpConfigError(f'{place} must have either a "command" or a "url"')
    kind = values.pop("type", values.pop("transport", None))
    allowed = ("stdio",) if "command" in values else ("http", "streamable-http", "streamable_http", "streamableHttp")
    if kind is not None and kind not in allowed:
        raise McpConfigError(f"{place}: type {kind!r} is not known here; choose from stdio, http")
    filled = _filled(values, lambda text: _fill(text, environ, place))
    try:
        if "command" in values:
            return StdioServer.model_validate({**filled, "name": name})
        return HttpServer.model_validate({**filled, "name": name})
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, problem["loc"]))
        raise McpConfigError(f"{place}: {key}: {problem['msg'][0].lower()}{problem['msg'][1:]}") from None


def _filled(value: Any, fill: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return fill(value)
    if isinstance(value, dict):
        return {key: _filled(item, fill) for key, item in value.items()}
    return [_filled(item, fill) for item in value] if isinstance(value, list) else value


def _fill(text: str, environ: Mapping[str, str], place: str) -> str:
    """Put the environment's text for each ``${VAR}``, and ``default`` for ``${VAR:-default}`` where it has none."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1], found[2]
        if name in environ:
            return environ[name]
        if default is None:
            raise McpConfigError(f"{place}: ${{{name}}} is not set in the environment")
        return default

    return _VARIABLE.sub(value, text)


def _secrets(server: McpServer) -> Iterator[str]:
    if isinstance(server, StdioServer):
        yield from (value for name, value in server.env.items() if _SECRET_NAME.search(name))
        return
    for name, value in server.headers.items():
        if _SECRET_NAME.search(name):
            yield from (value, value.rpartition(" ")[2])  # of "Bearer ..." the token alone, too
    address = urlsplit(server.url)
    if address.password:
        yield unquote(address.password)
    yield from (value for name, value in parse_qsl(address.query) if _SECRET_NAME.search(name))
