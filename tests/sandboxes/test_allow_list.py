"""Which hosts may be reached, by the user's list; and which addresses a name may lead to."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.addresses import is_public
from sandboxes.allow_list import AllowList, AllowListError


@pytest.mark.parametrize(
    ("entries", "host", "port", "permitted"),
    [
        ("docs.example", "docs.example", 443, True),
        ("docs.example", "docs.example", 80, True),
        ("docs.example", "docs.example", 22, False),
        ("docs.example", "Docs.Example.", 443, True),
        ("Docs.Example.", "docs.example", 443, True),
        ("docs.example", "docs.example.evil.example", 443, False),
        ("docs.example", "evildocs.example", 443, False),
        ("docs.example", "a.docs.example", 443, False),
        ("*.example.com", "a.example.com", 443, True),
        ("*.example.com", "a.b.example.com", 443, True),
        ("*.example.com", "example.com", 443, False),
        ("*.example.com", ".example.com", 443, False),
        ("*.example.com", "aexample.com", 443, False),
        ("*.example.com:8443", "a.example.com", 8443, True),
        ("*.example.com:8443", "a.example.com", 443, False),
        ("*", "anything.example", 443, True),
        ("*", "anything.example", 25, False),
        ("*", "1.1.1.1", 443, False),  # an address is no name
        ("*", "", 443, False),
        ("myhost:8080", "myhost", 8080, True),
        ("1.1.1.1", "1.1.1.1", 443, True),
        ("1.1.1.1", "1.1.1.2", 443, False),
        ("10.0.0.0/8", "10.9.8.7", 443, True),
        ("10.0.0.0/8:8080", "10.9.8.7", 8080, True),
        ("10.0.0.0/8", "[::ffff:10.9.8.7]", 443, True),
        ("2001:db8::1", "[2001:db8::1]", 443, True),
        ("[2001:db8::1]:8080", "[2001:db8::1]", 8080, True),
        ("a.example, b.example ,", "b.example", 80, True),
        ("", "a.example", 80, False),
    ],
)
def test_what_may_be_asked_for(entries: str, host: str, port: int, permitted: bool) -> None:
    assert AllowList.parse(entries).permits(host, port) is permitted


@pytest.mark.parametrize(
    ("entries", "address", "permitted"),
    [
        ("*", "93.184.216.34", True),
        ("*", "2606:2800:220:1:248:1893:25c8:1946", True),
        ("*", "127.0.0.1", False),
        ("*", "10.0.0.1", False),
        ("*", "100.64.0.1", False),
        ("*", "169.254.169.254", False),
        ("*", "168.63.129.16", False),
        ("*", "224.0.0.1", False),
        ("*", "0.0.0.0", False),
        ("*", "::1", False),
        ("*", "fe80::1%eth0", False),
        ("*", "fd00:ec2::254", False),
        ("*", "::ffff:127.0.0.1", False),
        ("*", "64:ff9b::7f00:1", False),
        ("*", "2002:7f00:1::", False),
        ("*,10.0.0.0/8", "10.0.0.1", True),
        ("*,10.0.0.0/8", "::ffff:10.0.0.1", True),
        ("*,10.0.0.0/8", "192.168.0.1", False),
        ("*,127.0.0.1:8000", "127.0.0.1", False),  # another port
        ("*", "no address", False),
    ],
)
def test_where_a_name_may_lead(entries: str, address: str, permitted: bool) -> None:
    assert AllowList.parse(entries).permits_address(address, 443) is permitted


@pytest.mark.parametrize(
    "entry", ["a b", "http://a.example", "a.example/x", "*.", "a.*.b", "x:0", "x:99999", "-", "[x]"]
)
def test_what_is_no_entry(entry: str) -> None:
    with pytest.raises(AllowListError, match="is neither a host name"):
        AllowList.parse(f"ok.example,{entry}")


@given(st.ip_addresses(v=4))
def test_an_address_in_disguise_is_judged_as_itself(address: ipaddress.IPv4Address) -> None:
    disguises = (
        f"::ffff:{address}",
        f"64:ff9b::{address}",
        str(ipaddress.IPv6Address((0x2002 << 112) | int(address) << 80)),
    )
    for disguise in disguises:
        assert is_public(ipaddress.IPv6Address(disguise)) == is_public(address)


@given(st.text(), st.integers(min_value=0, max_value=70_000))
def test_an_empty_list_permits_nothing(host: str, port: int) -> None:
    assert not AllowList.parse(" , ").permits(host, port)
