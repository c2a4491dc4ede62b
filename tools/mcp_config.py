"""The ``mcpServers`` file: which MCP servers a run has, as values.

Owns the file's shape, the ``${VAR}`` that may stand in it, and what of it is secret: whatever came through a ``${VAR}``
and is neither short nor plainly a place of this machine, and what is written out behind a name that says so. Everything
wrong is an McpConfigError of one line that names the server and the key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tools.secret_names import is_place, names_secret, secrets_in_address

_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")
_PLAIN_VARIABLE = re.compile(r"HOME|LOGNAME|USER|PATH|PWD|SHELL|TERM|LANG|LC_[A-Z]+|TZ|TMPDIR|HOSTNAME")
_SECRET_CHARS = 8  # shorter ones are found in ordinary text
_NAME_CHARS = 32
# What other programs write into such files and this one has no use for.
_IGNORED = ("disabled", "description", "autoApprove", "alwaysAllow", "timeout")
_WANTED = {
    "command": "a text that is not empty",
    "args": "a list of texts",
    "env": "an object of texts",
    "cwd": "a text",
    "url": "an http or https URL",
    "headers": "an object of texts",
}


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
    filled_in: frozenset[str] = frozenset()  # what came through ``${VAR}`` and may be secret

    def secrets(self) -> list[str]:
        """Return the texts in it that must not be seen in a row or a log."""
        named = {text for server in self.servers for text in _secrets(server) if not is_place(text)}
        found = {text for secret in named | self.filled_in for text in _spellings(secret)}
        return sorted(text for text in found if len(text) >= _SECRET_CHARS)


def read_mcp_config(path: Path, environ: Mapping[str, str]) -> McpConfig:
    """Return the servers of a file, without those that are ``disabled``. Raises McpConfigError."""
    variables = _Variables(environ)
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_without_repeats)
        servers = tuple(_servers(data, variables))
        return McpConfig(servers, frozenset(variables.secret))
    except OSError as error:
        raise McpConfigError(f"--mcp_config={path}: {error.strerror}") from None
    except McpConfigError as error:
        raise McpConfigError(f"--mcp_config={path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise McpConfigError(f"--mcp_config={path} is not JSON: {error}") from None


def plain_name(name: str, max_chars: int) -> str:
    """Return a name in the characters that endpoints take in tools' names."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name).strip("_")[:max_chars]


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object; one key twice would silently lose what the first one says."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise McpConfigError(f"{twice!r} is there twice in the same object; give one of them another name")
    return made


def _servers(data: Any, variables: _Variables) -> Iterator[McpServer]:
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
            yield _server(place, plain, {key: value for key, value in values.items() if key not in _IGNORED}, variables)


def _server(place: str, name: str, values: dict[str, Any], variables: _Variables) -> McpServer:
    if ("command" in values) == ("url" in values):
        raise McpConfigError(f'{place} must have either a "command" or a "url"')
    kind = values.pop("type", values.pop("transport", None))
    allowed = ("stdio",) if "command" in values else ("http", "streamable-http", "streamable_http", "streamableHttp")
    if kind is not None and kind not in allowed:
        raise McpConfigError(f"{place}: type {kind!r} is not known here; choose from stdio, http")
    filled = _filled(values, lambda text: variables.fill(text, place))
    server_class = StdioServer if "command" in values else HttpServer
    try:
        return server_class.model_validate({**filled, "name": name})
    except ValidationError as error:
        raise McpConfigError(f"{place}: {_problem(error, server_class)}") from None


def _problem(error: ValidationError, server_class: type[StdioServer | HttpServer]) -> str:
    """Return the first thing that is wrong, without what the file says: it may be secret."""
    first, *rest = (" ".join(str(part).split())[:100] for part in error.errors()[0]["loc"])
    if first not in server_class.model_fields:
        known = ", ".join(key for key in server_class.model_fields if key in _WANTED)
        return f"{first!r} is not known beside {known.partition(', ')[0]}; choose from {known}"
    if rest and first in ("env", "headers"):
        return f"{first}.{rest[0]} must be a text"
    return f"{first} must be {_WANTED[first]}"


def _filled(value: Any, fill: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return fill(value)
    if isinstance(value, dict):
        return {key: _filled(item, fill) for key, item in value.items()}
    return [_filled(item, fill) for item in value] if isinstance(value, list) else value


@dataclass
class _Variables:
    """The environment that ``${VAR}`` is filled in from, and what of it may be secret."""

    environ: Mapping[str, str]
    secret: set[str] = field(default_factory=set)

    def fill(self, text: str, place: str) -> str:
        """Put the variable's text for each ``${VAR}``, and ``default`` for ``${VAR:-default}`` where there is none."""

        def value(found: re.Match[str]) -> str:
            name, default = found[1], found[2]
            if name not in self.environ:
                if default is None:
                    raise McpConfigError(f"{place}: ${{{name}}} is not set in the environment")
                return default
            told = self.environ[name]
            if not _PLAIN_VARIABLE.fullmatch(name) and not is_place(told):
                self.secret.add(told)
            return told

        return _VARIABLE.sub(value, text)


def _spellings(secret: str) -> Iterator[str]:
    """Return the forms in which a server or a library may say it: as it is, in JSON, in a URL, in one line."""
    yield from (secret, json.dumps(secret)[1:-1], quote(secret), quote(secret, safe=""), " ".join(secret.split()))


def _secrets(server: McpServer) -> Iterator[str]:
    """Return what is written out behind a name that says that it is secret."""
    if isinstance(server, StdioServer):
        yield from (value for name, value in server.env.items() if names_secret(name))
        for word, following in pairwise((*server.args, "")):
            yield from _of_argument(word, following)
        return
    for name, value in server.headers.items():
        yield from _of_header(name, value)
    yield from secrets_in_address(server.url)


def _of_argument(word: str, following: str) -> Iterator[str]:
    """Take ``--token X``, ``--token=X``, ``TOKEN=X``, ``Authorization: X`` and addresses."""
    yield from secrets_in_address(word)
    name, mark, value = _parted(word)
    if mark:
        yield from _of_header(name, value.strip())
    elif word.startswith("-") and not following.startswith("-"):
        yield from _of_header(word, following)


def _parted(word: str) -> tuple[str, str, str]:
    found = re.search("[=:]", word)
    return (word[: found.start()], found[0], word[found.end() :]) if found else (word, "", "")


def _of_header(name: str, value: str) -> Iterator[str]:
    if names_secret(name):
        yield from (value, value.rpartition(" ")[2])  # of "Bearer ..." the token alone, too
