"""Names a shell gives values to, programs that run others, and what would end the runner itself."""

from __future__ import annotations

import asyncio

import pytest

from sandboxes.base import CommandRefused, SandboxSpec
from sandboxes.guard import exported, guard, is_shell
from sandboxes.local import LocalBackend

HOME = "/home/ann"

REFUSED = [
    'for d in /etc /usr; do rm -rf "$d"; done',
    'rm -rf "${UNSET}/"',
    "rm -rf $UNSET/*",
    'rm -rf "$UNSET"/',
    'rm -rf "$UNSET"/*',
    "rm -rf$IFS/",
    "rm${IFS}-rf${IFS}/",
    'f() { rm -rf "$1"; }; f /',
    'f() { rm -rf "$@"; }; f /',
    "alias x='rm -rf /'; x",
    "alias r=rm; r -rf /",
    "alias rr='rm -rf'; rr /",
    "coproc rm -rf /",
    "coproc X { rm -rf /; }",
    "bash -c -- 'rm -rf /'",
    "source <(echo 'rm -rf /')",
    "bash <(echo 'rm -rf /')",
    ". <(printf 'rm -rf /')",
    'D=(/); rm -rf "${D[@]}"',
    'D=(/tmp/x /etc); rm -rf "${D[@]}"',
    "D=(/); rm -rf ${D[0]}",
    'D+=(/etc); rm -rf "${D[@]}"',
    "printf -v D /; rm -rf $D",
    "printf -v D %s /; rm -rf $D",
    "read D <<< /; rm -rf $D",
    "read -r D <<< /; rm -rf $D",
    "runuser -u root -- rm -rf /",
    "systemd-run rm -rf /",
    "systemd-run --unit x -p A=b rm -rf /",
    "nsenter -t 1 -m rm -rf /",
    "echo b | tee /proc/sysrq-trigger",
    "echo b | sudo tee -a /proc/sysrq-trigger",
    "pkill bash",
    "pkill -9 bash",
    "pkill -f bash",
    "pkill sh",
    "pkill -x python3",
    "pkill -KILL -f python",
    "killall python3",
    "killall -9 python3.11",
    "killall bash",
    "pkill .",
    "pkill -9 -f .",
    "pkill '.*'",
    "pkill -u root",
    "killall -r '.*'",
    'set -- /; rm -rf "$@"',
    "bash -c 'rm -rf \"$1\"' x /",
    'echo / | while read d; do rm -rf "$d"; done',
    "killall -s KILL bash",
    'mv "$UNSET"/* /tmp/x',
    'chmod -R u+w "$UNSET"/',
    "bash < <(echo 'rm -rf /')",
]

PASSED = [
    'rm -rf build/ "$TMPDIR/x" ./node_modules',
    'DIR=build; rm -rf "$DIR"/sub',
    'for f in *.txt; do rm "$f"; done',
    'rm -rf "$TMPDIR"/x "$TMPDIR"/*',
    'for d in */; do rm -rf "$d"; done',
    'for d in a b; do rm -rf "$d/build"; done',
    'f() { rm -rf "$1"; }; f build',
    "alias ll='ls -l'; ll /",
    'D=(a b); rm -rf "${D[@]}"',
    'D=$(mktemp -d); rm -rf "$D"/*',
    'D="$(mktemp -d)"; trap \'rm -rf "$D"\' EXIT; cd "$D" && rm -rf ./*',
    "pkill -f server.py",
    'pkill -f "python server.py"',
    "pkill -f 'python3 -m http.server'",
    "pkill node",
    "killall node",
    "killall -l",
    'pkill -f "bash run.sh"',
    "pkill -P $$",
    "pkill -P 123 python",
    "kill $(pgrep -f server.py)",
    "read -p 'x' D; rm -rf \"$D\"",
    'set -e; rm -rf "$1"',
    'rm -rf "$1/build"',
    "coproc cat",
    "printf -v D '%s/x' a; rm -rf \"$D\"",
    "bash script.sh <(echo hi)",
    "diff <(ls a) <(ls b)",
    "arr=(1 2 3); echo ${arr[@]} ${#arr[@]}",
    "systemd-run --version",
    'IFS=, read -r a b <<< "1,2"',
    "IFS=$'\\n'; for x in $(ls); do echo $x; done",
    'rm -rf "${BUILD:?}"/*',
    'rm -rf "${BUILD:?}/"',
    'cd "$(dirname "$0")" && rm -rf dist',
    'rm -rf "$OUT/dist" $OUT/build',
    "rm -rf *.egg-info dist",
    'mv "$SRC"/*.py dest/',
    "for f in $(ls); do mv $f/* .; done",
    'while read f; do rm -rf "$f"/*; done < list',
    'for d in $(find . -type d); do rm -rf "$d"/*; done',
    'set -u; rm -rf "$BUILD"/*',
    '. ./env; rm -rf "$BUILD"/*',
    'f() { rm -rf "$X"/*; }; X=a; f',
    "BUILD=b; rm -rf $BUILD/*",
]


@pytest.mark.parametrize("command", REFUSED)
def test_refuses(command: str) -> None:
    assert guard(command, home=HOME)


@pytest.mark.parametrize("command", PASSED)
def test_passes(command: str) -> None:
    assert guard(command, home=HOME) == ""


def test_variables_of_earlier_commands_count() -> None:
    variables = exported("declare -x D=\"/\"\nexport BUILD='a b'\ndeclare -x EMPTY\n")
    assert variables == {"D": "/", "BUILD": "a b"}
    assert guard("rm -rf $D", home=HOME, variables=variables) == "recursive removal of /"
    assert guard('rm -rf "$BUILD"/*', home=HOME, variables=variables) == ""
    assert guard("rm -rf $HOME", home=HOME, variables={"HOME": "/srv/x"})


@pytest.mark.parametrize("command", ["sh", "bash -i", "/bin/dash -s", "zsh -il"])
def test_a_shell_reads_commands(command: str) -> None:
    assert is_shell(command)


@pytest.mark.parametrize("command", ["", "python3", "bash x.sh", "cat", "bash -c ls"])
def test_other_programs_read_data(command: str) -> None:
    assert not is_shell(command)


def test_what_is_written_to_a_shell_is_judged() -> None:
    async def scenario() -> None:
        sandbox = await LocalBackend().open(SandboxSpec(run_name="r", rollout_id="1"))
        try:
            process = await sandbox.start("sh")
            with pytest.raises(CommandRefused, match="too long"):
                await process.write(b"true;" * 5000)  # harmless, yet refused
            await process.write(b"echo fine\nexit\n")
            assert await process.wait(5)
            assert process.output() == "fine\n"
            cat = await sandbox.start("cat")
            await cat.write(b"true;" * 5000)
            await cat.close_stdin()
            assert await cat.wait(5)
        finally:
            await sandbox.close()

    asyncio.run(scenario())
