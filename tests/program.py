"""The program as its users have it: a process, a dataset, a scripted endpoint, and the files that are left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from endpoints.script import ScriptedReply
from endpoints.scripted import ScriptedEndpoint

ROOT = Path(__file__).resolve().parent.parent
Json = dict[str, Any]


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


@dataclass(frozen=True)
class Ended:
    """A run of the program that is over."""

    code: int
    stdout: str
    stderr: str


@dataclass
class Workplace:
    """A folder to run the program in."""

    path: Path
    env: dict[str, str] = field(default_factory=dict)

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
        words = [f"--{name}={value}" for name, value in values.items() if value is not None]
        return [sys.executable, str(ROOT / "batch_runner.py"), *words]

    def environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if "KEY" not in name and name != "TERMINAL_ENV"}
        return {**kept, **self.env}

    def start(self, base_url: str, **flags: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(base_url, flags),
            cwd=self.path,
            env=self.environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def run(self, base_url: str, timeout_seconds: float = 60, **flags: Any) -> Ended:
        process = self.start(base_url, **flags)
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


def prompts_of(endpoint: ScriptedEndpoint) -> list[str]:
    """The prompt of each request, in order."""
    return [
        next(message["content"] for message in request.body["messages"] if message["role"] == "user")
        for request in endpoint.requests
    ]
