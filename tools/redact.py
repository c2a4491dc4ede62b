"""Masking: no key-shaped string of a tool's output reaches the model, a log or a row.

Masked are the tokens of well-known services by their prefix, JWTs, private key blocks, ``Authorization`` headers,
long random-looking values assigned to a name that says "key" or "password", passwords in URLs and in lines of
environment files, and the exact secrets the caller names. A short prefix stays, so that the text can still be followed.
What has no such shape (a short password in prose, a key cut in two, one that is a uuid or bare hex) passes; names made
of words, hashes, uuids, encoded files, and what documents show in a key's place pass on purpose.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

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
    for rule in _rules_for(text.lower()):
        text, masked = _apply(rule, text)
        count += masked
    return text, count


def _rules_for(lowered: str) -> Iterable[_Rule]:
    # All tokens are long: mostly there is little among which to look for a hundred of them.
    long_runs = " ".join(_LONG_RUN.findall(lowered))
    found = [rule for needle, rule in _TOKENS_BY_NEEDLE if needle in long_runs] if long_runs else []
    return dict.fromkeys([*found, *(rule for needle, rule in _BY_NEEDLE if needle in lowered)])


_LONG_RUN = re.compile(r"[a-z0-9_.~/+=%-]{15,}")


@dataclass(frozen=True, eq=False)
class _Rule:
    """One shape of secret. The needles are looked for first: that costs next to nothing, a pattern does not."""

    needles: tuple[str, ...]  # in lower case; one of them is in every text the pattern matches
    pattern: str
    masked: Callable[[_Match], str]  # the match with the secret masked; the match as it is when it was none

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        """The pattern; most of them are never needed."""
        return re.compile(self.pattern, re.ASCII | re.MULTILINE)


def _apply(rule: _Rule, text: str) -> tuple[str, int]:
    count = 0

    def masked(match: _Match) -> str:
        nonlocal count
        replacement = rule.masked(match)
        count += replacement != match[0]
        return replacement

    return rule.compiled.sub(masked, text), count


def _tokens(prefixes: str, tail: str, *, random: bool = False) -> Iterator[_Rule]:
    """Return the rules of services' tokens: a literal prefix with no word before it, and a tail.

    ``random`` lets tails pass that are words.
    """
    for prefix in prefixes.split():
        yield _Rule((prefix.lower(),), _no_word_before(re.escape(prefix)) + tail, partial(_token, prefix, random))


def _token(prefix: str, random: bool, match: _Match) -> str:
    token = match[0]
    return token if random and not looks_random(token) else token[: len(prefix) + _KEPT_CHARS] + MASK


def _no_word_before(literal: str = "", of: str = "[A-Za-z0-9]") -> str:
    r"""Return a pattern of the literal; it stands before its look-behinds for the engine to skip from one to the next.

    A letter before a prefix is part of a word (task-...), unless it belongs to an escape (``\nsk-``, ``%22sk-``).
    """
    escapes = (r"\\[nrt]", r"\\x[0-9A-Fa-f]{2}", r"\\u[0-9A-Fa-f]{4}", r"%[0-9A-Fa-f]{2}")
    return f"{literal}(?:(?<!{of}{literal})" + "".join(f"|(?<={escape}{literal})" for escape in escapes) + ")"


def looks_random(value: str) -> bool:
    """Tell a drawn string from words: an unbroken run of 12 with letters and digits, or of 24, and neither of words."""
    return any(
        (len(run) >= 24 or (len(run) >= 12 and not run.isalpha() and not run.isdigit())) and _is_drawn(run)  # noqa: PLR2004 - said above
        for run in re.split(r"[^A-Za-z0-9]+", value)
    )


def _looks_assigned(value: str) -> bool:
    """Tell a secret from words where its name has already said what it is: mixed values count too."""
    mixed = all(any(test(char) for char in value) for test in (str.isupper, str.islower, str.isdigit))
    return looks_random(value) or (mixed and "." not in value and _is_drawn(value))


# A word of an identifier: four letters or more, with a vowel among them and never five consonants in a row; or a short
# one that is common where keys are.
_WORD = re.compile(
    r"[A-Z]?(?=[a-z]*?[aeiouy])(?![a-z]*?[b-df-hj-np-tvwxz]{5})[a-z]{3,}"
    r"|(?=[A-Z]*?[AEIOUY])(?![A-Z]*?[B-DF-HJ-NP-TVWXZ]{5})[A-Z]{4,}(?![a-z])"
    r"|(?i:api|key|jwt|url|get|set|for|and|new|dto|app|sha|aes|rsa)"
)
_WORDS_SHARE, _WORDS_SHARE_OF_LETTERS = 0.65, 0.5  # of the characters; of 100 drawn strings 2 to 10 have as much
_DIGIT_GROUPS = 3  # more than identifiers have
_SAYS_WHAT = re.compile("credential|passw|private|public|secret|token", re.IGNORECASE)  # Ed25519PrivateKey
_FEW_CHARS = 4  # xxxxxxxx, or 0000-0000


def _is_drawn(text: str) -> bool:
    """Tell that a long text is not of words (``passwordFieldOfForm1``), nor a row of the same few characters."""
    if len(set(text)) <= _FEW_CHARS or _SAYS_WHAT.search(text):
        return False
    digit_groups = len(re.findall("[0-9]+", text))
    if digit_groups >= _DIGIT_GROUPS:
        return True
    of_words = sum(map(len, _WORD.findall(text))) / len(text)
    return of_words < (_WORDS_SHARE if digit_groups else _WORDS_SHARE_OF_LETTERS)


_SECRET_NAME = re.compile(
    r"""(?: api[_-]?key | (?:access|private)[_-]?key | secret | passw(?:or)?d | passphrase
          | (?:access|api|auth|bearer|bot|deploy|id|refresh|session)[_-]?token | (?-i:\bTOKEN|_TOKEN) )
        (?P<rest>[A-Za-z0-9_-]{0,20}) \\?["'\]]{0,2}[ \t]{0,4}$""",
    re.IGNORECASE | re.VERBOSE,
)
_NAMES_NO_SECRET = re.compile(r"hash|digest|sum|name|path|file|url|uri|arn|version|commit|revision", re.IGNORECASE)


