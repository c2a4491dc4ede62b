from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
import tracemalloc
import zlib
from pathlib import Path

import pytest

from rollout.chat_model import CallLimits, ModelError, OpenAIChatModel
from rollout.messages import UserMessage
from tests.rollout.asking import HELLO, KEY, LIMITS, QUICK, ask, config, failure, reply
from tests.rollout.http_server import (
    Answer,
    as_is,
    body_of,
    chunked,
    cut_off,
    endless,
    hangs_up,
    raw,
    says,
    serve,
    stalled,
    zipped,
)


def test_sends_nothing_the_environment_slips_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "Authorization: Bearer other\nX-Secret: 1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-not-for-this-host")
    _, (asked,) = ask(says())
    assert asked.headers["authorization"] == f"Bearer {KEY}"
    assert not any(name.startswith("x-") for name in asked.headers)
    assert "cookie" not in asked.headers


def test_cookies_are_not_kept() -> None:
    _, requests = ask(raw("{}", headers={"Set-Cookie": "a=b"}), says())
    assert "cookie" not in requests[1].headers


def test_a_redirect_is_not_followed() -> None:
    kind, message, count = failure(raw("<title>Moved</title>", 307, {"Location": "http://127.0.0.1:9/v1"}))
    told = "HTTP 307: it redirects to http://127.0.0.1:9/v1; give --base_url as it is after redirects"
    assert (kind, message, count) == ("bad_request", told, 1)


@pytest.mark.parametrize(
    "answer",
    [
        zipped(json.dumps(body_of()).encode()),
        chunked(json.dumps(body_of()).encode()),
        raw(json.dumps(body_of()), headers={"Content-Type": "text/html"}),
        raw(b"\xef\xbb\xbf" + json.dumps(body_of()).encode(), headers={"Content-Type": "text/plain; charset=latin-1"}),
        as_is(b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps(body_of()).encode(), close=True),
    ],
    ids=["gzip", "chunked", "html type", "BOM", "until close"],
)
def test_ways_to_send_a_good_answer(answer: Answer) -> None:
    assert reply(answer).message.content == "fine"


def test_a_conversation_of_many_megabytes_is_sent() -> None:
    _, (asked,) = ask(says(), messages=(UserMessage("é" * 2_000_000),))
    assert len(asked.body["messages"][0]["content"]) == 2_000_000


@pytest.mark.parametrize("answer", [cut_off(), hangs_up()], ids=["cut off", "hangs up"])
def test_a_broken_connection_is_retried(answer: Answer) -> None:
    assert reply(answer, says()).message.content == "fine"
    assert failure(answer)[::2] == ("connection", QUICK.max_tries)


def test_a_base_url_may_be_a_bare_host() -> None:
    async def run() -> None:
        async with serve(says()) as endpoint:
            for ending in ("", "/"):
                base_url = endpoint.base_url.removesuffix("/v1") + ending
                model = OpenAIChatModel(config(base_url), KEY, LIMITS)
                await model.complete(HELLO, ())
                await model.close()
            assert {asked.path for asked in endpoint.requests} == {"/chat/completions"}

    asyncio.run(run())


def test_a_refused_connection() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        base_url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"

        async def run() -> None:
            model = OpenAIChatModel(config(base_url), KEY, LIMITS)
            with pytest.raises(ModelError) as caught:
                await model.complete(HELLO, ())
            assert caught.value.kind == "connection"
            await model.close()

        asyncio.run(run())


def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> str:
        async with serve(says()) as proxy:
            monkeypatch.setenv("http_proxy", proxy.base_url.removesuffix("/v1"))
            monkeypatch.delenv("no_proxy", raising=False)
            model = OpenAIChatModel(config("http://model.example/v1"), KEY, LIMITS)
            await model.complete(HELLO, ())
            await model.close()
            return proxy.requests[0].path

    assert asyncio.run(run()) == "http://model.example/v1/chat/completions"


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    path = tmp_path / "both.pem"
    command = [openssl, "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*command, "-keyout", path, "-out", tmp_path / "cert.pem"], check=True, capture_output=True, timeout=30
    )
    with path.open("a") as both:
        both.write((tmp_path / "cert.pem").read_text())
    return path


def test_certificates_are_checked(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate)

    async def run() -> str:
        async with serve(says(), tls=tls) as endpoint:
            model = OpenAIChatModel(config(endpoint.base_url), KEY, LIMITS)
            try:
                return (await model.complete(HELLO, ())).message.content
            except ModelError as error:
                return f"{error.kind}: {error}"
            finally:
                await model.close()

    told = asyncio.run(run())
    assert told.startswith("connection: ")
    assert "CERTIFICATE_VERIFY_FAILED" in told
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert asyncio.run(run()) == "fine"


def test_what_is_not_http() -> None:
    assert failure(as_is(b"SSH-2.0-OpenSSH_9.6\r\n", close=True))[0] == "bad_response"


@pytest.mark.parametrize("answer", [stalled(), stalled(b"")], ids=["in the body", "before the head"])
def test_a_stalled_answer_times_out(answer: Answer) -> None:
    limits = CallLimits(request_seconds=0.1, retry=QUICK)
    assert reply(answer, says(), limits=limits).message.content == "fine"
    assert failure(answer, limits=limits) == ("timeout", "no whole answer within 0.1 s", QUICK.max_tries)


def test_a_body_without_end_eats_no_memory() -> None:
    tracemalloc.start()
    kind, message, _ = failure(endless())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (kind, message) == ("bad_response", "HTTP 200 with a body of more than 200000 bytes")
    assert peak < 20_000_000


def test_a_compressed_bomb_eats_no_memory() -> None:
    packer = zlib.compressobj(wbits=31)
    bomb = b"".join(packer.compress(b" " * 1_000_000) for _ in range(300)) + packer.flush()
    tracemalloc.start()
    kind, _, _ = failure(raw(bomb, headers={"Content-Encoding": "gzip"}))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert kind == "bad_response"
    assert peak < 20_000_000
