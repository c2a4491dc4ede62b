"""Masking: no key-shaped string of a tool's output reaches the model, a log or a row.

Masked are the tokens of well-known services by their prefix, JWTs, private key blocks, ``Authorization`` headers,
long random-looking values assigned to a name that says "key" or "password", passwords in URLs, and the exact secrets
the caller names. A short prefix stays, so that the text can still be followed. What has no such shape (a short
password in prose, a key cut in two) passes; hashes, uuids and encoded files pass on purpose.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MASK = "***"
MIN_SECRET_CHARS = 8  # a shorter exact secret would mask ordinary words
_KEPT_CHARS = 4

_Match = re.Match[str]


def redact(text: str, secrets: Iterable[str] = ()) -> tuple[str, int]:
    """Return the text with secrets masked, and how many were.

    ``secrets`` are masked wherever they occur, unless shorter than MIN_SECRET_CHARS. Masking twice changes nothing.
    """
    if len(text) < MIN_SECRET_CHARS:
        return text, 0  # most names and many values: nothing that short has any of the shapes
    count = 0
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= MIN_SECRET_CHARS and secret in text:
            count += text.count(secret)
            text = text.replace(secret, secret[: min(_KEPT_CHARS, len(secret) // 4)] + MASK)
    lowered = text.lower()
    for rule in [rule for needle, rule in _BY_NEEDLE if needle in lowered]:
        text, masked = _apply(rule, text)
        count += masked
    return text, count


@dataclass(frozen=True)
class _Rule:
    """One shape of secret. The needles are looked for first: that costs next to nothing, a pattern does not."""

    needles: tuple[str, ...]  # in lower case; one of them is in every text the pattern matches
    pattern: re.Pattern[str]
    masked: Callable[[_Match], str]  # the match with the secret masked; the match as it is when it was none


def _apply(rule: _Rule, text: str) -> tuple[str, int]:
    count = 0

    def masked(match: _Match) -> str:
        nonlocal count
        replacement = rule.masked(match)
        count += replacement != match[0]
        return replacement

    return rule.pattern.sub(masked, text), count


def _token(prefix: str, tail: str, *, random: bool = False) -> _Rule:
    """Return the rule of a service's token: a literal prefix with no word before it, and a tail.

    The literal stands in front of its look-behind because the regex engine then skips from one to the next.
    ``random`` lets tails pass that are words.
    """
    literal = re.escape(prefix)
    # a letter before the prefix is part of a word (task-…), unless it belongs to an escape in JSON text (\nsk-…)
    pattern = re.compile(rf"{literal}(?:(?<![A-Za-z0-9]{literal})|(?<=\\[nrt]{literal})){tail}")

    def masked(match: _Match) -> str:
        token = match[0]
        return token if random and not _looks_random(token) else token[: len(prefix) + _KEPT_CHARS] + MASK

    return _Rule((prefix.lower(),), pattern, masked)


def _looks_random(value: str) -> bool:
    """Tell a drawn string from words: an unbroken run of 12 with letters and digits, or of 24."""
    return any(
        len(run) >= 24 or (len(run) >= 12 and not run.isalpha() and not run.isdigit())  # noqa: PLR2004 - said above
        for run in re.split(r"[^A-Za-z0-9]+", value)
    )


def _looks_assigned(value: str) -> bool:
    """Tell a secret from words where its name has already said what it is: mixed long values count too."""
    mixed = all(any(test(char) for char in value) for test in (str.isupper, str.islower, str.isdigit))
    return _looks_random(value) or (len(value) >= 32 and mixed and "." not in value)  # noqa: PLR2004 - as long as keys are


_SECRET_NAME = re.compile(
    r"""(?: api[_-]?key | (?:access|private)[_-]?key | secret | passw(?:or)?d | passphrase
          | (?:access|api|auth|bearer|bot|deploy|id|refresh|session)[_-]?token | (?-i:\bTOKEN|_TOKEN) )
        (?P<rest>[A-Za-z0-9_-]{0,20}) \\?["'\]]{0,2}[ \t]{0,4}$""",
    re.IGNORECASE | re.VERBOSE,
)
_NAMES_NO_SECRET = re.compile(r"hash|digest|sum|name|path|file|url|uri|arn|version", re.IGNORECASE)