def _assigned(match: _Match) -> str:
    name = _SECRET_NAME.search(match.string[max(0, match.start() - 64) : match.start()])
    says_so = name and not _NAMES_NO_SECRET.search(name["rest"])
    is_secret = says_so and "EXAMPLE" not in match["value"] and _looks_assigned(match["value"])
    return _without_value(match) if is_secret else match[0]


def _authorization(match: _Match) -> str:
    return _without_value(match) if looks_random(match["value"]) else match[0]


def _without_value(match: _Match) -> str:
    return match["before"] + match["value"][:_KEPT_CHARS] + MASK


_NO_PASSWORD = re.compile(
    r"(?:your|my)?[-_]?(?:pass|passwd|password|pw|pwd|secret|token)|admin|change-?(?:me|this)|example|guest|postgres"
    r"|root|test|foo|bar|abc|xyz|&lt;.*"
    r"|(.)\1*",  # xxxxxxxx
    re.IGNORECASE,
)


def is_no_password(user: str, password: str) -> bool:
    """Tell what examples and local servers have in a password's place: the user's name again, or a word for it."""
    return password[0] in "$<{[%*" or password.lower() == user.lower() or bool(_NO_PASSWORD.fullmatch(password))


def _url_password(match: _Match) -> str:
    is_none = is_no_password(match["user"], match["password"])
    return match[0] if is_none else f"://{match['user']}:{MASK}@"


