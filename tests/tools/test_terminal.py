from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.surroundings import surroundings
from tools.base import JsonObject, ToolContext, ToolError, ToolLimits
from tools.terminal import exit_code_meaning, process, strip_ansi, terminal

Work = Callable[[ToolContext], Awaitable[Any]]


def in_rollout(work: Work, **limits: Any) -> Any:
    async def rollout() -> Any:
        async with surroundings(ToolLimits(**limits)) as context:
            return await work(context)

    return asyncio.run(rollout())


def run(command: str, limits: JsonObject | None = None, **arguments: Any) -> JsonObject:
    async def work(context: ToolContext) -> JsonObject:
        return await terminal(context, {"command": command, **arguments})

    result: JsonObject = in_rollout(work, **(limits or {}))
    return result


def refusal(command: str, **arguments: Any) -> ToolError:
    with pytest.raises(ToolError) as caught:
        run(command, **arguments)
    return caught.value


# --- terminal: a command ---


def test_a_command_gives_its_output_and_exit_code() -> None:
    assert run("echo out; echo err >&2") == {"output": "out\nerr\n", "exit_code": 0, "error": None}
    assert run("exit 3") == {"output": "", "exit_code": 3, "error": None}


@pytest.mark.parametrize("command", ['read x; echo "[$x]"', "cat", "python3", "sudo -k true"])
def test_nothing_waits_for_input(command: str) -> None:
    started = time.monotonic()
    assert run(command)["error"] is None
    assert time.monotonic() - started < 5


def test_a_child_left_behind_does_not_hold_the_command() -> None:
    started = time.monotonic()
    assert run("sleep 120 & echo started") == {"output": "started\n", "exit_code": 0, "error": None}
    assert time.monotonic() - started < 5


def test_folder_and_variables_persist() -> None:
    async def work(context: ToolContext) -> JsonObject:
        await terminal(context, {"command": "mkdir 'a b'; cd 'a b'; export GREETING='hi there'"})
        return await terminal(context, {"command": 'echo "$GREETING from ${PWD##*/}"'})

    assert in_rollout(work)["output"] == "hi there from a b\n"


def test_a_long_output_keeps_its_head_and_tail_and_says_what_is_missing() -> None:
    output = run("seq 1 200000; echo LAST_LINE")["output"]
    notice = re.search(r"\[OUTPUT TRUNCATED - (\d+) chars omitted out of (\d+) total\]", output)
    assert notice
    omitted, total = map(int, notice.groups())
    assert total == 1_288_895 + len("LAST_LINE\n")
    assert total - omitted <= 50_000 <= len(output) <= 50_200
    assert output.startswith("1\n2\n")
    assert output.endswith("\n200000\nLAST_LINE\n")
    assert abs(notice.start() - 20_000) < 200


def test_output_that_is_no_text_comes_back_as_text() -> None:
    output = run("printf 'a\\377\\376b'; printf '\\303\\251'")["output"]
    assert output.encode().decode() == output
    assert (output[0], output[-2:]) == ("a", "bé")


def test_a_timeout_keeps_what_was_written_and_counts_as_a_failure() -> None:
    result = run("echo partial; sleep 30", timeout=1)
    assert result == {
        "output": "partial\n[Command timed out after 1s]",
        "exit_code": 124,
        "error": "Command timed out after 1 seconds and was killed",
    }
    assert run("sleep 30", timeout="1")["output"] == "[Command timed out after 1s]"


def test_the_default_timeout_is_the_limit_of_the_run() -> None:
    result = run("sleep 30", {"terminal_timeout_seconds": 0.3})
    assert result["output"] == "[Command timed out after 0.3s]"


def test_a_command_of_its_own_with_exit_code_124_did_not_time_out() -> None:
    assert run("exit 124") == {"output": "", "exit_code": 124, "error": None}


