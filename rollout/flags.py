"""The command line's words: what was typed, checked against the flags there are, as text.

Owns the spelling of flags and the ``--help`` text; what a value may be is RunConfig's business. Everything wrong here
is a UsageError whose message is one line.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollout.config import RunConfig
from rollout.join import recorded_flags

SWITCHES = ("resume", "verbose", "reasoning_disabled", "keep_no_reasoning", "list_distributions", "clean", "help")
_SWITCH_WORDS = ("true", "false")
LISTS = ("providers_allowed", "providers_ignored", "providers_order", "merge")
REQUIRED = ("dataset_file", "batch_size", "run_name")
# Flags whose name or text is not RunConfig's.
_OWN_TEXT = {
    "prefill_messages_file": "JSON file holding an array of {role, content}; few-shot priming, never saved.",
    "list_distributions": "Print the toolset distributions and exit; needs no other flag.",
    "clean": "Remove the sandboxes that dead runs left behind, say which, and exit; needs no other flag.",
    "help": "Print this and exit.",
}
FLAGS = (*(name for name in RunConfig.model_fields if name != "prefill_messages"), *_OWN_TEXT)
_DEFAULT_WORDS = {"api_key": "from the environment", "sandbox": "auto", "concurrency": "auto"}


class UsageError(ValueError):
    """The user's mistake on the command line, told in one line."""


def checked_words(argv: Sequence[str]) -> list[str]:
    """Return the words as ``--flag=value``, each flag with its value: fire would take ``-v`` or ``-`` for its own.

    Raises UsageError for what fire would let pass: stray words, unknown flags, a text flag without its value.
    """
    words: list[str] = []
    before = ""  # the flag of the last word, where that word had no value of its own
    for word in argv:
        if before and (word.lower() in _SWITCH_WORDS if before in SWITCHES else not word.startswith("--")):
            words[-1] = f"--{before}={word}"
            before = ""
            continue
        _refuse_missing(before)
        if word == "-h":
            word = "--help"  # noqa: PLW2901 - the only short form there is
        if not re.match(r"--[A-Za-z]", word):
            raise UsageError(f"unexpected word {word!r}; every option is written --flag=value")
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if name not in FLAGS:
            raise UsageError(_unknown_flag(name))
        words.append(f"--{name}={value if equals else 'true'}")
        before = "" if equals else name
    _refuse_missing(before)
    for name, _, value in (word[2:].partition("=") for word in words):
        if not value and name != "ephemeral_system_prompt":
            _refuse_missing(name)
    return words


def _refuse_missing(flag: str) -> None:
    if flag and flag not in SWITCHES:
        raise UsageError(f"--{flag} has no value; write --{flag}=VALUE")


def _unknown_flag(name: str) -> str:
    near = difflib.get_close_matches(name, FLAGS, n=1)
    hint = f"did you mean --{near[0]}?" if near else "--help lists the flags"
    return f"unknown flag --{name}; {hint}"


def switch(name: str, text: str) -> bool:
    """Return a switch's value: true or false in any case."""
    word = text.strip().lower()
    if word not in _SWITCH_WORDS:
        raise UsageError(f"--{name}={text!r} is no switch value; write --{name}, --{name}=true or --{name}=false")
    return word == "true"


def to_config(typed: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> RunConfig:
    """Make the RunConfig of the flags as typed. Raises UsageError or JoinError with the first thing that is wrong."""
    if typed.get("merge"):
        typed = {**recorded_flags(typed["merge"]), **typed}
    for name in REQUIRED:
        if not typed.get(name, "").strip():
            raise UsageError(f"--{name} is required")
    values = {name: _value(name, text) for name, text in typed.items() if name in RunConfig.model_fields}
    for name in LISTS:
        if values.get(name) == ():
            raise UsageError(f"--{name}={typed[name]} names nothing; leave it out, or give names with commas between")
    if values.get("concurrency", "").lower() == "auto":
        del values["concurrency"]
    if "sandbox" not in values and environ.get("TERMINAL_ENV"):
        values["sandbox"] = environ["TERMINAL_ENV"]
    if "prefill_messages_file" in typed:
        values["prefill_messages"] = _read_prefill(Path(typed["prefill_messages_file"]))
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise UsageError(_first_problem(error, environ)) from None


def _value(name: str, text: str) -> Any:
    if name in SWITCHES:
        return switch(name, text)
    if name in LISTS:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text


def _first_problem(error: ValidationError, environ: Mapping[str, str]) -> str:
    problem = error.errors(include_url=False)[0]
    name = str(problem["loc"][0])
    if name == "prefill_messages":
        place = ".".join(map(str, problem["loc"][1:]))
        return f"--prefill_messages_file: message {place}: {problem['msg'].lower()}"
    value = problem["input"]
    from_environ = name == "sandbox" and environ.get("TERMINAL_ENV") == value
    origin = f"TERMINAL_ENV={value}" if from_environ else f"--{name}={value}"
    if problem["type"] == "literal_error":
        return f"{origin} is not known; choose from {problem['ctx']['expected'].replace(' or ', ', ')}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{origin}: {message[0].lower()}{message[1:]}"


def _read_prefill(path: Path) -> list[Any]:
    try:
        messages = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"--prefill_messages_file={path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--prefill_messages_file={path} is not JSON: {error}") from None
    if not isinstance(messages, list):
        raise UsageError(f"--prefill_messages_file={path} must hold a JSON array of {{role, content}} objects")
    return messages


def words_of(config: RunConfig) -> list[str]:
    """Return the flags that make this config, but for what must not be shown or is a matter of one start."""
    words = []
    for name, field in RunConfig.model_fields.items():
        value = getattr(config, name)
        if value == field.default or name in ("api_key", "prefill_messages", "resume", "merge", "verbose"):
            continue
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        words.append(f"--{name}={text.lower() if isinstance(value, bool) else text}")
    return words


def help_text() -> str:
    """Return what ``--help`` prints: every flag, its text, its default."""
    lines = ["Runs each prompt of a JSONL file through a tool-calling agent and saves the trajectories.", ""]
    lines += ["usage: python batch_runner.py --dataset_file=FILE --batch_size=N --run_name=NAME [--flag=value ...]", ""]
    for name in FLAGS:
        default = default_of(name)
        words = "  (required)" if name in REQUIRED else f"  (default {default})" if default else ""
        lines += [f"  --{name}{words}", f"      {text_of(name)}"]
    lines += [
        "",
        "exit codes: 0 every sample done, 1 some failed or were not run, 2 bad usage or input, 130 interrupted",
    ]
    return "\n".join(lines)


def text_of(name: str) -> str:
    """Return what a flag means, in a line."""
    return _OWN_TEXT.get(name) or _texts_of_fields()[name]


@cache
def _texts_of_fields() -> dict[str, str]:
    """Return the text under each field of RunConfig; read from the source, and only when somebody wants to see it."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(RunConfig)).body if isinstance(node, ast.ClassDef))
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def default_of(name: str) -> str:
    """Return a flag's default in words; "" when there is none."""
    if name in REQUIRED or name in _OWN_TEXT:
        return ""
    default = RunConfig.model_fields[name].default
    if default is None or default == ():
        default = ""
    return _DEFAULT_WORDS.get(name) or str(default).replace("False", "false")