# What numbering, grep, a diff or a quotation puts in front of a line, and what source code puts around it.
_IN_FRONT = r"""[ \t]{0,12}(?:[^\s"']{0,100}[:|<>#*+/\t-])?[ \t]{0,40}["'+]?"""
_BEHIND = r"(?:\^M)?\$?"  # cat -A shows where lines end
_KEY_LINE = rf"{_IN_FRONT}[A-Za-z0-9+/=]{{40,}}+{_BEHIND}"
_KEY_NAME = r"(?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
_KEY_BLOCK = (
    rf"(?P<begin>-----BEGIN {_KEY_NAME})(?!\*\*\*)"
    r"""(?:(?P<body>(?:[\w+/=:,.()\s\\|"'<>#*@~^$]|-(?!----)|-(?=-----END)){40,}+)"""
    r"""(?P<end>-----END [A-Z0-9 ]{1,40}-----)"""
    rf"""|(?:{_BEHIND}[\s\\nr"',+]{{0,12}}{_KEY_LINE})++)"""  # its end was cut off
)
_KEY_TAIL = (  # its beginning was not asked for
    r"^"  # from the first line on: to try each costs the square
    + "".join(rf"(?<![A-Za-z0-9+/=]{{40}}{end}\n)" for end in ("", r"\r", r"\$", r"\^M\$"))
    + rf"(?:{_KEY_LINE}\r?\n)++(?:{_IN_FRONT}[A-Za-z0-9+/=]{{1,39}}{_BEHIND}\r?\n)?+"
    rf"{_IN_FRONT}(?P<end>-----END {_KEY_NAME})"
)


def _without_key_lines(match: _Match) -> str:
    """Mask a block that holds a key; code that names both its ends holds none."""
    body = match["body"]
    is_key = body is None or 3 * sum(map(len, re.findall(r"[A-Za-z0-9+/=]{40,}", body))) > len(body)
    return f"{match['begin']}{MASK}{match['end'] or ''}" if is_key else match[0]


