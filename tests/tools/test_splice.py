from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tools.fuzzy import MatchError, find
from tools.splice import edit, splice
from tools.text_files import TextFile, decode


def refusal(text: str, old: str, new: str, *, replace_all: bool = False) -> str:
    with pytest.raises(MatchError) as caught:
        edit(text, old, new, replace_all=replace_all)
    return str(caught.value)


# --- one place, all places ---


def test_one_place_is_replaced() -> None:
    edited = edit("a = 1\nb = 2\n", "b = 2", "b = 3")
    assert (edited.text, edited.strategy, edited.line_numbers) == ("a = 1\nb = 3\n", "exact", (2,))
    assert edit("a b c", " b", "").text == "a c"


def test_several_places_are_counted_and_named() -> None:
    message = refusal("x\ny\nx\nx = x\n", "x", "z")
    assert "4 times" in message
    assert "lines 1, 3, 4, 4" in message
    assert "replace_all" in message
    assert "lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, …" in refusal("x\n" * 30, "x", "z")
    assert "2 times" in refusal("aaa", "aa", "b")


def test_all_places_are_replaced_on_demand() -> None:
    edited = edit("x\ny\nx\n", "x", "xx", replace_all=True)
    assert (edited.text, edited.line_numbers) == ("xx\ny\nxx\n", (1, 3))
    assert edit("aaaaa", "aa", "b", replace_all=True).text == "bba"
    assert edit("  a\n    a\n", "a \n", "b\n", replace_all=True).text == "  b\n    b\n"


def test_likeness_does_not_replace_all() -> None:
    text = "def f(x):\n    one = 1\n    return one\n"
    quoted = text.replace("one = 1", "ones = 1")
    assert "replace_all" in refusal(text, quoted, "pass\n", replace_all=True)
    assert edit(text, quoted, "pass\n").text == "pass\n"


@pytest.mark.parametrize(("old", "new"), [("", "x"), (" \n\t", "x"), ("a", "a"), ("b\n", "b\r\n")])
def test_edits_that_say_nothing_are_refused(old: str, new: str) -> None:
    assert re.search("blank|identical|change nothing", refusal("a\nb\n", old, new))


# --- line ends ---


def test_crlf_files_stay_crlf() -> None:
    text = "a\r\nb\r\nc\r\n"
    assert edit(text, "a\nb", "x\ny\nz").text == "x\r\ny\r\nz\r\nc\r\n"
    assert edit(text, "b", "x\ny").text == "a\r\nx\r\ny\r\nc\r\n"
    assert edit(text, "b\r\n", "x\r\ny\r\n").text == "a\r\nx\r\ny\r\nc\r\n"
    assert edit(text, "  b\nc", "  b\n  d\nc").text == "a\r\nb\r\nd\r\nc\r\n"
    assert edit("a\r\nb", "b", "x\ny").text == "a\r\nx\r\ny"


def test_lf_files_stay_lf() -> None:
    assert edit("a\nb\n", "a\r\nb", "x\r\ny\r\nz").text == "x\ny\nz\n"


def test_mixed_files_keep_the_lines_that_were_not_changed() -> None:
    text = "a\r\nb\nc\r\nd\ne\n"
    assert edit(text, "a\nb\nc\nd", "a\nB\nc\nd").text == "a\r\nB\nc\r\nd\ne\n"
    assert edit(text, "d\ne", "d\nx\ne").text == "a\r\nb\nc\r\nd\nx\ne\n"
    assert edit("a\rb\r\nc\n", "c", "d").text == "a\rb\r\nd\n"


@pytest.mark.parametrize(
    ("text", "old", "new", "result"),
    [
        ("a\nb", "b", "c", "a\nc"),
        ("a\nb", "b\n", "c\n", "a\nc"),
        ("a\nb", "b", "c\n", "a\nc"),
        ("a\nb", " b\n", " c\n", "a\nc"),
        ("a\nb\n", "b\n", "c", "a\nc\n"),
        ("a\nb\n", "b", "c\n", "a\nc\n\n"),
        ("a\nb\n", "\nb\n", "", "a\n"),
        ("a\nb\n", "b\n", "", "a\n"),
        ("a\nb", "b", "", "a\n"),
        ("a\n", "a\n", "", ""),
        ("a\nb", "b", "b\n", "a\nb\n"),  # the edit is about the line end
        ("a\nb\n", "b\n", "b", "a\nb"),
        ("a\r\nb\r\n", "b\n", "c", "a\r\nc\r\n"),
        ("a\r\nb", "b\n", "c\nd\n", "a\r\nc\r\nd"),
        ("a\nb\nc\n", "\n  b \n", "\n  x", "a\nx\nc\n"),
    ],
)
def test_the_end_of_the_file(text: str, old: str, new: str, result: str) -> None:
    assert edit(text, old, new).text == result