def test_odd_timeouts() -> None:
    assert run("echo hi", timeout="3")["output"] == "hi\n"
    assert "timeout: Input should be greater than or equal to 1" in str(refusal("true", timeout=0))
    assert "timeout" in str(refusal("true", timeout="soon"))
    above = refusal("true", timeout=99999)
    assert str(above).startswith(
        "timeout 99999 is above the foreground limit of 600 seconds; run it with background=true"
    )
    assert above.details == {"output": "", "exit_code": -1}
    assert run("echo hi", timeout=600)["exit_code"] == 0
    refusal("true", timeout=10**400)


def test_workdir_is_for_this_command_only(tmp_path: Path) -> None:
    async def work(context: ToolContext) -> list[str]:
        here = await terminal(context, {"command": "pwd"})
        there = await terminal(context, {"command": "pwd", "workdir": str(tmp_path)})
        again = await terminal(context, {"command": "pwd"})
        return [here["output"], there["output"], again["output"]]

    here, there, again = in_rollout(work)
    assert there == f"{tmp_path}\n"
    assert here == again != there
    missing = run("pwd", workdir="/no/such/folder")
    assert missing["exit_code"] != 0
    assert "/no/such/folder" in missing["output"]


@pytest.mark.parametrize("workdir", ["/home; rm x", "$(id)", "`id`", "a\nb", "a|b", "'", "*", "\0"])
def test_a_workdir_with_shell_characters_is_refused(workdir: str) -> None:
    assert "workdir" in str(refusal("pwd", workdir=workdir))


@pytest.mark.parametrize("command", ["", "  \n", "echo \0"])
def test_what_is_no_command_is_refused(command: str) -> None:
    assert refusal(command).details == {"output": "", "exit_code": -1}


def test_colours_are_stripped() -> None:
    assert run(r"printf '\033[1;31mred\033[0m \033]0;title\007plain'")["output"] == "red plain"


def test_there_is_no_pty_and_the_result_says_so() -> None:
    result = run("test -t 1; echo $?", pty=True)
    assert result["output"] == "1\n"
    assert "no pty" in result["note"]


def test_an_exit_code_that_is_no_failure_is_explained() -> None:
    result = run("echo abc | grep xyz")
    assert (result["exit_code"], result["error"]) == (1, None)
    assert result["exit_code_meaning"] == "grep exits with 1 when nothing matched"
    assert "exit_code_meaning" not in run("echo abc | grep abc")


# --- process ---


def test_a_background_process_from_start_to_end() -> None:
    async def work(context: ToolContext) -> list[JsonObject]:
        started = await terminal(context, {"command": "echo ready; read x; echo got $x; exit 4", "background": True})
        listed = await process(context, {"action": "list"})
        fed = await process(context, {"action": "submit", "session_id": "proc_1", "data": "né"})
        waited = await process(context, {"action": "wait", "session_id": "proc_1", "timeout": 10})
        polled = await process(context, {"action": "poll", "session_id": "proc_1"})
        killed = await process(context, {"action": "kill", "session_id": "proc_1"})
        return [started, listed, fed, waited, polled, killed]

    started, listed, fed, waited, polled, killed = in_rollout(work)
    pid = started.pop("pid")
    assert pid > 1
    assert started == {
        "output": "Background process started",
        "session_id": "proc_1",
        "exit_code": 0,
        "error": None,
    }
    (entry,) = listed["processes"]
    assert abs(datetime.fromisoformat(entry.pop("started_at")).timestamp() - time.time()) < 20
    assert Path(entry.pop("cwd")).is_absolute()
    assert entry.pop("output_preview") in ("", "ready\n")
    assert entry == {
        "session_id": "proc_1",
        "command": "echo ready; read x; echo got $x; exit 4",
        "pid": pid,
        "uptime_seconds": 0,
        "status": "running",
    }
    assert fed == {"status": "ok", "bytes_written": 4}
    assert waited == {"status": "exited", "session_id": "proc_1", "exit_code": 4, "output": "ready\ngot né\n"}
    assert polled == {
        "session_id": "proc_1",
        "command": "echo ready; read x; echo got $x; exit 4",
        "status": "exited",
        "pid": pid,
        "uptime_seconds": polled["uptime_seconds"],
        "output_preview": "ready\ngot né\n",
        "exit_code": 4,
    }
    assert killed == {"status": "already_exited", "session_id": "proc_1", "exit_code": 4}


