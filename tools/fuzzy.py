"""Where in a file the text is that a model wants to replace. Pure: text in, places out.

Models quote from memory: spaces, quotes, indentation, escapes go wrong. A chain of strategies, the strictest first,
looks for the place; the first that finds any decides. A wrong edit costs more than a refused one, so the strategies
that only measure likeness take a single place, clearly ahead of any other, or none; and only misspelt words may
differ there, never another number, operator or name. How long likeness may be measured is bounded: nobody can stop the
thread that does it.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from difflib import Match, SequenceMatcher
from itertools import accumulate

Span = tuple[int, int]  # offsets in View.text

MAX_EFFORT = 4_000_000  # of finding what is like a text, and of finding what to show instead; see _Effort
MAX_LIKENESS_CHARS = 500  # of a line; longer ones are alike only when equal
MAX_LIKENESS_PLACES = 100  # with the right outer lines; among more, likeness does not choose
MAX_MISSPELT_LINES = 20  # of a block; one with more is not quoted from this file
LEAD = 0.15  # of the best likeness over the second
_COST_OF_A_PAIR = 10  # of lines that are compared, even if their lengths tell all
_ANCHORED_MIN_LINES = 3
_TYPO_MIN_CHARS = 3  # of a word that may be misspelt; among shorter ones each is a name of its own
_TYPO_LIKENESS = 0.8

# Characters that are written one for another. The first of each set is what a keyboard has.
_ALIKE = (
    "'\u2018\u2019\u201a\u201b\u2032\u02bc\uff07",
    '"\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb',
    "-\u2010\u2011\u2012\u2013\u2014\u2015\u2212",
    " \u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u3000",
)
_FOLDED = str.maketrans({char: chars[0] for chars in _ALIKE for char in chars} | {"\u2026": "..."})
_TYPED = {
    **{char: f"[{re.escape(chars)}]" for chars in _ALIKE for char in chars},
    "--": "(?:--|[\u2013\u2014])",
    "\u2013": "(?:--|[\u2010-\u2015-])",
    "\u2014": "(?:--|[\u2010-\u2015-])",
    "...": "(?:\\.\\.\\.|\u2026)",
    "\u2026": "(?:\\.\\.\\.|\u2026)",
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


class MatchError(ValueError):
    """There is no place for an edit, or no single one. The message is meant for the model."""


class _TooDearError(Exception):
    """Likeness cannot be measured to the end with the effort that is allowed."""


class _Effort:
    """What measuring may still cost, in characters that are looked at or compared; 5 to 20 million take a second."""

    def __init__(self) -> None:
        self._left = MAX_EFFORT

    def spend(self, cost: int) -> None:
        """Note what the next step costs. Raises _TooDearError, before it is taken."""
        self._left -= cost
        if self._left < 0:
            raise _TooDearError


class _Matcher(SequenceMatcher[str]):
    """Compares two lines with bounded effort: the more often their characters come again, the longer it takes."""

    def __init__(self, one: str, other: str, effort: _Effort) -> None:
        effort.spend(len(one) + len(other))
        self._effort, self._one, self._times = effort, one, Counter(other)
        super().__init__(None, one, other, autojunk=False)

    def find_longest_match(self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None) -> Match:
        """See the base class, whose loops these are."""
        self._effort.spend(sum(self._times[char] for char in self._one[alo:ahi]))
        return super().find_longest_match(alo, ahi, blo, bhi)


class View:
    """A file's text with LF line ends and a final one, and the way back to the file's own offsets."""

    def __init__(self, original: str) -> None:
        self.original = original
        self.text = original.replace("\r\n", "\n")
        if not self.text.endswith("\n"):
            self.text += "\n"
        self.lines = self.text.split("\n")[:-1]
        self._starts = [0, *accumulate(len(line) + 1 for line in self.lines)]
        self._crlf = [match.start() - before for before, match in enumerate(re.finditer("\r\n", original))]

    def original_offset(self, offset: int) -> int:
        """Return where in the original text an offset of this one is."""
        return min(offset + bisect_left(self._crlf, offset), len(self.original))

    def line_number(self, offset: int) -> int:
        """Return the 1-based line an offset is in."""
        return bisect_right(self._starts, offset)

    def starts_line(self, offset: int) -> bool:
        """Tell whether a line starts here."""
        return offset == 0 or self.text[offset - 1] == "\n"

    def block(self, index: int, count: int, *, line_end: bool) -> Span:
        """Return the span of ``count`` lines from the 0-based ``index`` on, with the last one's line end or without."""
        return self._starts[index], self._starts[index + count] - (0 if line_end else 1)


