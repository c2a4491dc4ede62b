from __future__ import annotations

import json
import os
import pty
import shlex
import termios
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from batch_runner import main
from endpoints.scripted import ScriptedEndpoint
from rollout.config import RunConfig
from rollout.interrupt import resume_command
from tests.program import (
    Ended,
    Workplace,
    answer,
    ending,
    processes_with,
    prompt_of,
    prompts_of,
    reply,
    results,
    terminal,
    turns,
)

GOOD = (
    "--dataset_file=prompts.jsonl",
    "--batch_size=2",
    "--run_name=r",
    "--distribution=terminal_only",
    "--sandbox=local",
)
NOWHERE = "http://127.0.0.1:9/v1"
FLAGS = {
    "tools_file",
    "mcp_config",
    *("dataset_file", "batch_size", "run_name", "distribution", "model", "base_url", "api_key", "max_turns"),
    *("num_workers", "resume", "verbose", "max_samples", "providers_allowed", "providers_ignored", "providers_order"),
    *("provider_sort", "max_tokens", "reasoning_effort", "reasoning_disabled", "ephemeral_system_prompt"),
    *("prefill_messages_file", "log_prefix_chars", "list_distributions", "clean"),
    *("sandbox", "concurrency", "seed", "keep_no_reasoning", "timeout_seconds"),
    *("executor", "ray_address", "shard", "merge", "max_cost_usd", "max_total_tokens", "max_hours"),
}

# What is typed after good flags (or instead of the one that is named), and what is told.
MISTAKES: dict[str, tuple[str, ...]] = {
    "--providers_allowed=,": ("--providers_allowed=, names nothing; leave it out, or give names with commas",),
    "--modle=x": ("unknown flag --modle; did you mean --model?",),
    "extra": ("unexpected word 'extra'; every option is written --flag=value",),
    "--model": ("--model has no value; write --model=VALUE",),
    "--batch_size=0": ("--batch_size=0", "greater than or equal to 1"),
    "--reasoning_effort=ultraaa": (
        "--reasoning_effort=ultraaa is not known; choose from ",
        "'minimal', 'low'",
        "'ultra'",
    ),
    "--prefill_messages_file=object.json": ("--prefill_messages_file=object.json must hold a JSON array",),
    "--run_name=../x": ("run_name '../x' must be one folder name",),
    "--base_url=localhost:8000": ("base_url 'localhost:8000': must be http://",),
    "--api_key=two words": ("--api_key holds characters no API key has",),
    "--distribution=reserch": ("unknown distribution 'reserch'; choose from default, ",),
    "TERMINAL_ENV=dockr": ("TERMINAL_ENV=dockr is not known; choose from ",),
    "TERMINAL_TIMEOUT=soon": ("TERMINAL_TIMEOUT=soon must be a number of seconds above 0",),
    "no --run_name": ("--run_name is required",),
}
# The same where no process is started for each.
MORE_MISTAKES: dict[str, tuple[str, ...]] = {
    "--quick": ("unknown flag --quick; --help lists the flags",),
    "-v": ("unexpected word '-v'",),
    "--model --verbose": ("--model has no value",),
    "--batch_size=": ("--batch_size has no value",),
    "--prefill_messages_file=deep.json": ("--prefill_messages_file=deep.json is not JSON",),
    "--batch_size=two": ("--batch_size=two", "integer"),
    "--batch_size=1.5": ("--batch_size=1.5", "integer"),
    "--max_turns=0": ("--max_turns=0", "greater than or equal to 1"),
    "--num_workers=-1": ("--num_workers=-1",),
    "--max_samples=0": ("--max_samples=0",),
    "--concurrency=0": ("--concurrency=0",),
    "--seed=x": ("--seed=x", "integer"),
    "--timeout_seconds=0": ("--timeout_seconds=0", "greater than 0"),
    "--timeout_seconds=nan": ("--timeout_seconds=nan",),
    "--shard=0/2": ("--shard=0/2: must be i/n with i from 1 to n, such as 1/4",),
    "--shard=3/2": ("--shard=3/2: must be i/n",),
    "--shard=1": ("--shard=1: must be i/n",),
    "--shard=2/2": ("--shard=2/2: prompts.jsonl has only 1 samples",),
    "--max_cost_usd=0": ("--max_cost_usd=0", "greater than 0"),
    "--max_total_tokens=1.5": ("--max_total_tokens=1.5", "integer"),
    "--max_hours=inf": ("--max_hours=inf", "finite"),
    "--provider_sort=cheap": ("--provider_sort=cheap is not known; choose from ", "'price'", "'latency'"),
    "--sandbox=dockr": ("--sandbox=dockr is not known; choose from ", "'bubblewrap'"),
    "--resume=maybe": ("--resume='maybe' is no switch value; write --resume, --resume=true or --resume=false",),
    "--prefill_messages_file=none.json": ("--prefill_messages_file=none.json: No such file or directory",),
    "--prefill_messages_file=prompts.jsonl": ("--prefill_messages_file=prompts.jsonl must hold a JSON array",),
    "--prefill_messages_file=role.json": ("--prefill_messages_file: message 0.role: ",),
    "no --dataset_file": ("--dataset_file is required",),
    "no --batch_size": ("--batch_size is required",),
}


