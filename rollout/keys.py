"""Which API key goes to which host. Pure; both the parent and the workers use it.

A key is chosen by the host alone, so that none ever goes to a host it was not meant for.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

PLACEHOLDER_KEY = "no-key"  # for local servers that ask for none; clients refuse to send an empty one
_ROUTE = "/chat/completions"
_OPENROUTER_DOMAIN = "openrouter.ai"


def host_of(base_url: str) -> str:
    """Return the host of an endpoint, in lower case. Raises ValueError for what is no plain http(s) address."""
    try:
        parts = urlsplit(base_url)
        host = parts.hostname or ""
        _ = parts.port  # a bad one raises
    except ValueError as error:
        raise ValueError(f"base_url {base_url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not host or base_url.split() != [base_url]:
        raise ValueError(f"base_url {base_url!r}: must be http://host[:port]/path or https://host[:port]/path")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("base_url: must hold no user name, password, query or fragment; the key goes in --api_key")
    if parts.path.rstrip("/").endswith(_ROUTE):
        raise ValueError(f"base_url {base_url!r}: leave out {_ROUTE}, which is added to it")
    return host.rstrip(".").lower()


def is_openrouter(host: str) -> bool:
    """Tell whether a host, as ``host_of`` gives it, is openrouter.ai or a subdomain."""
    return host == _OPENROUTER_DOMAIN or host.endswith("." + _OPENROUTER_DOMAIN)


def key_variable(host: str) -> str:
    """Return the environment variable that holds the key of a host."""
    return "OPENROUTER_API_KEY" if is_openrouter(host) else "OPENAI_API_KEY"


def api_key_for(host: str, explicit: str | None, environ: Mapping[str, str]) -> str:
    """Return the key to send to a host: the explicit one, else its variable's, else a placeholder.

    Raises ValueError, without showing the key, when it holds what an HTTP header cannot carry.
    """
    variable = key_variable(host)
    key = (explicit or "").strip() or environ.get(variable, "").strip() or PLACEHOLDER_KEY
    if not (key.isascii() and key.isprintable() and " " not in key):
        source = "--api_key" if (explicit or "").strip() else variable
        raise ValueError(f"{source} holds characters no API key has (spaces, line breaks or letters outside ASCII)")
    return key


def missing_key(host: str, key: str) -> str:
    """Say what to do when nothing can be asked of this host with the key it would get; "" when that may do."""
    if key != PLACEHOLDER_KEY or not is_openrouter(host):
        return ""
    return f"no key for {host}: set {key_variable(host)}, or pass --api_key or another --base_url"
