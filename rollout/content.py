"""What a sample asks, as 24 bytes: how samples and rows are told apart and found again without keeping their text.

A key is a digest of the prompt (stripped, as the original compares them, and cleaned, as rows hold them) and a digest
of image and working folder together. Keys live as long as the process; written down is only that of a row whose own
question cannot be read in it any more, because something secret is masked there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Any

from rollout.texts import clean_text

PROMPT_BYTES = 16
PLACE_BYTES = 8
KEY_BYTES = PROMPT_BYTES + PLACE_BYTES
ANYWHERE = b"\xff" * PLACE_BYTES  # the place of a row that does not say its image and cwd: any will do
ASKED = "asked"  # the key of what a row answers, in hexadecimal digits, where the row itself does not show it


class Keys:
    """A growing list of keys in one block of memory."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes) // KEY_BYTES

    def __getitem__(self, number: int) -> bytes:
        if not 0 <= number < len(self):
            raise IndexError(number)
        return bytes(self._bytes[number * KEY_BYTES : (number + 1) * KEY_BYTES])

    def append(self, key: bytes) -> None:
        """Add one key of ``KEY_BYTES`` bytes."""
        self._bytes += key

    def extend(self, more: Keys) -> None:
        """Add all keys of another list."""
        self._bytes += more._bytes


def content_key(prompt: str, image: str, cwd: str) -> bytes:
    """Return the key of a sample, or of a row that says its image and cwd; ``prompt`` as ``prompt_text`` gives it."""
    return _prompt_digest(prompt) + _place_digest(image, cwd)


def placeless_key(prompt: str) -> bytes:
    """Return the key of a row that does not say where it ran; ``prompt`` as ``prompt_text`` gives it."""
    return _prompt_digest(prompt) + ANYWHERE


def row_key(row: Mapping[str, Any]) -> bytes:
    """Return the key of a row, ours or the original's. Raises ValueError with the reason when it is no row."""
    if (asked := _key_in_hex(row.get(ASKED))) is not None:
        return asked
    prompt = _row_prompt(row)
    metadata = row.get("metadata")
    if isinstance(metadata, dict):
        image, cwd = metadata.get("image"), metadata.get("cwd")
        if isinstance(image, str) and isinstance(cwd, str):
            return content_key(prompt, image, cwd)
    return placeless_key(prompt)


def _key_in_hex(text: Any) -> bytes | None:
    try:
        key = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES else None


def _row_prompt(row: Mapping[str, Any]) -> str:
    """Return what was asked: the first human turn, else the ``prompt``, else the first message of the user."""
    said = _first(row.get("conversations"), "from", "human", "value")
    if said is None:
        said = row.get("prompt")
    if said is None:
        said = _first(row.get("messages"), "role", "user", "content")
    if said is None:
        raise ValueError("a row without a prompt")
    return prompt_text(said)


def _first(turns: Any, key: str, wanted: str, text: str) -> Any:
    if isinstance(turns, list):
        for turn in turns:
            if isinstance(turn, dict) and turn.get(key) == wanted:
                return turn.get(text)
    return None


def same_content(row_key: bytes, sample_key: bytes) -> bool:
    """Tell whether a row answers what a sample asks."""
    return row_key == sample_key or (
        row_key[PROMPT_BYTES:] == ANYWHERE and row_key[:PROMPT_BYTES] == sample_key[:PROMPT_BYTES]
    )


def prompt_text(value: Any) -> str:
    """Return a prompt as clean text: a number or boolean as JSON writes it, a list of text parts joined by newlines.

    Raises ValueError with a few words that say why it is no prompt.
    """
    if isinstance(value, str):
        text = value
    elif isinstance(value, bool | int | float):
        text = _number_text(value)
    elif isinstance(value, list):
        text = "\n".join(_part_text(part) for part in value)
    elif value is None:
        raise ValueError('"prompt" is null')
    else:
        raise ValueError('"prompt" is an object, not text')
    if not text or text.isspace():
        raise ValueError('"prompt" is empty')
    return clean_text(text)


def _number_text(value: float) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        raise ValueError('"prompt" is a number that JSON does not have, or one with too many digits') from None


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        raise ValueError('"prompt" has a part that is not text')  # noqa: TRY004 - one error for all bad prompts
    return text


def _prompt_digest(prompt: str) -> bytes:
    return sha256(prompt.strip().encode()).digest()[:PROMPT_BYTES]


@lru_cache(maxsize=1024)
def _place_digest(image: str, cwd: str) -> bytes:
    place = f"{clean_text(image)}\0{clean_text(cwd)}"
    return sha256(place.encode()).digest()[:PLACE_BYTES]
