"""Which addresses belong to the public internet, in all the forms that stand for another, and which are our own."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_GLOBAL_UNICAST = IPv6Network("2000::/3")  # all that is routed of IPv6; the rest is local, reserved or a disguise
_NAT64 = IPv6Network("64:ff9b::/96")
_NOT_PUBLIC = (
    IPv4Network("168.63.129.16/32"),  # the metadata service of a cloud, at an address that looks public
    IPv4Network("192.0.0.0/24"),  # protocol assignments, and another cloud's metadata service
    IPv4Network("192.88.99.0/24"),  # 6to4 relays
    IPv6Network("3fff::/20"),  # documentation
)


def is_public(address: Address) -> bool:
    """Tell whether an address belongs to the public internet; one that stands for another is judged by that."""
    if isinstance(address, IPv6Address):
        if inner := address.ipv4_mapped or address.sixtofour or _nat64(address):
            return is_public(inner)
        if address not in _GLOBAL_UNICAST:
            return False
    return (
        address.is_global
        and not (address.is_multicast or address.is_reserved)
        and not any(address in network for network in _NOT_PUBLIC)
    )


def is_own(address: Address) -> bool:
    """Tell whether an address is one of this machine's, public ones included."""
    family = socket.AF_INET if isinstance(address, IPv4Address) else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))  # sends nothing, and works for one's own addresses only
    except OSError:
        return False
    return True


def _nat64(address: IPv6Address) -> IPv4Address | None:
    return IPv4Address(address.packed[-4:]) if address in _NAT64 else None
