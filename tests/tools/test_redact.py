from __future__ import annotations

import base64
import hashlib
import random
import string
import sysconfig
import time
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.redact import MASK, redact

ALNUM = string.ascii_letters + string.digits
URLSAFE = ALNUM + "-_"


def drawn(alphabet: str, length: int, seed: int) -> str:
    return "".join(random.Random(seed).choices(alphabet, k=length))


def key_shapes(seed: int) -> dict[str, str]:
    """Name → a key as the service would draw it, and never a real one."""
    upper = string.ascii_uppercase + string.digits
    return {
        "sk": f"sk-{drawn(ALNUM, 48, seed)}",
        "openai project": f"sk-proj-{drawn(URLSAFE, 120, seed)}",
        "openrouter": f"sk-or-v1-{drawn('0123456789abcdef', 64, seed)}",
        "anthropic": f"sk-ant-api03-{drawn(URLSAFE, 95, seed)}",
        "stripe": f"sk_live_{drawn(ALNUM, 24, seed)}",
        "github": f"ghp_{drawn(ALNUM, 36, seed)}",
        "github server": f"ghs_{drawn(ALNUM, 36, seed)}",
        "github fine": f"github_pat_{drawn(ALNUM, 22, seed)}_{drawn(ALNUM, 59, seed)}",
        "gitlab": f"glpat-{drawn(URLSAFE, 20, seed)}",
        "aws": f"AKIA{drawn(upper, 16, seed)}",
        "slack": f"xoxb-{drawn(string.digits, 12, seed)}-{drawn(ALNUM, 24, seed)}",
        "google": f"AIza{drawn(URLSAFE, 35, seed)}",
        "huggingface": f"hf_{drawn(ALNUM, 34, seed)}",
        "npm": f"npm_{drawn(ALNUM, 36, seed)}",
        "groq": f"gsk_{drawn(ALNUM, 52, seed)}",
        "sendgrid": f"SG.{drawn(URLSAFE, 22, seed)}.{drawn(URLSAFE, 43, seed)}",
        "jwt": f"eyJ{drawn(URLSAFE, 30, seed)}.eyJ{drawn(URLSAFE, 60, seed)}.{drawn(URLSAFE, 43, seed)}",
    }


SURROUNDINGS = [
    "{}",
    "key {}.",
    '"{}"',
    "export A={}\n",
    "a\n{}\nb",
    r'{{"text": "line\n{}\n"}}',
    "x:{},",
    "({})",
    "|{}|",
]


@pytest.mark.parametrize("around", SURROUNDINGS)
@pytest.mark.parametrize("name", key_shapes(0))
def test_keys_are_masked_wherever_they_stand(name: str, around: str) -> None:
    for seed in range(5):
        key = key_shapes(seed)[name]
        text = around.format(key)
        shown, count = redact(text)
        assert key not in shown
        assert key[10:] not in shown
        assert count == 1
        before, _, after = around.format("\0").partition("\0")
        assert shown.startswith(before + key[:3])
        assert shown.endswith(MASK + after)


def test_a_recognisable_prefix_stays() -> None:
    assert redact("sk-ant-api03-Zx81kd92mAl0QpW8rT6y")[0] == "sk-ant-***"
    assert redact("ghp_0123456789abcdefghij0123456789abcdef")[0] == "ghp_0123***"


@given(st.integers(0, 2**32), st.sampled_from(sorted(key_shapes(0))), st.text(), st.text())
def test_masking_twice_changes_nothing(seed: int, name: str, before: str, after: str) -> None:
    once, _ = redact(f"{before} {key_shapes(seed)[name]} {after}")
    assert redact(once) == (once, 0)


KEY_LIKE = st.text(alphabet="sk-ghp_AIzaeyJ.:/@=\"' \nBearer0123456789abcdefXYZ*", max_size=80)


