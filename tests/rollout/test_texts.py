from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.texts import MAX_JSON_DEPTH, clean_text, dump_json, is_blank, one_line, parse_json, shown_name

ANY_TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates included
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXT, inner),
    max_leaves=20,
)


@given(ANY_TEXT)
def test_clean_text_is_valid_and_leaves_good_text_alone(text: str) -> None:
    cleaned = clean_text(text)
    cleaned.encode()
    assert "\0" not in cleaned
    assert clean_text(cleaned) == cleaned
    good = not any(char == "\0" or "\ud800" <= char <= "\udfff" for char in text)
    assert (cleaned == text) == good


def test_surrogates_that_belong_together_become_their_character() -> None:
    assert clean_text("\ud83d\ude00 \ud83d é\0") == "😀 \ufffd é\ufffd"


@given(ANY_JSON)
def test_parsed_json_can_always_be_dumped(value: Any) -> None:
    parsed = parse_json(json.dumps(value))
    text = dump_json(parsed)
    text.encode()
    assert "\n" not in text
    assert json.loads(text, parse_constant=pytest.fail) == parsed


@given(st.text())
def test_any_text_parses_or_raises_value_error(text: str) -> None:
    try:
        parse_json(text)
    except ValueError:
        return


def test_numbers_json_has_not_become_null() -> None:
    assert parse_json("[NaN, Infinity, -Infinity, 1e999, 1.5]") == [None, None, None, None, 1.5]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_json_has_not_are_refused_where_that_is_asked_for(number: str) -> None:
    with pytest.raises(ValueError, match=f"{number} is no number in JSON"):
        parse_json(f"[{number}]", strict_numbers=True)


def test_numbers_that_are_too_long_are_told_for_people() -> None:
    with pytest.raises(ValueError, match="a number with more digits than any reader takes"):
        parse_json("9" * 5000)


def test_raw_line_breaks_in_strings_are_let_through() -> None:
    assert parse_json('{"a": "x\ny"}') == {"a": "x\ny"}


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * (MAX_JSON_DEPTH + 1) + "]" * (MAX_JSON_DEPTH + 1)])
def test_nesting_is_bounded(text: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(text)
    deepest = "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH
    assert dump_json(parse_json(deepest)) == deepest


@given(st.text(), st.integers(0, 50))
def test_one_line_is_short_and_printable(text: str, max_chars: int) -> None:
    line = one_line(text, max_chars)
    assert len(line) <= max_chars
    assert line.isprintable()


def test_one_line_keeps_what_fits() -> None:
    assert one_line(" a\r\n  b\x1b[31m ", 10) == "a b\ufffd[31m"
    assert one_line("x" * 20, 10) == "x" * 9 + "…"


@pytest.mark.parametrize("text", ["", " \n\t", "\u200b", "\u2060\ufeff", " \u200d \u00ad\u3000"])
def test_what_shows_nothing_is_blank(text: str) -> None:
    assert is_blank(text)
    assert not is_blank(f"{text}x{text}")


@pytest.mark.parametrize("text", [".", "\U0001f642", "\u200b0", "\ufffd"])
def test_what_shows_anything_is_not(text: str) -> None:
    assert not is_blank(text)


def test_names_are_shown_so_that_they_can_be_read() -> None:
    assert [shown_name(name, 4) for name in ("", " \n", "ls", "a\nb", "toolong")] == [
        "(no name)",
        "(no name)",
        "ls",
        "a b",
        "too\u2026",
    ]
