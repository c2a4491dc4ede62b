from __future__ import annotations

import json

import pytest

from tools.base import Tool
from tools.files import read_file, write_file
from tools.patch import patch
from tools.search import search_files

TOOLS = (read_file, write_file, patch, search_files)
MAX_CHARS = 2600  # about 650 tokens; every request of a rollout pays for them


def definition(tool: Tool) -> str:
    return json.dumps({"name": tool.name, "description": tool.description, "parameters": tool.parameters})


def test_the_definitions_are_short() -> None:
    assert sum(len(definition(tool)) for tool in TOOLS) <= MAX_CHARS


@pytest.mark.parametrize(
    ("tool", "required", "optional"),
    [
        (read_file, {"path"}, {"offset": 1, "limit": 500}),
        (write_file, {"path", "content"}, {}),
        (
            patch,
            set(),
            {"mode": "replace", "path": "", "old_string": "", "new_string": None, "replace_all": False, "patch": ""},
        ),
        (
            search_files,
            {"pattern"},
            {
                "target": "content",
                "path": ".",
                "file_glob": "",
                "limit": 50,
                "offset": 0,
                "output_mode": "content",
                "context": 0,
            },
        ),
    ],
)
def test_names_and_defaults_are_the_original_s(tool: Tool, required: set[str], optional: dict[str, object]) -> None:
    assert tool.toolset == "file"
    assert set(tool.parameters.get("required", [])) == required
    given = dict.fromkeys(required, "x")
    assert tool.checked(given) == {**given, **optional}


def test_choices_are_shown() -> None:
    assert patch.parameters["properties"]["mode"]["enum"] == ["replace", "patch"]
    assert search_files.parameters["properties"]["target"]["enum"] == ["content", "files"]
    assert search_files.parameters["properties"]["output_mode"]["enum"] == ["content", "files_only", "count"]


def test_what_models_send_is_understood() -> None:
    assert read_file.checked({"path": "a", "offset": "3", "limit": None, "encoding": "utf-8"}) == {
        "path": "a",
        "offset": 3,
        "limit": 500,
    }
    assert patch.checked({"path": "a", "replace_all": "true", "new_string": 5})["new_string"] == "5"
    assert patch.checked({"replace_all": "true"})["replace_all"] is True
    assert write_file.checked({"path": "a", "content": 12})["content"] == "12"
