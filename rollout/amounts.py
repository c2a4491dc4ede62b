"""Numbers that others wrote, in files or answers: those that can be true are believed, the others count as 0. Pure.

Every number of a row, a checkpoint or an endpoint's bill goes through here before anything is added up: so no sum is
ever infinite or no number at all, and what is written of it is strict JSON that fits the types of its readers.
"""

from __future__ import annotations

from typing import Any

MAX_AMOUNT = 10**18  # of anything that a row counts; it fits 64 bits
MAX_ANSWER_USD = 1e6  # that one answer of an endpoint can have cost
MAX_ANSWER_TOKENS = 10**12  # and how long it can have been
MAX_LEG_SECONDS = 1e9  # thirty years


def amount(value: Any, most: float = MAX_AMOUNT) -> float:
    """Return a number from 0 to ``most`` as it is, int or float; 0.0 for whatever else it is."""
    believed = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most
    return value if believed else 0.0


def count(value: Any, most: float = MAX_AMOUNT) -> int:
    """Return a number from 0 to ``most`` as a whole one; 0 for whatever else it is."""
    return int(amount(value, most))


def is_count(value: Any) -> bool:
    """Tell whether it is a whole number that ``count`` believes."""
    return type(value) is int and 0 <= value <= MAX_AMOUNT