def prepared(folder: Path) -> Workplace:
    folder.mkdir(exist_ok=True)
    (folder / "object.json").write_text('{"role": "user", "content": "x"}', encoding="utf-8")
    (folder / "deep.json").write_text("[" * 100_000, encoding="utf-8")
    (folder / "role.json").write_text('[{"role": "boss", "content": "x"}]', encoding="utf-8")
    place = Workplace(folder)
    place.dataset(["never asked"])
    return place


def with_mistake(place: Workplace, mistake: str) -> list[str]:
    words = [*GOOD, f"--base_url={NOWHERE}"]
    if mistake.startswith("no "):
        return [word for word in words if not word.startswith(mistake[3:])]
    if mistake.startswith("TERMINAL_"):
        place.env = dict([mistake.split("=")])
        return [word for word in words if not word.startswith("--sandbox")]
    return [*words, *([mistake] if "two words" in mistake else mistake.split())]


def assert_told_in_one_line(ended: Ended, place: Workplace, texts: tuple[str, ...]) -> None:
    assert (ended.code, ended.stdout) == (2, ""), ended
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    assert all(text in ended.stderr for text in texts), ended.stderr
    assert sorted(path.name for path in place.path.iterdir()) == [
        "deep.json",
        "object.json",
        "prompts.jsonl",
        "role.json",
    ]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Ended, Workplace]]:
    """What became of every mistake; two at a time."""
    folder = tmp_path_factory.mktemp("mistakes")

    def make(number: int, mistake: str) -> tuple[Ended, Workplace]:
        place = prepared(folder / str(number))
        return place.run_words(*with_mistake(place, mistake)), place

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(MISTAKES, pool.map(make, range(len(MISTAKES)), MISTAKES), strict=True))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_one_line_and_nothing_is_touched(
    told: dict[str, tuple[Ended, Workplace]], mistake: str
) -> None:
    assert_told_in_one_line(*told[mistake], MISTAKES[mistake])


@pytest.mark.parametrize("mistake", MORE_MISTAKES)
def test_other_mistakes_are_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], mistake: str
) -> None:
    monkeypatch.chdir(tmp_path)
    place = prepared(tmp_path)
    code = main(with_mistake(place, mistake))
    assert_told_in_one_line(Ended(code, *capfd.readouterr()), place, MORE_MISTAKES[mistake])


@pytest.mark.parametrize("words", [("--help",), ("--help", "--batch_size=0"), (*GOOD, "--help=true")])
def test_help_touches_nothing(place: Workplace, words: tuple[str, ...]) -> None:
    ended = place.run_words(*words)
    assert (ended.code, ended.stderr) == (0, "")
    assert [name for name in FLAGS if f"\n  --{name}" not in ended.stdout] == []
    assert not list(place.path.iterdir())


