"""The program as its users have it: a process, a dataset, a scripted endpoint, and the files that are left."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from endpoints.script import ScriptedReply
from endpoints.scripted import RecordedRequest, ScriptedEndpoint
from tests.forked import Forked

ROOT = Path(__file__).resolve().parent.parent
Json = dict[str, Any]
Scenes = Mapping[str, Sequence[ScriptedReply]]  # prompt → what the model says to it

# What must not come in from whoever runs the tests.
_NOT_INHERITED = re.compile(r"KEY|TERMINAL_|PROXY|^OPENAI|^PYTHON(UTF8|IOENCODING|DONTWRITEBYTECODE)", re.IGNORECASE)
_OF_THE_START = re.compile(r"^PYTHON|^LC_|^LANG|^LD_|KEY|TOKEN|SECRET|PASS|^--api.key|^--executor", re.IGNORECASE)
_RESPONSE = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def call(name: str, arguments: Any, **more: Any) -> ScriptedReply:
    """One reply with one tool call, and a thought."""
    values = {"reasoning": "let me see", "tool_calls": [{"name": name, "arguments": arguments}], **more}
    return ScriptedReply.model_validate(values)


def terminal(command: str, **more: Any) -> ScriptedReply:
    return call("terminal", {"command": command}, **more)


def answer(text: str, **more: Any) -> ScriptedReply:
    """One final reply, and a thought."""
    return ScriptedReply.model_validate({"reasoning": "that is it", "content": text, **more})


def reply(**values: Any) -> ScriptedReply:
    return ScriptedReply.model_validate(values)


def script(scenes: Scenes) -> list[ScriptedReply]:
    """All scenes as one script; no prompt may be part of another."""
    assert not [(one, other) for one in scenes for other in scenes if one != other and one in other]
    return [line.model_copy(update={"prompt": prompt}) for prompt, lines in scenes.items() for line in lines]


@dataclass(frozen=True)
class Ended:
    """A run of the program that is over."""

    code: int
    stdout: str
    stderr: str

    @property
    def told(self) -> str:
        """What it says on stderr, but for what dead runs of other tests have left, which any run may find."""
        lines = self.stderr.splitlines(keepends=True)
        return "".join(line for line in lines if not line.endswith(" sandboxes that a dead run had left behind\n"))

    @property
    def last_line(self) -> str:
        """Of the report."""
        return self.stdout.rstrip().rpartition("\n")[2]


@dataclass
class Workplace:
    """A folder to run the program in."""

    path: Path
    env: dict[str, str] = field(default_factory=dict)
    fresh: bool = False  # the program begins as an interpreter of its own, for tests of how it begins

    def dataset(self, rows: Iterable[Any], name: str = "prompts.jsonl") -> Path:
        """Write a dataset; text is a prompt, bytes are a raw line."""
        with (self.path / name).open("wb") as file:
            for row in rows:
                if isinstance(row, bytes):
                    file.write(row + b"\n")
                else:
                    value = {"prompt": row} if isinstance(row, str) else row
                    file.write(json.dumps(value, ensure_ascii=False).encode() + b"\n")
        return self.path / name

    def command(self, base_url: str, flags: Mapping[str, Any]) -> list[str]:
        values: Json = {
            "dataset_file": "prompts.jsonl",
            "batch_size": 2,
            "run_name": "r",
            "distribution": "terminal_only",
            "sandbox": "local",
            "base_url": base_url,
            "model": "scripted",
            "num_workers": 1,
            **flags,
        }
        return self.words(*(f"--{name}={value}" for name, value in values.items() if value is not None))

    @staticmethod
    def words(*words: str) -> list[str]:
        """The program with just these words."""
        return [sys.executable, str(ROOT / "batch_runner.py"), *words]

    def environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not _NOT_INHERITED.search(name)}
        return {**kept, **self.env}

    def start(self, base_url: str, **flags: Any) -> subprocess.Popen[str]:
        return self.start_command(self.command(base_url, flags))

    def start_command(self, command: Sequence[str], **streams: Any) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        kind = subprocess.Popen if streams or self._needs_interpreter(command) else Forked
        return kind(
            command, cwd=self.path, env=self.environ(), encoding="utf-8", errors="replace", **{**pipes, **streams}
        )

    def _needs_interpreter(self, command: Sequence[str]) -> bool:
        """Tell whether the start matters: that of another program, what Python itself reads, what /proc shows."""
        settings = [*self.env, *command[2:]]
        return self.fresh or command[:2] != self.words() or any(map(_OF_THE_START.search, settings))

    def run(self, base_url: str, **flags: Any) -> Ended:
        return self.ended(self.start(base_url, **flags))

    def run_words(self, *words: str) -> Ended:
        return self.ended(self.start_command(self.words(*words)))

    @staticmethod
    def ended(process: subprocess.Popen[str], timeout_seconds: float = 60) -> Ended:
        """Wait for the end of the program."""
        try:
            stdout, stderr = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            raise AssertionError(f"the program hung\n{stdout}\n{stderr}") from None
        return Ended(process.returncode, stdout, stderr)

    def run_dir(self, run_name: str = "r") -> Path:
        return self.path / "data" / run_name

    def rows(self, run_name: str = "r") -> list[Json]:
        """All rows of the batch files, in the order of files and lines."""
        files = sorted(self.run_dir(run_name).glob("batch_*.jsonl"), key=lambda path: int(path.stem[6:]))
        return [json.loads(line) for path in files for line in path.read_bytes().splitlines()]

    def trajectories(self, run_name: str = "r") -> list[Json]:
        lines = (self.run_dir(run_name) / "trajectories.jsonl").read_bytes().splitlines()
        return [json.loads(line) for line in lines]

    def json(self, name: str, run_name: str = "r") -> Any:
        return json.loads((self.run_dir(run_name) / name).read_bytes())


@dataclass(frozen=True)
class Played:
    """A run over scenes that is over."""

    place: Workplace
    ended: Ended
    requests: list[RecordedRequest]

    def row(self, prompt: str) -> Json:
        """The only row of a prompt."""
        (row,) = [row for row in self.place.rows() if prompt_of(row) == prompt]
        return row

    def asked(self, prompt: str) -> list[Json]:
        """The bodies of a prompt's requests."""
        return [request.body for request in self.requests if asks(request.body, prompt)]


