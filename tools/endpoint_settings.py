"""The environment variables by which a user names another endpoint for a tool: ``<PREFIX>_BASE_URL`` and ``_API_KEY``.

A key belongs to the address that stands beside it and is sent nowhere else: without one it is not used at all.
"""

from __future__ import annotations

from typing import TypedDict

from tools.services import Settings

KEY_VARIABLES = ("OPENROUTER_API_KEY", "OPENAI_API_KEY")  # of hosts that no variable names a key for


class NamedEndpoint(TypedDict):
    """The part of a Question or a Post that says where it goes; blank is the run's own endpoint."""

    base_url: str
    api_key: str


def endpoint_variables(prefix: str) -> tuple[str, str]:
    """Return the names of the variables."""
    return f"{prefix}_BASE_URL", f"{prefix}_API_KEY"


def named_endpoint(prefix: str, settings: Settings) -> NamedEndpoint:
    """Return the endpoint the user names, blank where none is named."""
    base_url, api_key = (settings.get(name, "") for name in endpoint_variables(prefix))
    return {"base_url": base_url, "api_key": api_key if base_url else ""}


def wrong_endpoint(prefix: str, settings: Settings, *, needs: str = "") -> str:
    """Say why the variables make no sense and what to do about it; "" when they do.

    ``needs`` is the variable of the model, without which another endpoint cannot be asked.
    """
    base_url_name, _ = endpoint_variables(prefix)
    base_url = settings.get(base_url_name, "")
    if base_url and not base_url.lower().startswith(("http://", "https://")):
        return f"{base_url_name}={base_url!r} must be http://host[:port]/path or https://host[:port]/path"
    if base_url and needs and needs not in settings:
        return f"{base_url_name} needs {needs}: set it to a model of that endpoint"
    return ""
