"""What every sandbox promises about commands, whatever its kind and whatever shell it finds."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest

from sandboxes.base import ExecResult, Sandbox
from tests.sandboxes.support import HOST_KINDS, MINUTE, SPEC, exec_all, outputs, run

POSIX = [
    ("cat <<'EOF'\nhi\nEOF", "hi\n", 0),
    ("cat <<EOF\n$((1+1))\nEOF\n", "2\n", 0),
    ("echo a # c", "a\n", 0),
    ("false | true; (exit 7)", "", 7),
    ("printf 'no newline'", "no newline", 0),
    ("echo one\necho two", "one\ntwo\n", 0),
    ("echo 'é 🙂'", "é 🙂\n", 0),
    ("kill -TERM $$", "", 143),
    ("{ sh -c 'kill -9 $$'; } 2>/dev/null", "", 137),
    ("exec echo replaced", "replaced\n", 0),
    ("set -e; echo a; false; echo b", "a\n", 1),
    ("trap 'echo bye' EXIT; echo hi; exit 2", "hi\nbye\n", 2),
    ("echo $#$*; set --; echo $#", "0\n0\n", 0),
    ('f() { echo "f $1"; }; f x', "f x\n", 0),
    ('read x; echo "[$x]"; cat; wc -c', "[]\n0\n", 0),
    ("for i in 1 2 3; do echo $i; done | tail -n 1", "3\n", 0),
    ("\ud800 2>/dev/null; echo x\0y", "xy\n", 0),
]
MISCHIEF = [
    "exit 3",
    "exec true",
    "exec no-such-program",
    "exec >/dev/null 2>&1 </dev/null",
    "set -e; false; echo no",
    "set -u; echo $FOO_UNSET",
    "set -C; set -f; set -n; echo no",
    "echo 'unclosed",
    'echo "unclosed',
    "echo $(unclosed",
    "if true; then",
    ")",
    "cat <<EOF\nunclosed",
    "trap 'echo bye' EXIT",
    "trap '' TERM INT HUP",
    "kill $$",
    "kill -9 $$",
    "kill $PPID; sleep 5",
    "kill -9 $PPID; sleep 5",
    "kill 0",
    "unset PATH HOME TMPDIR PWD IFS",
    "export PATH=/nowhere",
    "export BASH_ENV=/nowhere ENV=/nowhere IFS=x CDPATH=/",
    "readonly MINE=1; export MINE; readonly PWD",
    "cd() { echo mine; }; export() { echo mine; }; printf() { echo mine; }",
    "ulimit -n 10; ulimit -t 1",
    "return 4",
    "break; continue; shift 9",
    "while :; do break 9; done",
    "exec 3>&- 4>&- 5>&-; exec 2>&1",
    "echo \\",
    "# nothing",
    "",
    "   \n\n",
    "&",
]


def test_output_and_exit_code(kind: str) -> None:
    result = exec_all(kind, "echo out; echo err >&2; exit 7")[0]
    assert result == ExecResult(output="out\nerr\n", exit_code=7, total_chars=8)


def test_posix(any_shell: str) -> None:
    results = exec_all(any_shell, *(command for command, _, _ in POSIX))
    for (command, output, exit_code), result in zip(POSIX, results, strict=True):
        assert (command, result.output, result.exit_code) == (command, output, exit_code)


def test_a_shell_error_is_the_commands_own(any_shell: str) -> None:
    results = exec_all(any_shell, "set -u; echo $FOO_UNSET", "echo 'unclosed", "no-such-program", "echo fine")
    assert [result.exit_code for result in results] in ([127, 2, 127, 0], [2, 2, 127, 0], [1, 2, 127, 0])
    assert "FOO_UNSET" in results[0].output
    assert "no-such-program" in results[2].output
    assert not any("channel" in result.output for result in results)


def test_after_any_command_the_next_is_healthy(any_shell: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        for command in MISCHIEF:
            await sandbox.exec("cd /usr; export KEPT='a b'", timeout_seconds=MINUTE)
            first = await sandbox.exec(command, timeout_seconds=4)
            assert not first.timed_out, command
            await sandbox.exec("PATH=/usr/bin:/bin; cd /usr; export PATH", timeout_seconds=MINUTE)
            second = await sandbox.exec('pwd; echo "$KEPT"; expr 1 + 1', timeout_seconds=MINUTE)
            assert (command, second.output, second.exit_code) == (command, "/usr\na b\n2\n", 0)

    run(any_shell, body)


class TestState:
    def test_folder_and_variables_persist(self, any_shell: str) -> None:
        commands = ["cd /usr && export A=1 B='x y'", 'pwd; echo "$A $B"', "cd bin; exit 3", "pwd", "cd -; pwd"]
        assert outputs(any_shell, *commands)[1::2] == ["/usr\n1 x y\n", "/usr/bin\n"]

    def test_cd_minus_goes_back(self) -> None:
        assert outputs("local", "cd /usr", "cd /etc", "cd -")[2] == "/usr\n"

    def test_any_value_survives(self, any_shell: str) -> None:
        value = "a\nb'c\"d\\e$f`g`\t!é\n\n"
        commands = [f"export M={_quoted(value)}", 'printf %s "$M"', 'export N="$M$M"', 'printf %s "$N"']
        assert outputs(any_shell, *commands)[1::2] == [value, value * 2]

    def test_what_is_unset_stays_unset(self, any_shell: str) -> None:
        commands = ["unset LANG HOME; export -n TERM 2>/dev/null", 'echo "${LANG-none} ${HOME-none}"']
        assert outputs(any_shell, *commands)[1] == "none none\n"

    def test_what_is_not_exported_is_forgotten(self, any_shell: str) -> None:
        assert outputs(any_shell, "A=1; f() { :; }; set -e", 'echo "${A-none}"; false; echo on')[1] == "none\non\n"

    def test_a_command_that_is_killed_leaves_no_state(self, any_shell: str) -> None:
        assert outputs(any_shell, "cd /usr; export A=1", "cd /etc; A=2; kill -9 $$", 'pwd; echo "$A"')[2] == "/usr\n1\n"

    def test_state_is_kept_under_a_trap_of_the_commands_own(self, any_shell: str) -> None:
        assert outputs(any_shell, "trap 'echo bye' EXIT; cd /usr", "pwd") == ["bye\n", "/usr\n"]

    def test_a_folder_that_is_gone_is_left(self, any_shell: str) -> None:
        commands = ["pwd", "mkdir x; cd x; rmdir ../x", "pwd", "echo $?"]
        start, _, after, fine = outputs(any_shell, *commands)
        assert (after, fine) == (start, "0\n")

    def test_odd_folder_names(self, any_shell: str) -> None:
        name = "a 'b\nc\"$d\\"
        commands = [f"mkdir {_quoted(name)}; cd {_quoted(name)}", 'printf %s "${PWD##*/}"; pwd | wc -l']
        assert outputs(any_shell, *commands)[1].startswith(name)

    def test_links_keep_their_name(self, kind: str) -> None:
        assert outputs(kind, "ln -s /usr link; cd link", "pwd")[1].endswith("/link\n")

    def test_cwd_of_one_call(self, kind: str) -> None:
        async def body(sandbox: Sandbox) -> list[ExecResult]:
            await sandbox.exec("cd /usr", timeout_seconds=MINUTE)
            return [
                await sandbox.exec("pwd; export A=1; cd /", timeout_seconds=MINUTE, cwd="bin"),
                await sandbox.exec("pwd; echo $A", timeout_seconds=MINUTE),
                await sandbox.exec("pwd", timeout_seconds=MINUTE, cwd="~"),
                await sandbox.exec("echo not run", timeout_seconds=MINUTE, cwd="/no/such folder"),
                await sandbox.exec("pwd", timeout_seconds=MINUTE),
            ]

        there, back, home, nowhere, still = run(kind, body)
        assert (there.output, back.output, still.output) == ("/usr/bin\n", "/usr\n1\n", "/usr\n")
        assert home.output.startswith("/home/user" if kind == "bubblewrap" else "/")
        assert (nowhere.exit_code, nowhere.output) == (1, "cd: /no/such folder: No such directory\n")

    def test_a_command_elsewhere_leaves_the_folder_as_it_was(self, kind: str) -> None:
        async def body(sandbox: Sandbox) -> str:
            await sandbox.exec("mkdir -p other; A=1; export A", timeout_seconds=MINUTE)
            await sandbox.exec("export B=2", timeout_seconds=MINUTE, cwd="other")
            done = await sandbox.exec('[ "$PWD" -ef . ] && echo "$A$B ${PWD##*/}" "$(pwd)"', timeout_seconds=MINUTE)
            return done.output

        said = run(kind, body).split()
        assert said[0] == "12"
        assert said[1] != "other"
        assert said[2].endswith(said[1])

    def test_commands_side_by_side(self, any_shell: str) -> None:
        """Each waits for all the others, so one after the other they would never end."""
        wait = "while ! { set -- here.*; [ $# = 10 ]; }; do sleep 0.05; done"

        async def body(sandbox: Sandbox) -> list[ExecResult]:
            commands = [f"echo > here.{index}; {wait}; echo {index}" for index in range(10)]
            return await asyncio.gather(*(sandbox.exec(command, timeout_seconds=MINUTE) for command in commands))

        assert [result.output for result in run(any_shell, body)] == [f"{index}\n" for index in range(10)]


class TestEnvironment:
    @pytest.mark.parametrize("kind", HOST_KINDS)  # containers get nothing of it
    def test_a_short_list_of_the_hosts(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPENROUTER_API_KEY", "sk-secret")
        monkeypatch.setenv("LC_TIME", "C")
        monkeypatch.setenv("TZ", "UTC")
        (env,) = outputs(kind, "env; cat /proc/$$/environ /proc/self/environ /proc/$PPID/environ")
        names = {line.partition("=")[0] for line in env.splitlines() if "=" in line and "\0" not in line}
        own = {"HOME", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "_"}
        assert {"PATH", "HOME", "TMPDIR", "LC_TIME", "TZ"} <= names
        assert names <= own | {"PATH", "LANG", "TERM", "TZ"} | {name for name in names if name.startswith("LC_")}
        assert "secret" not in env

    def test_of_the_spec(self, kind: str) -> None:
        assert outputs(kind, 'echo "$A $LANG"', spec=replace(SPEC, env={"A": "b'c", "LANG": "C"})) == ["b'c C\n"]

    def test_private_folders(self, kind: str) -> None:
        async def body(sandbox: Sandbox) -> str:
            command = 'cd; pwd; [ "$PWD" = "$HOME" ] && cd "$TMPDIR" && touch "$HOME/a" b && ls -A . "$HOME" | wc -l'
            return (await sandbox.exec(command, timeout_seconds=MINUTE)).output

        first, second = run(kind, body), run(kind, body)
        assert first.split()[1] == second.split()[1]  # nothing of the first is there
        if kind in HOST_KINDS:  # a container's may have the same name
            assert first.split()[0] != os.path.expanduser("~")  # noqa: PTH111 (as the shell sees it)

    def test_nothing_of_the_protocol_shows(self, any_shell: str) -> None:
        shown, functions, descriptors = outputs(
            any_shell, "set; env; jobs", "type run kill_tree", "echo /proc/self/fd/*"
        )
        assert "channel" not in shown
        assert "function" not in functions
        assert [path.rpartition("/")[2] for path in descriptors.split()][:3] == ["0", "1", "2"]
        assert len(descriptors.split()) <= 4

    def test_no_terminal(self, kind: str) -> None:
        result = exec_all(kind, "(: </dev/tty) 2>/dev/null && echo asks; tty; [ -t 0 ] || echo none")[0]
        assert result.output == "not a tty\nnone\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def test_a_tools_own_command_is_free_of_what_the_model_has_set(any_shell: str) -> None:
    async def body(sandbox: Sandbox) -> list[str]:
        await sandbox.exec("mkdir -p sub && cd sub && export PATH=/nonexistent HOME=/mine MINE=1", timeout_seconds=20)
        command = 'ls -a; echo "${PWD##*/} ${MINE-unset} $HOME"; cd /; export MINE=2'
        done = await sandbox.exec_plain(command, timeout_seconds=20)
        after = await sandbox.exec('echo "${PWD##*/} $MINE $HOME"', timeout_seconds=20)
        return [done.output, after.output]

    plain, after = run(any_shell, body)
    assert plain.startswith(".\n..\nsub unset /")
    assert not plain.endswith("/mine\n")
    assert after == "sub 1 /mine\n"


def test_a_tools_own_command_takes_no_longer_than_it_may(any_shell: str) -> None:
    async def body(sandbox: Sandbox) -> ExecResult:
        return await sandbox.exec_plain("echo begun; sleep 60", timeout_seconds=0.5)

    done = run(any_shell, body)
    assert (done.output, done.exit_code, done.timed_out) == ("begun\n", 124, True)
