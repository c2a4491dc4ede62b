from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollout.secrecy import for_workers, hold_any, known_secrets, masked, without_secrets

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


CDP_URL = "wss://browsers.example.com/?token=of-the-browser"
DSN = "https://0123456789abcdef@errors.example.com/1"
HOOK = "https://hooks.example.com/services/T0AB12CD3/" + "Zx81kd92mAl0" + "QpW8rT6y"
BASE_URL = "postgresql://app:hunter2-hunter2@db/app"


@pytest.mark.parametrize(
    ("name", "value", "masked"),
    [
        ("OPENAI_API_KEY", "hunter2-hunter2", ["hunter2-hunter2"]),
        ("DB_PASS", "hunter2-hunter2", ["hunter2-hunter2"]),
        ("MYSQL_PWD", "hunter2-hunter2", ["hunter2-hunter2"]),
        ("GITHUB_PAT", "hunter2-hunter2", ["hunter2-hunter2"]),
        ("SITE_COOKIES", "session=hunter2", ["session=hunter2"]),
        ("SLACK_WEBHOOK_URL", HOOK, [HOOK]),
        ("ERRORS_SECRET_URL", DSN, [DSN]),
        ("BROWSER_CDP_URL", CDP_URL, [CDP_URL, "of-the-browser"]),
        ("DATABASE_URL", BASE_URL, [BASE_URL, "hunter2-hunter2"]),
        ("CACHE_URL", "redis://:a%40b@cache:6379/0", ["redis://:a%40b@cache:6379/0"]),
    ],
)
def test_what_is_secret_in_the_environment_is_masked_and_kept_from_children(
    name: str, value: str, masked: list[str]
) -> None:
    assert known_secrets({name: value}, []) == masked
    assert without_secrets({name: value}) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KEYCLOAK_URL", "http://localhost:8080"),
        ("KEYCLOAK_URL", "http://localhost:8080/realms/main?client=the-client"),
        ("TOKENIZER_MODEL", "bert-base-uncased"),
        ("KEYBOARD_LAYOUT", "us-with-dead-keys"),
        ("SSH_AUTH_SOCK", "/tmp/ssh-abcdefgh/agent.1234"),  # noqa: S108 - never opened
        ("HF_TOKEN_PATH", "/home/somebody/.cache/huggingface/token"),
        ("PASSWORD_STORE_DIR", "/home/somebody/.password-store"),
        ("GIT_AUTHOR_NAME", "Somebody Somewhere"),
        ("GIT_ASKPASS", "/usr/lib/git/askpass-of-the-editor"),
        ("PWD", "/home/somebody/project"),
        ("DESKTOP_SESSION", "ubuntu-wayland"),
        ("DATABASE_URL", "postgres://postgres:postgres@localhost:5432/postgres"),
        ("DOCS_URL", "https://example.com/?page=introduction#key"),
    ],
)
def test_what_is_plain_in_the_environment_stays(name: str, value: str) -> None:
    assert known_secrets({name: value}, []) == []
    assert without_secrets({name: value}) == {name: value}


def test_places_and_public_addresses_are_masked_under_no_name(tmp_path: Path) -> None:
    environ = {"SIGNING_KEY": str(tmp_path), "AUTH_URL": "https://login.example.com/realms/main"}
    assert known_secrets(environ, []) == []
    assert known_secrets({"SIGNING_KEY": f"{tmp_path}/none"}, []) == [f"{tmp_path}/none"]


def test_workers_keep_the_way_out() -> None:
    proxies = {"https_proxy": "http://me:hunter2@proxy:3128", "NO_PROXY": "localhost"}
    assert for_workers({**proxies, "A_TOKEN": "hunter2"}) == proxies
    assert without_secrets(proxies) == {"NO_PROXY": "localhost"}


def test_short_values_and_words_that_stand_for_no_key_are_no_secrets() -> None:
    environ = {"A_KEY": "0123456789ab", "B_KEY": "0123456789a", "C": "no secret by its name"}
    assert known_secrets(environ, ["12345678", "1234567", "", "anything", "not-needed"]) == ["0123456789ab", "12345678"]


def test_what_is_masked_are_texts_not_keys() -> None:
    row = {"completed": True, "tool_stats": {"terminal": {"count": 1}}, "turns": ["completed in the terminal", 7, None]}
    assert masked(row, ["completed", "terminal"]) == {**row, "turns": ["*** in the ***", 7, None]}


@given(JSON, st.text(min_size=8, max_size=12), st.booleans())
def test_a_secret_is_seen_and_masked_wherever_it_stands(value: Any, secret: str, ascii_only: bool) -> None:
    nested = json.dumps({"output": f"it is {secret}."}, ensure_ascii=ascii_only)
    twice = json.dumps({"content": nested}, ensure_ascii=ascii_only)
    row = {"turns": [value, f"<{secret}>", nested, twice]}
    secrets = known_secrets({}, [secret])
    assume(secrets)  # it is none of the words that stand for no key
    assert hold_any(json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass"), secrets)
    shown = masked(row, secrets)
    assert shown["turns"][1:3] == ["<***>", '{"output": "it is ***."}']
    assert json.loads(json.loads(shown["turns"][3])["content"]) == {"output": "it is ***."}
    assert masked(shown, secrets) == shown


SHOW_PROC = (
    "import sys; from pathlib import Path; from rollout.secrecy import wipe_proc; wipe_proc();"
    "print(Path('/proc/self', sys.argv[1]).read_bytes().replace(bytes(1), b' ').decode())"
)


def shown_in_proc(file: str, *words: str, **environ: str) -> str:
    program = [sys.executable, "-c", SHOW_PROC, file, *words]
    root = Path(__file__).parents[2]
    return subprocess.run(program, cwd=root, env=environ, check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--api_key=hunter2=", "--model=m"], "--api_key=xxxxxxxx --model=m"),
        (["--api-key=hunter2", "--model=m"], "--api-key=xxxxxxx --model=m"),
        (["--api_key", "hunter2", "-v"], "--api_key xxxxxxx -v"),
        (["--api-key", "hunter=2", "a=b"], "--api-key xxxxxxxx a=b"),
        (["--run_name=--api_key", "x", "--api_keys=y"], "--run_name=--api_key x --api_keys=y"),
    ],
)
def test_the_key_is_wiped_from_the_command_line(words: list[str], shown: str) -> None:
    assert shown_in_proc("cmdline", *words).endswith(f" cmdline {shown} \n")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_secrets_are_wiped_from_the_environment() -> None:
    shown = shown_in_proc("environ", A_KEY="hunter2=2", PLAIN="plain", EMPTY_TOKEN="", CDP="ws://h?token=12345678")
    assert sorted(shown.split()) == [f"A_KEY={'x' * 9}", f"CDP={'x' * 21}", "EMPTY_TOKEN=", "PLAIN=plain"]
