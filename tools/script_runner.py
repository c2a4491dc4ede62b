"""What runs a script inside a sandbox: a program of its own, of which execute_code sends the text in.

This program does not import it: it runs under whatever Python the sandbox has, from 3.7 on, and uses its library alone.
``JOB``, set in front of the text, holds the script, the stubs and the bounds. The script's calls go out through the
FIFO ``requests`` beside this file, one line a call; the answers come in through this program's stdin, which the script
has under another number. A lock lets the script's threads and forks call too. At the end one line goes to stdout: how
it ended, the exit code, stdout and stderr in base64.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
DRAIN_SECONDS = 1.0  # how long the output of children that outlive the script is waited for

STUBS = '''"""The tools, as functions. Each returns the tool's result, a dict; what went wrong is under "error"."""
import fcntl, json, os, threading

_folder = os.path.dirname(os.path.abspath(__file__))
_answers = int(os.environ.get("TOOL_ANSWERS_FD", "-1"))
_lock = threading.Lock()


def _call(name, arguments):
    arguments = {key: value for key, value in arguments.items() if value is not None}
    request = json.dumps({"name": name, "arguments": arguments}) + "\\n"
    with _lock, open(os.path.join(_folder, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with open(os.path.join(_folder, "requests"), "w") as requests:
            requests.write(request)
        answer = b""
        while not answer.endswith(b"\\n"):
            piece = os.read(_answers, 65536)
            if not piece:
                raise RuntimeError("the tools do not answer any more")
            answer += piece
    return json.loads(answer.decode())
'''


class Output:
    """One stream of the script: 40 % from its head and 60 % from its tail, where it is too long."""

    def __init__(self, limit: int) -> None:
        self.head_bytes, self.tail_bytes = limit * 2 // 5, limit - limit * 2 // 5
        self.head, self.tail, self.total = b"", b"", 0

    def read(self, pipe: Any) -> None:
        """Read a pipe to its end."""
        while True:
            piece = os.read(pipe.fileno(), 65536)
            if not piece:
                return
            self.total += len(piece)
            room = self.head_bytes - len(self.head)
            self.head += piece[:room]
            self.tail = (self.tail + piece[room:])[-self.tail_bytes :]

    def encoded(self) -> str:
        """Return what was kept, in base64; never blank."""
        omitted = self.total - len(self.head) - len(self.tail)
        notice = b"\n[%d of %d bytes left out]\n" % (omitted, self.total) if omitted else b""
        return base64.b64encode(self.head + notice + self.tail).decode() or "="


def start(job: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the script in a process group of its own, with no secret in its environment."""
    for name, text in (("script", job["code"]), (job["module"], STUBS + job["stubs"])):
        (FOLDER / f"{name}.py").write_text(text, encoding="utf-8")
    answers = os.dup(0)
    environ = {name: value for name, value in os.environ.items() if not SECRET.search(name)}
    environ.update(PYTHONUNBUFFERED="1", PYTHONDONTWRITEBYTECODE="1", PYTHONUTF8="1", TOOL_ANSWERS_FD=str(answers))
    return subprocess.Popen(
        [sys.executable, str(FOLDER / "script.py")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        pass_fds=[answers],
        start_new_session=True,
    )


def main(job: dict[str, Any]) -> None:
    """Run the script and say how it ended."""
    process = start(job)
    outputs = [Output(limit) for limit in job["limits"]]
    readers = [
        threading.Thread(target=output.read, args=(pipe,), daemon=True)
        for output, pipe in zip(outputs, (process.stdout, process.stderr))  # noqa: B905 - unknown before 3.10
    ]
    for reader in readers:
        reader.start()
    ended = "ended"
    try:
        process.wait(job["seconds"])
    except subprocess.TimeoutExpired:
        ended = "timeout"
    with suppress(ProcessLookupError):  # it had no children, and has ended
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    deadline = time.monotonic() + DRAIN_SECONDS
    for reader in readers:
        reader.join(max(0.0, deadline - time.monotonic()))
    shutil.rmtree(str(FOLDER), ignore_errors=True)
    sys.stdout.write(" ".join(["\n" + ended, str(code), *(output.encoded() for output in outputs)]) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a reader may still wait for children that hold a pipe


if __name__ == "__main__":
    main(globals()["JOB"])
