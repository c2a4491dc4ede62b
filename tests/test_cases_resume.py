from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from endpoints.scripted import ScriptedEndpoint
from tests.program import Ended, Json, Workplace, answer, prompt_of, prompts_of, reply, script, terminal, turns

ANSWER = [answer("four")]


def original_row(index: int, prompt: str, **more: Any) -> Json:
    """A row as the original runner writes it."""
    return {
        "prompt_index": index,
        "conversations": [
            {"from": "system", "value": "tools"},
            {"from": "human", "value": prompt},
            {"from": "gpt", "value": "<think>\nhm\n</think>\n4"},
        ],
        "metadata": {"batch_num": 0, "timestamp": "2026-01-02T03:04:05", "model": "m"},
        "completed": True,
        "partial": False,
        "api_calls": 1,
        "toolsets_used": ["terminal"],
        "tool_stats": {"terminal": {"count": 0, "success": 0, "failure": 0}},
        "tool_error_counts": {"terminal": 0},
        **more,
    }


def line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def batch_file(place: Workplace, number: int, content: bytes) -> Path:
    place.run_dir().mkdir(parents=True, exist_ok=True)
    path = place.run_dir() / f"batch_{number}.jsonl"
    path.write_bytes(content)
    return path


def resumed(place: Workplace, replies: Any = ANSWER, **flags: Any) -> tuple[Ended, list[str]]:
    """Run with --resume; return the end and the prompts that were asked."""
    with ScriptedEndpoint(replies) as endpoint:
        ended = place.run(endpoint.base_url, resume=True, **flags)
        return ended, prompts_of(endpoint)


def test_equal_prompts_are_matched_by_count(place: Workplace) -> None:
    place.dataset(["roll a die"] * 3)
    kept = batch_file(place, 0, line(original_row(0, "roll a die")))
    before = kept.read_bytes()
    ended, asked = resumed(place)
    assert (ended.code, asked) == (0, ["roll a die"] * 2)
    assert kept.read_bytes() == before
    rows = place.trajectories()
    assert [row["prompt_index"] for row in rows] == [0, 1, 2]
    assert {prompt_of(row) for row in rows} == {"roll a die"}
    assert rows[0].keys() == rows[1].keys()
    assert rows[0]["tool_stats"].keys() == rows[1]["tool_stats"].keys()


def test_a_question_in_which_something_secret_is_masked_is_not_paid_for_again(place: Workplace) -> None:
    """Whatever the environment holds by then."""
    prompts = ["mend the hunter2-x page", "who is A. N. Author?", "use tok-123-tok-123", "say anything"]
    place.dataset([*prompts, "late"])
    place.env = {"OPENAI_API_KEY": "hunter2-x", "MY_TOKEN": "tok-123-tok-123", "GIT_AUTHOR_NAME": "A. N. Author"}
    first, asked = resumed(place, max_samples=4, batch_size=5)
    assert (first.code, sorted(asked)) == (0, sorted(prompts))
    place.env = {}
    second, asked = resumed(place, batch_size=5)
    assert (second.code, asked) == (0, ["late"])
    rows = place.trajectories()
    shown = ["mend the *** page", "who is A. N. Author?", "use ***", "say anything", "late"]
    assert [prompt_of(row) for row in rows] == shown
    assert {tuple(row) for row in rows} == {tuple(rows[-1])}, "trainers see the same keys in every row"


def test_a_discarded_sample_is_not_paid_for_again(place: Workplace) -> None:
    place.dataset(["no thought", "a thought"])
    replies = script({"no thought": [reply(content="4")], "a thought": ANSWER})
    first, asked = resumed(place, replies)  # of a run that never was: begins it
    assert (first.code, sorted(asked)) == (0, ["a thought", "no thought"])
    second, asked = resumed(place, replies)
    assert (second.code, asked) == (0, [])
    assert [prompt_of(row) for row in place.trajectories()] == ["a thought"]
    (discarded,) = [row for row in place.rows() if "discarded" in row]
    assert (discarded["discarded"], turns(discarded, "gpt")) == ("no_reasoning", ["<think>\n</think>\n4"])
    statistics = place.json("statistics.json")
    assert statistics["discarded_no_reasoning"] == 1
    assert (statistics["outcomes"]["discarded"], statistics["outcomes"]["completed"]) == (1, 1)
    checkpoint = place.json("checkpoint.json")
    assert checkpoint["completed_prompts"] == [0, 1]
    assert checkpoint["batch_stats"] == {"0": {"processed": 2, "skipped": 0, "failed": 0, "discarded_no_reasoning": 1}}
    assert "discarded                  1" in second.stdout
    assert len(statistics["legs"]) == 2


