"""The address guard: which hosts a tool may be sent to by a model or by a page.

Owns the one rule for every tool that fetches: public addresses only, and none of this machine's, whether written as a
literal or given by DNS, unless the user allows the host. Names are looked up here and the checked addresses handed out,
so that a caller who connects to these, and not to a name, cannot be sent elsewhere by a second look-up. Connecting, and
asking again at every redirect, is the caller's.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address, ip_network

from sandboxes.addresses import Address, Network, is_own, is_public

ALLOWED_HOSTS_VARIABLE = "WEB_ALLOWED_HOSTS"

Lookup = Callable[[str, int], Awaitable[list[str]]]  # host, port → addresses; raises OSError when there are none

# Of its own: whoever answers for a hostile name may take its time, and must hold up nobody else's look-ups.
_THREADS = ThreadPoolExecutor(16, thread_name_prefix="lookup")
_ENTRY = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<name>[^:\s\[\]/]+))(?::(?P<port>\d{1,5}))?")


class BlockedAddressError(Exception):
    """The host is private or internal, and not allowed by the user."""

    def __init__(self) -> None:
        super().__init__("Blocked: URL targets a private or internal network address")


@dataclass(frozen=True)
class AllowedHosts:
    """What the user opens although it is private."""

    hosts: frozenset[tuple[str, int]] = frozenset()  # name or address in its usual form, port; port 0 is any
    networks: tuple[Network, ...] = ()

    @classmethod
    def parse(cls, text: str) -> AllowedHosts:
        """Read ``WEB_ALLOWED_HOSTS``: host, host:port, [IPv6]:port or network (CIDR), comma-separated.

        Raises ValueError that names the entry that is none of these.
        """
        hosts: set[tuple[str, int]] = set()
        networks: list[Network] = []
        for entry in filter(None, map(str.strip, text.split(","))):
            try:
                networks.append(ip_network(entry))  # a lone address is a network of one
                continue
            except ValueError:
                found = _ENTRY.fullmatch(entry)
            if not found:
                raise ValueError(
                    f"{ALLOWED_HOSTS_VARIABLE}: {entry!r} is no host, host:port, [IPv6]:port or network like 10.0.0.0/8"
                )
            hosts.add((_usual(found["v6"] or found["name"]), int(found["port"] or 0)))
        return cls(frozenset(hosts), tuple(networks))

    def allows(self, host: str, port: int) -> bool:
        """Tell whether the host, a name or an address, may be reached at this port whatever its address is."""
        usual = _usual(host)
        return not self.hosts.isdisjoint({(usual, port), (usual, 0)}) or self._holds(_literal(usual))

    def permits(self, address: Address) -> bool:
        """Tell whether this address may be connected to."""
        return self._holds(address) or (is_public(address) and not is_own(address))

    def _holds(self, address: Address | None) -> bool:
        return address is not None and any(address in network for network in self.networks)


NO_HOSTS = AllowedHosts()


async def system_lookup(host: str, port: int) -> list[str]:
    """Ask the machine's resolver. Raises OSError."""
    try:
        ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(_THREADS, ask)
    except UnicodeError:
        raise OSError(f"{host!r} is no host name") from None
    return list(dict.fromkeys(str(item[4][0]) for item in found))


async def resolve_public(
    host: str, port: int, allowed: AllowedHosts = NO_HOSTS, lookup: Lookup = system_lookup
) -> list[str]:
    """Return the addresses to connect to, at least one, all of them checked.

    ``host`` is a name, or an address without brackets. One private address among public ones blocks the host. Raises
    BlockedAddressError, and OSError for a name that is not found.
    """
    literal = _literal(host)
    addresses = [str(literal)] if literal else await lookup(host, port)
    if not addresses:
        raise OSError(f"no address found for {host}")
    if not allowed.allows(host, port) and not all(allowed.permits(ip_address(address)) for address in addresses):
        raise BlockedAddressError
    return addresses


def _literal(host: str) -> Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None  # a name, or a number like 2130706433, which the resolver reads as an address


def _usual(host: str) -> str:
    return str(_literal(host) or host.lower().rstrip("."))