def play(place: Workplace, scenes: Scenes, **flags: Any) -> Played:
    """Run the program over the scenes' prompts, in their order."""
    place.dataset(scenes)
    with ScriptedEndpoint(script(scenes)) as endpoint:
        ended = place.run(endpoint.base_url, **flags)
    return Played(place, ended, list(endpoint.requests))


def asks(body: Json, prompt: str) -> bool:
    return any(message["role"] == "user" and message["content"] == prompt for message in body["messages"])


def prompts_of(endpoint: ScriptedEndpoint) -> list[str]:
    """The prompt of each request, in order."""
    return [
        next(message["content"] for message in request.body["messages"] if message["role"] == "user")
        for request in endpoint.requests
    ]


def prompt_of(row: Json) -> str:
    """What a row answers, failed or not."""
    return str(row["prompt"]) if row.get("failed") else turns(row, "human")[0]


def turns(row: Json, sender: str) -> list[str]:
    return [turn["value"] for turn in row["conversations"] if turn["from"] == sender]


def responses(row: Json) -> list[Json]:
    """The blocks of all tool turns, in order: {tool_call_id, name, content}."""
    return [json.loads(block) for turn in turns(row, "tool") for block in _RESPONSE.findall(turn)]


def results(row: Json) -> list[Any]:
    """What the tools gave back, in order."""
    return [response["content"] for response in responses(row)]


def nap(seconds: int) -> str:
    """A command that nobody waits for, told from all others of the machine, another test run's too."""
    return f"sleep {seconds}.{os.getpid():07}"


def wait_until(true: Callable[[], Any], what: str, timeout_seconds: float = 60) -> None:
    """Ask again and again, and spend at most a tenth of the time on asking: what is waited for wants the core too."""
    asked = time.monotonic()
    deadline = asked + timeout_seconds
    while not true():
        answered = time.monotonic()
        assert answered < deadline, f"it took too long until {what}"
        time.sleep(max(0.02, 9 * (answered - asked)))
        asked = time.monotonic()


def processes_with(text: str) -> list[int]:
    """The processes in whose command line this text stands, its words parted by blanks."""
    found = []
    for pid in [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if text in words and pid != os.getpid():
            found.append(pid)
    return found


def descendants(pid: int) -> list[int]:
    """The process's children, their children and so on."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        return []
    return [pid for child in map(int, children) for pid in (child, *descendants(child))]


@contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Let no program outlive a test that failed."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
