from __future__ import annotations

import pytest

from tools.secret_names import names_secret, secrets_in_address

NAMES_OF_SECRETS = """
OPENAI_API_KEY OPENAI_APIKEY OPENAI_API_KEYS AWS_ACCESS_KEY_ID KEY2 apiKey X-Api-Key x-goog-api-key --api-key
HF_TOKEN HF_TOKENS accessToken _authToken MODAL_TOKEN_ID TOK BASIC_AUTH OAUTH AUTHORIZATION Proxy-Authorization
CLIENT_SECRET client_secret SECRETS PASSWORD PGPASSWORD DB_PASSWD -password DB_PASS SSHPASS MYSQL_PWD GITHUB_PAT
SSH_KEY_PASSPHRASE GOOGLE_CREDENTIALS DB_CREDS COOKIE SITE_COOKIES SLACK_WEBHOOK_URL JWT SESSION X-Session-Id
sig signature
"""
OTHER_NAMES = """
HOME GIT_AUTHOR_NAME GIT_AUTHOR_EMAIL XAUTHORITY TOKENIZER_MODEL TOKENIZERS_PARALLELISM KEYBOARD_LAYOUT
KEYCLOAK_URL SSH_AUTH_SOCK HF_TOKEN_PATH PASSWORD_STORE_DIR --key-file SECRET_NAME PWD OLDPWD PATH LD_LIBRARY_PATH
SSH_ASKPASS BYPASS_HOSTS MONKEY XDG_SESSION_ID DESKTOP_SESSION XDG_SESSION_TYPE PATTERN COMPAT TIKTOK_USER
SECTION page
"""


@pytest.mark.parametrize("name", NAMES_OF_SECRETS.split())
def test_a_name_says_that_it_holds_a_secret(name: str) -> None:
    assert names_secret(name)


@pytest.mark.parametrize("name", OTHER_NAMES.split())
def test_a_name_says_no_such_thing(name: str) -> None:
    assert not names_secret(name)


@pytest.mark.parametrize(
    ("address", "secrets"),
    [
        ("postgres://me:hunter%402@db/x", {"hunter%402", "hunter@2"}),
        ("https://h/?apiKey=hunter2hunter2&page=introduction", {"hunter2hunter2"}),
        ("https://h/?token=short", set()),
        ("https://h:8080/a@b?c=of-no-account", set()),
        ("postgres://postgres:postgres@localhost/x", set()),
        ("amqp://guest:guest@localhost", set()),
        ("http://[::1", set()),
    ],
)
def test_secrets_in_addresses(address: str, secrets: set[str]) -> None:
    assert set(secrets_in_address(address)) == secrets