@dataclass(frozen=True)
class Found:
    """The places one strategy found."""

    view: View
    strategy: str
    old: str  # as it was searched for; line by line it answers to the text at each span
    new: str  # as it is to be put there
    spans: tuple[Span, ...]  # in order; they may overlap
    by_likeness: bool = False

    def line_numbers(self) -> list[int]:
        """Return the 1-based first line of each place."""
        return [self.view.line_number(start) for start, _ in self.spans]


def find(text: str, old: str, new: str, *, whole_lines: bool = False) -> Found:
    """Return the places of ``old`` in ``text``, at least one; with ``whole_lines`` only those that start a line.

    Raises MatchError when there is none, when likeness cannot decide between several, or when ``old`` and ``new`` are
    escaped in a way the file is not.
    """
    view = View(text)
    old, new = old.replace("\r\n", "\n"), new.replace("\r\n", "\n")
    try:
        for found in _chain(view, old, new):
            spans = tuple(span for span in found.spans if not whole_lines or view.starts_line(span[0]))
            if spans:
                _refuse_escape_drift(found, spans)
                return replace(found, spans=spans)
        hint = _nearest(view, old)
    except _TooDearError:
        hint = " as written; what is only like it was not looked for to the end: the file is too large, or too uniform"
    raise MatchError(f"the text to replace was not found{hint}")


def _chain(view: View, old: str, new: str) -> Iterator[Found]:
    def found(strategy: str, spans: list[Span]) -> Found:
        return Found(view, strategy, old, new, tuple(spans))

    exact = _occurrences(view.text, old)
    if not all(_splits_indentation(view, start) for start, _ in exact):
        yield found("exact", exact)
    yield found("line_trimmed", _blocks(view, old, str.strip))
    yield found("whitespace_normalized", _with_other_blanks(view, old))
    yield found("indentation_flexible", _blocks(view, old, _loose))
    decoded = _decoded(old, new)
    if decoded[0] != old:
        spans = _occurrences(view.text, decoded[0]) or _blocks(view, decoded[0], str.strip)
        yield Found(view, "escape_normalized", *decoded, tuple(spans))
    old, new = _without_outer_blank_lines(old), _without_outer_blank_lines(new)
    yield found("trimmed_boundary", _blocks(view, old, str.strip))
    if not (old.isascii() and view.text.isascii()):
        spans = _pattern_matches(view, "".join(_TYPED.get(token, re.escape(token)) for token in _typed_tokens(old)))
        yield found("unicode_normalized", spans or _blocks(view, old, lambda line: _loose(line.translate(_FOLDED))))
    effort = _Effort()
    yield replace(found("block_anchor", _anchored(view, old, effort)), by_likeness=True)
    yield replace(found("context_aware", _similar(view, old, effort)), by_likeness=True)


def _occurrences(text: str, wanted: str) -> list[Span]:
    spans = []
    at = text.find(wanted)
    while at >= 0:
        spans.append((at, at + len(wanted)))
        at = text.find(wanted, at + 1)
    return spans


