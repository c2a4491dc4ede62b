from __future__ import annotations

import hashlib
import io
import json
import os
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.jsonl import read_lines
from rollout.samples import Dataset, DatasetError, Sample
from rollout.texts import clean_text

BOM = b"\xef\xbb\xbf"


def save(folder: Path, *lines: bytes | Any, end: bytes = b"\n") -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(b"".join((part if isinstance(part, bytes) else json.dumps(part).encode()) + end for part in lines))
    return path


def samples_of(path: Path, max_samples: int | None = None) -> list[Sample]:
    with Dataset.open(path, max_samples) as dataset:
        return [dataset[index] for index in range(len(dataset))]


def warning_of(folder: Path, row: bytes | Any) -> str:
    with Dataset.open(save(folder, {"prompt": "good"}, row)) as dataset:
        assert (len(dataset), dataset.skipped) == (1, 1)
        return dataset.warnings[0].removeprefix(f"{dataset.path}:2: ")


def test_odd_lines_are_skipped_with_their_numbers_and_the_rest_runs(tmp_path: Path) -> None:
    path = save(
        tmp_path, {"prompt": 123}, {"prompt": None}, b"42", ["prompt"], {"prompt": "ok"}, b"", b'{"prompt":"bad json"'
    )
    with Dataset.open(path) as dataset:
        assert [dataset[0].prompt, dataset[1].prompt] == ["123", "ok"]
        assert [dataset[0].index, dataset[1].index] == [0, 1]
        assert dataset.skipped == 4
        assert [warning.split(":")[1] for warning in dataset.warnings] == ["2", "3", "4", "7"]
        assert all(warning.startswith(f"{path}:") for warning in dataset.warnings)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"  \t\n", b"\n\n", b"\n \r\n"])
def test_byte_order_mark_line_ends_and_blank_lines(tmp_path: Path, end: bytes) -> None:
    path = save(tmp_path, BOM + b'{"prompt": "first"}', {"prompt": "na\u00efve \U0001f642"}, end=end)
    assert [sample.prompt for sample in samples_of(path)] == ["first", "na\u00efve \U0001f642"]


def test_a_byte_order_mark_in_the_middle_of_joined_files(tmp_path: Path) -> None:
    path = save(tmp_path, BOM + b'{"prompt": "first"}', BOM + b'{"prompt": "second"}')
    assert [sample.prompt for sample in samples_of(path)] == ["first", "second"]


def test_the_last_line_needs_no_newline(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "b"}')
    assert [sample.prompt for sample in samples_of(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (b"123", "123"),
        (b"1.5", "1.5"),
        (b"-0.25", "-0.25"),
        (b"true", "true"),
        (b"false", "false"),
        (b"0", "0"),
        (b'"  kept as it is \\n"', "  kept as it is \n"),
        (b'["one", "two"]', "one\ntwo"),
        (b'[{"type": "text", "text": "one"}, {"text": "two"}]', "one\ntwo"),
        (b'"half \\ud83d, whole \\ud83d\\ude42, nul \\u0000"', "half \ufffd, whole \U0001f642, nul \ufffd"),
    ],
)
def test_what_becomes_of_a_prompt(tmp_path: Path, prompt: bytes, text: str) -> None:
    assert samples_of(save(tmp_path, b'{"prompt": %b}' % prompt))[0].prompt == text


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, 'no "prompt"'),
        ({"Prompt": "x"}, 'no "prompt"'),
        ({"prompt": None}, '"prompt" is null'),
        ({"prompt": ""}, '"prompt" is empty'),
        ({"prompt": " \n\t"}, '"prompt" is empty'),
        ({"prompt": []}, '"prompt" is empty'),
        ({"prompt": {"text": "x"}}, '"prompt" is an object, not text'),
        ({"prompt": ["x", 3]}, '"prompt" has a part that is not text'),
        ({"prompt": [{"type": "image_url", "image_url": "x"}]}, '"prompt" has a part that is not text'),
        ({"prompt": "x", "image": 7}, '"image" must be text, not 7'),
        ({"prompt": "x", "docker_image": ["a"]}, '"docker_image" must be text, not ["a"]'),
        ({"prompt": "x", "cwd": False}, '"cwd" must be text, not false'),
        ({"prompt": "x", "cwd": ".."}, "\"cwd\" '..' leads out of the sandbox"),
        (
            {"prompt": "x", "cwd": "a/../../b"},
            "\"cwd\" 'a/../../b' leads out of the sandbox",
        ),
        ({"prompt": "x", "cwd": "./../b"}, "\"cwd\" './../b' leads out of the sandbox"),
        (b"[]", "not a JSON object"),
        (b'"prompt"', "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"prompt": "x"} {}', "not valid JSON (Extra data, column 17)"),
        (b"prompt: x", "not valid JSON (Expecting value, column 1)"),
        (b'{"prompt": "caf\xe9"}', "not valid UTF-8"),
        (b'{"prompt": "\xed\xa0\x80"}', "not valid UTF-8"),
        (b'{"prompt": "x", "deep": %b}' % (b"[" * 300 + b"]" * 300), "nested too deeply"),
        (b'{"prompt": "x", "deep": %b}' % (b"[" * 90_000), "nested too deeply"),
    ],
)
def test_unusable_lines_are_told(tmp_path: Path, row: bytes | Any, reason: str) -> None:
    assert warning_of(tmp_path, row) == reason


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-1e999", b"9" * 5000])
def test_numbers_that_are_no_text_are_told(tmp_path: Path, number: bytes) -> None:
    assert warning_of(tmp_path, b'{"prompt": %b}' % number) in (
        '"prompt" is a number that JSON does not have, or one with too many digits',
        "a number with more digits than any reader takes",
    )


