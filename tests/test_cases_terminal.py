from __future__ import annotations

import subprocess
from typing import Any

import pytest

from endpoints.scripted import ScriptedEndpoint
from tests.program import Json, Played, Workplace, answer, call, nap, play, processes_with, results, terminal

DONE = answer("done")
LEFT = nap(1201)  # a background child that nobody ends
ENDED = nap(1202)  # in the process group of a command that takes too long
ENDED_PATTERN = f"{ENDED[:-1].replace(' ', '.')}[{ENDED[-1]}]"  # does not match itself
SERVER = nap(1203)
SLOW = nap(5)
MARKER = "LAST_LINE"
CUT = "[OUTPUT TRUNCATED - {} chars omitted out of {} total]"
MAX_CHARS = 50_000


def timed(command: str, timeout: Any) -> Any:
    return call("terminal", {"command": command, "timeout": timeout})


SCENES = {
    "background child": [terminal(f"{LEFT} & echo started"), terminal("echo next"), DONE],
    "too slow": [
        timed(f"echo part; {ENDED} & {ENDED}", 1),
        terminal(f"grep -las '{ENDED_PATTERN}' /proc/[0-9]*/cmdline | wc -l"),
        DONE,
    ],
    "heredoc": [terminal("cat <<'EOF'\nhi\nEOF"), terminal("echo a # c"), DONE],
    "unset": [terminal("set -u; echo $FOO_UNSET"), terminal("echo [$FOO_UNSET]"), DONE],
    "exit": [terminal("exit 3"), terminal("false | true; (exit 7)"), terminal("exec false"), terminal("echo on"), DONE],
    "unhealthy": [
        terminal("echo 'open"),
        terminal("set -e; false; echo no"),
        terminal("if"),
        terminal("echo on"),
        DONE,
    ],
    "export": [terminal("export M=$'a\\nb'; mkdir sub; cd sub"), terminal('printf %s "$M"; basename "$PWD"'), DONE],
    "reads": [terminal('read x; echo "[$x]"'), terminal("python3"), terminal("sudo -k true"), terminal("cat"), DONE],
    "long": [terminal(f"seq 1 2000000; echo {MARKER}"), DONE],
    "binary": [terminal("head -c 3000000 /dev/urandom"), DONE],
    "accents": [terminal("python3 -c \"print('é'*200000)\""), DONE],
    "time-outs": [
        timed(f"echo early; {SLOW}", 1),
        timed("echo zero", 0),
        timed("echo text", "3"),
        timed("echo long", 99999),
        timed("echo word", "soon"),
        terminal("echo on"),
        DONE,
    ],
    "server": [
        call("terminal", {"command": f"read line; echo got $line; {SERVER}", "background": True}),
        call("process", {"action": "submit", "session_id": "proc_1", "data": "this"}),
        terminal("sleep 0.3"),
        call("process", {"action": "log", "session_id": "proc_1"}),
        call("process", {"action": "list"}),
        call("process", {"action": "kill", "session_id": "proc_1"}),
        call("process", {"action": "poll", "session_id": "proc_9"}),
        DONE,
    ],
}


@pytest.fixture(scope="module", params=["local", "bubblewrap"])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    place = Workplace(tmp_path_factory.mktemp("terminal"))
    return play(place, SCENES, sandbox=request.param, concurrency=len(SCENES), num_workers=1)


def told(played: Played, prompt: str) -> list[Json]:
    return results(played.row(prompt))


def short(result: Json) -> tuple[str, int]:
    return result["output"].strip(), result["exit_code"]


def test_every_rollout_goes_on_to_its_end(played: Played) -> None:
    assert played.ended.code == 0, played.ended
    assert [row["completed"] for row in played.place.trajectories()] == [True] * len(SCENES)


def test_a_background_child_does_not_hold_the_command(played: Played) -> None:
    started, following = told(played, "background child")
    assert short(started) == ("started", 0)
    assert short(following) == ("next", 0)
    assert played.row("background child")["metadata"]["duration_seconds"] < 60


def test_nothing_that_was_started_is_left(played: Played) -> None:
    assert played.ended.code == 0
    assert not [pid for text in (LEFT, ENDED, SERVER, SLOW) for pid in processes_with(text)]


def test_a_time_out_ends_the_whole_group_and_keeps_the_output(played: Played) -> None:
    slow, left = told(played, "too slow")
    assert slow["exit_code"] == 124
    assert slow["output"].startswith("part\n")
    assert "timed out after 1 seconds" in slow["error"]
    assert short(left) == ("0", 0)


