"""The guard refuses what would harm the host, in any spelling, and lets pass what only speaks of it."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.guard import guard
from tests.sandboxes import guard_names

HOME = "/home/ann"

REFUSED = [
    # recursive removal: spellings of the command
    "rm -rf /",
    "rm -fr /",
    "rm -r -f /",
    "rm -Rf /",
    "rm / -rf",
    "rm -rf -- /",
    "rm --recursive --force /",
    "rm --rec /",
    "rm -rf --no-preserve-root /",
    "/bin/rm -rf /",
    "\\rm -rf /",
    "'rm' -rf /",
    'r"m" -rf /',
    "r''m -rf /",
    "$'\\x72m' -rf /",
    "rm \\\n  -rf \\\n  /",
    "r\\\nm -rf /",
    # of the path
    "rm -rf //",
    "rm -rf /./",
    "rm -rf /.",
    "rm -rf '/'",
    'rm -rf "/"',
    "rm -rf /*",
    "rm -rf /.*",
    "rm -rf /*/",
    "rm -rf /etc/..",
    "rm -rf /usr/../etc",
    "rm -rf /{bin,etc}",
    "rm -rf /e*",
    "rm -rf /???",
    "rm -rf /etc",
    "rm -rf /etc/",
    "rm -rf /etc/nginx",
    "rm -rf /usr/*",
    "rm -rf /usr/lib/python3",
    "rm -rf /boot /tmp/x",
    "rm -rf /tmp/x /var",
    "rm -rf /var/lib",
    "rm -rf /tmp",
    "rm -rf /tmp/*",
    "rm -rf /proc/self/root",
    # homes
    "rm -rf ~",
    "rm -rf ~/",
    "rm -rf ~/*",
    "rm -rf ~root",
    "rm -rf ~bob",
    "rm -rf $HOME",
    'rm -rf "$HOME"',
    "rm -rf ${HOME}",
    "rm -rf ${HOME}/",
    "rm -rf ${HOME:?}",
    'rm -rf "${HOME}"/*',
    "rm -rf /home",
    "rm -rf /home/*",
    "rm -rf /home/ann",
    "rm -rf /home/bob",
    "rm -rf /root",
    # where it runs
    "cd / && rm -rf *",
    "cd /; rm -rf .",
    "cd /usr && cd .. && rm -rf *",
    "cd ~ && rm -rf ../ann",
    "cd; rm -rf *",
    "cd / ; (rm -rf *)",
    "(cd /; rm -rf ./*)",
    # values that are plain to see
    "X=/; rm -rf $X",
    'export X=/etc; rm -rf "$X"',
    "X=~; rm -rf $X",
    "rm -rf ${X:-/}",
    "for d in /etc /usr; do rm -rf $d; done",
    "rm -rf $(echo /)",
    'rm -rf "$(echo /)"',
    "rm -rf `echo /`",
    "$(echo rm) -rf /",
    "$(which rm) -rf /",
    "$RM -rf /",
    "rm -rf /$X",
    "rm -rf /$X/*",
    # prefixes
    "sudo rm -rf /",
    "sudo -u root rm -rf /",
    "sudo -n -- rm -rf /",
    "env rm -rf /",
    "env -i A=1 rm -rf /",
    "A=1 B=2 rm -rf /",
    "nohup rm -rf / &",
    "nice -n 5 rm -rf /",
    "timeout -s KILL 5 rm -rf /",
    "timeout 5 sudo env nohup rm -rf /",
    "command rm -rf /",
    "command -p rm -rf /",
    "exec rm -rf /",
    "exec -a x rm -rf /",
    "time rm -rf /",
    "time -p rm -rf /",
    "setsid rm -rf /",
    "busybox rm -rf /",
    "! rm -rf /",
    # positions
    "true && rm -rf /",
    "true; rm -rf /",
    "true\nrm -rf /",
    "echo \\\\\nrm -rf /",
    "false || rm -rf /",
    "ls | rm -rf /",
    "(rm -rf /)",
    "{ rm -rf /; }",
    "if true; then rm -rf /; fi",
    "while true; do rm -rf /; done",
    "case x in x) rm -rf /;; esac",
    "f() { rm -rf /; }; f",
    "echo $(rm -rf /)",
    'echo "$(rm -rf /)"',
    "echo `rm -rf /`",
    'echo "`rm -rf /`"',
    "cat <(rm -rf /)",
    "echo ${X:-$(rm -rf /)}",
    "cat <<EOF\n$(rm -rf /)\nEOF",
    "rm -rf / > /dev/null 2>&1",
    ">/dev/null rm -rf /",
    "cat <<EOF; rm -rf /\nhi\nEOF",
    # texts that are run
    "sh -c 'rm -rf /'",
    'bash -lc "rm -rf /"',
    "bash -x -c 'rm -rf /'",
    "bash -c \"bash -c 'rm -rf /'\"",
    'bash -c "rm -rf $HOME"',
    "sudo sh -c 'rm -rf /'",
    "su -c 'rm -rf /'",
    "su - root -c 'rm -rf /'",
    "eval rm -rf /",
    "eval 'rm -rf /'",
    "env -S 'rm -rf /'",
    "trap 'rm -rf /' EXIT",
    "watch 'rm -rf /'",
    "echo 'rm -rf /' | sh",
    "printf 'rm -rf /\\n' | sudo bash",
    "bash <<EOF\nrm -rf /\nEOF",
    "bash <<'EOF'\nrm -rf /\nEOF",
    "cat <<'EOF' | sh\nrm -rf /\nEOF",
    "bash <<< 'rm -rf /'",
    "bash -s <<EOF\nrm -rf /\nEOF",
    ". /dev/stdin <<EOF\nrm -rf /\nEOF",
    # xargs and find
    "echo / | xargs rm -rf",
    r"printf '/\0' | xargs -0 rm -rf",
    "xargs rm -rf / < list",
    "echo / | xargs -I{} rm -rf {}",
    "echo x | xargs -n 1 rm -rf /",
    "find / | xargs rm -rf",
    "find / -delete",
    "find / -type f -delete",
    "find / -name '*' -delete",
    "find ~ -delete",
    "find /etc /tmp/x -delete",
    "find / -exec rm -rf {} \\;",
    "find / -type f -exec rm {} +",
    "find / -exec sh -c 'rm -rf {}' \\;",
    "cd / && find . -delete",
    "echo / | xargs -I % rm -rf %",
    # what find does is not narrowed by a test's opposite, beyond an -o, behind it, or of another choice
    "find / ! -name x -delete",
    "find / -not -name x -delete",
    "find / ! \\( -name x \\) -delete",
    "find / -name x -prune -o -delete",
    "find / -name x -prune -o -print0 | xargs -0 rm -rf",
    "find / -name x -o -type f | xargs rm -rf",
    "find / -delete -name x",
    "find / \\( -name x -o -type f \\) -exec rm {} +",
    "find / -name x -exec ls {} \\; -o -exec rm -rf {} +",
    # names that ls writes
    "rm -rf $(ls -d /usr)",
    "ls -d /* | xargs rm -rf",
    "ls -1d /* | xargs rm -rf",
    "ls / | xargs -I{} rm -rf /{}",
    "ls / | xargs -I {} rm -rf /{}",
    "for d in $(ls /); do rm -rf /$d; done",
    "cd / && ls | xargs rm -rf",
    # what loops are told to read
    "while read d; do rm -rf $d; done <<< /",
    "while read d; do rm -rf $d; done <<EOF\n/usr\nEOF",
    'while read -r d; do rm -rf "$d"; done < <(ls -d /*)',
    "{ read d; rm -rf $d; } <<< /",
    # what is left of a value, and a value by another's name
    "x=/usr/y; rm -rf ${x%/*}",
    "x=/etc:/tmp/y; rm -rf ${x%%:*}",
    "x=y:/etc; rm -rf ${x##*:}",
    "x=/y; rm -rf ${x:0:1}",
    "x=/usr; y=x; rm -rf ${!y}",
    # arithmetic hides nothing
    "echo $(( $(rm -rf /) ))",
    "echo $((rm -rf /))",
    "x=$((1 << 2))\nrm -rf /",
    "((x << 2))\nrm -rf /",
    "((rm -rf /); ls)",
    "a[1<<2]=3\nrm -rf /",
    "``rm -rf /``",
    # other ways to the same end
    "chmod -R 777 /",
    "sudo chown -R ann /usr",
    "mv /etc /tmp/x",
    "mv ~ /tmp/x",
    # raw disks
    "dd if=/dev/zero of=/dev/sda",
    "sudo dd if=/dev/zero of=/dev/nvme0n1 bs=1M",
    "cat x > /dev/sda",
    "echo x >> /dev/vda1",
    "> /dev/sda",
    ": >| /dev/mmcblk0",
    "cat x &> /dev/sda",
    "cp x /dev/sdb",
    "echo x | sudo tee /dev/sda",
    "wipefs -a /dev/sda",
    "shred /dev/disk/by-id/x",
    "truncate -s 0 /dev/sda",
    "mkfs.ext4 /dev/sda1",
    "mkfs -t ext4 $DISK",
    "sudo mkfs.xfs -f /dev/nvme0n1p1",
    "mkswap /dev/sda2",
    "echo b > /proc/sysrq-trigger",
    # fork bombs
    ":(){ :|:& };:",
    ":() { : | : & }; :",
    "bomb() { bomb | bomb & }; bomb",
    "function f { f & f & }; f",
    "f(){ f|f; }; f",
    "bash -c ':(){ :|:& };:'",
    # every process, the machine
    "kill -9 -1",
    "kill -KILL -1",
    "kill -s KILL -1",
    "kill -- -1",
    "kill -TERM -- -1",
    "sudo kill -9 -1",
    "kill -1",
    "shutdown now",
    "sudo shutdown -h now",
    "/sbin/reboot",
    "reboot -f",
    "halt",
    "poweroff",
    "init 0",
    "init 6",
    "telinit 6",
    "systemctl poweroff",
    "systemctl --force reboot",
    "loginctl poweroff",
    "true && reboot",
    "killall5",
    # no depth is deep enough
    "echo " + "$(" * 200 + "rm -rf /" + ")" * 200,
    "eval " * 50 + "rm -rf /",
]

PASSED = [
    "",
    "ls",
    # only spoken of
    'echo "rm -rf /"',
    "echo rm -rf /",
    "echo 'rm -rf /' > notes.txt",
    "printf '%s\\n' 'shutdown now'",
    "git commit -m 'rm -rf / is bad; reboot'",
    "git log --grep='rm -rf /'",
    "grep -r 'rm -rf /' .",
    "grep 'mkfs\\|dd of=/dev/sda' file",
    "# rm -rf /",
    "ls # ; rm -rf /",
    "cat <<EOF\nrm -rf /\nEOF",
    "cat > x.sh <<'EOF'\nrm -rf /\n$(reboot)\nEOF",
    "cat <<-EOF\n\trm -rf /\n\tEOF",
    "python3 - <<EOF\nprint('rm -rf /')\nEOF",
    "echo 'it''s rm -rf /'",
    'echo "a \\" ; rm -rf / \\""',
    "man shutdown",
    "which reboot",
    "command -v rm",
    "type halt",
    "X='rm -rf /'; echo \"$X\"",
    "alias | grep rm",
    "awk '{ print \"rm -rf /\" }' f",
    "timeout 5 echo rm -rf /",
    "sudo echo rm -rf /",
    "xargs echo rm -rf / < list",
    "echo 'rm -rf /' | cat",
    "echo 'rm -rf /' | python3 tool.py",
    "ssh-keygen -f reboot",
    "npm run reboot",
    "git init 0",
    # removal of one's own
    "rm -rf build",
    "rm -rf ./build ../other",
    "rm -rf /tmp/x",
    "rm -rf /tmp/x/*",
    "rm -rf ~/project",
    "rm -rf $HOME/project/*",
    'rm -rf "$BUILD"',
    "rm -rf *",
    "rm -rf .",
    "cd build && rm -rf *",
    "cd / && ls; cd /tmp/x && rm -rf *",
    "(cd / && ls); rm -rf *",
    "rm /etc/hostname.bak",
    "rm -f /",
    "rm -rf /home/ann/project",
    "rm -rf /opt/mine",
    "rm -rf /srv/app/cache",
    "rm -rf /var/lib/apt/lists/*",
    "rm -rf /usr/local/lib/mine",
    "rm -rf /usr/src/app/build",
    "rm -rf /dev/shm/mine",
    "find . -name '*.pyc' -delete",
    "find /tmp/x -delete",
    "find / -name core",
    "find . -exec rm {} +",
    "find . -type d -exec rm -rf {} +",
    "find /tmp -name 'mine*' -delete",
    "ls | xargs rm -rf",
    "ls -d build* | xargs rm -rf",
    "rm -rf $(ls -d dist)",
    "ls project | xargs -I{} rm -rf project/{}",
    "find . -not -name '*.py' -delete",
    "find / ! -name x",
    "find / -path /proc -prune -o -name core -delete",
    "find / -name x -delete -o -name y -delete",
    "find / \\( -name '*.pyc' -o -name '*.pyo' \\) -delete",
    "find / -name x -o -name y | xargs rm -rf",
    "find / -print -name x -delete",
    'while read d; do rm -rf "$d"; done <<< build',
    "while read d; do echo $d; done <<< /",
    "f=a.tar.gz; rm -rf ${f%.tar.gz} ${f%%.*}",
    "x=/srv/x/y; rm -rf ${x%/*}/z ${x##*/}",
    "truncate -s 0 log.txt",
    "loginctl list-sessions",
    "chmod -R 755 .",
    "chmod 777 /tmp/x",
    "mv a b",
    "mv x /etc",
    # harmless relatives
    "dd if=/dev/zero of=disk.img bs=1M count=1",
    "dd if=/dev/sda of=/dev/null",
    "echo x > /dev/null 2>&1",
    "echo x > /dev/tcp/127.0.0.1/80",
    "head -c 10 /dev/urandom > x",
    "tee /dev/stderr < x",
    "fdisk -l /dev/sda",
    "mkfs.ext4 -F disk.img",
    "kill -9 123",
    "kill -1 123",
    "kill -9 -123",
    "kill $!",
    "kill %1",
    "init --help",
    "shutdown --help",
    "systemctl status ssh",
    "systemctl restart nginx",
    "f() { f2 | f3 & }; f",
    "walk() { for i in *; do walk $i; done; }; walk",
    "server & client | server",
    # odd texts are no reason
    "echo 'unclosed",
    'echo "unclosed',
    "echo $(unclosed",
    "echo `unclosed",
    "echo ${unclosed",
    "cat <<EOF",
    ")))",
    ";;&|",
    "<",
    "echo $'\\",
    "((x>1)) && echo $((1+2))",
    "[[ a > b ]] || echo no",
    "echo {a,b}{c,d}",
]


@pytest.mark.parametrize("command", [*REFUSED, *guard_names.REFUSED])
def test_refuses(command: str) -> None:
    assert guard(command, home=HOME)


@pytest.mark.parametrize("command", [*PASSED, *guard_names.PASSED])
def test_passes(command: str) -> None:
    assert guard(command, home=HOME) == ""


def test_where_a_command_starts_counts() -> None:
    assert guard("rm -rf *", home=HOME, cwd="/")
    assert guard("rm -rf $PWD", home=HOME, cwd="/etc")
    assert guard("rm -rf ../..", home=HOME, cwd="/srv/x")
    assert guard("rm -rf ${PWD%%/*}/", home=HOME, cwd="/srv/x")
    assert guard("rm -rf ${PWD:0:1}", home=HOME, cwd="/srv/x")
    assert guard("ls | xargs rm -rf", home=HOME, cwd="/")
    assert not guard("rm -rf ${PWD##*/}", home=HOME, cwd="/srv/x")
    assert not guard("rm -rf *", home=HOME, cwd="/srv/x")
    assert not guard("rm -rf $PWD", home=HOME, cwd="/srv/x")


def test_the_reason_names_what_is_refused() -> None:
    assert guard("rm -rf /etc", home=HOME) == "recursive removal of /etc"


PIECES = st.sampled_from(["{}", "'{}'", '"{}"', "\\{}", '""{}', "''{}", "{}\\\n"])
PREFIXES = ["", "sudo ", "env A=1 ", "nohup ", "command ", "exec ", "timeout 9 ", "nice -n 1 ", "true; ", "! ", "{ "]
WRAPPED = ["%s", "(%s)", "echo $(%s)", "`%s`", "if %s; then :; fi", 'echo "$(%s)"', "x=$(%s)"]
PATHS = ["/", "//", "/.", "/etc", "/etc/../usr", "~", "$HOME", "${HOME}", "/home/ann/.", "/usr/bin/../../"]


@st.composite
def disguised(draw: st.DrawFn, word: str) -> str:
    return "".join(draw(PIECES).format(char) for char in word)


@st.composite
def removals(draw: st.DrawFn) -> str:
    flags = draw(st.sampled_from(["-rf", "-fr", "-r -f", "-R", "--recursive", "-vrf"]))
    blank = st.sampled_from([" ", "  ", "\t", " \\\n"])
    words = [draw(disguised("rm")), flags, draw(st.sampled_from(PATHS))]
    command = draw(st.sampled_from(PREFIXES)) + draw(blank).join(words)
    for _ in range(draw(st.integers(0, 3))):
        if draw(st.booleans()):
            command = f"sh -c {shlex.quote(command)}"
        else:
            wrapped = draw(st.sampled_from(WRAPPED))
            command = wrapped % (command.replace("\\", "\\\\").replace("`", "\\`") if "`" in wrapped else command)
    return command


@given(removals())
def test_no_spelling_hides_a_removal(command: str) -> None:
    assert guard(command, home=HOME)


@given(removals())
def test_quoted_text_is_only_text(command: str) -> None:
    assert guard(f"echo {shlex.quote(command)}", home=HOME) == ""
    assert guard(f"cat <<'END'\n{command}\nEND\n", home=HOME) == ""


@given(st.text(alphabet="rm -f/$(){}[]<>|&;'\"`\\\n~*#=ab", max_size=60))
def test_any_text_is_read_to_its_end(text: str) -> None:
    guard(text, home=HOME, cwd="/srv/x")


def test_values_that_grow_are_given_up() -> None:
    assert guard("x=aa; " + "x=$x$x; " * 60 + "rm -rf $x", home=HOME) == ""


def test_what_is_too_much_is_refused() -> None:
    for text in ("true;" * 5000, "(" * 5000, "$((" * 5000, "${x:-" * 5000, "cat <<a\n" * 5000):
        assert "too long" in guard(text, home=HOME)


def test_long_texts_are_read_quickly() -> None:
    body = "some text with 'quotes' and $(things)\n" * 20_000
    assert guard(f"cat > f <<'EOF'\n{body}EOF\n", home=HOME) == ""