def test_text_arrives_as_it_was_typed(place: Workplace) -> None:
    place.dataset(["hello"], name="1")
    words = {
        "007": "--run_name=007 --model=1234 --ephemeral_system_prompt='[be brief]' --resume=False",
        "1e3": "--run-name 1e3 --model True --ephemeral_system_prompt a,b --verbose FALSE --seed -5",
        "2024-05-01": "--run_name=2024-05-01 --model=a=b= --ephemeral_system_prompt=--x --resume",
        "a,b": "--run_name a,b --model - --ephemeral_system_prompt -v --resume",
    }
    models, prompts = [], []
    with ScriptedEndpoint([answer("4")]) as endpoint:
        common = [
            "--dataset_file=1",
            "--batch_size",
            "2",
            f"--base_url={endpoint.base_url}",
            "--num_workers=1",
            *GOOD[3:],
        ]
        for run_name, typed in words.items():
            ended = place.run_words(*common, *shlex.split(typed))
            assert ended.code == 0, ended
            assert f"Run {run_name}: 1 sample" in ended.stdout
            assert place.trajectories(run_name)[0]["metadata"]["model"] == endpoint.requests[-1].body["model"]
            models.append(endpoint.requests[-1].body["model"])
            prompts.append(endpoint.requests[-1].body["messages"][0]["content"])
    assert models == ["1234", "True", "a=b=", "-"]
    assert prompts == ["[be brief]", "a,b", "--x", "-v"]
    assert sorted(path.name for path in (place.path / "data").iterdir()) == sorted(words)
    assert place.json("checkpoint.json", "1e3")["config"]["seed"] == -5


def test_the_report_is_on_stdout_and_the_log_on_stderr(place: Workplace) -> None:
    place.dataset(["hello", "fails"])
    replies = [reply(prompt="fails", status=400, error="no"), terminal("echo 0123456789"), answer("4")]
    with ScriptedEndpoint(replies) as endpoint:
        ended = place.run(endpoint.base_url, verbose=True, log_prefix_chars=12)
        assert ended.code == 1
        report = ended.stdout.splitlines()
        assert report[0].startswith("Run r: 2 samples, ")
        assert report[-1].startswith("1 failed of 2 samples; resume with: ")
        assert "Run r" not in ended.stderr
        lines = ended.stderr.splitlines()
        assert '[B0:P0] -> terminal {"command":…' in lines
        assert '[B0:P0] <- terminal {"output":…' in lines
        assert [line for line in lines if line.startswith("failed: [B0:P1] bad_request: HTTP 400: no")]
        assert "-> terminal" not in ended.stdout

        # The command that the last line gives does what it says.
        endpoint.requests.clear()
        command = shlex.split(report[-1].partition("resume with: ")[2])
        replies_of_resume = place.ended(place.start_command(command))
        assert replies_of_resume.code == 1
        assert prompts_of(endpoint) == ["fails"]


def rows_are_whole(place: Workplace, count: int) -> None:
    assert [prompt_of(row) for row in place.rows()] == ["hello"] * count
    assert len(place.trajectories()) == count
    assert place.json("statistics.json")["outcomes"]["completed"] == count


@pytest.mark.parametrize(
    ("redirection", "code"),
    [(">&- 2>&- <&-", 0), (">/dev/full 2>/dev/full", 1), ("2>&1 | true", 0)],
    ids=["closed", "full", "gone"],
)
def test_streams_that_do_not_work_do_no_harm(place: Workplace, redirection: str, code: int) -> None:
    place.dataset(["hello"])
    with ScriptedEndpoint([terminal("echo hi"), answer("4", delay_seconds=0.3)]) as endpoint:
        words = shlex.join(place.command(endpoint.base_url, {"verbose": True}))
        script = f"set -o pipefail; {{ {words}; echo $? >code; }} {redirection}"
        ended = place.ended(place.start_command(["bash", "-c", script]))
    assert (place.path / "code").read_text() == f"{code}\n"
    rows_are_whole(place, 1)
    assert "Traceback" not in ended.stderr
    assert "-> terminal" in (place.run_dir() / "run.log").read_text(encoding="utf-8")