def _splits_indentation(view: View, offset: int) -> bool:
    """Tell whether an offset is between the blanks a line starts with: the text there is indented in another way."""
    before = view.text[view.text.rfind("\n", 0, offset) + 1 : offset]
    return bool(before) and not before.strip(" \t") and view.text[offset] in " \t"


def _loose(line: str) -> str:
    return " ".join(line.split())


def _lines_of(old: str) -> tuple[list[str], bool]:
    """Return the lines of a block, and whether the last one's line end belongs to it."""
    lines = old.split("\n")
    return (lines[:-1], True) if len(lines) > 1 and not lines[-1] else (lines, False)


def _blocks(view: View, old: str, key: Callable[[str], str]) -> list[Span]:
    """Find whole lines that are equal under ``key``."""
    lines, line_end = _lines_of(old)
    keys = [key(line) for line in view.lines]
    starts = [0, *accumulate(len(line) + 1 for line in keys)]
    # One search in one text: line by line it would take lines times lines where many are equal.
    found = _occurrences("\n".join(["", *keys, ""]), "\n".join(["", *map(key, lines), ""]))
    return [view.block(bisect_left(starts, start), len(lines), line_end=line_end) for start, _ in found]


def _with_other_blanks(view: View, old: str) -> list[Span]:
    """Find a text whose runs of blanks may have any length, but not in the middle of words."""
    ends, left_out = [0], [0]  # of each run of the file, in a text where each is one blank
    for run in re.finditer("[ \t]{2,}", view.text):
        left_out.append(left_out[-1] + len(run[0]) - 1)
        ends.append(run.end() - left_out[-1])

    def offset(narrow: int) -> int:
        return narrow + left_out[bisect_right(ends, narrow) - 1]

    found = _occurrences(*(re.sub("[ \t]+", " ", text) for text in (view.text, old)))
    spans = [(offset(start), offset(end)) for start, end in found]
    return [span for span in spans if not _cuts_words(view, span)]


def _cuts_words(view: View, span: Span) -> bool:
    return any(re.match(r"\w\w", view.text[max(0, at - 1) : at + 1]) for at in span)


def _typed_tokens(old: str) -> list[str]:
    return re.findall(r"--|\.\.\.|.", old, re.DOTALL)


def _pattern_matches(view: View, pattern: str) -> list[Span]:
    """Find a pattern made of a text, but not in the middle of words."""
    compiled = re.compile(pattern)
    spans = []
    match = compiled.search(view.text)
    while match:
        if not _cuts_words(view, match.span()):
            spans.append(match.span())
        match = compiled.search(view.text, match.start() + 1)
    return spans


def _decoded(old: str, new: str) -> tuple[str, str]:
    r"""Return both with ``\n``, ``\t`` … turned into what they stand for; ``new`` only in the way ``old`` needed it."""
    letters = {letter for letter in re.findall(r"\\(.)", old) if letter in _ESCAPES}
    kept = {"n"} if "\n" in new else set()  # real line ends: its escaped ones are meant

    def decode(text: str, letters: set[str]) -> str:
        return re.sub(r"\\(.)", lambda match: _ESCAPES[match[1]] if match[1] in letters else match[0], text)

    return decode(old, letters), decode(new, letters - kept)


def _without_outer_blank_lines(block: str) -> str:
    lines = block.split("\n")
    solid = [index for index, line in enumerate(lines) if line.strip()]
    end = "\n" if block.endswith("\n") else ""
    return "\n".join(lines[solid[0] : solid[-1] + 1]) + end if solid else ""


def _refuse_escape_drift(found: Found, spans: tuple[Span, ...]) -> None:
    if found.strategy == "exact":
        return
    for escaped in ("\\'", '\\"'):
        there = all(escaped in found.view.text[start:end] for start, end in spans)
        if escaped in found.old and escaped in found.new and not there:
            raise MatchError(
                f"old_string and new_string hold {escaped} where the file holds {escaped[1]}: "
                "send both as the file has it, without the backslash"
            )


