from __future__ import annotations

from difflib import SequenceMatcher

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.fuzzy import MatchError
from tools.v4a import Change, PatchError, apply_hunks, parse


def update(body: str, *, path: str = "f") -> Change:
    [change] = parse(f"*** Begin Patch\n*** Update File: {path}\n{body}\n*** End Patch")
    return change


def applied(text: str, body: str) -> str:
    return apply_hunks(text, update(body).hunks)


def refusal(text: str, body: str) -> str:
    with pytest.raises(MatchError) as caught:
        applied(text, body)
    return str(caught.value)


# --- what a patch says ---


def test_all_kinds_of_changes() -> None:
    changes = parse(
        "*** Begin Patch\n"
        "*** Update File: src/a b.py\n"
        "@@ class A\n"
        "@@ def f(self):\n"
        " context\n"
        "-old\n"
        "+new\n"
        "*** Add File: new.txt\n"
        "+one\n"
        "+\n"
        "+ two\n"
        "*** Delete File: gone.txt\n"
        "*** Move File: from.txt -> to/there.txt\n"
        "*** End Patch\n"
    )
    assert [(change.kind, change.path, change.to) for change in changes] == [
        ("update", "src/a b.py", ""),
        ("add", "new.txt", ""),
        ("delete", "gone.txt", ""),
        ("move", "from.txt", "to/there.txt"),
    ]
    [hunk] = changes[0].hunks
    assert hunk.anchors == ["class A", "def f(self):"]
    assert (hunk.block("-"), hunk.block("+")) == ("context\nold\n", "context\nnew\n")
    assert changes[1].content == "one\n\n two\n"


def test_what_models_add_or_leave_out_is_understood() -> None:
    text = (
        "\n*** Update File: f \r\n@@ -1,2 +1,2 @@ def f():\r\n def f():\r\n-  a\r\n+  b\r\n\r\n"
        "*** Add File: empty\r\n*** End Patch\r\n```"
    )
    first, second = parse(text)
    [hunk] = first.hunks
    assert first.path == "f"
    assert hunk.anchors == ["def f():"]
    assert hunk.block("-") == "def f():\n  a\n"
    assert second.content == ""
    assert update("@@ def f @@\n-a\n+b").hunks[0].anchors == ["def f"]
    assert update("@@ @@\n-a\n+b").hunks[0].anchors == []
    assert update("-a\n+b\n\\ No newline at end of file").hunks[0].block("+") == "b\n"
    assert update("def f():\n-a\n+b").hunks[0].block("-") == "def f():\na\n"
    assert update("*** Move to: g\n-a\n+b").to == "g"
    assert update("*** Move to: g").hunks == []
    marked = update("-*** End Patch\n+*** Begin Patch\n *** End of File")
    assert marked.hunks[0].block("-") == "*** End Patch\n*** End of File\n"


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ("", "End Patch"),
        ("*** Begin Patch\n*** Update File: f\n-a\n+b\n", "cut off"),
        ("*** End Patch\n*** Begin Patch\n*** Delete File: f\n", "cut off"),
        ("*** Begin Patch\n*** End Patch", "names no file"),
        ("*** Begin Patch\nhello\n*** End Patch", 'line 2: expected "*** Update File: path"'),
        ("*** Begin Patch\n*** Update File: f\n*** End Patch", "no hunk"),
        ("*** Begin Patch\n*** Update File: f\n a\n*** End Patch", "line 3"),
        ("*** Begin Patch\n*** Update File: f\n@@ anchor\n*** End Patch", "line 3"),
        ("*** Begin Patch\n*** Add File: f\n+a\nb\n*** End Patch", 'line 4: expected a line that starts with "+"'),
        ("*** Begin Patch\n*** Delete File: f\n-a\n*** End Patch", "line 3: expected nothing"),
        ("*** Begin Patch\n*** Move File: f\n*** End Patch", "old path -> new path"),
        ("*** Begin Patch\n*** Move File: f -> \n*** End Patch", "old path -> new path"),
    ],
)
def test_what_is_no_patch_is_refused(patch: str, words: str) -> None:
    with pytest.raises(PatchError) as caught:
        parse(patch)
    assert words in str(caught.value)


# --- what it makes of a text ---


def test_hunks_replace_remove_and_add() -> None:
    text = "a\nb\nc\nd\n"
    assert applied(text, " a\n-b\n+B\n c") == "a\nB\nc\nd\n"
    assert applied(text, "-b") == "a\nc\nd\n"
    assert applied(text, " d\n+e") == "a\nb\nc\nd\ne\n"
    assert applied(text, "+0\n a") == "0\na\nb\nc\nd\n"
    assert applied(text, "-a\n-b\n-c\n-d") == ""
    assert applied(text, "@@\n-a\n+A\n@@\n-d\n+D") == "A\nb\nc\nD\n"


def test_the_end_of_the_file_stays_as_it_is() -> None:
    assert applied("a\nb", "-b\n+c") == "a\nc"
    assert applied("a\nb", " a\n-b") == "a"
    assert applied("a\nb", " b\n+c") == "a\nb\nc"
    assert applied("a\r\nb\r\n", " b\n+c") == "a\r\nb\r\nc\r\n"


def test_only_whole_lines_are_matched() -> None:
    assert applied("xa\na\nax\n", "-a\n+b") == "xa\nb\nax\n"


