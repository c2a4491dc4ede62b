from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from endpoints.scripted import ScriptedEndpoint
from tests.program import Json, Workplace, answer, prompt_of, prompts_of, terminal

SMILE = "naïve 🙂"
LINES = (
    {"prompt": 123},
    {"prompt": None},
    b"42",
    b'["prompt"]',
    {"prompt": "ok"},
    b"",
    b'{"prompt":"bad json"',
    {"text": "no prompt"},
    {"prompt": "  "},
    {"prompt": True},
    {"prompt": 1.5},
    {"prompt": [{"type": "text", "text": "two"}, {"type": "text", "text": "parts"}]},
    {"prompt": [{"type": "image_url"}]},
    {"prompt": SMILE, "cwd": "sub", "id": 7, "tags": ["é"]},
    {"prompt": "null", "image": None, "docker_image": "", "cwd": None},
    {"prompt": "bad image", "image": 5},
    b'{"prompt": "half \\ud83d, nul \\u0000, line\\u2028end"}',
    b'{"prompt": "not text \xff"}',
    b"   ",
)
SKIPPED = {2: "null", 3: "not a JSON object", 4: "not a JSON object", 7: "not valid JSON", 8: 'no "prompt"', 9: "empty"}
SKIPPED |= {13: "not text", 16: '"image" must be text', 18: "not valid UTF-8"}
PROMPTS = ["123", "ok", "true", "1.5", "two\nparts", SMILE, "null", "half \ufffd, nul \ufffd, line\u2028end"]


@pytest.fixture
def odd(place: Workplace) -> Workplace:
    """A dataset with a byte order mark, CRLF and all that can be wrong; a terminal without any language."""
    lines = [line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=False).encode() for line in LINES]
    (place.path / "prompts.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    place.env = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    return place


def test_odd_lines_are_named_and_the_others_run(odd: Workplace) -> None:
    replies = [terminal("cat; printf 'naïve 🙂'; basename \"$PWD\""), answer(f"{SMILE}!")]
    with ScriptedEndpoint(replies) as endpoint:
        ended = odd.run(endpoint.base_url, num_workers=2, verbose=True)
        asked = set(prompts_of(endpoint))
        flags: Json = {"resume": True, "run_name": "r"}
        again = odd.run(endpoint.base_url, **flags)
        assert len(endpoint.requests) == 2 * len(PROMPTS)
    assert (ended.code, again.code) == (0, 0), ended
    assert asked == set(PROMPTS)
    rows = odd.trajectories()
    assert [prompt_of(row) for row in rows] == PROMPTS
    assert [row["prompt_index"] for row in rows] == list(range(len(PROMPTS)))

    warnings = [line for line in ended.stderr.splitlines() if line.startswith("warning: prompts.jsonl:")]
    told = {int(line.split(":")[2]): line for line in warnings}
    assert told.keys() == SKIPPED.keys()
    assert all(reason in told[number] for number, reason in SKIPPED.items())
    assert "skipped lines              9" in ended.stdout
    assert ended.stderr.isascii()
    assert "na\\xefve \\U0001f642" in ended.stderr  # the call's log line, for a terminal that has no such letters

    smile = rows[PROMPTS.index(SMILE)]
    assert smile["metadata"]["cwd"] == "sub"
    assert json.loads(smile["metadata"]["sample_json"]) == {"id": 7, "tags": ["é"]}
    assert f"{SMILE}sub" in smile["conversations"][3]["value"]
    assert smile["conversations"][4]["value"].endswith(f"{SMILE}!")
    plain = rows[PROMPTS.index("null")]
    assert [plain["metadata"][name] for name in ("image", "cwd", "sample_json")] == ["", "", ""]
    lines = (odd.run_dir() / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()  # strict, also of U+2028
    assert len(lines) == len(PROMPTS)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot read dataset prompts.jsonl: No such file or directory"),
        (b"", "prompts.jsonl has no usable line: it is empty"),
        (b'\n{"text": "x"}\n[]\n', 'prompts.jsonl has no usable line (prompts.jsonl:2: no "prompt"; '),
        (b'{"prompt": "a"}\n{"prompt": "b", "image": "busybox"}\n', "sample 1 of prompts.jsonl names an image"),
        ("folder", "dataset prompts.jsonl is a folder, not a JSONL file"),
    ],
)
def test_a_dataset_that_cannot_be_used_ends_it_at_the_door(place: Workplace, content: Any, told: str) -> None:
    path = place.path / "prompts.jsonl"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    ended = place.run("http://127.0.0.1:9/v1")
    assert ended.code == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith(f"error: {told}")
    assert ended.stderr.count("\n") == 1
    assert not (place.path / "data").exists()


def test_a_files_name_need_be_no_text(place: Workplace) -> None:
    name = os.fsdecode(b"d\xff.jsonl")
    place.dataset(["hello"], name=name)
    with ScriptedEndpoint([answer("4")]) as endpoint:
        ended = place.run(endpoint.base_url, dataset_file=name)
    assert ended.code == 0, ended
    assert place.json("checkpoint.json")["dataset"]["path"] == "d?.jsonl"


def peak_megabytes(place: Workplace, base_url: str) -> tuple[int, int]:
    """Run the program; return its exit code and what its largest process had in memory."""
    watched = (
        "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:], stdout=2);"
        "print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)"
    )
    python, *words = place.command(base_url, {"batch_size": 100})
    ended = place.ended(place.start_command([python, "-c", watched, python, *words]), 110)
    code, megabytes = map(int, ended.stdout.split())
    return code, megabytes


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    peaks = []
    for name, samples in (("small", 10), ("large", 100_000)):
        place = Workplace(tmp_path / name)
        place.path.mkdir()
        place.dataset(f"{number} {'x' * 2000}" for number in range(samples))
        with ScriptedEndpoint([answer("no", status=401)], record=0) as endpoint:  # ends the dispatch at once
            code, megabytes = peak_megabytes(place, endpoint.base_url)
        assert code == 1
        peaks.append(megabytes)
    assert peaks[1] - peaks[0] < 50  # of 200 MB of text