def test_a_terminal_gets_a_bar_and_is_never_asked(place: Workplace) -> None:
    place.dataset(["hello"])
    nosy = terminal("(echo ASKED >/dev/tty) 2>&1; sudo -k true; read -r line </dev/tty")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with os.fdopen(ours, "rb", buffering=0) as screen, ScriptedEndpoint([nosy, answer("4")]) as endpoint:
        command = ["setsid", "--ctty", "--wait", *place.command(endpoint.base_url, {})]
        with ending(place.start_command(command, stdin=theirs, stdout=theirs, stderr=theirs)) as process:
            os.close(theirs)
            shown = read_all(screen.fileno())
            assert process.wait(30) == 0
    assert "1/1" in shown
    assert "prompt" in shown
    assert "Done: 1 sample, nothing left to do." in shown
    assert "ASKED" not in shown
    (told,) = results(place.trajectories()[0])
    assert "/dev/tty" in told["output"]


def read_all(screen: int) -> str:
    """Read a terminal until nobody has it open any more."""
    shown = b""
    while True:
        try:
            data = os.read(screen, 4096)
        except OSError:  # how Linux tells the end
            break
        if not data:
            break
        shown += data
    return shown.decode(errors="replace")


def test_the_sandbox_of_the_environment_is_used_unless_a_flag_names_one(place: Workplace) -> None:
    place.dataset(["hello"])
    place.env = {"TERMINAL_ENV": "local"}
    with ScriptedEndpoint([terminal("echo hi"), answer("4")]) as endpoint:
        assert place.run(endpoint.base_url, sandbox=None).code == 0
        assert place.run(endpoint.base_url, sandbox="bubblewrap", run_name="b").code == 0
    assert place.trajectories()[0]["metadata"]["sandbox"] == "local"
    assert place.trajectories("b")[0]["metadata"]["sandbox"] == "bubblewrap"


def test_every_flag_of_the_config_is_in_the_help() -> None:
    assert {*RunConfig.model_fields, "prefill_messages_file", "list_distributions", "clean"} - {
        "prefill_messages"
    } == FLAGS


@pytest.mark.parametrize(
    "typed", ["--api_key=sk-x --resume=false", "--api-key sk-x --resume", "--api_key sk-x --resume FALSE"]
)
def test_the_resume_command_is_what_was_typed_without_the_key(typed: str) -> None:
    words = ["python", "batch_runner.py", *typed.split(), "--run_name=a b", "--model", "m"]
    assert resume_command(words) == "python batch_runner.py '--run_name=a b' --model m --resume"


def test_prepared_replies_need_no_server(place: Workplace) -> None:
    place.dataset(["hello", "bye"])
    lines = [{"reasoning": "hm", "tool_calls": [{"name": "terminal", "arguments": {"command": "echo hi"}}]}]
    lines += [{"reasoning": "so", "content": "done"}]
    (place.path / "replies.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    ended = place.run("scripted:replies.jsonl")
    assert ended.code == 0, ended
    assert [turns(row, "gpt")[-1] for row in place.trajectories()] == ["<think>\nso\n</think>\ndone"] * 2
    assert not processes_with("endpoints.scripted replies.jsonl")

    (place.path / "replies.jsonl").write_text('{"contents": "typo"}\n', encoding="utf-8")
    ended = place.run("scripted:replies.jsonl", run_name="other")
    assert (ended.code, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ended.stderr.startswith('error: replies.jsonl:1: unknown key "contents"')
    assert not place.run_dir("other").exists()