def test_a_larger_limit_runs_just_what_is_new(place: Workplace) -> None:
    place.dataset([f"question {number}" for number in range(10)])
    with ScriptedEndpoint(ANSWER) as endpoint:
        assert place.run(endpoint.base_url, max_samples=3).code == 0
    early = {path.name: path.read_bytes() for path in place.run_dir().glob("batch_*")}
    assert set(early) == {"batch_0.jsonl", "batch_1.jsonl"}
    checkpoint = place.json("checkpoint.json")
    assert checkpoint["completed_prompts"] == [0, 1, 2]

    ended, asked = resumed(place, max_samples=6)  # at another port
    assert (ended.code, sorted(asked)) == (0, ["question 3", "question 4", "question 5"])
    assert "resume: 6 samples, 3 done already, 3 to run in 2 batches" in ended.stderr
    assert "warning" not in ended.stderr
    assert {name: (place.run_dir() / name).read_bytes() for name in early} == early
    assert {row["metadata"]["batch_num"] for row in place.rows()} == {0, 1, 2, 3}
    again = place.json("checkpoint.json")
    assert again["completed_prompts"] == [0, 1, 2, 3, 4, 5]
    assert list(again["batch_stats"]) == ["0", "1", "2", "3"]
    assert {name: again["batch_stats"][name] for name in "01"} == checkpoint["batch_stats"]
    rows = place.trajectories()
    assert [(row["prompt_index"], prompt_of(row)) for row in rows] == [(n, f"question {n}") for n in range(6)]

    # Nothing is left to do: what is made of the rows is made again.
    (place.run_dir() / "trajectories.jsonl").unlink()
    (place.run_dir() / "statistics.json").write_text("{}")
    ended, asked = resumed(place, max_samples=6)
    assert (ended.code, asked) == (0, [])
    assert place.trajectories() == rows
    assert place.json("statistics.json")["total_prompts"] == 6
    assert len(place.json("statistics.json")["legs"]) == 3


def test_damaged_files_cost_no_more_than_what_was_lost(place: Workplace) -> None:
    place.dataset([{"prompt": 123}, "torn", "ok"])
    torn = b'{"prompt_index": 1, "conversa'
    damaged = b"7\n" + line(original_row(0, "123")) + b"\xff\xfe junk\n\n" + torn
    kept = batch_file(place, 4, damaged)
    (place.run_dir() / "checkpoint.json").write_text('{"run_name": "r", "comp')
    ended, asked = resumed(place)
    assert (ended.code, sorted(asked)) == (0, ["ok", "torn"])
    assert kept.read_bytes() == damaged
    assert [path.name for path in sorted(place.run_dir().glob("batch_*"))] == ["batch_4.jsonl", "batch_5.jsonl"]
    assert [(row["prompt_index"], prompt_of(row)) for row in place.trajectories()] == [
        (0, "123"),
        (1, "torn"),
        (2, "ok"),
    ]
    assert place.json("checkpoint.json")["completed_prompts"] == [0, 1, 2]
    assert "data/r/checkpoint.json is damaged" in ended.stderr
    for number in (1, 3, 5):
        assert f"data/r/batch_4.jsonl:{number}: " in ended.stderr
    assert "Traceback" not in ended.stderr


def test_numbers_go_on_above_files_and_checkpoint(place: Workplace) -> None:
    place.dataset(["a", "b", "c", "d"])
    done = batch_file(place, 0, line(original_row(0, "a")) + line(original_row(1, "b")))
    before = done.read_bytes()
    stats = {"processed": 2, "skipped": 0, "discarded_no_reasoning": 0}
    checkpoint = {"run_name": "r", "completed_prompts": [0, 1], "batch_stats": {"0": stats, "7": stats}}
    (place.run_dir() / "checkpoint.json").write_text(json.dumps({**checkpoint, "last_updated": "2026-01-02T03:04:05"}))
    ended, asked = resumed(place)
    assert (ended.code, sorted(asked)) == (0, ["c", "d"])
    assert done.read_bytes() == before
    assert sorted(path.name for path in place.run_dir().glob("batch_*")) == ["batch_0.jsonl", "batch_8.jsonl"]
    assert list(place.json("checkpoint.json")["batch_stats"]) == ["0", "7", "8"]
    assert not [path for path in place.run_dir().iterdir() if path.suffix == ".tmp"]