@given(
    st.lists(KEY_LIKE | st.sampled_from(["api_key=", "password: ", "Bearer ", "://", "sk-", "eyJ", MASK]), max_size=8)
)
def test_masking_twice_changes_nothing_on_odd_texts(pieces: list[str]) -> None:
    once, _ = redact("".join(pieces))
    assert redact(once) == (once, 0)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("OPENAI_API_KEY=Zx81kd92mAl0QpW8rT6y", "OPENAI_API_KEY=Zx81***"),
        ('"api_key": "Zx81kd92mAl0QpW8rT6y"', '"api_key": "Zx81***"'),
        (r"{\"apiKey\": \"Zx81kd92mAl0QpW8rT6y\"}", r"{\"apiKey\": \"Zx81***\"}"),
        ("X-Api-Key: Zx81kd92mAl0QpW8rT6y", "X-Api-Key: Zx81***"),
        ("client_secret: 'Zx81kd92mAl0QpW8rT6y'", "client_secret: 'Zx81***'"),
        ("MY_TOKEN=Zx81kd92mAl0QpW8rT6y # mine", "MY_TOKEN=Zx81*** # mine"),
        ("password = Zx81kd92mAl0QpW8rT6y", "password = Zx81***"),
        ("secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYqwertyuiop", "secret_access_key = wJal***"),
        ("--api-key=0123456789abcdef0123456789abcdef", "--api-key=0123***"),
        ("Authorization: Bearer Zx81kd92mAl0QpW8rT6y", "Authorization: Bearer Zx81***"),
        ("authorization: bearer Zx81kd92mAl0QpW8rT6y", "authorization: bearer Zx81***"),
        ("Authorization: Basic dXNlcjpodW50ZXIyIQ==", "Authorization: Basic dXNl***"),
        ("postgres://me:hunter2@db.local:5432/x", "postgres://me:***@db.local:5432/x"),
        ("redis://:hunter2@localhost", "redis://:***@localhost"),
    ],
)
def test_assignments_headers_and_urls(text: str, shown: str) -> None:
    assert redact(text) == (shown, 1)
    assert redact(shown) == (shown, 0)


def private_key(kind: str) -> str:
    body = base64.encodebytes(bytes(range(256)) * 3).decode()
    return f"-----BEGIN {kind}PRIVATE KEY-----\n{body}-----END {kind}PRIVATE KEY-----"


@pytest.mark.parametrize("kind", ["", "RSA ", "OPENSSH ", "ENCRYPTED "])
def test_private_keys_are_masked_as_a_block(kind: str) -> None:
    shown, count = redact(f"before\n{private_key(kind)}\nafter")
    assert shown == f"before\n-----BEGIN {kind}PRIVATE KEY-----***-----END {kind}PRIVATE KEY-----\nafter"
    assert count == 1
    assert redact(shown) == (shown, 0)


def test_a_private_key_without_its_end_is_masked_to_its_last_line() -> None:
    cut = private_key("")[:400]
    shown, count = redact(f"{cut}\n[OUTPUT TRUNCATED - 5 chars omitted]\nplain words")
    assert count == 1
    assert shown.startswith("-----BEGIN PRIVATE KEY-----***")
    assert shown.endswith("\n[OUTPUT TRUNCATED - 5 chars omitted]\nplain words")
    escaped = private_key("").replace("\n", "\\n")
    assert redact(f'{{"key": "{escaped}"}}')[1] == 1


@given(st.binary(min_size=16, max_size=64))
def test_digests_uuids_and_encoded_files_pass(data: bytes) -> None:
    texts = [
        hashlib.sha1(data, usedforsecurity=False).hexdigest(),
        f"sha256:{hashlib.sha256(data).hexdigest()}",
        f"commit {hashlib.sha1(data, usedforsecurity=False).hexdigest()}\nAuthor: A <a@b.c>",
        str(uuid.UUID(bytes=data[:16])),
        f"id={uuid.UUID(bytes=data[:16])}",
        base64.b64encode(data * 20).decode(),
        base64.encodebytes(data * 20).decode(),
        f"data:image/png;base64,{base64.b64encode(data * 20).decode()}",
        f'"integrity": "sha512-{base64.b64encode(hashlib.sha512(data).digest()).decode()}"',
        data.hex(" "),
    ]
    for text in texts:
        assert redact(text) == (text, 0)