@pytest.mark.parametrize("cwd", ["sub", "./a/../b", "/app", "..a/b..", "a/.."])
def test_folders_of_the_sandbox_are_taken(tmp_path: Path, cwd: str) -> None:
    assert samples_of(save(tmp_path, {"prompt": "x", "cwd": cwd}))[0].cwd == cwd


def test_many_warnings_are_counted_and_not_all_kept(tmp_path: Path) -> None:
    with Dataset.open(save(tmp_path, *[b"junk"] * 250, {"prompt": "x"})) as dataset:
        assert dataset.skipped == 250
        assert len(dataset.warnings) == 101
        assert dataset.warnings[-1] == "... and 150 more"


def test_image_and_cwd_are_the_samples_and_other_columns_its_json(tmp_path: Path) -> None:
    path = save(
        tmp_path,
        {"prompt": "a"},
        {"prompt": "b", "docker_image": "busybox", "cwd": "/app", "id": 7, "tags": ["\u00e9"]},
        {"prompt": "c", "image": "alpine", "docker_image": "ignored", "cwd": None, "score": None},
        {"prompt": "d", "image": "", "docker_image": "debian", "cwd": " "},
    )
    first, second, third, fourth = samples_of(path)
    assert first == Sample(0, "a")
    assert second == Sample(1, "b", "busybox", "/app", '{"id": 7, "tags": ["\u00e9"]}')
    assert third == Sample(2, "c", "alpine", "", '{"score": null}')
    assert fourth == Sample(3, "d", "debian")
    with Dataset.open(path) as dataset:
        assert dataset.first_image_index == 1


def test_without_images_there_is_no_first_one(tmp_path: Path) -> None:
    with Dataset.open(save(tmp_path, {"prompt": "a"}, {"prompt": "b", "image": None})) as dataset:
        assert dataset.first_image_index is None


def test_other_columns_are_strict_json_whatever_the_line_held(tmp_path: Path) -> None:
    path = save(tmp_path, b'{"prompt": "a", "x": NaN, "y": "\\ud800\\u0000"}')
    assert json.loads(samples_of(path)[0].extra_json) == {"x": None, "y": "\ufffd\ufffd"}