def test_lines_may_move_and_what_has_changed_is_told(place: Workplace) -> None:
    refusal = [reply(status=400, error="what is this?")]
    place.dataset(["first", "second", "twin", "twin", "refused"])
    with ScriptedEndpoint(script({"first": ANSWER, "second": ANSWER, "twin": ANSWER, "refused": refusal})) as endpoint:
        first = place.run(endpoint.base_url, batch_size=5)
    assert first.code == 1
    assert first.last_line.startswith("1 failed of 5 samples; resume with: ")
    assert first.last_line.endswith(" --resume")

    place.dataset(["twin", "new", "refused", {"prompt": "first", "cwd": "elsewhere"}, "first", "twin"])
    ended, asked = resumed(place, model="other", seed=3)
    assert (ended.code, sorted(asked)) == (0, ["first", "new", "refused"])  # in another folder it is another question
    (told,) = [text for text in ended.stderr.splitlines() if text.startswith("warning: this run was begun otherwise")]
    assert "model was scripted, is other; seed was 0, is 3; the dataset has changed" in told
    rows = place.trajectories()
    now = [row for row in rows if prompt_of(row) != "second"]
    assert [(row["prompt_index"], prompt_of(row), row["metadata"]["cwd"]) for row in now] == [
        (0, "twin", ""),
        (1, "new", ""),
        (2, "refused", ""),
        (3, "first", "elsewhere"),
        (4, "first", ""),
        (5, "twin", ""),
    ]
    assert [row["metadata"]["model"] for row in now] == ["scripted", "other", "other", "other", "scripted", "scripted"]
    assert "second" not in [prompt_of(row) for row in rows]  # its line is gone; its row stays in its batch file alone
    statistics = place.json("statistics.json")
    assert statistics["outcomes"] == {"completed": 6, "not_completed": 0, "partial": 0, "discarded": 0, "failed": 0}
    assert [(leg["model"], leg["seed"], leg["rows"]) for leg in statistics["legs"]] == [
        ("scripted", 0, 5),
        ("other", 3, 3),
    ]


def test_rows_of_an_earlier_run_are_not_touched_without_resume(place: Workplace) -> None:
    place.dataset(["a"])
    batch_file(place, 0, line(original_row(0, "a")))
    before = {path.name: path.read_bytes() for path in place.run_dir().iterdir()}
    with ScriptedEndpoint(ANSWER) as endpoint:
        ended = place.run(endpoint.base_url)
        assert not endpoint.requests
    assert ended.code == 2
    assert ended.stdout == ""
    assert ended.stderr == "error: data/r holds rows of an earlier run: pass --resume, or choose another run_name\n"
    assert {path.name: path.read_bytes() for path in place.run_dir().iterdir()} == before


def test_a_prompt_that_holds_the_key_is_done_when_it_was_answered(place: Workplace) -> None:
    place.dataset(["How do I start lm-studio-2?", "another"])
    with ScriptedEndpoint(ANSWER) as endpoint:
        first = place.run(endpoint.base_url, api_key="lm-studio-2")
        again = place.run(endpoint.base_url, api_key="lm-studio-2", resume=True)
    assert (first.code, again.code, len(endpoint.requests)) == (0, 0, 2)
    assert [prompt_of(row) for row in place.trajectories()] == ["How do I start ***?", "another"]


def test_what_needs_no_answer_needs_no_key(place: Workplace) -> None:
    """The default endpoint wants one: a finished run is merged again without, nothing else is begun without."""
    place.dataset(["one"])
    openrouter = "https://openrouter.ai/api/v1"
    fresh = place.run(openrouter)
    assert (fresh.code, "no key for openrouter.ai: set OPENROUTER_API_KEY" in fresh.stderr) == (2, True)
    assert not place.run_dir().exists()
    with ScriptedEndpoint([terminal("echo hi"), answer("done")]) as endpoint:
        assert place.run(endpoint.base_url).code == 0
    (place.run_dir() / "trajectories.jsonl").unlink()
    again = place.run(openrouter, resume="true")
    assert again.code == 0, again
    assert len(place.trajectories()) == 1
    place.dataset(["one", "two"])
    more = place.run(openrouter, resume="true")
    assert (more.code, "no key for openrouter.ai" in more.stderr) == (2, True)
    assert len(place.rows()) == 1
