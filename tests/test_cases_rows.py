from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from endpoints.scripted import ScriptedEndpoint
from tests.program import Json, Played, Workplace, answer, call, play, prompts_of, reply, results, terminal, turns
from toolsets import KNOWN_TOOLS

DONE = answer("done", usage={"prompt_tokens": 100, "completion_tokens": 10, "cost": 0.25})
KEYS = [
    "prompt_index",
    "conversations",
    "metadata",
    "completed",
    "partial",
    "api_calls",
    "toolsets_used",
    "tool_stats",
    "tool_error_counts",
]
METADATA: dict[str, type] = {
    "batch_num": int,
    "timestamp": str,
    "model": str,
    "image": str,
    "cwd": str,
    "sandbox": str,
    "stop_reason": str,
    "duration_seconds": float,
    "usage": dict,
    "cost_usd": float,
    "sample_json": str,
}
NO_TOKENS = {"prompt_tokens": 0, "completion_tokens": 0, "reasoning_tokens": 0, "cached_tokens": 0}
TIMES = re.compile(
    r'"(timestamp|completed_at|started_at|ended_at|last_updated|\w*seconds)": ("[^"]*"|[\d.]+|\{[^}]*\})'
)

SCENES = {
    "runs commands": [
        terminal("false"),
        terminal("echo hi"),
        call("terminal", {"command": "sleep 5", "timeout": 1}),
        DONE,
    ],
    "reads files": [
        call("read_file", {"path": "none"}),
        call("patch", {"path": "none", "old_string": "a", "new_string": "b"}),
        call("search_files", {"pattern": "x"}),
        reply(content="no thought", usage=None),
    ],
    "does nothing": [DONE],
    "thinks nothing": [reply(content="4", usage=None)],
    "fails": [reply(status=400, error="no")],
    "is cut": [answer("a lon", finish_reason="length", usage=None)],
}
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 3},
    "completion_tokens_details": {"reasoning_tokens": 2},
    "cost": 0.5,
}
SCENES["has its price"] = [answer("4", usage=USAGE)]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    place = Workplace(tmp_path_factory.mktemp("rows"))
    return play(place, SCENES, batch_size=3, num_workers=2)