# --- indentation ---


def test_two_blanks_in_the_edit_four_in_the_file() -> None:
    text = "class A:\n    def f(self):\n        if x:\n            return 1\n        return 2\n"
    old = "  def f(self):\n    if x:\n      return 1\n"
    new = "  def f(self):\n    if y:\n      for z in y:\n        return z\n      return 0\n"
    assert edit(text, old, new).text == (
        "class A:\n    def f(self):\n        if y:\n            for z in y:\n                return z\n"
        "            return 0\n        return 2\n"
    )


def test_blanks_in_the_edit_tabs_in_the_file() -> None:
    text = "func f() {\n\tif x {\n\t\treturn\n\t}\n}\n"
    old = "  if x {\n    return\n  }"
    new = "  if x {\n    for {\n      g()\n    }\n  }"
    assert edit(text, old, new).text == "func f() {\n\tif x {\n\t\tfor {\n\t\t\tg()\n\t\t}\n\t}\n}\n"


def test_tabs_in_the_edit_blanks_in_the_file() -> None:
    text = "if x:\n    a()\n    b()\n"
    assert edit(text, "\ta()\n", "\tif y:\n\t\ta()\n").text == "if x:\n    if y:\n        a()\n    b()\n"


def test_an_edit_without_the_outer_indentation() -> None:
    text = "class A:\n    def f(self):\n        return 1\n"
    old = "def f(self):\n    return 1"
    new = "def f(self):\n    if x:\n        return 2\n\n    return 1"
    assert edit(text, old, new).text == (
        "class A:\n    def f(self):\n        if x:\n            return 2\n\n        return 1\n"
    )


def test_a_new_line_further_out_than_any_quoted_one() -> None:
    text = "def f():\n    if x:\n        y()\n"
    assert edit(text, "    y()\n", "    y()\nz()\n").text == "def f():\n    if x:\n        y()\n    z()\n"
    assert edit(text, "  if x:\n    y()\n", "  if x:\n    y()\nz()\n").text == text + "z()\n"


def test_continuation_lines_keep_their_own_extra_blanks() -> None:
    text = "def f():\n        call(one)\n"
    new = "    call(one,\n         two)\n"
    assert edit(text, "    call(one)\n", new).text == "def f():\n        call(one,\n             two)\n"


def test_an_exact_match_is_taken_as_it_is_written() -> None:
    assert edit("    return x\n", "return x", "if x:\n  return x").text == "    if x:\n  return x\n"
    assert edit("  a\n  b\n", "a\n  b", "a\n      c").text == "  a\n      c\n"


def test_one_line_quoted_with_less_indentation_is_indented_like_the_file() -> None:
    text = "if a:\n    return 1\n"
    assert edit(text, "  return 1", "  if b:\n    return 2").text == "if a:\n    if b:\n        return 2\n"
    assert edit(text, "  return", "  yield").text == "if a:\n    yield 1\n"
    assert edit("x foo\n  foo\n", " foo", " bar", replace_all=True).text == "x bar\n  bar\n"


def test_a_match_inside_a_line_indents_the_lines_that_follow() -> None:
    text = "x = f(a,  b)\n        g(c)\n"
    assert edit(text, "f(a, b)\n        g(c)", "f(a, b)\n        h(c)").text == "x = f(a,  b)\n        h(c)\n"


# --- only what was changed is changed ---


def test_repeated_lines_stay_the_file_s_own() -> None:
    text = "say \u201chi\u201d  \n  x =  1\nend\u2026\n"
    new = 'say "hi"\nx = 2\nend...'
    assert edit(text, 'say "hi"\nx = 1\nend...', new).text == "say \u201chi\u201d  \n  x = 2\nend\u2026\n"


def test_curly_quotes_are_matched_by_straight_ones() -> None:
    assert edit("it\u2019s \u201cone\u201d\n", 'it\'s "one"', 'it\'s "two"').text == 'it\'s "two"\n'


def test_misquoted_lines_that_are_repeated_stay_right() -> None:
    text = "def area(shape):\n    width = shape.width\n    height = shape.height\n    return width\n"
    old = text.replace("shape.height", "shapes.hight")
    assert edit(text, old, old.replace("return width", "return height")).text == text.replace(
        "return width", "return height"
    )


# --- properties ---