def test_a_process_is_killed_with_its_children() -> None:
    async def work(context: ToolContext) -> tuple[JsonObject, JsonObject, JsonObject]:
        await terminal(context, {"command": "sleep 300 & sleep 300", "background": True})
        killed = await process(context, {"action": "kill", "session_id": "proc_1"})
        again = await process(context, {"action": "kill", "session_id": "proc_1"})
        return killed, again, await process(context, {"action": "wait", "session_id": "proc_1"})

    killed, again, waited = in_rollout(work)
    assert killed == {"status": "killed", "session_id": "proc_1"}
    assert again["status"] == "already_exited"
    assert waited["status"] == "exited"


def test_stdin_is_written_and_closed() -> None:
    async def work(context: ToolContext) -> tuple[JsonObject, JsonObject, JsonObject, ToolError]:
        await terminal(context, {"command": "cat; echo end", "background": True})
        wrote = await process(context, {"action": "write", "session_id": "proc_1", "data": "one "})
        closed = await process(context, {"action": "close", "session_id": "proc_1"})
        waited = await process(context, {"action": "wait", "session_id": "proc_1"})
        with pytest.raises(ToolError) as caught:
            await process(context, {"action": "write", "session_id": "proc_1", "data": "two"})
        return wrote, closed, waited, caught.value

    wrote, closed, waited, late = in_rollout(work)
    assert wrote == {"status": "ok", "bytes_written": 4}
    assert closed == {"status": "ok", "message": "stdin closed"}
    assert waited["output"] == "one end\n"
    assert late.details == {"status": "already_exited"}


def test_waits_are_clamped_to_the_terminal_timeout() -> None:
    async def work(context: ToolContext) -> tuple[JsonObject, JsonObject]:
        await terminal(context, {"command": "echo x; sleep 300", "background": True})
        asked = await process(context, {"action": "wait", "session_id": "proc_1", "timeout": 10**400})
        return asked, await process(context, {"action": "wait", "session_id": "proc_1"})

    asked, default = in_rollout(work, terminal_timeout_seconds=0.3)
    assert (asked["status"], asked["output"]) == ("timeout", "x\n")
    assert re.match(
        r"Waited 0.3 seconds \(asked for 10+, a wait takes at most 0.3\); .*running$", asked["timeout_note"]
    )
    assert default["timeout_note"] == "Waited 0.3 seconds; the process is still running"


def test_the_log_shows_the_newest_lines_or_those_asked_for() -> None:
    async def work(context: ToolContext) -> list[JsonObject]:
        await terminal(context, {"command": "seq 1 500", "background": True})
        await process(context, {"action": "wait", "session_id": "proc_1"})
        log = {"action": "log", "session_id": "proc_1"}
        return [
            await process(context, log),
            await process(context, {**log, "limit": 2}),
            await process(context, {**log, "offset": 10, "limit": "2"}),
            await process(context, {**log, "offset": 1000}),
        ]

    newest, two, middle, beyond = in_rollout(work)
    assert newest["output"].splitlines() == [str(number) for number in range(301, 501)]
    assert two == {
        "session_id": "proc_1",
        "status": "exited",
        "output": "499\n500",
        "total_lines": 500,
        "showing": "2 lines from line 498",
    }
    assert middle["output"] == "11\n12"
    assert beyond["output"] == ""


