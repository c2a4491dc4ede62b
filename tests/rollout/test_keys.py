from __future__ import annotations

import pytest

from rollout.keys import PLACEHOLDER_KEY, api_key_for, host_of, is_openrouter, key_variable, missing_key

ENVIRON = {"OPENROUTER_API_KEY": "for-openrouter", "OPENAI_API_KEY": "for-others"}


@pytest.mark.parametrize(
    ("host", "openrouter"),
    [
        ("openrouter.ai", True),
        ("eu.openrouter.ai", True),
        ("openrouter.ai.evil.example", False),
        ("notopenrouter.ai", False),
        ("localhost", False),
        ("api.openai.com", False),
    ],
)
def test_a_key_goes_to_its_own_host_only(host: str, openrouter: bool) -> None:
    assert is_openrouter(host) is openrouter
    assert api_key_for(host, None, ENVIRON) == ("for-openrouter" if openrouter else "for-others")
    assert key_variable(host) == ("OPENROUTER_API_KEY" if openrouter else "OPENAI_API_KEY")


def test_the_explicit_key_wins() -> None:
    assert api_key_for("openrouter.ai", " mine\n", ENVIRON) == "mine"


def test_without_a_key_there_is_a_placeholder() -> None:
    assert api_key_for("127.0.0.1", None, {}) == PLACEHOLDER_KEY
    assert api_key_for("127.0.0.1", "", {"OPENROUTER_API_KEY": "x", "OPENAI_API_KEY": " "}) == PLACEHOLDER_KEY


def test_openrouter_always_wants_a_key() -> None:
    for host in ("openrouter.ai", "eu.openrouter.ai"):
        key = api_key_for(host, " ", {"OPENAI_API_KEY": "x", "OPENROUTER_API_KEY": " "})
        assert missing_key(host, key).startswith(f"no key for {host}: set OPENROUTER_API_KEY, or pass --api_key")
        assert missing_key(host, "mine") == ""
    assert missing_key("localhost", PLACEHOLDER_KEY) == ""


@pytest.mark.parametrize("key", ["two words", "new\nline", "clé"])
def test_a_key_no_header_can_carry_is_refused_unseen(key: str) -> None:
    with pytest.raises(ValueError, match="--api_key holds characters") as caught:
        api_key_for("localhost", key, {})
    assert key not in str(caught.value)
    with pytest.raises(ValueError, match="OPENAI_API_KEY holds characters"):
        api_key_for("localhost", None, {"OPENAI_API_KEY": key})


@pytest.mark.parametrize(
    ("base_url", "host"),
    [
        ("https://openrouter.ai/api/v1", "openrouter.ai"),
        ("https://OpenRouter.AI./api/v1", "openrouter.ai"),
        ("http://localhost:8000", "localhost"),
        ("http://[::1]:8000/v1", "::1"),
        ("http://10.0.0.1/v1/", "10.0.0.1"),
    ],
)
def test_host_of(base_url: str, host: str) -> None:
    assert host_of(base_url) == host


@pytest.mark.parametrize(
    "base_url",
    [
        "",
        "localhost:8000",
        " http://host/v1",
        "http://host/a b",
        "ftp://host/v1",
        "http://",
        "http://host:port/v1",
        "http://[::1/v1",
        "https://user:pass@host/v1",
        "https://host/v1?key=1",
        "https://openrouter.ai@evil.example/v1",
        "https://host/v1/chat/completions",
        "https://host/v1/chat/completions/",
    ],
)
def test_what_is_no_endpoint(base_url: str) -> None:
    with pytest.raises(ValueError, match="base_url") as caught:
        host_of(base_url)
    assert "pass@" not in str(caught.value)