def test_a_limit_takes_the_first_samples_and_the_hash_still_covers_the_file(tmp_path: Path) -> None:
    path = save(tmp_path, b"junk", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c", "image": "i"}, b"more junk")
    with Dataset.open(path, 2) as limited, Dataset.open(path) as whole, Dataset.open(path, 50) as wide:
        assert [len(limited), len(whole), len(wide)] == [2, 3, 3]
        assert limited[1] == whole[1] == Sample(1, "b")
        assert [limited.skipped, whole.skipped] == [1, 2]
        assert limited.first_image_index is None
        assert limited.sha256 == whole.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        with pytest.raises(IndexError):
            limited[2]
        with pytest.raises(IndexError):
            limited[-1]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "has no usable line: it is empty"),
        (b"\n \r\n", "has no usable line: it is empty"),
        (b"1\n2\n", ":2: not a JSON object)"),
        (b"1\n2\n3\n4\n5\n", ":3: not a JSON object; and 2 more)"),
        ('{"prompt": "x"}\n'.encode("utf-16"), "not valid UTF-8"),
        (b"\x1f\x8b\x08\0\0\0\0\0", ":1: not valid UTF-8"),
    ],
)
def test_no_usable_line_is_an_error_with_the_first_reasons(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(DatasetError) as caught:
        Dataset.open(path)
    assert str(path) in str(caught.value)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_readable_file_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, told in (("none", "No such file"), ("", "is a folder"), ("pipe", "not a regular file"), ("a\0b", "null")):
        with pytest.raises(DatasetError, match=told):
            Dataset.open(tmp_path / name)


def test_a_file_that_is_edited_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path, {"prompt": "aaaa"}, {"prompt": "bbbb", "id": 1}, {"prompt": "cccc"})
    with Dataset.open(path) as dataset:
        path.write_bytes(path.read_bytes().replace(b"bbbb", b"BBBB"))
        assert dataset[0].prompt == "aaaa"
        with pytest.raises(DatasetError, match=r"was changed while the run was reading it \(sample 1 "):
            dataset[1]
        path.write_bytes(path.read_bytes()[:50])
        with pytest.raises(DatasetError, match="was changed"):
            dataset[2]


def test_a_file_that_is_replaced_or_grows_does_no_harm(tmp_path: Path) -> None:
    path = save(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    with Dataset.open(path) as dataset:
        with path.open("ab") as file:
            file.write(b'{"prompt": "c"}\n')
        (tmp_path / "other").write_text('{"prompt": "other"}\n' * 3, encoding="utf-8")
        (tmp_path / "other").replace(path)
        assert [dataset[0].prompt, dataset[1].prompt] == ["a", "b"]


def test_a_line_without_end_is_passed_over_in_pieces() -> None:
    lines = b"short\n" + b"x" * 95 + b"\nnext\n" + b"y" * 30
    found = list(read_lines(io.BytesIO(lines), max_bytes=10))
    assert [(number, line[:5]) for number, _, line in found] == [
        (1, b"short"),
        (2, b"xxxxx"),
        (3, b"next\n"),
        (4, b"yyyyy"),
    ]
    assert all(lines[offset : offset + len(line)] == line for _, offset, line in found)
    assert max(len(line) for *_, line in found) == 10


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    count = 20_000
    path = tmp_path / "prompts.jsonl"
    with path.open("wb") as file:
        file.writelines(b'{"prompt": "%b %d"}\n' % (b"x" * 500, number) for number in range(count))
    tracemalloc.start()
    try:
        with Dataset.open(path) as dataset:
            kept, peak = tracemalloc.get_traced_memory()
            assert len(dataset) == count
    finally:
        tracemalloc.stop()
    assert kept < 60 * count
    assert peak < 60 * count + 4_000_000  # the buffer of one reader, and a line


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.lists(st.tuples(texts, st.booleans(), st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\njunk\n"])), max_size=12))
def test_every_usable_line_comes_back_in_order(rows: list[tuple[str, bool, bytes]]) -> None:
    usable = [clean_text(prompt) for prompt, _, _ in rows if prompt.strip()]
    with TemporaryDirectory() as folder:  # hypothesis has no tmp_path of its own for an example
        path = Path(folder) / "prompts.jsonl"
        with path.open("wb") as file:
            for prompt, ascii_only, end in rows:
                file.write(json.dumps({"prompt": prompt}, ensure_ascii=ascii_only).encode() + end)
        if usable:
            assert [sample.prompt for sample in samples_of(path)] == usable
        else:
            with pytest.raises(DatasetError):
                Dataset.open(path)
