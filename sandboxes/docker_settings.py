"""What the environment says about containers: the original's variables, with the original's meaning.

A value that cannot be what it should be is one error that names the variable, before anything is started.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sandboxes.allow_list import AllowList, AllowListError
from sandboxes.base import SandboxError
from sandboxes.environment import NAME

DEFAULT_IMAGE = "nikolaik/python-nodejs:python3.11-nodejs20"
_YES = ("true", "1", "yes", "on")
_NO = ("false", "0", "no", "off")
_OF_THE_HOST = re.compile(r"/(home|Users)/|[A-Za-z]:|.*\\")  # absolute paths that are a person's, not an image's


class SettingsError(ValueError):
    """A variable holds what it cannot; the message is for the user."""


@dataclass(frozen=True)
class Settings:
    """How containers are made."""

    image: str  # of samples that name none
    cpus: float  # 0 = no limit
    memory_mb: int  # 0 = no limit
    disk_mb: int  # 0 = no limit
    network: bool  # the engine's own, without limits
    allowed: AllowList | None  # the hosts that may be reached where there is no network; None = none at all
    max_containers: int  # at once, of one run; 0 = what the memory bears
    volumes: tuple[str, ...]  # host:inside[:mode], the user's own wish
    variables: dict[str, str]  # of the host that are forwarded, and those set for containers
    cwd: str  # first folder, "" for the image's own

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Settings:
        """Read the variables. Raises SettingsError."""
        forwarded = _names(environ, "TERMINAL_DOCKER_FORWARD_ENV")
        network = _network(environ, "TERMINAL_DOCKER_NETWORK")
        return cls(
            image=environ.get("TERMINAL_DOCKER_IMAGE", "").strip() or DEFAULT_IMAGE,
            cpus=_number(environ, "TERMINAL_CONTAINER_CPU", 1),
            memory_mb=math.ceil(_number(environ, "TERMINAL_CONTAINER_MEMORY", 5120)),
            disk_mb=math.ceil(_number(environ, "TERMINAL_CONTAINER_DISK", 51200)),
            network=network is True,
            allowed=network if isinstance(network, AllowList) else None,
            max_containers=math.ceil(_number(environ, "TERMINAL_MAX_CONTAINERS", 0)),
            volumes=_texts(environ, "TERMINAL_DOCKER_VOLUMES"),
            variables={
                **{name: environ[name] for name in forwarded if name in environ},
                **_variables(environ, "TERMINAL_DOCKER_ENV"),
            },
            cwd=_container_cwd(environ.get("TERMINAL_CWD", "").strip()),
        )


def read_settings(kind: str = "") -> Settings:
    """Return this process's settings; for a ``kind`` that cannot limit the network to hosts. Raises SandboxError."""
    try:
        settings = Settings.from_environment(os.environ)
    except SettingsError as error:
        raise SandboxError(str(error)) from error
    if kind and settings.allowed:
        raise SandboxError(f"sandbox {kind} has a network or none; set TERMINAL_DOCKER_NETWORK to true or false")
    return settings


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise SettingsError(f"{name}={text} must be a number, 0 or more (0 means no limit)")
    return number


def _network(environ: Mapping[str, str], name: str) -> bool | AllowList:
    text = environ.get(name, "").strip()
    if not text or text.lower() in _YES + _NO:
        return text.lower() not in _NO
    if not re.search(r"[.:*,]", text):  # else a switch that is misspelt would be a host
        raise SettingsError(
            f"{name}={text} must be true or false, or name hosts (docs.example,*.example.com,myhost:8080)"
        )
    try:
        return AllowList.parse(text)
    except AllowListError as error:
        raise SettingsError(f"{name}: {error}") from error


def _texts(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    value = _json(environ, name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise SettingsError(f"{name} must be a JSON list of texts")
    return tuple(value)


def _names(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(_checked(name, item) for item in _texts(environ, name))


def _variables(environ: Mapping[str, str], name: str) -> dict[str, str]:
    value = _json(environ, name)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(item, str | int | float) for item in value.values()):
        raise SettingsError(f"{name} must be a JSON object of texts")
    return {_checked(name, key): item if isinstance(item, str) else json.dumps(item) for key, item in value.items()}


def _json(environ: Mapping[str, str], name: str) -> Any:
    text = environ.get(name, "").strip()
    try:
        return json.loads(text) if text else None
    except ValueError as error:
        raise SettingsError(f"{name} must be JSON: {error}") from error


def _checked(source: str, name: str) -> str:
    if not NAME.fullmatch(name):
        raise SettingsError(f"{source}: {name!r} cannot be the name of a variable")
    return name


def _container_cwd(path: str) -> str:
    """Return a path that can be meant for a container, "" for one that is relative or looks like the host's."""
    return path if path.startswith("/") and not _OF_THE_HOST.match(path) else ""
