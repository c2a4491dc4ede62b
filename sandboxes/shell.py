"""The resident shell: one POSIX shell per sandbox that starts commands, whatever kind of sandbox it lives in.

``RESIDENT`` is its script, for bash, dash and busybox ash alike. It reads lines on its stdin and never runs a model's
text itself: every command gets a fresh shell, in a process group of its own where the system can do that, without the
resident's descriptors and variables. What a transport must provide is a *channel folder* the resident can see:

======================  ================================================================================================
``N.cmd``               the text of the command in slot N
``N.state``             shell text that runs before it: ``begin()``
``save``                shell text that runs after any: ``save()``
``N.out``               where its output goes, stdout and stderr merged (a FIFO)
``N.ctl``               where its frames go (a FIFO that is being read)
======================  ================================================================================================

Lines in: ``run N STDIN KEEP MARK`` (STDIN is a path; KEEP is ``keep`` when the command's variables and folder are
wanted at its end, else ``drop``; MARK, where there is one, is written after the command's output: NUL, MARK, ``m``),
``put FILE - TEXT`` (into the channel folder, TEXT in the words of ``printf %b``), ``kill PID PARENT``, ``ping``. Line
out, on stdout: ``pong``. Frames end in a NUL byte and begin with their kind: ``p`` pid and parent, ``e`` the exported
variables as shell text, ``d`` the folder, ``x`` the exit code. A control FIFO that ends without ``x`` means that the
command was lost together with its watcher.

When its stdin ends the resident goes, and its pid namespace with it; or else, where it is told to, it first kills what
it started and removes the sandbox's own folder. A worker that is gone leaves nothing behind.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Arguments: channel folder, shell for commands, private folder. At the end the private folder (unless ""), the channel
# and all processes that were started for it are removed.
RESIDENT = r"""
channel=$1 shell=$2 private=$3
name=${shell##*/}
cd / || exit 1

own= leader=pid # of a command's process group: the command's own shell, or the watcher above it
if [ -n "$BASH_VERSION" ]; then set -m; leader=parent
elif command -v setsid >/dev/null; then own=setsid
fi
case $name in bash) get='<' ;; *) get="$(command -v cat) " ;; esac

run() { # number, stdin, keep or drop, mark
    text=". $channel/$1.state 2>/dev/null; :; eval \"\$($get$channel/$1.cmd)\""
    said="{ set -- \$? $1 said; set +xv; [ -z \"\$BASH_VERSION\" ] || trap - DEBUG; } >/dev/null 2>&1"
    [ "$3" = keep ] && text="$text; $said
. $channel/save"
    (
        exec 3>"$channel/$1.ctl" </dev/null >/dev/null # only the resident has its pipes: their ends are signs
        [ -z "$4" ] || exec 4>"$channel/$1.out"
        (exec $own "$shell" -c "$text" "$name") <"$2" >"$channel/$1.out" 2>&1 3>&- 4>&-
        code=$?
        [ -z "$4" ] || printf '\000%sm' "$4" >&4
        printf 'x%s\000' "$code" >&3
    ) &
}

# Arguments: pids. Kills all that descends from them or is in a group or session of theirs, and them at last, for their
# end is what is waited for. First everything is stopped, so that none can fork away. Builtins only: it works when no
# process can be made any more.
kill_tree() {
    roots=" $* " tree=" $* " before=
    while [ "$before" != "$tree" ]; do
        before=$tree
        for stat in /proc/[0-9]*/stat; do
            read -r line <"$stat" || continue
            pid=${line%% *}
            case $tree in *" $pid "*) continue ;; esac
            set -- ${line##*) }
            case $tree in *" $2 "* | *" $3 "* | *" $4 "*) kill -STOP "$pid"; tree="$tree$pid " ;; esac
        done
    done
    for pid in ${tree#"$roots"} $roots; do kill -KILL "$pid"; done
}