def test_blanks_are_forgiven_and_context_stays_as_it_is() -> None:
    text = "def f():\n\tif x:\n\t\treturn  1  \n\tend()\n"
    body = " def f():\n   if x:\n-    return 1\n+    return 2\n   end()"
    assert applied(text, body) == "def f():\n\tif x:\n\t\treturn 2\n\tend()\n"


def test_a_hunk_with_several_places_needs_a_deciding_line() -> None:
    text = "def f():\n    return 1\n\ndef g():\n    return 1\n\ndef h():\n    return 1\n"
    body = "-    return 1\n+    return 2"
    assert "lines 2, 5, 8" in refusal(text, body)
    assert applied(text, f"@@ def g():\n{body}") == text.replace("g():\n    return 1", "g():\n    return 2")
    assert applied(text, f" def g():\n{body}") == text.replace("g():\n    return 1", "g():\n    return 2")
    assert applied(text, f"@@ def h\n{body}") == text.replace("h():\n    return 1", "h():\n    return 2")
    assert applied(text, f"{body}\n*** End of File") == text.replace("h():\n    return 1", "h():\n    return 2")
    assert "is not in the file" in refusal(text, f"@@ def nowhere\n{body}")
    assert "lines 2, 5, 8" in refusal(text, body)
    assert "several places" in refusal(text, f"@@ def\n{body}")


def test_anchors_are_looked_for_one_below_the_other() -> None:
    text = "class A:\n  def f():\n    x\nclass B:\n  def f():\n    x\n"
    body = "-    x\n+    y"
    assert applied(text, f"@@ class B:\n@@ def f():\n{body}") == text[:-2] + "y\n"
    assert applied(text, f"@@ class A:\n@@ def f():\n{body}") == text.replace("x", "y", 1)
    assert "not below" in refusal("x\nclass B:\n", f"@@ class B:\n{body.replace('    ', '')}")


def test_an_anchor_may_be_repeated_as_context() -> None:
    assert applied("def f():\n  a\n", "@@ def f():\n def f():\n-  a\n+  b") == "def f():\n  b\n"


def test_lines_without_context_go_below_the_anchor_or_to_the_end() -> None:
    assert applied("a\nb\n", "@@ a\n+x\n+y") == "a\nx\ny\nb\n"
    assert applied("a\r\nb\r\n", "@@ a\n+x") == "a\r\nx\r\nb\r\n"
    assert applied("a\r\nend", "@@ end\n+x\n+y") == "a\r\nend\r\nx\r\ny"
    assert applied("a\nend", "@@ end\n+x") == "a\nend\nx"
    assert applied("end", "@@ end\n+x") == "end\nx"
    assert applied("a\n", "+x") == "a\nx\n"
    assert applied("a", "+x") == "a\nx"
    assert applied("a\r\n", "+x\n+y") == "a\r\nx\r\ny\r\n"
    assert applied("", "+x") == "x\n"
    assert "2 places" in refusal("a\nb\na\n", "@@ a\n+x")
    assert "0 places" in refusal("a\n", "@@ z\n+x")


def test_a_hunk_that_does_not_fit_names_itself() -> None:
    message = refusal("one\ntwo\n", "@@\n-one\n+1\n@@\n-three\n+3")
    assert message.startswith("hunk at line 6 of the patch")
    assert "blank" in refusal("a\n\n\nb\n", "+x\n ")
    assert "nothing" in refusal("a\n", "-a\n+a")


# --- properties ---

LINES = st.lists(st.text(alphabet="ab ", max_size=3), max_size=12)


def hunks_between(old: list[str], new: list[str], context: int) -> str:
    """Return V4A hunks with so many lines of context."""
    body = []
    for group in SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(context):
        body.append("@@")
        for tag, old_from, old_to, new_from, new_to in group:
            if tag == "equal":
                body += [f" {line}" for line in old[old_from:old_to]]
            else:
                body += [f"-{line}" for line in old[old_from:old_to]]
                body += [f"+{line}" for line in new[new_from:new_to]]
    return "\n".join(body)


def joined(lines: list[str], end: str) -> str:
    return "".join(line + end for line in lines)


@given(LINES, LINES, st.sampled_from(["\n", "\r\n"]))
def test_a_patch_with_full_context_does_what_it_says(old: list[str], new: list[str], end: str) -> None:
    old, new = ["first line", *old], ["first line", *new]
    body = hunks_between(old, new, 100)
    if body:
        assert applied(joined(old, end), body) == joined(new, end)


@given(LINES, LINES, st.integers(0, 3))
def test_a_patch_is_applied_right_or_not_at_all(old: list[str], new: list[str], context: int) -> None:
    numbered = [f"{number} {line}" if number % 2 else line for number, line in enumerate(old)]
    changed = [line for line in numbered if len(line) != 1] + new[:1]
    body = hunks_between(numbered, changed, context)
    if not body:
        return
    try:
        result = applied(joined(numbered, "\n"), body)
    except MatchError:
        return
    assert sorted(result.split("\n")) == sorted(joined(changed, "\n").split("\n"))


def test_an_anchor_that_is_not_there_is_never_passed_over() -> None:
    text = "class B:\n    def run(self):\n        pass\n"
    told = refusal(text, "@@ class C:\n     def run(self):\n-        pass\n+        return 1")
    assert '"@@ class C:" is not in the file' in told
