"""What is secret by its name or in an address: one answer for variables, flags, headers and fields of queries.

Names are read in whole words, for TOKENIZER is no TOKEN, KEYBOARD no KEY and AUTHOR no AUTH; of words that were joined
the end counts (``PGPASSWORD``, ``apikey``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from tools.redact import is_no_password, looks_random

_WORD_ENDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")
_SECRET = re.compile(
    r"""(?<![A-Z0-9])(?![A-Z]*ASKPASS|BYPASS|COMPASS|HOTKEY|MONKEY|TURKEY)
        (?: [A-Z0-9]*(?:SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|WEBHOOK)[A-Z0-9]*
          | [A-Z0-9]*(?:KEYS?|TOKENS?|AUTH|PASS|PWD)[0-9]*
          | AUTHENTICATION | AUTHORIZATION | BEARER | CREDS? | JWT | PAT | SESSION(?=(?:_ID)?$) | SIG | SIGNATURE | TOK
        )(?![A-Z0-9])""",
    re.VERBOSE,
)
# Where a secret lies or what it is called is none, nor is the shell's folder or the desktop's session.
_PLAIN = re.compile(r"_(?:DIR|FILE|FOLDER|METHOD|MODE|NAME|PATH|SOCK|TYPE)$|^_?(?:OLD)?PWD$|^(?:DESKTOP|XDG)_SESSION")
_FIELD_CHARS = 8  # of a query: shorter ones are found in ordinary text


def names_secret(name: str) -> bool:
    """Tell whether a name says that what it holds is secret."""
    words = _WORD_ENDS.sub("_", name).upper()
    return bool(_SECRET.search(words)) and not _PLAIN.search(words)


def is_plain(value: str) -> bool:
    """Tell a value that is no secret whatever its name says: a place of this machine, or a public address."""
    address = _split(value)
    if not address or not address.scheme or not address.netloc:
        return is_place(value)
    return not ("@" in address.netloc or address.query or address.fragment or looks_random(address.path))


def is_place(text: str) -> bool:
    """Tell a file or folder of this machine."""
    try:
        return text.startswith("/") and Path(text).exists()
    except (OSError, ValueError):  # too long, or with a NUL
        return False


def secrets_in_address(text: str) -> Iterator[str]:
    """Return the password of a URL, and what its query holds behind names that say so, as written and as meant."""
    address = _split(text)
    if not address:
        return
    if address.password and not is_no_password(address.username or "", address.password):
        yield from (address.password, unquote(address.password))
    for field in address.query.split("&"):
        name, _, value = field.partition("=")
        if len(value) >= _FIELD_CHARS and names_secret(name):
            yield from (value, unquote(value.replace("+", " ")))


def _split(text: str) -> SplitResult | None:
    try:
        return urlsplit(text)
    except ValueError:
        return None