# Kills whatever is in the resident's session, or was started with a HOME or TMPDIR in the sandbox's folder. Many of us
# may do this at the same time, so the search is grep's, which is quick; it finds itself too, and is gone by then.
kill_all() {
    for group in $(jobs -p); do kill -KILL "-$group"; done # at once and for nothing: then there is less to search
    cd /proc
    for _ in 1 2 3 4 5 6 7 8 9; do # what was forked away is found the next time
        killed=
        found=$(grep -laE "\) [^XZ] [0-9]+ [0-9]+ $$ |(HOME|TMPDIR)=$private/" [0-9]*/stat [0-9]*/environ)
        for path in $found; do
            pid=${path%%/*}
            [ "$pid" != $$ ] && kill -KILL "$pid" && killed=yes
        done
        [ -n "$killed" ] || break
    done
}

# Caught, not ignored: what is ignored would stay ignored in every command.
trap 'signalled=1' HUP INT QUIT TERM USR1 USR2 ALRM PIPE
exec 2>/dev/null
while signalled=; read -r verb first second third || [ -n "$signalled" ]; do
    jobs >/dev/null # lets shells that reap only when asked reap
    case $verb in
        put) printf %b "$third" >"$channel/$first" ;;
        run) run "$first" "$second" $third ;;
        kill)
            [ "$leader" = parent ] && group=$second || group=$first
            kill -STOP "$first" "-$group"
            kill_tree "$first" "$group"
            kill -CONT "$second"
            ;;
        ping) echo pong ;;
    esac
    verb=
done

[ -n "$private" ] || exit 0
kill_all
rm -rf "$private" "$channel" || { chmod -R u+rwX "$private"; rm -rf "$private"; }
"""

# Said by a command's shell at its end: one group of builtins, which costs no process. "command" steps over functions of
# the same name, and the folder is asked of the shell, for PWD may hold anything.
_SAY_STATE = r"""{ command printf e; command export -p; command printf "\000"
command cd . && command printf "d%s\000" "$PWD"; } 2>/dev/null >"""

_READ = """file={path}
if [ -d "$file" ]; then echo 'Is a directory'; exit 1; fi
if [ ! -e "$file" ]; then echo 'No such file or directory'; exit 1; fi
if [ ! -f "$file" ]; then echo 'Not a regular file'; exit 1; fi
exec head -c {max_bytes} "$file"
"""

# The copy is made for its mode and owner; the content follows. A link stays a link: what it points to is replaced.
_WRITE = """file={path} data={data}
if [ -L "$file" ] && [ ! -e "$file" ]; then echo 'Dangling symbolic link'; exit 1; fi
if [ -L "$file" ]; then file=$(readlink -f "$file") || exit 1; fi
if [ -d "$file" ]; then echo 'Is a directory'; exit 1; fi
if [ -e "$file" ] && [ ! -f "$file" ]; then echo 'Not a regular file'; exit 1; fi
folder=${{file%/*}}
[ -d "$folder/" ] || mkdir -p "$folder" || exit 1
if [ ! -w "$folder/" ] || {{ [ -e "$file" ] && [ ! -w "$file" ]; }}; then echo 'Permission denied'; exit 1; fi
new=$folder/.write-$$.tmp
trap 'rm -f "$new"' EXIT
if [ -e "$file" ]; then cp -p "$file" "$new" || exit 1; fi
cat "$data" >"$new" && mv -f "$new" "$file"
"""

MAX_FRAME_BYTES = 1 << 20  # more exported variables than this are not kept
_TWO_NUMBERS = re.compile(rb"([1-9]\d{0,8}) ([1-9]\d{0,8})")
_EXIT_CODE = re.compile(rb"\d{1,3}")


@dataclass
class Frames:
    """What a control channel has said so far."""

    pid: int = 0  # as first said: before the command itself could say anything
    parent: int = 0
    variables: bytes | None = None  # shell text; None: the command did not say
    folder: bytes | None = None
    exit_code: int | None = None
    _rest: bytes = b""

    def feed(self, data: bytes) -> None:
        """Take what came; whatever is no frame is passed over, for the command can write here too."""
        *whole, self._rest = (self._rest + data).split(b"\0")
        if len(self._rest) > MAX_FRAME_BYTES:
            self._rest = b"?"  # no kind of ours: the frame is passed over when it ends
        for frame in whole:
            kind, value = frame[:1], frame[1:]
            if kind == b"p" and not self.pid and (numbers := _TWO_NUMBERS.fullmatch(value)):
                self.pid, self.parent = int(numbers[1]), int(numbers[2])
            elif kind == b"x" and (number := _EXIT_CODE.fullmatch(value)):
                self.exit_code = int(number[0])
            elif kind == b"e":
                self.variables = value
            elif kind == b"d":
                self.folder = value


def quote(path: str) -> str:
    """Return one shell word that stands for ``path``."""
    return shlex.quote(path)


def save(channel: str) -> str:
    """Return the shell text that is run after a command, with its exit code and number as arguments."""
    return f"{_SAY_STATE}{channel}/$2.ctl\nexit $1\n"


def begin(channel: str, number: int, state: bytes, *, keep: bool) -> bytes:
    """Return the shell text that is run before a command: ``state``, in a shell that inherited nothing.

    With ``keep`` the state is told at the command's end however it comes, but for a signal, ``exec``, or ``exit`` under
    an EXIT trap of the command's own.
    """
    control = f"{channel}/{number}.ctl"
    start = f"unset HOME BASH_EXECUTION_STRING\nprintf 'p%s %s\\000' $$ $PPID >{control}\n"
    say = f'{{ set +xv; [ "${{3-}}" = said ] || {_SAY_STATE}{control}; }} >/dev/null 2>&1'
    end = f"trap '{say}' EXIT\n" if keep else ""
    return encode(start) + state + encode(end)


def exports(variables: Mapping[str, str]) -> bytes:
    """Return shell text that exports ``variables``."""
    return encode("".join(f"export {name}={quote(value)}\n" for name, value in variables.items()))


def state(variables: bytes, folder: str, fallbacks: Iterable[str]) -> bytes:
    """Return shell text that restores variables and folder; where that is gone, the first fallback that is there.

    The folder comes first, for ``cd`` changes OLDPWD, which is among the variables; so is PWD, which after a command
    that ran elsewhere names that place.
    """
    there = quote(folder)
    attempts = " || ".join(f"cd {quote(path)}" for path in fallbacks)
    return encode(f"cd {there}\n") + variables + encode(f"\nPWD={there}\n[ . -ef {there} ] || {attempts}\n")


def enter(folder: str) -> bytes:
    """Return shell text that goes to ``folder``, or ends the command with a message."""
    return encode(f"cd {quote(folder)} || {{ echo {quote(f'cd: {folder}: No such directory')}; exit 1; }}\n")


def read_command(path: str, max_bytes: int) -> str:
    """Return a command that writes a file's first bytes; on failure it writes the reason and ends with another code."""
    return _READ.format(path=quote(path), max_bytes=max_bytes)


def write_command(path: str, data_path: str) -> str:
    """Return a command that replaces ``path`` by the content of ``data_path``; on failure it writes the reason."""
    return _WRITE.format(path=quote(path), data=quote(data_path))


def encode(text: str) -> bytes:
    """Return the bytes of shell text: NULs go, as shells drop them; lone surrogates are bytes of names, or replaced."""
    text = text.replace("\0", "")
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


def decode_name(name: bytes) -> str:
    """Return the text of a path, such that ``encode`` gives the same bytes back."""
    return name.decode("utf-8", "surrogateescape")