def test_a_command_means_what_it_means_to_a_shell(played: Played) -> None:
    assert [short(result) for result in told(played, "heredoc")] == [("hi", 0), ("a", 0)]
    unset, next_one = told(played, "unset")
    plain = subprocess.run(["bash", "-c", "set -u; echo $FOO_UNSET"], capture_output=True, check=False)
    assert "FOO_UNSET: unbound variable" in unset["output"]
    assert unset["exit_code"] == plain.returncode
    assert short(next_one) == ("[]", 0)


def test_what_ends_or_breaks_a_shell_is_this_commands_own_result(played: Played) -> None:
    exited, piped, replaced, healthy = told(played, "exit")
    assert [exited["exit_code"], piped["exit_code"], replaced["exit_code"]] == [3, 7, 1]
    assert (exited["output"], exited["error"], short(healthy)) == ("", None, ("on", 0))
    unclosed, stopped, torn, healthy = told(played, "unhealthy")
    assert unclosed["exit_code"] != 0
    assert "no" not in stopped["output"]
    assert (stopped["exit_code"], torn["exit_code"], short(healthy)) == (1, 2, ("on", 0))


def test_folder_and_variables_persist(played: Played) -> None:
    set_up, read_back = told(played, "export")
    assert short(set_up) == ("", 0)
    assert read_back["output"] == "a\nbsub\n"


def test_stdin_is_empty(played: Played) -> None:
    read, python, sudo, cat = told(played, "reads")
    assert read["output"] == "[]\n"
    assert short(python) == ("", 0)
    assert sudo["exit_code"] != 124
    assert short(cat) == ("", 0)
    assert played.row("reads")["metadata"]["duration_seconds"] < 60


def test_long_output_loses_its_middle(played: Played) -> None:
    (result,) = told(played, "long")
    output = result["output"]
    total = sum(len(str(number)) + 1 for number in range(1, 2_000_001)) + len(MARKER) + 1
    notice = CUT.format(total - MAX_CHARS, total)
    head, _, tail = output.partition(f"\n\n{notice}\n\n")
    assert (len(head), len(tail)) == (20_000, 30_000)
    assert head.startswith("1\n2\n3\n")
    assert tail.endswith(f"\n2000000\n{MARKER}\n")


def test_binary_output_is_replaced_and_bounded(played: Played) -> None:
    (result,) = told(played, "binary")
    assert "\N{REPLACEMENT CHARACTER}" in result["output"]
    assert "\0" not in result["output"]
    assert "chars omitted out of" in result["output"]
    assert MAX_CHARS * 0.9 < len(result["output"]) < MAX_CHARS + 200  # what looks like an escape sequence is gone


def test_characters_are_counted_not_bytes(played: Played) -> None:
    (result,) = told(played, "accents")
    assert result["output"].count("é") == MAX_CHARS - 1
    assert CUT.format(200_001 - MAX_CHARS, 200_001) in result["output"]
    assert "\N{REPLACEMENT CHARACTER}" not in result["output"]


def test_odd_time_outs_are_told_or_understood(played: Played) -> None:
    slow, zero, text, long, word, healthy = told(played, "time-outs")
    assert (slow["exit_code"], slow["output"].partition("\n")[0]) == (124, "early")
    assert "timeout" in zero["error"]
    assert short(text) == ("text", 0)
    assert "600" in long["error"]
    assert "background" in long["error"]
    assert "timeout" in word["error"]
    assert short(healthy) == ("on", 0)
    stats = played.row("time-outs")["tool_stats"]["terminal"]
    assert stats == {"count": 6, "success": 2, "failure": 4}


def test_background_processes_are_looked_after(played: Played) -> None:
    started, submitted, _, log, listed, killed, unknown = told(played, "server")
    assert (started["session_id"], started["exit_code"], started["error"]) == ("proc_1", 0, None)
    assert submitted["status"] == "ok"
    assert log["output"] == "got this"
    (only,) = listed["processes"]
    assert (only["status"], only["session_id"]) == ("running", "proc_1")
    assert killed["status"] == "killed"
    assert unknown["status"] == "not_found"


@pytest.mark.parametrize("sandbox", ["local", "bubblewrap"])
def test_tracing_shows_the_commands_own_lines_alone(place: Workplace, sandbox: str) -> None:
    commands = ["set -x; echo hi", "set -v; echo v", "trap 'echo DBG $BASH_COMMAND' DEBUG; echo a", "set -x; exit 3"]
    place.dataset(["trace"])
    with ScriptedEndpoint([*map(terminal, commands), answer("done")]) as endpoint:
        place.run(endpoint.base_url, sandbox=sandbox)
    outputs = [result["output"].splitlines() for result in results(place.rows()[0])]
    assert outputs == [["++ echo hi", "hi"], ["v"], ["DBG echo a", "a"], ["++ exit 3"]]