def _assigned(match: _Match) -> str:
    name = _SECRET_NAME.search(match.string[max(0, match.start() - 64) : match.start()])
    is_secret = name and not _NAMES_NO_SECRET.search(name["rest"]) and _looks_assigned(match["value"])
    return _without_value(match) if is_secret else match[0]


def _authorization(match: _Match) -> str:
    return _without_value(match) if _looks_random(match["value"]) else match[0]


def _without_value(match: _Match) -> str:
    return match["before"] + match["value"][:_KEPT_CHARS] + MASK


def _url_password(match: _Match) -> str:
    is_placeholder = match["password"][0] in "$<{%*"
    return match[0] if is_placeholder else f"://{match['user']}:{MASK}@"


_RULES = (
    _Rule(
        ("private key",),
        re.compile(
            r"(?P<begin>-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----)"
            r"(?:(?:[A-Za-z0-9+/=:,.()\s\\]|-(?!----)){40,}+(?P<end>-----END [A-Z0-9 ]{1,40}-----)"
            r"|(?:[\s\\nr]{0,8}[A-Za-z0-9+/=]{40,}+)++)"  # its end was cut off
        ),
        lambda match: f"{match['begin']}{MASK}{match['end'] or ''}",
    ),
    _token("sk-", r"[A-Za-z0-9_-]{16,}+", random=True),  # OpenAI, OpenRouter, Anthropic and many others
    *(_token(f"{kind}_{mode}_", r"[A-Za-z0-9]{16,}+") for kind in ("sk", "rk") for mode in ("live", "test")),
    *(_token(f"gh{kind}_", r"[A-Za-z0-9]{30,}+") for kind in "pousr"),
    _token("github_pat_", r"[A-Za-z0-9_]{30,}+"),
    _token("glpat-", r"[A-Za-z0-9_-]{20,}+"),
    *(_token(prefix, r"[A-Z0-9]{16}(?![A-Za-z0-9])") for prefix in ("AKIA", "ASIA")),
    *(_token(f"xox{kind}-", r"[A-Za-z0-9-]{10,}+") for kind in "abposr"),
    _token("AIza", r"[A-Za-z0-9_-]{35}"),
    _token("ya29.", r"[A-Za-z0-9_-]{20,}+"),
    *(_token(prefix, r"[A-Za-z0-9]{30,}+") for prefix in ("hf_", "npm_", "gsk_", "xai-", "r8_", "pplx-", "lin_api_")),
    _token("tvly-", r"[A-Za-z0-9-]{20,}+", random=True),
    _token("fc-", r"[a-f0-9]{32}(?![A-Za-z0-9])"),
    _token("SG.", r"[A-Za-z0-9_-]{16,}+\.[A-Za-z0-9_-]{16,}+"),
    _token("eyJ", r"[A-Za-z0-9_-]{8,}+\.eyJ[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]{8,}+"),
    _Rule(
        ("bearer ", "basic "),
        re.compile(r"(?P<before>[Bb](?:earer|EARER|asic) {1,4})(?P<value>[A-Za-z0-9._~+/=-]{16,}+)"),
        _authorization,
    ),
    _Rule(
        ("://",),
        re.compile(r"""://(?P<user>[^\s/:@"'<>]{0,100}):(?P<password>[^\s/@"'<>]{1,200})@"""),
        _url_password,
    ),
    _Rule(
        ("key", "secret", "passw", "passphrase", "token"),
        re.compile(r"""(?P<before>[=:]{1,2}>?[ \t]{0,8}\\?["'`]?)(?P<value>[A-Za-z0-9+/_=.~-]{16,}+)(?![(\[])"""),
        _assigned,
    ),
)
_BY_NEEDLE = [(needle, rule) for rule in _RULES for needle in rule.needles]