LINE = st.text(alphabet="ab \t(\u2019'", max_size=6)
ENDS = st.sampled_from(["\n", "\r\n"])
TEXT = st.lists(st.tuples(LINE, ENDS), max_size=8).map(lambda lines: "".join(line + end for line, end in lines))
QUOTE = st.lists(LINE, min_size=1, max_size=4).map("\n".join)


@given(TEXT, LINE, QUOTE, QUOTE)
def test_outside_the_places_every_byte_stays(text: str, last: str, old: str, new: str) -> None:
    text += last
    assume(old.strip())
    try:
        found = find(text, old, new)
    except MatchError:
        return
    view = found.view
    for span in found.spans:
        start, end = (view.original_offset(offset) for offset in span)
        result = splice(found, [span])
        assert result.startswith(text[:start])
        assert result.endswith(text[end:])
        assert len(result) >= start + len(text) - end


@given(st.binary(max_size=40), st.binary(max_size=40), QUOTE)
def test_bytes_around_an_edit_stay_whatever_they_are(before: bytes, after: bytes, new: str) -> None:
    file = decode(before + b"\n\tthe place\t\n" + after)
    try:
        edited = edit(file.text, "the  place\n", f"{new}\n")
    except MatchError:
        return
    data = TextFile(edited.text, file.bom).encode()
    assert data.startswith(before + b"\n")
    assert data.endswith(b"\n" + after)


@given(TEXT, LINE, QUOTE, QUOTE)
def test_no_line_comes_from_nowhere(text: str, last: str, old: str, new: str) -> None:
    text += last
    try:
        result = edit(text, old, new).text
    except MatchError:
        return
    if find(text, old, new).strategy in ("line_trimmed", "indentation_flexible", "block_anchor"):
        known = {line.strip() for line in (*text.split("\n"), *new.split("\n"))}
        assert {line.strip() for line in result.split("\n")} <= known


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=12).map("\n".join), st.data())
def test_an_exact_edit_is_a_plain_replacement(text: str, data: st.DataObject) -> None:
    text += "\n"
    start = data.draw(st.integers(0, len(text) - 1))
    old = text[start : data.draw(st.integers(start + 1, len(text)))]
    new = data.draw(st.text(alphabet="xyz\n"))
    assume(old.strip() and text.count(old) == 1 and len(find(text, old, new).spans) == 1)
    result = edit(text, old, new).text
    plain = text.replace(old, new)
    assert result == plain or (result == plain + "\n" and not plain.endswith("\n"))


@given(st.lists(LINE, min_size=1, max_size=8), QUOTE, QUOTE)
def test_crlf_stays_crlf_and_lf_stays_lf(lines: list[str], old: str, new: str) -> None:
    for end in ("\r\n", "\n"):
        try:
            result = edit(end.join(lines) + end, old, new, replace_all=True).text
        except MatchError:
            continue
        bare = result.replace("\r\n", "") if end == "\r\n" else result.replace("\n", "")
        assert "\n" not in bare
        assert "\r" not in bare


@given(TEXT, LINE, QUOTE, QUOTE)
def test_a_text_that_ends_with_a_line_end_still_does(text: str, last: str, old: str, new: str) -> None:
    for whole in (text, text + last):
        try:
            result = edit(whole, old, new).text
        except MatchError:
            continue
        about_the_end = old.rstrip("\n") == new.rstrip("\n")
        if whole.endswith("\n") and result and not about_the_end:
            assert result.endswith("\n")


@given(st.lists(st.text(alphabet="abcxyz", min_size=3, max_size=8), min_size=4, max_size=8, unique=True), st.data())
def test_a_sloppy_quotation_gives_the_same_edit_as_an_exact_one(words: list[str], data: st.DataObject) -> None:
    depths = data.draw(st.lists(st.integers(0, 3), min_size=len(words), max_size=len(words)))
    assume(all(deep - flat <= 1 for flat, deep in pairwise(depths)))
    step = data.draw(st.sampled_from(["  ", "    ", "\t"]))
    file_step = data.draw(st.sampled_from(["  ", "    ", "\t"]))
    file = [file_step * depth + f"{word} =  1" for word, depth in zip(words, depths, strict=True)]
    first = data.draw(st.integers(0, len(words) - 2))
    last = data.draw(st.integers(first + 1, len(words)))
    quoted = [step * depth + f"{word} = 1" for word, depth in zip(words, depths, strict=True)][first:last]
    changed = data.draw(st.integers(0, len(quoted) - 1))
    new = [*quoted]
    new[changed] = new[changed].replace("= 1", "= 2")
    expected = [*file]
    expected[first + changed] = file[first + changed].replace("=  1", "= 2")
    result = edit("\n".join([*file, ""]), "\n".join(quoted), "\n".join(new)).text
    assert result == "\n".join([*expected, ""])