def _likeness(one: str, other: str, effort: _Effort, floor: float = 0.0) -> float:
    """Return how alike two lines are apart from their outer blanks, from 0 to 1; 0 when less than ``floor``."""
    effort.spend(_COST_OF_A_PAIR)
    one, other = one.strip(), other.strip()
    if one == other:
        return 1.0
    short, long = sorted((len(one), len(other)))
    if long > MAX_LIKENESS_CHARS or 2 * short < floor * (short + long):
        return 0.0
    matcher = _Matcher(one, other, effort)
    if matcher.quick_ratio() < floor:
        return 0.0
    ratio = matcher.ratio()
    return ratio if ratio >= floor else 0.0


def _likenesses(wanted: list[str], have: list[str], effort: _Effort, floor: float) -> list[float]:
    """Return the likeness of each pair of lines of which not both are blank."""
    pairs = zip(wanted, have, strict=True)
    return [_likeness(one, other, effort, floor) for one, other in pairs if one.strip() or other.strip()]


def _anchored(view: View, old: str, effort: _Effort, floor: float = 0.7) -> list[Span]:
    """Find the block whose first and last line are equal to the wanted ones and whose middle is that one, misspelt."""
    wanted, line_end = _lines_of(old)
    count = len(wanted)
    if count < _ANCHORED_MIN_LINES:
        return []
    have = [line.strip() for line in view.lines]
    first, last = wanted[0].strip(), wanted[-1].strip()
    places = [i for i in range(len(have) - count + 1) if have[i] == first and have[i + count - 1] == last]
    if not 0 < len(places) <= MAX_LIKENESS_PLACES:
        return []
    scored = []
    for place in places:
        values = _likenesses(wanted[1:-1], view.lines[place + 1 : place + count - 1], effort, 0.0)
        scored.append((sum(values) / max(1, len(values)), min(values, default=0.0), place))
    (average, worst, best), *others = sorted(scored, reverse=True)
    if average < floor or worst < floor:
        return []
    if others and average - others[0][0] < LEAD:
        raise _undecided(sorted((best, others[0][2])))
    return [view.block(best, count, line_end=line_end)] if _is_meant(view, wanted, best, effort) else []


def _similar(view: View, old: str, effort: _Effort, floor: float = 0.8) -> list[Span]:
    """Find the only block that is the wanted one, misspelt; words may be missing in its outer lines."""
    wanted, line_end = _lines_of(old)
    count = len(wanted)
    if sum(bool(line.strip()) for line in wanted) < _ANCHORED_MIN_LINES:
        return []
    places = [
        index
        for index in range(len(view.lines) - count + 1)
        if _likeness(wanted[0], view.lines[index], effort, floor)
        and _likeness(wanted[-1], view.lines[index + count - 1], effort, floor)
        and all(_likenesses(wanted, view.lines[index : index + count], effort, floor))
    ]
    if len(places) > 1:
        raise _undecided(places)
    return [view.block(index, count, line_end=line_end) for index in places if _is_meant(view, wanted, index, effort)]


def _is_meant(view: View, wanted: list[str], index: int, effort: _Effort) -> bool:
    """Tell whether the block at ``index`` is the wanted one with some words misspelt, and not another of its form.

    What is likely to be intended is no misspelling: another number, operator or short name, a word that the file has
    elsewhere, a line that is as much like another one of the file.
    """
    effort.spend(len(view.text))
    known = set(re.findall(r"\w+", view.text))
    tokens = {line.strip(): _tokens(line) for line in view.lines}
    there = [line.strip() for line in view.lines[index : index + len(wanted)]]
    pairs = enumerate(zip((line.strip() for line in wanted), there, strict=True))
    differing = [(number, line, other) for number, (line, other) in pairs if line != other]
    if len(differing) > MAX_MISSPELT_LINES or any(line in tokens for _, line, _ in differing):
        return False
    for number, line, other in differing:
        quoted = _tokens(line)
        outer = number in (0, len(wanted) - 1)
        if not (_names_agree(quoted, tokens[other]) if outer else _misspelt(quoted, tokens[other], known, effort)):
            return False
        alike = (rival for rival, words in tokens.items() if rival != other and _misspelt(quoted, words, set(), effort))
        if any(_likeness(line, rival, effort) >= _likeness(line, other, effort) for rival in alike):
            return False
    return True