def shape(value: Any) -> Any:
    """The tree of keys and types, without what is said."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items() if name != "conversations"}
    return type(value)


def test_all_rows_have_the_same_keys_and_types(played: Played) -> None:
    rows = played.place.trajectories()
    assert len(rows) == 5
    for row in rows:
        assert list(row) == KEYS
        assert {name: type(value) for name, value in row["metadata"].items()} == METADATA
        assert row["metadata"]["usage"].keys() == NO_TOKENS.keys()
        assert list(row["tool_stats"]) == list(row["tool_error_counts"]) == list(KNOWN_TOOLS)
        assert shape(row) == shape(rows[0])
        assert {name: stats["failure"] for name, stats in row["tool_stats"].items()} == row["tool_error_counts"]
        assert all(stats["count"] == stats["success"] + stats["failure"] for stats in row["tool_stats"].values())
        assert [turn["from"] for turn in row["conversations"][:2]] == ["system", "human"]
        assert all(("tool_calls" in turn) == (turn["from"] == "gpt") for turn in row["conversations"])
    assert [row["prompt_index"] for row in rows] == [0, 1, 2, 5, 6]


def test_a_row_says_what_made_it(played: Played) -> None:
    row = played.row("has its price")
    metadata = row["metadata"]
    assert datetime.fromisoformat(metadata["timestamp"]).tzinfo
    assert (metadata["batch_num"], metadata["model"], metadata["sandbox"]) == (2, "scripted", "local")
    assert metadata["usage"] == {"prompt_tokens": 7, "completion_tokens": 5, "reasoning_tokens": 2, "cached_tokens": 3}
    assert (metadata["cost_usd"], row["toolsets_used"], row["api_calls"]) == (0.5, ["file", "terminal"], 1)
    assert played.row("is cut")["metadata"]["usage"] == NO_TOKENS


def test_batches_are_cut_in_order(played: Played) -> None:
    batches = {
        turns(row, "human")[0] if row["conversations"] else row["prompt"]: row["metadata"]
        for row in played.place.rows()
    }
    assert [batches[prompt]["batch_num"] for prompt in SCENES] == [0, 0, 0, 1, 1, 1, 2]
    checkpoint = played.place.json("checkpoint.json")
    none = {"skipped": 0, "failed": 0, "discarded_no_reasoning": 0}
    assert checkpoint["batch_stats"] == {
        "0": {"processed": 3, **none},
        "1": {"processed": 3, **none, "failed": 1, "discarded_no_reasoning": 1},
        "2": {"processed": 1, **none},
    }
    assert checkpoint["completed_prompts"] == [0, 1, 2, 3, 5, 6]
    assert (checkpoint["format"], checkpoint["run_name"], checkpoint["dataset"]["samples"]) == (1, "r", 7)
    assert datetime.fromisoformat(checkpoint["last_updated"]).tzinfo


def test_what_counts_as_a_tool_failure(played: Played) -> None:
    tools = played.place.json("statistics.json")["tool_statistics"]
    assert tools == {
        # a non-zero exit code is a result, a time-out is none
        "terminal": {"count": 3, "success": 2, "failure": 1, "success_rate": 66.67, "failure_rate": 33.33},
        "patch": {"count": 1, "success": 0, "failure": 1, "success_rate": 0.0, "failure_rate": 100.0},
        "read_file": {"count": 1, "success": 0, "failure": 1, "success_rate": 0.0, "failure_rate": 100.0},
        "search_files": {"count": 1, "success": 1, "failure": 0, "success_rate": 100.0, "failure_rate": 0.0},
    }


def test_statistics_cover_the_run(played: Played) -> None:
    statistics = played.place.json("statistics.json")
    assert statistics["outcomes"] == {"completed": 4, "not_completed": 0, "partial": 1, "discarded": 1, "failed": 1}
    assert statistics["discarded_no_reasoning"] == 1
    assert statistics["reasoning_statistics"] == {
        "total_assistant_turns": 11,
        "turns_with_reasoning": 10,
        "turns_without_reasoning": 1,
    }
    assert statistics["failures"] == {
        "bad_request": {"count": 1, "example": statistics["failures"]["bad_request"]["example"]}
    }
    facts = {
        name: statistics[name]
        for name in ("run_name", "distribution", "total_prompts", "total_batches", "batch_size", "model")
    }
    assert list(facts.values()) == ["r", "terminal_only", 7, 3, 3, "scripted"]
    assert statistics["cost_usd"] == 1.0
    assert statistics["tokens"]["cached_tokens"] == 3
    assert statistics["turns"] == {"total": 12, "median": 1.0}
    assert statistics["toolsets"] == {name: {"drawn": 7, "percent": 100.0} for name in ("file", "terminal")}
    assert 0 < statistics["rollout_seconds"]["median"] <= statistics["rollout_seconds"]["p95"]
    assert 1 < statistics["duration_seconds"] == pytest.approx(statistics["legs"][0]["duration_seconds"], abs=0.5)
    (leg,) = statistics["legs"]
    assert (leg["rows"], leg["samples"], leg["model"], leg["seed"]) == (7, 7, "scripted", 0)
    requests = sum(row["api_calls"] for row in played.place.rows())
    assert statistics["api_calls"] == requests == len(played.requests) - 1  # one was refused


def test_the_report(played: Played) -> None:
    assert played.ended.code == 1
    report = re.sub(r" +", " ", played.ended.stdout)
    for text in (
        "Run r: 7 samples, ",
        "\n completed 4\n",
        "\n partial 1 cut short, kept\n",
        "\n discarded 1 no reasoning in any turn",
        "\n failed 1 ",
        "\n trajectories 5\n",
        "\n terminal 3 66.67% 33.33%\n",
        "\n patch 1 0.00% 100.00%\n",
        "\nReasoning: 10 of 11 assistant turns (90.91%)\n",
        "(3 cached)",
        "\nCost: $1.0000 ",
        "\nFailed\n bad_request 1\n HTTP 400: no",
        "\nFiles\n data/r/trajectories.jsonl\n data/r/statistics.json\n",
    ):
        assert text in report
    assert played.ended.last_line.startswith("1 failed of 7 samples; resume with: ")


def test_what_is_not_to_be_saved_is_not(place: Workplace) -> None:
    prefill = [{"role": "user", "content": "PRIMED?"}, {"role": "assistant", "content": "PRIMED!"}]
    (place.path / "few.json").write_text(json.dumps(prefill), encoding="utf-8")
    flags = {"prefill_messages_file": "few.json", "ephemeral_system_prompt": "SECRET-STYLE", "max_turns": 1}
    scene = [terminal("echo hi"), answer("that was it")]
    played = play(place, {"the question": scene, "another": scene}, verbose=True, **flags)
    assert played.ended.code == 0
    assert len(played.requests) == 4  # two turns and a summary for each
    front = [{"role": "system", "content": "SECRET-STYLE"}, *prefill]
    for request in played.requests:
        messages = request.body["messages"]
        assert messages[:3] == front
        assert messages[3]["role"] == "user"
        assert [message["role"] for message in messages].count("system") == 1
    assert turns(played.row("the question"), "human")[0] == "the question"
    assert [turn["from"] for turn in played.row("the question")["conversations"]] == [
        "system",
        "human",
        "gpt",
        "tool",
        "human",
        "gpt",
    ]
    for path in place.run_dir().iterdir():
        text = path.read_text(encoding="utf-8")
        assert "SECRET-STYLE" not in text, path
        assert "PRIMED" not in text, path


def test_rollouts_without_reasoning(place: Workplace) -> None:
    prompts = [f"question {number}" for number in range(21)]
    place.dataset([*prompts, "cut"])
    cut = reply(content="half a", finish_reason="length", prompt="cut")  # says nothing of whether the model reasons
    with ScriptedEndpoint([cut, reply(content="4", prompt="question")]) as endpoint:
        base_url = endpoint.base_url
        dropped = place.run(base_url, batch_size=30)
        kept = place.run(base_url, run_name="kept", keep_no_reasoning=True, max_samples=2)
        off = place.run(base_url, run_name="off", reasoning_disabled=True, reasoning_effort="high", max_samples=2)
        assert [request.body.get("reasoning_effort") for request in endpoint.requests] == [None] * 24 + ["none"] * 2
        assert sorted(prompts_of(endpoint)[-2:]) == prompts[:2]
    assert (dropped.code, kept.code, off.code) == (0, 0, 0)
    assert "warning: none of the first 20 rollouts shows any reasoning" in dropped.stderr
    assert "--keep_no_reasoning" in dropped.stderr
    assert [turns(row, "human") for row in place.trajectories()] == [["cut"]]
    assert [row.get("discarded") for row in place.rows()].count("no_reasoning") == 21
    assert place.json("statistics.json")["discarded_no_reasoning"] == 21
    for run_name in ("kept", "off"):
        assert [turns(row, "gpt") for row in place.trajectories(run_name)] == [["<think>\n</think>\n4"]] * 2


def test_rollouts_that_are_all_cut_short_are_told(place: Workplace) -> None:
    place.dataset([f"question {number}" for number in range(21)])
    with ScriptedEndpoint([reply(content="half a", finish_reason="length")]) as endpoint:
        ended = place.run(endpoint.base_url, batch_size=30)
    assert ended.code == 0
    told = (
        "warning: each of the first 20 rollouts was cut short (the last one: cut_by_token_limit): they may hold nothing"
    )
    assert ended.stderr.count(told) == 1


def test_a_sandbox_that_cannot_be_made_fails_its_sample_alone(place: Workplace) -> None:
    place.dataset([{"prompt": "nowhere", "cwd": "/no/such/folder"}, {"prompt": "somewhere", "cwd": "/usr/lib"}])
    with ScriptedEndpoint([terminal("pwd"), DONE]) as endpoint:
        ended = place.run(endpoint.base_url)
    assert ended.code == 1
    failed, done = sorted(place.rows(), key=lambda row: int(row["prompt_index"]))
    assert (failed["error"]["kind"], failed["prompt"]) == ("sandbox", "nowhere")
    assert "/no/such/folder" in failed["error"]["message"]
    assert results(done)[0]["output"] == "/usr/lib\n"
    assert done["metadata"]["cwd"] == "/usr/lib"


def test_two_runs_of_the_same_script_differ_in_times_alone(tmp_path: Path) -> None:
    texts: list[Json] = []
    for name, workers in (("one", 1), ("two", 2)):
        place = Workplace(tmp_path / name)
        place.path.mkdir()
        played = play(
            place,
            {prompt: SCENES[prompt] for prompt in ("runs commands", "reads files", "is cut")},
            num_workers=workers,
        )
        assert played.ended.code == 0
        files = {
            file: (place.run_dir() / file).read_text(encoding="utf-8")
            for file in ("trajectories.jsonl", "statistics.json")
        }
        batches = "".join(sorted(path.read_text(encoding="utf-8") for path in place.run_dir().glob("batch_*")))
        texts.append({"batches": sorted(batches.splitlines()), **files})
    first, second = ({name: TIMES.sub("", str(text)) for name, text in written.items()} for written in texts)
    assert first["trajectories.jsonl"].count("\n") == 3
    assert "timestamp" not in first["trajectories.jsonl"]
    for name, text in first.items():
        assert text == second[name]


def test_keys_are_in_no_row_whoever_says_them(place: Workplace) -> None:
    """Not in a reply that echoes the key, not in a tool's output, not those of other hosts."""
    key, other = "TESTKEY-0123456789abcdef", "another-hosts-0123456789"
    place.env = {"OPENROUTER_API_KEY": other}
    place.dataset(["echo"])
    with ScriptedEndpoint([terminal(f"echo {key}; echo {other}"), answer(f"your key is {key}")]) as endpoint:
        ended = place.run(endpoint.base_url, api_key=key)
    left = b"".join(path.read_bytes() for path in place.run_dir().iterdir() if path.is_file())
    assert ended.code == 0
    assert key.encode() not in left
    assert other.encode() not in left
    assert key not in ended.stdout + ended.stderr
