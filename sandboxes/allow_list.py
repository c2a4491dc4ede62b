"""Which hosts a sandbox may reach, where that is limited: the user's list, and the rules that go with it.

An entry is a host name (``docs.example``), a pattern for all names below one (``*.example.com``, at any depth), ``*``
for every name, or an address or network (``10.1.2.3``, ``10.0.0.0/8``); with ``:port`` it means that port, else 80 and
443.
A name never leads to an address that is this machine's or not public (loopback, private, link-local with its metadata
services, …) unless an entry names that address, too.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from sandboxes.addresses import Address, Network, is_own, is_public

WEB_PORTS = (80, 443)
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"(\*|(\*\.)?{_LABEL}(\.{_LABEL})*)")
_ENTRY = re.compile(r"(?P<host>[^\[\]:]+|\[[^\[\]]+\])(:(?P<port>\d{1,5}))?")


class AllowListError(ValueError):
    """An entry that cannot be understood; the message names it."""


@dataclass(frozen=True)
class _Entry:
    host: str  # in lower case; "" for a network
    network: Network | None
    ports: tuple[int, ...]


@dataclass(frozen=True)
class AllowList:
    """The hosts that may be reached."""

    text: str  # as the user wrote it
    entries: tuple[_Entry, ...]

    @classmethod
    def parse(cls, text: str) -> AllowList:
        """Read a comma-separated list. Raises AllowListError."""
        words = [word.strip() for word in text.split(",")]
        return cls(text, tuple(_entry(word) for word in words if word))

    def permits(self, host: str, port: int) -> bool:
        """Tell whether this may be asked for; where it leads to is for ``permits_address``."""
        host = host.lower().removesuffix(".")
        address = _address(host)
        if address:
            return self._lists(address, port)
        return any(port in entry.ports and _matches(entry.host, host) for entry in self.entries)

    def permits_address(self, address: str, port: int) -> bool:
        """Tell whether a permitted name may lead to this address."""
        found = _address(address)
        if found is None:
            return False
        return self._lists(found, port) or (is_public(found) and not is_own(found))

    def _lists(self, address: Address, port: int) -> bool:
        address = getattr(address, "ipv4_mapped", None) or address
        return any(port in entry.ports and entry.network and address in entry.network for entry in self.entries)


def _entry(word: str) -> _Entry:
    match = _ENTRY.fullmatch(word) if _address(word) is None and _network(word) is None else None
    host = (match["host"] if match else word).strip("[]").lower()
    host = host if host == "*." else host.removesuffix(".")  # a slip of the pen is not every name
    ports = (int(match["port"]),) if match and match["port"] else WEB_PORTS
    network = _network(host)
    named = bool(_HOST.fullmatch(host)) and not word.startswith("[")
    if ports[0] not in range(1, 65536) or not (network or named):
        raise AllowListError(f"{word!r} is neither a host name, nor a pattern like *.example.com, nor an address")
    return _Entry("" if network else host, network, ports)


def _matches(pattern: str, host: str) -> bool:
    if pattern == "*" or not pattern:
        return bool(pattern and host)
    return host.endswith(pattern[1:]) and host != pattern[1:] if pattern.startswith("*.") else host == pattern


def _network(text: str) -> Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return None