@pytest.mark.parametrize(
    "text",
    [
        "api_key = os.environ['OPENAI_API_KEY']",
        "api_key=get_secret_from_vault_v2('name')",
        "client = OpenAI(api_key=settings.openai_api_key, base_url=url)",
        "export OPENAI_API_KEY=$(cat ~/.keys/openai)",
        "API_KEY=your-api-key-here",
        "API_KEY=<your key>  # sk-...",
        "password: str = Field(min_length=12)",
        "password_hash: 0123456789abcdef0123456789abcdef",
        "secret_file = /run/secrets/database2password3",
        "if token == TOKEN_SEPARATOR_2: return",
        "next_page_token: CAUQAA12345678901234",
        "max_tokens=4096, tokenizer=cl100k_base_tokenizer",
        "cache_key = sha256_of_the_whole_thing_v2",
        "the task-specific-and-quite-long-name-2 of a disk-usage-report-for-2024",
        "sk-estimator-doc-link sk-container-id-12 sk-toggleable__control sk-learn-contrib-project-2",
        "https://example.org:8080/a@b?c=d",
        "git clone https://${USER}:${TOKEN}@example.org/x.git",
        "ssh://git@example.org:22/x.git",
        "basic understanding_of_things_at_length",
        "Bearer authentication is described in RFC 6750",
        'if "-----BEGIN PRIVATE KEY-----" in text and "-----END PRIVATE KEY-----" in text:',
        "AKIAS and ASIAN markets; ghp_short; hf_hub_download(repo_id); npm_config_registry=x",
        "eyJhbGciOiJIUzI1NiJ9",
    ],
)
def test_ordinary_text_passes(text: str) -> None:
    assert redact(text) == (text, 0)


def test_the_standard_library_passes() -> None:
    # a stand-in for "ordinary code": two hundred files with hashes, URLs, passwords and keys as words
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.glob("*.py"))[:200]:
        text = path.read_text(encoding="utf-8", errors="replace")
        shown, count = redact(text)
        assert (count, shown == text) == (0, True), path


@given(st.text(alphabet=ALNUM + "!#%+/", min_size=8, max_size=40), st.text(), st.text())
def test_exact_secrets_are_masked(secret: str, before: str, after: str) -> None:
    text = f"{before}\n{secret}\n{after}"
    shown, count = redact(text, [secret])
    assert secret not in shown
    assert count >= 1
    assert redact(shown, [secret]) == (shown, 0)


def test_exact_secrets_count_each_time_and_the_longer_goes_first() -> None:
    assert redact("hunter2hunter2! hunter2hunter2!?", ["hunter2h", "hunter2hunter2!?"])[0] == "hu***unter2! hunt***"
    assert redact("correct horse, correct horse", ["correct horse"]) == ("cor***, cor***", 2)
    assert redact("short words stay short", ["short", ""]) == ("short words stay short", 0)


@pytest.mark.parametrize(
    "text",
    [
        "x" * 100_000,
        "sk-" * 33_000,
        "-----BEGIN PRIVATE KEY-----\n" * 3_500,
        "-----BEGIN PRIVATE KEY-----" + "A " * 50_000,
        "eyJ" * 33_000,
        "=" * 100_000,
        "api_key=" + "a" * 100_000,
        "://a:" * 20_000,
        "bearer " * 14_000,
        "password: x\n" * 8_000,
        "é" * 100_000,
    ],
    ids=lambda text: text[:12].strip(),
)
def test_long_texts_take_milliseconds(text: str) -> None:
    started = time.process_time()
    redact(text)
    assert time.process_time() - started < 0.2  # some 5 ms on a quiet machine; a bad pattern takes seconds