_NO_MORE = r"(?![A-Za-z0-9])"
_UUID = r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}"
_TOKENS = (
    # models
    # OpenAI, OpenRouter, Anthropic and many others; what scikit-learn calls the parts of its pages is none
    *_tokens("sk-", rf"(?!(?:(?<=#sk-)|(?<=id=.sk-)|(?<=id=\\.sk-)){_UUID})[A-Za-z0-9_-]{{16,}}+", random=True),
    *_tokens("hf_ gsk_ xai- r8_ pplx-", r"[A-Za-z0-9]{30,}+"),
    *_tokens("AIza", r"[A-Za-z0-9_-]{35}"),
    *_tokens("nvapi-", r"[A-Za-z0-9_-]{40,}+"),
    *_tokens("tgp_v1_", r"[A-Za-z0-9_-]{40,}+"),
    *_tokens("fw_", rf"[A-Za-z0-9]{{22,24}}{_NO_MORE}", random=True),
    *_tokens("csk-", r"[a-z0-9]{40,}+", random=True),
    *_tokens("jina_", r"[a-f0-9]{32}[A-Za-z0-9_-]{28}"),
    *_tokens("lsv2_pt_ lsv2_sk_", r"[a-f0-9]{32}_[a-f0-9]{10}"),
    *_tokens("sk_", rf"[a-f0-9]{{48}}{_NO_MORE}"),  # ElevenLabs
    *_tokens("tvly-", r"[A-Za-z0-9-]{20,}+", random=True),
    *_tokens("fc-", rf"[a-f0-9]{{32}}{_NO_MORE}"),
    # where code and packages are kept
    *_tokens("ghp_ gho_ ghu_ ghs_ ghr_", r"[A-Za-z0-9]{30,}+"),
    *_tokens("github_pat_", r"[A-Za-z0-9_]{30,}+"),
    *_tokens(
        "glpat- glrt- gldt- glptt- glcbt- glsoat- glft- glagent-", r"[\w-]{20,}+(?:\.[a-z0-9]{2}\.?[a-z0-9]{7,9})?"
    ),
    *_tokens("ATATT3 ATCTT3", r"[A-Za-z0-9_-]{50,}+(?:=[A-F0-9]{8})?"),
    *_tokens("ATBB", rf"[A-Za-z0-9]{{32}}{_NO_MORE}"),
    *_tokens("npm_", r"[A-Za-z0-9]{30,}+"),
    *_tokens("_authToken=", _UUID),
    *_tokens("pypi-Ag", r"[A-Za-z0-9_-]{50,}+"),
    *_tokens("dckr_pat_ dckr_oat_", r"[A-Za-z0-9_-]{27,}+"),
    *_tokens("rubygems_", rf"[a-f0-9]{{48}}{_NO_MORE}"),
    # clouds
    *_tokens(  # with the secret, where it stands beside its id
        "AKIA ASIA",
        rf"[A-Z0-9]{{16}}{_NO_MORE}(?<!EXAMPLE)"
        r"""(?:["']?[,;:|\t ]{1,2}["']?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=]))?""",
    ),
    *_tokens("ABSK", r"[A-Za-z0-9+/]{100,}+={0,2}"),
    *_tokens("bedrock-api-key-", r"[A-Za-z0-9+/_-]{50,}+={0,2}"),
    *_tokens("ya29.", r"[A-Za-z0-9_-]{20,}+"),
    *_tokens("GOCSPX-", r"[A-Za-z0-9_-]{28}"),
    *_tokens("1//0", r"[A-Za-z0-9_-]{40,}+"),
    *_tokens(
        "AccountKey= SharedAccessKey=", r"(?!Eby8vdM02xNOcqFl)[A-Za-z0-9+/]{43,86}+={1,2}"
    ),  # an emulator's is known
    *_tokens("sig=", r"(?:[A-Za-z0-9+/_-]|%2[BbFf]){43}(?:=|%3[Dd])"),
    *_tokens("dop_v1_ doo_v1_ dor_v1_", r"[a-f0-9]{64}"),
    *_tokens("hvs. hvb.", r"[A-Za-z0-9_-]{24,}+", random=True),
    *_tokens("dapi", rf"[a-f0-9]{{32}}(?:-[0-9])?{_NO_MORE}"),
    *_tokens("glsa_", r"[A-Za-z0-9]{32}_[A-Fa-f0-9]{8}"),
    *_tokens("sbp_", rf"[a-f0-9]{{40}}{_NO_MORE}"),
    *_tokens("sb_secret_", r"[A-Za-z0-9_-]{20,}+", random=True),
    *_tokens("vcp_ vci_ vca_ vcr_ vck_", r"[A-Za-z0-9]{24,}+", random=True),
    *_tokens("vercel_blob_rw_", r"[A-Za-z0-9]{10,}_[A-Za-z0-9]{20,}+"),
    # services
    *_tokens("sk_live_ sk_test_ rk_live_ rk_test_", r"[A-Za-z0-9]{16,}+"),
    *_tokens("whsec_", r"[A-Za-z0-9+/]{24,}+={0,2}", random=True),
    *_tokens("shpat_ shpca_ shppa_ shpss_", rf"[A-Fa-f0-9]{{32}}{_NO_MORE}"),
    *_tokens("xoxa- xoxb- xoxe- xoxo- xoxp- xoxr- xoxs- xapp-", r"[A-Za-z0-9-]{10,}+"),
    *_tokens(
        "hooks.slack.com/services/ hooks.slack.com/workflows/ hooks.slack.com/triggers/",
        r"[TE][A-Z0-9]{6,}/(?:[AB][A-Z0-9]{6,}/)?(?:[0-9]{6,}/)?[A-Za-z0-9]{20,}+",
        random=True,
    ),
    *_tokens("discord.com/api/webhooks/ discordapp.com/api/webhooks/", r"[0-9]{17,20}/[A-Za-z0-9_-]{60,}+"),
    *_tokens("SK", rf"[a-f0-9]{{32}}{_NO_MORE}"),  # Twilio
    *_tokens("SG.", r"[A-Za-z0-9_-]{16,}+\.[A-Za-z0-9_-]{16,}+"),
    *_tokens("lin_api_", r"[A-Za-z0-9]{30,}+"),
    *_tokens("ntn_", rf"[A-Za-z0-9]{{40,50}}{_NO_MORE}"),
    *_tokens("secret_", r"[A-Za-z0-9]{43}(?!\w)", random=True),  # Notion's older ones
    *_tokens("PMAK-", r"[a-f0-9]{24}-[a-f0-9]{34}"),
    # any of them
    *_tokens("AGE-SECRET-KEY-1", r"[02-9AC-HJ-NP-Z]{58}"),
    *_tokens("django-insecure-", r"[a-z0-9!@#$%^&*()_=+-]{30,}+"),
    *_tokens("eyJ", r"[A-Za-z0-9_-]{8,}+\.eyJ[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]{8,}+"),
)


def _after_its_mark(match: _Match) -> str:
    return match["before"] + MASK


