from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollout.resume import NO_ROW, Match, match_rows
from tests.rollout.run_files import Row, a_failure, a_row, an_original_row, index_of, keys_of

Asked = tuple[str, str, str]


def match(samples: list[str] | list[Asked], rows: list[Row]) -> Match:
    return match_rows(keys_of(samples), index_of(rows))


def pending(samples: list[str] | list[Asked], rows: list[Row]) -> list[int]:
    return list(match(samples, rows).pending())


def test_a_new_run_has_everything_to_do() -> None:
    found = match(["a", "b"], [])
    assert list(found.pending()) == [0, 1]
    assert found.done_indices() == []
    assert list(found.final_rows) == [NO_ROW, NO_ROW]


def test_three_equal_prompts_of_which_one_is_done_leave_two() -> None:
    assert pending(["roll a die"] * 3, [a_row(0, "roll a die")]) == [1, 2]
    assert pending(["roll a die"] * 3, [a_row(2, "roll a die")]) == [0, 1]
    assert pending(["roll a die"] * 3, [a_row(1, "roll a die"), a_row(2, "roll a die")]) == [0]


def test_the_same_row_twice_counts_once() -> None:
    assert pending(["x"] * 3, [a_row(0, "x"), a_row(0, "x"), a_row(0, "x")]) == [1, 2]
    assert pending(["y", "x", "x"], [a_row(0, "x"), a_row(0, "x")]) == [0, 2]


def test_lines_that_moved_are_found() -> None:
    rows = [a_row(0, "a"), a_row(1, "b"), a_row(2, "c")]
    assert pending(["c", "a", "b"], rows) == []
    assert pending(["new", "a", "b", "newer", "c"], rows) == [0, 3]
    assert pending(["c"], rows) == []


def test_rows_of_deleted_lines_are_orphans() -> None:
    rows = [a_row(0, "a"), a_failure(1, "b"), a_row(2, "c"), a_row(3, "c"), a_row(None, "d")]
    found = match(["c"], rows)
    assert list(found.orphans) == [0, 3, 4]
    assert list(found.final_rows) == [2]


def test_a_row_under_its_own_index_wins() -> None:
    found = match(["x", "x"], [a_row(7, "x"), a_row(1, "x"), a_row(0, "x")])
    assert list(found.final_rows) == [2, 1]
    assert list(found.orphans) == [0]


def test_the_last_row_of_a_sample_counts() -> None:
    failed_then_done = match(["a"], [a_failure(0, "a"), a_row(0, "a")])
    assert (list(failed_then_done.final_rows), failed_then_done.done_indices()) == ([1], [0])
    done_then_failed = match(["a"], [a_row(0, "a"), a_failure(0, "a")])
    assert (list(done_then_failed.final_rows), list(done_then_failed.pending())) == ([1], [0])
    moved = match(["new", "a"], [a_row(0, "a"), a_failure(0, "a")])
    assert (list(moved.final_rows), list(moved.pending())) == ([NO_ROW, 1], [0, 1])


def test_a_failure_gives_way_to_a_result_that_moved() -> None:
    found = match(["a", "b"], [a_failure(0, "a"), a_row(5, "a")])
    assert list(found.final_rows) == [1, NO_ROW]
    assert list(found.orphans) == []


def test_partial_unfinished_and_discarded_are_done() -> None:
    rows = [
        a_row(0, "a", completed=False),
        a_row(1, "b", completed=False, partial=True),
        a_row(2, "c", discarded="no_reasoning"),
        {"prompt_index": 3, "discarded": "no_reasoning", "prompt": "d"},
    ]
    assert pending(["a", "b", "c", "d", "e"], rows) == [4]


def test_image_and_folder_are_part_of_what_is_asked() -> None:
    samples = [("a", "", ""), ("a", "busybox", ""), ("a", "busybox", "/app")]
    assert pending(samples, [a_row(0, "a", image="busybox", cwd="/app")]) == [0, 1]
    assert pending(samples, [a_row(0, "a", image="alpine")]) == [0, 1, 2]


def test_rows_of_the_original_fit_any_image_and_leave_the_choosy_their_place() -> None:
    samples = [("a", "busybox", ""), ("a", "alpine", "")]
    assert pending(samples, [an_original_row(0, "a")]) == [1]
    assert pending(samples, [an_original_row(1, "a")]) == [0]
    found = match(samples, [an_original_row(0, "a"), a_row(9, "a", image="busybox")])
    assert list(found.final_rows) == [1, 0]


