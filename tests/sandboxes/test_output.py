"""The collectors: what they keep does not depend on how the bytes were cut into chunks."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sandboxes.output import HeadAndTail, Newest, Raw


def chunks(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(places) if start < end]


CUTS = st.lists(st.integers(0, 1000), max_size=20)
BYTES = st.one_of(st.binary(max_size=300), st.text(alphabet="aé🙂\n", max_size=150).map(str.encode))


@given(BYTES, CUTS, st.integers(0, 100))
def test_head_and_tail(data: bytes, cuts: list[int], limit: int) -> None:
    collector = HeadAndTail(limit)
    for chunk in chunks(data, cuts):
        collector.feed(chunk)
    collector.feed(b"")
    text = data.decode("utf-8", "replace")
    assert collector.total_chars == len(text)
    assert collector.omitted_chars == max(0, len(text) - limit)
    if len(text) <= limit:
        assert collector.text() == text
        return
    head, tail = limit * 2 // 5, limit - limit * 2 // 5
    notice = f"[OUTPUT TRUNCATED - {len(text) - limit} chars omitted out of {len(text)} total]"
    assert collector.text() == f"{text[:head]}\n\n{notice}\n\n{text[len(text) - tail :]}"


@given(BYTES, CUTS, st.integers(0, 100))
def test_newest(data: bytes, cuts: list[int], limit: int) -> None:
    collector = Newest(limit)
    for chunk in chunks(data, cuts):
        collector.feed(chunk)
        assert len(collector.text()) <= limit
    collector.feed(b"")
    text = data.decode("utf-8", "replace")
    assert collector.text() == text[max(0, len(text) - limit) :]


@given(BYTES, CUTS, st.integers(0, 100))
def test_raw(data: bytes, cuts: list[int], limit: int) -> None:
    collector = Raw(limit)
    for chunk in chunks(data, cuts):
        collector.feed(chunk)
    assert collector.data == data[:limit]


def test_memory_is_bounded() -> None:
    collector = HeadAndTail(1000)
    for _ in range(10_000):
        collector.feed(b"x" * 1000)
    assert collector.total_chars == 10_000_000
    assert len(collector._tail._pieces) < 4