def _tokens(line: str) -> list[str]:
    """Return the words and signs of a line, without what is often quoted wrong: blanks, quotes, the last sign."""
    plain = re.sub(r"\\*[\"'`]", "'", line.translate(_FOLDED)).strip().rstrip(".,;:")
    return re.findall(r"\w+|[^\w\s]", plain)


def _misspelt(quoted: list[str], there: list[str], known: set[str], effort: _Effort) -> bool:
    """Tell whether two lines are the same but for misspelt words that are not ``known``; one word at least is right."""
    if len(quoted) != len(there):
        return False
    effort.spend(len(quoted))
    pairs = [(one, other) for one, other in zip(quoted, there, strict=True) if one != other]
    right = sum(one == other and one[0].isalnum() for one, other in zip(quoted, there, strict=True))
    return (not pairs or right > 0) and all(one not in known and _is_typo(one, other, effort) for one, other in pairs)


def _is_typo(one: str, other: str, effort: _Effort) -> bool:
    """Tell whether a word is another one misspelt: the same parts (of ``a_b`` or ``aB``), long ones with a slip."""
    if one.replace("_", "") == other.replace("_", ""):
        return len(other) >= _TYPO_MIN_CHARS
    if one[0] != other[0]:  # a sign, or "encode" and "decode"
        return False
    parts, others = (re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_A-Za-z]+", word) for word in (one, other))
    return len(parts) == len(others) and all(
        part == wrong
        or (
            part.isalpha()
            and part[0] == wrong[0]
            and min(len(part), len(wrong)) >= _TYPO_MIN_CHARS
            and _likeness(part, wrong, effort) >= _TYPO_LIKENESS
        )
        for part, wrong in zip(parts, others, strict=True)
    )


def _names_agree(quoted: list[str], there: list[str]) -> bool:
    """Tell whether two lines differ only in words, not numbers, that one of them does not have."""
    matcher = SequenceMatcher(None, quoted, there, autojunk=False)
    changes = [change for change in matcher.get_opcodes() if change[0] != "equal"]
    extra = [word for _, a, b, c, d in changes for word in (*quoted[a:b], *there[c:d])]
    return all(change[0] != "replace" for change in changes) and all(
        word == "," or (word.isidentifier() and word != "not") for word in extra
    )


def _undecided(places: list[int]) -> MatchError:
    lines = ", ".join(str(place + 1) for place in places[:10])
    return MatchError(f"not found as written, and several places are like it (lines {lines}): quote it exactly")


def _nearest(view: View, old: str, shown_lines: int = 8) -> str:
    """Return the two blocks of the file that are most like the wanted one, with line numbers; "" when none is."""
    wanted = _lines_of(_without_outer_blank_lines(old))[0][:shown_lines]
    effort = _Effort()

    def score(index: int) -> float:
        block = view.lines[index : index + len(wanted)]
        return sum(_likenesses(wanted[: len(block)], block, effort, 0.0))

    firsts = [(_likeness(wanted[0], line, effort, 0.6), index) for index, line in enumerate(view.lines)]
    likely = [index for value, index in heapq.nlargest(10, firsts) if value]
    best = sorted(likely, key=score, reverse=True)[:2]
    blocks = [
        "\n".join(f"{n}|{line[:200]}" for n, line in enumerate(view.lines[index : index + len(wanted)], index + 1))
        for index in best
    ]
    return ". The nearest lines are:\n" + "\n--\n".join(blocks) if blocks else ""