def test_a_sample_the_original_failed_and_we_did() -> None:
    rows: list[Row] = [{"prompt_index": 0, "prompt": "a", "failed": True}, a_row(0, "a")]
    assert list(match(["a"], rows).final_rows) == [1]


def test_rows_without_an_index_count_one_by_one() -> None:
    assert pending(["a", "a", "a", "b"], [a_row(None, "a"), a_row(None, "a")]) == [2, 3]


def test_white_space_around_a_prompt_makes_no_difference() -> None:
    assert pending(["  a\n", "b c"], [a_row(0, "a"), a_row(1, " b c ")]) == []
    assert pending(["b c"], [a_row(0, "b  c")]) == [0]


def test_the_order_of_the_merge() -> None:
    rows = [a_row(0, "a"), a_row(1, "gone"), a_row(2, "c"), a_row(9, "gone too"), a_row(None, "no index")]
    index = index_of(rows)
    found = match_rows(keys_of(["c", "b", "a"]), index)
    assert list(found.in_prompt_order()) == [(2, 0), (0, 2)]


prompts = st.sampled_from(["a", "b", "c"])
places = st.sampled_from([("", ""), ("img", "")])
samples_strategy = st.lists(st.tuples(prompts, places).map(lambda ask: (ask[0], *ask[1])), max_size=8)
recorded = st.tuples(st.integers(-1, 9), prompts, places, st.booleans())


def rows_of(records: list[tuple[int, str, tuple[str, str], bool]]) -> list[Row]:
    rows = []
    for index, prompt, (image, cwd), failed in records:
        row = a_row(index if index >= 0 else None, prompt, image=image, cwd=cwd)
        rows.append({**row, "failed": True} if failed else row)
    return rows


def content(row: Row) -> Asked:
    return row["conversations"][1]["value"], row["metadata"]["image"], row["metadata"]["cwd"]


@given(samples_strategy, st.lists(recorded, max_size=10))
def test_as_many_samples_are_done_as_the_rows_allow(
    samples: list[Asked], records: list[tuple[int, str, tuple[str, str], bool]]
) -> None:
    rows = rows_of(records)
    found = match(samples, rows)
    last = {(content(row), row.get("prompt_index", -number - 1)): row for number, row in enumerate(rows)}
    results = Counter(key[0] for key, row in last.items() if not row.get("failed"))
    wanted = Counter(samples)
    done = Counter(samples[index] for index in found.done_indices())
    assert done == Counter({ask: min(count, results[ask]) for ask, count in wanted.items()}) - Counter()
    assert len(found.orphans) == (results - wanted).total()
    used = [row for row in found.final_rows if row != NO_ROW] + list(found.orphans)
    assert len(used) == len(set(used))
    for index, row in enumerate(found.final_rows):
        assert row == NO_ROW or content(rows[row]) == samples[index]
        assert bool(found.done[index]) == (row != NO_ROW and not rows[row].get("failed"))


@given(samples_strategy, st.integers(0, 1000))
def test_no_order_of_the_lines_makes_a_finished_run_run_again(samples: list[Asked], seed: int) -> None:
    rows = [a_row(index, prompt, image=image, cwd=cwd) for index, (prompt, image, cwd) in enumerate(samples)]
    shuffled = random.Random(seed).sample(samples, len(samples))
    found = match(shuffled, rows)
    assert list(found.pending()) == []
    assert list(found.orphans) == []
    assert sorted(found.final_rows) == list(range(len(rows)))


@given(samples_strategy, st.data())
def test_interrupted_and_resumed_over_and_over_every_sample_runs_once(
    samples: list[Asked], data: st.DataObject
) -> None:
    rows: list[Row] = []
    for _ in range(4):
        samples = data.draw(st.permutations(samples))
        todo = list(match(samples, rows).pending())
        for index in todo[: data.draw(st.integers(0, len(todo)))]:
            prompt, image, cwd = samples[index]
            rows.append(a_row(index, prompt, image=image, cwd=cwd))
    found = match(samples, rows)
    assert len(found.orphans) == 0
    assert len(rows) + len(found.pending()) == len(samples)


@given(samples_strategy, st.lists(st.booleans(), min_size=8, max_size=8), st.integers(0, 1000))
def test_the_originals_rows_are_found_in_any_order_too(samples: list[Asked], done: list[bool], seed: int) -> None:
    rows = [an_original_row(index, samples[index][0]) for index in range(len(samples)) if done[index]]
    shuffled = random.Random(seed).sample(samples, len(samples))
    assert len(match(shuffled, rows).pending()) == len(samples) - len(rows)
