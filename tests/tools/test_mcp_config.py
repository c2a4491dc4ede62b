from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.mcp_config import HttpServer, McpConfig, McpConfigError, StdioServer, read_mcp_config


def read(folder: Path, content: Any, **environ: str) -> McpConfig:
    path = folder / "mcp.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return read_mcp_config(path, environ)


def servers(**values: Any) -> dict[str, Any]:
    return {"mcpServers": values}


def test_both_kinds_of_servers(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        servers(
            files={"command": "npx", "args": ["-y", "files"], "env": {"A": "1"}, "cwd": "/srv", "autoApprove": ["x"]},
            web={"type": "streamable-http", "url": "http://localhost:1/mcp", "headers": {"X": "y"}},
            off={"command": "x", "disabled": True},
        ),
    )
    assert config.servers == (
        StdioServer(name="files", command="npx", args=("-y", "files"), env={"A": "1"}, cwd="/srv"),
        HttpServer(name="web", url="http://localhost:1/mcp", headers={"X": "y"}),
    )


def test_variables_are_filled_in_where_they_are_written(tmp_path: Path) -> None:
    values = {"command": "${BIN:-run}", "args": ["$KEY", "${KEY}"], "env": {"TOKEN": "a${KEY}b", "E": "${NO:-}"}}
    (server,) = read(tmp_path, servers(x=values), KEY="secret").servers
    assert server == StdioServer(name="x", command="run", args=("$KEY", "secret"), env={"TOKEN": "asecretb", "E": ""})
    with pytest.raises(McpConfigError, match=r"server 'x': \$\{KEY\} is not set in the environment"):
        read(tmp_path, servers(x=values))


def test_what_is_secret_is_known(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        servers(
            x={"command": "x", "env": {"API_KEY": "key-12345678", "MODE": "production", "TOKEN": "short"}},
            y={
                "url": "https://u:password1@h/mcp?api_key=query-1234&page=12345678",
                "headers": {"Authorization": "Bearer bearer-1234", "Accept": "text/plain"},
            },
        ),
    )
    told = ["Bearer bearer-1234", "bearer-1234", "key-12345678", "password1", "query-1234"]
    assert [secret for secret in config.secrets() if "%" not in secret] == told


def test_what_a_variable_filled_in_is_secret_wherever_it_stands(tmp_path: Path) -> None:
    filled = {
        "GH_PAT": "pat-in-an-argument",
        "MYTOK": "tok-in-the-env",
        "WHERE": "folder-that-is-not-there",
        "QUOTED": 'with "quotes" in it',
        "HOST": "host.example.com",
        "HEADER": "in-a-header",
    }
    plain = {"HOME": "/home/of-somebody", "PLACE": str(tmp_path), "SHORT": "1234567", "UNUSED": "not-asked-for"}
    program = {
        "command": "${WHERE}/run",
        "args": ["--pat", "${GH_PAT}", "${SHORT}", "--quoted=${QUOTED}", "${NONE:-a-default-of-the-file}"],
        "env": {"TK": "${MYTOK}", "HOME": "${HOME}", "MODE": "production"},
        "cwd": "${PLACE}",
    }
    web = {"url": "https://${HOST}/mcp", "headers": {"X-Id": "${HEADER}"}}
    secrets = read(tmp_path, servers(x=program, y=web), **filled, **plain).secrets()
    assert set(filled.values()) <= set(secrets)
    assert 'with \\"quotes\\" in it' in secrets
    assert not {"/home/of-somebody", str(tmp_path), "1234567", "not-asked-for", "production"} & set(secrets)
    assert "a-default-of-the-file" not in secrets


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", "hunter2hunter2"],
        ["--api-key=hunter2hunter2"],
        ["--token", "hunter2hunter2"],
        ["-password", "hunter2hunter2"],
        ["run", "-e", "GITHUB_PAT=hunter2hunter2", "image"],
        ["--header", "Authorization: Bearer hunter2hunter2"],
        ["postgresql://user:hunter2hunter2@host/base"],
        ["https://host/mcp?apiKey=hunter2hunter2&x=1"],
    ],
    ids=" ".join,
)
def test_what_is_written_out_behind_a_secrets_name_is_secret(tmp_path: Path, words: list[str]) -> None:
    assert "hunter2hunter2" in read(tmp_path, servers(x={"command": "x", "args": words})).secrets()


def test_what_is_written_out_elsewhere_is_none(tmp_path: Path) -> None:
    words = ["-y", "some-package", "--key-file", str(tmp_path), "--verbose", "--token", "--port=12345678"]
    assert read(tmp_path, servers(x={"command": "x", "args": words})).secrets() == []


def test_names_are_made_fit_for_tools(tmp_path: Path) -> None:
    names = [server.name for server in read(tmp_path, {"mcpServers": {"github.com/x y": {"command": "a"}}}).servers]
    assert names == ["github_com_x_y"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "is not JSON: .*line 1 column 2"),
        ("[" * 100_000, "is not JSON"),
        ([], "must be a JSON object like"),
        ({"servers": {}}, "must be a JSON object like"),
        ({"mcpServers": {}}, "must be a JSON object like"),
        (servers(x="npx"), "server 'x' must be an object with a command or a url"),
        (servers(x={}), """server 'x' must have either a "command" or a "url\""""),
        (servers(x={"command": "a", "url": "http://h"}), "must have either"),
        (servers(x={"command": 7}), "server 'x': command must be a text that is not empty$"),
        (servers(x={"command": ""}), "server 'x': command must be a text that is not empty$"),
        (servers(x={"command": "a", "args": "b"}), "server 'x': args must be a list of texts$"),
        (servers(x={"command": "a", "args": [1]}), "server 'x': args must be a list of texts$"),
        (servers(x={"command": "a", "env": {"A": 1}}), "server 'x': env.A must be a text$"),
        (servers(x={"command": "a", "env": 1}), "server 'x': env must be an object of texts$"),
        (
            servers(x={"command": "a", "headers": {}}),
            "'headers' is not known beside command; choose from command, args, env, cwd$",
        ),
        ('{"mcpServers": {"x": {"command": "a"}, "x": {"command": "b"}}}', "'x' is there twice in the same object"),
        ('{"mcpServers": {"x": {"command": "a", "command": "b"}}}', "'command' is there twice in the same object"),
        (servers(x={"url": "ftp://h"}), "server 'x': url must be an http or https URL$"),
        (
            servers(x={"url": "http://h", "type": "sse"}),
            "server 'x': type 'sse' is not known here; choose from stdio, http",
        ),
        (
            {"mcpServers": {"a.b": {"command": "x"}, "a b": {"command": "x"}}},
            "server 'a b' cannot be told from server 'a.b'",
        ),
        ({"mcpServers": {"...": {"command": "x"}}}, "has no letter or digit in its name"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, content: Any, complaint: str) -> None:
    with pytest.raises(McpConfigError, match=complaint) as caught:
        read(tmp_path, content)
    assert str(caught.value).startswith(f"--mcp_config={tmp_path}/mcp.json")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(McpConfigError, match="No such file"):
        read_mcp_config(tmp_path / "none.json", {})
