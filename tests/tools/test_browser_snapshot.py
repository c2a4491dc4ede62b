from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from tools.browser_snapshot import MAX_CHARS, MAX_FULL_CHARS, shown

BOX = "[box=8,8,100,20]"
ABOVE = "[box=8,-400,100,20]"
PAGE = f"""\
- generic [active] [ref=e1] {BOX}:
  - heading "Welcome" [level=1] [ref=e2] {BOX}
  - generic [ref=e3] {BOX}:
    - generic [ref=e4] {BOX}:
      - text: Name
      - textbox "Name" [ref=e5] {BOX}: Ann
    - button "Go" [ref=e6] [cursor=pointer] {BOX}
  - iframe [ref=e7] {BOX}:
    - link "in a frame" [ref=f1e2] [cursor=pointer] {BOX}:
      - /url: /inner
  - paragraph [ref=e8] [cursor=pointer] {BOX}: a paragraph to click
  - 'link "with: colon" [ref=e9] {BOX}'"""


def long_page(lines: int, above: int = 0) -> str:
    return "\n".join(
        f'- link "number {number}" [ref=e{number}] {ABOVE if number < above else BOX}:\n  - /url: /{number}'
        for number in range(lines)
    )


def test_what_can_be_acted_on_keeps_its_reference_and_mere_groups_go() -> None:
    seen = shown(PAGE, full=False)
    assert (
        seen.text
        == """\
- heading "Welcome" [level=1]
- text: Name
- textbox "Name" [ref=e5]: Ann
- button "Go" [ref=e6]
- iframe:
  - link "in a frame" [ref=f1e2]:
    - /url: /inner
- paragraph [ref=e8]: a paragraph to click
- 'link "with: colon" [ref=e9]'"""
    )
    assert seen.element_count == 5


def test_a_full_snapshot_leaves_out_the_boxes_alone() -> None:
    seen = shown(PAGE, full=True)
    assert seen.text == PAGE.replace(f" {BOX}", "")
    assert seen.element_count == 10


def test_an_empty_page() -> None:
    assert shown("", full=False).text == ""
    assert shown("\n", full=True).element_count == 0


def test_a_long_page_is_cut_at_a_line_and_says_so() -> None:
    seen = shown(long_page(1000), full=False)
    lines = seen.text.splitlines()
    assert lines[0] == '- link "number 0" [ref=e0]:'
    assert re.fullmatch(r"\[\d+ lines further down left out; scroll down to see them\]", lines[-1])
    assert MAX_CHARS * 0.9 < len(seen.text) <= MAX_CHARS
    assert seen.element_count == 1000
    assert MAX_FULL_CHARS * 0.9 < len(shown(long_page(1000), full=True).text) <= MAX_FULL_CHARS


def test_a_long_page_begins_at_the_view() -> None:
    lines = shown(long_page(1000, above=700), full=False).text.splitlines()
    assert lines[0] == "[1400 lines above the view left out; scroll up to see them]"
    assert lines[1] == '- link "number 700" [ref=e700]:'
    assert lines[2] == "  - /url: /700"
    assert "further down" in lines[-1]
    end = shown(long_page(1000, above=995), full=False).text.splitlines()
    assert end[-1] == "  - /url: /999"
    assert len(end) == 11


def test_a_page_that_fits_keeps_what_is_above_the_view() -> None:
    assert shown(long_page(10, above=5), full=False).text.count("link") == 10


def test_a_long_line_is_cut_and_keeps_its_reference() -> None:
    seen = shown(f'- button "{"x" * 100_000}" [ref=e5] {BOX}', full=False)
    assert len(seen.text) < 1000
    assert "characters more]" in seen.text
    assert seen.text.endswith("[ref=e5]")


@given(st.text(), st.booleans())
def test_any_text_is_bounded_and_loses_no_reference_line(text: str, full: bool) -> None:
    seen = shown(text * 50, full=full)
    assert len(seen.text) <= (MAX_FULL_CHARS if full else MAX_CHARS)
    assert seen.element_count >= 0


@given(st.lists(st.integers(0, 6), max_size=60))
def test_left_out_groups_leave_a_tree(depths: list[int]) -> None:
    lines: list[str] = []
    depth = 0
    for number, wanted in enumerate(depths):
        depth = min(wanted, depth + 1) if lines else 0
        role = "generic" if number % 2 else f'button "b{number}"'
        lines.append(f"{'  ' * depth}- {role} [ref=e{number}] {BOX}:")
    seen = shown("\n".join(lines), full=False).text.splitlines()
    assert len(seen) == (len(depths) + 1) // 2
    before = -2
    for line in seen:
        indent = len(line) - len(line.lstrip())
        assert indent % 2 == 0
        assert indent <= before + 2
        before = indent


def test_passwords_are_masked_where_they_are_the_text_of_a_field() -> None:
    raw = """\
- textbox "Password" [ref=e1]: hunter2
- 'textbox "with: colon" [ref=e2]': hunter2
- textbox "Hint" [ref=e3]:
  - /placeholder: hunter2
  - text: hunter2
- textbox "Quoted" [ref=e4]: "one: \\"two\\""
- paragraph [ref=e5]: hunter2
- textbox "Other" [ref=e6]: hunter22"""
    seen = shown(raw, full=True, passwords=["hunter2", 'one:  "two"', ""]).text.splitlines()
    assert [line.rpartition(": ")[2] for line in seen if ": " in line] == [
        *("***", "***", "hunter2", "***", "***", "hunter2", "hunter22")
    ]