def test_previews_are_short() -> None:
    async def work(context: ToolContext) -> tuple[JsonObject, JsonObject, JsonObject]:
        await terminal(context, {"command": f"printf '%05000d' 0 #{'x' * 500}", "background": True})
        waited = await process(context, {"action": "wait", "session_id": "proc_1"})
        polled = await process(context, {"action": "poll", "session_id": "proc_1"})
        return waited, polled, (await process(context, {"action": "list"}))["processes"][0]

    waited, polled, listed = in_rollout(work)
    assert len(waited["output"]) == 2000
    assert len(polled["output_preview"]) == 1000
    assert (len(listed["output_preview"]), len(listed["command"])) == (200, 200)


def test_an_unknown_or_missing_session_is_told() -> None:
    async def work(context: ToolContext) -> list[ToolError]:
        await terminal(context, {"command": "true", "background": "true"})
        errors = []
        for arguments in ({"session_id": "proc_9"}, {}, {"session_id": None}):
            with pytest.raises(ToolError) as caught:
                await process(context, {"action": "poll", **arguments})
            errors.append(caught.value)
        return errors

    unknown, missing, null = in_rollout(work)
    assert str(unknown) == "No process with ID proc_9; known: proc_1"
    assert unknown.details == {"status": "not_found"}
    assert str(missing) == str(null) == "session_id is required for poll"


def test_session_ids_count_up_within_a_rollout_and_stay_inside_it() -> None:
    async def work(context: ToolContext) -> list[str]:
        started = [await terminal(context, {"command": "true", "background": True}) for _ in range(3)]
        return [result["session_id"] for result in started]

    assert in_rollout(work) == in_rollout(work) == ["proc_1", "proc_2", "proc_3"]

    async def look(context: ToolContext) -> JsonObject:
        return await process(context, {"action": "list"})

    assert in_rollout(look) == {"processes": []}


# --- the pure parts ---


@pytest.mark.parametrize(
    ("command", "exit_code", "program"),
    [
        ("grep x f", 1, "grep"),
        ("cd /tmp && LC_ALL=C /usr/bin/grep -r 'a;b|c' . # why", 1, "grep"),
        ("cat f | grep x > out 2>&1", 1, "grep"),
        ("rg x", 1, "rg"),
        ("diff a b", 1, "diff"),
        ("[ -f x ]", 1, "["),
        ("make; test -f x", 1, "test"),
        ("curl https://x.invalid", 6, "curl"),
        ("echo a\ngrep b c", 1, "grep"),
        ("grep x f", 2, ""),
        ("grep x f", 0, ""),
        ("! grep x f", 1, ""),
        ("grep x f | head", 1, ""),
        ("grep x f; false", 1, ""),
        ("echo 'grep x", 1, ""),
        ('python3 -c "\nimport x\ngrep y"', 1, ""),
        ("echo $(grep x f)", 1, ""),
        ("", 1, ""),
        ("grep " + "x" * 100_000, 1, ""),
    ],
)
def test_exit_code_meanings(command: str, exit_code: int, program: str) -> None:
    meaning = exit_code_meaning(command, exit_code)
    assert meaning.startswith(f"{program} exits with {exit_code} when ") if program else meaning == ""


@given(st.text(), st.integers(0, 255))
def test_any_command_has_a_meaning_or_none(command: str, exit_code: int) -> None:
    assert isinstance(exit_code_meaning(command, exit_code), str)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("\x1b[0m\x1b[38;5;196mred\x1b[K", "red"),
        ("\x1b]8;;http://a.b\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b(B\x1b=\x1b7kept\x1b8\x1bM", "kept"),
        ("\x1b]0;no end, so the text stays", "0;no end, so the text stays"),
        ("50% \x1b[2K\r100%", "50% \r100%"),
        ("[31m is no sequence", "[31m is no sequence"),
    ],
)
def test_ansi_sequences_are_stripped(text: str, plain: str) -> None:
    assert strip_ansi(text) == plain


def test_stripping_takes_time_in_proportion() -> None:
    started = time.process_time()
    strip_ansi("\x1b]" * 50_000 + "\x1b[" * 50_000 + "\x1b]" + "x" * 100_000)
    assert time.process_time() - started < 1
