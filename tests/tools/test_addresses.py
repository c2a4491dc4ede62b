from __future__ import annotations

import asyncio
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.addresses import is_own, is_public
from tests.tools.web_server import PUBLIC, names
from tools.addresses import AllowedHosts, BlockedAddressError, resolve_public, system_lookup

PRIVATE = [
    "0.0.0.0",
    "10.1.2.3",
    "100.64.0.1",  # carrier-grade NAT
    "100.100.100.200",  # a metadata service in there
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "168.63.129.16",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::7f00:1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%lo",
    "fec0::1",
    "ff02::1",
    "100::1",
    "2001::1",  # Teredo
    "2001:db8::1",
    "3fff::1",
    "5f00::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "2002:7f00:1::",
    "2002:a9fe:a9fe::1",
    "64:ff9b::10.0.0.1",
    "64:ff9b:1::8.8.8.8",
]
OPEN = [PUBLIC, "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::1"]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_and_disguised_addresses(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize("address", OPEN)
def test_public_addresses(address: str) -> None:
    assert is_public(ip_address(address))


@given(st.ip_addresses(v=4))
def test_a_disguise_changes_nothing(address: IPv4Address) -> None:
    inner = int(address)
    disguises = [(0xFFFF << 32) | inner, (0x2002 << 112) | (inner << 80), (0x64FF9B << 96) | inner]
    assert {is_public(IPv6Address(disguise)) for disguise in disguises} == {is_public(address)}


def test_this_machines_own_addresses() -> None:
    for own in ("127.0.0.1", "127.9.9.9", "0.0.0.0"):
        assert is_own(ip_address(own))
    for other in OPEN:
        assert not is_own(ip_address(other))


def resolve(host: str, known: dict[str, list[str]] | None = None, allowed: str = "", port: int = 80) -> list[str]:
    lookup = system_lookup if known is None else names(known)
    return asyncio.run(resolve_public(host, port, AllowedHosts.parse(allowed), lookup))


def is_blocked(host: str, known: dict[str, list[str]] | None = None, allowed: str = "", port: int = 80) -> bool:
    try:
        resolve(host, known, allowed, port)
    except BlockedAddressError:
        return True
    return False


def test_what_dns_says_counts() -> None:
    assert resolve("site", {"site": [PUBLIC]}) == [PUBLIC]
    with pytest.raises(BlockedAddressError, match=r"^Blocked: URL targets a private or internal network address$"):
        resolve("site", {"site": ["10.0.0.5"]})
    assert is_blocked("site", {"site": [f"{PUBLIC} 127.0.0.1"]})
    assert is_blocked("site", {"site": ["::ffff:10.0.0.5"]})
    with pytest.raises(OSError, match="no such host"):
        resolve("other", {"site": [PUBLIC]})
    with pytest.raises(OSError, match="no address found for site"):
        resolve("site", {"site": [""]})


@pytest.mark.parametrize("host", ["localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0"])
def test_the_machines_own_names_for_itself(host: str) -> None:
    assert is_blocked(host)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 300, "\N{SNOWMAN}" * 70, "a b", ""])
def test_what_is_no_host(host: str) -> None:
    with pytest.raises((OSError, BlockedAddressError)):
        resolve(host)


@pytest.mark.parametrize(
    ("allowed", "host", "port", "ok"),
    [
        ("10.0.0.5", "10.0.0.5", 80, True),
        ("10.0.0.5", "10.0.0.6", 80, False),
        ("10.0.0.5:8080", "10.0.0.5", 8080, True),
        ("10.0.0.5:8080", "10.0.0.5", 80, False),
        (" Intranet , 10.9.0.0/16 ", "intranet", 80, True),
        ("intranet", "INTRANET.", 80, True),
        ("intranet:443", "intranet", 80, False),
        ("intranet", "other", 80, False),
        ("10.0.0.0/8", "intranet", 80, True),  # by its address
        ("10.0.0.0/8", "mixed", 80, False),
        ("10.0.0.0/8", "11.0.0.1", 80, True),  # public anyway
        ("::1", "::1", 80, True),
        ("[::1]:8080", "::1", 8080, True),
        ("[::1]:8080", "::1", 80, False),
        ("[0:0::1]:8080", "::1", 8080, True),
        ("fd00::/8", "fd12::1", 80, True),
        (",,", "127.0.0.1", 80, False),
    ],
)
def test_hosts_the_user_allows(allowed: str, host: str, port: int, ok: bool) -> None:
    known = {name: ["10.0.0.7"] for name in ("intranet", "INTRANET.", "other")} | {"mixed": ["10.0.0.7 192.168.0.1"]}
    assert is_blocked(host, known, allowed, port) is not ok


@pytest.mark.parametrize("entry", ["10.0.0.0/33", "http://intranet", "a b", "host:port", "host:", "10.0.0.1/8", "[::1"])
def test_what_is_no_host_of_the_users(entry: str) -> None:
    with pytest.raises(ValueError, match=r"^WEB_ALLOWED_HOSTS: .* is no host, "):
        AllowedHosts.parse(f"ok.example,{entry}")


@given(st.text())
def test_any_list_of_hosts_is_read_or_refused(text: str) -> None:
    try:
        allowed = AllowedHosts.parse(text)
    except ValueError:
        return
    assert not allowed.allows("metadata.google.internal", 80)