def _discord_bot(match: _Match) -> str:
    """Mask what begins with a number, the bot's, in base64."""
    return match["before"] + MASK if b64decode(match["id"] + "==").isdigit() else match[0]


def _line_of_password(match: _Match) -> str:
    value = match["value"]
    is_password = len(set(value)) > _FEW_CHARS and re.search("[0-9]", value) and re.search("[A-Za-z]", value)
    return _without_value(match) if is_password else match[0]


_NO_DIGIT_BEFORE, _ALONE = _no_word_before(of="[0-9]"), _no_word_before(of="[A-Za-z0-9_.-]")
# Tokens that do not begin with what says whose they are.
_MARKED = (
    # Telegram
    _Rule((":aa",), rf"{_NO_DIGIT_BEFORE}(?P<before>[0-9]{{8,10}}:AA)[\w-]{{33}}(?![\w-])", _after_its_mark),
    # Azure AD, Azure OpenAI
    _Rule(("q~",), rf"{_ALONE}(?P<before>[\w.~-]{{3}}[0-9]Q~)[\w.~-]{{31,34}}(?![\w~-])", _after_its_mark),
    _Rule(
        ("jqqj99",), rf"{_ALONE}(?P<before>[A-Za-z0-9]{{4}})[A-Za-z0-9]{{48}}JQQJ99[A-Za-z0-9]{{20,}}+", _after_its_mark
    ),
    _Rule(("fal_key",), rf"""(?P<before>FAL_KEY["' :=]{{1,6}})(?P<value>{_UUID}:[a-f0-9]{{32}})""", _without_value),
    _Rule(
        ("discord", "bot", "token"),
        rf"(?P<id>(?P<before>{_no_word_before('[MNO][DTjz]')}[A-Za-z0-9]{{2}})[A-Za-z0-9]{{19,22}})"
        r"\.[\w-]{6}\.[\w-]{27,38}(?![\w-])",
        _discord_bot,
    ),
)
_RULES = (
    _Rule(("private key",), _KEY_BLOCK, _without_key_lines),
    _Rule(("private key",), _KEY_TAIL, lambda match: MASK + match["end"]),
    *_MARKED,
    _Rule(
        ("bearer ", "basic "),
        r"(?P<before>[Bb](?:earer|EARER|asic) {1,4})(?P<value>[A-Za-z0-9._~+/=-]{16,}+)",
        _authorization,
    ),
    _Rule(
        ("authorization",),
        r"""(?P<before>[Aa](?:uthorization|UTHORIZATION)\\?["']? ?[:=] ?\\?["']?(?:[A-Za-z]{3,12} {1,4})?)"""
        r"""(?P<value>[A-Za-z0-9._~+/=-]{16,}+)""",
        _authorization,
    ),
    _Rule(
        ("://",),
        r"""://(?P<user>[^\s/:@"'<>]{0,100}):(?P<password>[^\s/@"'<>]{1,200})@(?!(?:www\.)?example\.(?:com|net|org)(?![\w.-]))""",
        _url_password,
    ),
    _Rule(  # a line of an environment file; there a password need not be long
        ("password=", "passwd=", "pass=", "pwd="),
        r"""(?<![A-Za-z0-9])(?P<before>(?:[A-Z0-9]{1,30}_){0,6}(?:PASSWORD|PASSWD|PASS|PWD)=["']?)"""
        r"""(?P<value>[A-Za-z0-9!@#%^*+~?]{12,}+)(?=["'\s]|\Z)""",
        _line_of_password,
    ),
    _Rule(  # of env=NAME=value it is the second name that tells
        ("key", "secret", "passw", "passphrase", "token"),
        r"""(?P<before>[=:]{1,2}>?[ \t]{0,8}\\?["'`]?)"""
        r"""(?P<value>(?![A-Za-z_][A-Za-z0-9_-]{0,60}=[^=\s"'])[A-Za-z0-9+/_=.~-]{16,}+)(?![(\[])""",
        _assigned,
    ),
)
_TOKENS_BY_NEEDLE = [(needle, rule) for rule in _TOKENS for needle in rule.needles]
_BY_NEEDLE = [(needle, rule) for rule in _RULES for needle in rule.needles]
