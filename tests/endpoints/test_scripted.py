from __future__ import annotations

import asyncio
import base64
import gzip
import http.client
import io
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from endpoints.child import EndpointError
from endpoints.picture import picture
from endpoints.script import Script, ScriptedReply, ServerLimits
from endpoints.scripted import ScriptedEndpoint
from tests.program import ROOT

Json = dict[str, Any]
PROMPT = [{"role": "user", "content": "hi"}]
PATIENCE_SECONDS = 30.0


def endpoint(*lines: Json, limits: Json | None = None) -> ScriptedEndpoint:
    replies = tuple(ScriptedReply.model_validate(line) for line in lines)
    return ScriptedEndpoint(Script("script", replies, ServerLimits.model_validate(limits or {})))


def connect(served: ScriptedEndpoint, timeout: float = PATIENCE_SECONDS) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(served.base_url.split("/")[2], timeout=timeout)


def ask(connection: http.client.HTTPConnection, **body: Any) -> http.client.HTTPResponse:
    content = json.dumps({"model": "m", "messages": PROMPT, **body})
    connection.request("POST", "/v1/chat/completions", content, {"Content-Type": "application/json"})
    return connection.getresponse()


def answer_of(*lines: Json, **body: Any) -> Json:
    """Return the first answer of a script, as JSON."""
    with endpoint(*lines) as served:
        connection = connect(served)
        response = ask(connection, **body)
        value: Json = json.loads(response.read())
        connection.close()
    assert response.status == 200
    return value


def message_of(line: Json) -> Json:
    message: Json = answer_of(line)["choices"][0]["message"]
    return message


def raw(served: ScriptedEndpoint, timeout: float = PATIENCE_SECONDS) -> socket.socket:
    """Open a connection and ask by hand."""
    host, port = served.base_url.split("/")[2].split(":")
    client = socket.create_connection((host, int(port)), timeout=timeout)
    content = json.dumps({"messages": PROMPT}).encode()
    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content))
    return client


def read_all(client: socket.socket) -> tuple[bytes, type[OSError] | None]:
    """Return what came until the end, and how it ended if not properly."""
    data = b""
    try:
        while chunk := client.recv(65536):
            data += chunk
    except (TimeoutError, ConnectionResetError) as error:
        return data, type(error)
    return data, None


# What is said


def test_an_answer() -> None:
    answer = answer_of({"content": "Hello"}, model="gpt-x")
    assert answer["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
    ]
    assert (answer["object"], answer["model"]) == ("chat.completion", "gpt-x")
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0


@pytest.mark.parametrize("content", ["naïve 🙂", "", None, [{"type": "text", "text": "a"}, {"type": "image_url"}]])
def test_content_of_any_form(content: Any) -> None:
    assert message_of({"content": content})["content"] == content


def test_reasoning_in_its_three_forms() -> None:
    line = {"content": "x", "reasoning": "a", "reasoning_content": "b", "reasoning_details": [{"text": "c"}]}
    assert message_of(line) == {"role": "assistant", **line}


def test_tool_calls() -> None:
    calls = [
        {"name": "terminal", "arguments": {"command": "ls é"}},
        {"name": "a", "arguments": '{"broken'},
        {"name": "b", "arguments": None, "id": "mine"},
        {"name": "c", "id": ""},
    ]
    answer = answer_of({"tool_calls": calls})["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    assert answer["message"]["tool_calls"] == [
        {"id": "call_1_1", "type": "function", "function": {"name": "terminal", "arguments": '{"command": "ls é"}'}},
        {"id": "call_1_2", "type": "function", "function": {"name": "a", "arguments": '{"broken'}},
        {"id": "mine", "type": "function", "function": {"name": "b", "arguments": None}},
        {"id": "", "type": "function", "function": {"name": "c", "arguments": "{}"}},
    ]


def test_ids_name_the_turn() -> None:
    later = [*PROMPT, {"role": "assistant", "tool_calls": [{}]}, {"role": "tool", "content": "x"}]
    calls = {"tool_calls": [{"name": "terminal"}]}
    answer = answer_of(calls, calls, messages=later)
    assert answer["choices"][0]["message"]["tool_calls"][0]["id"] == "call_2_1"


def test_finish_reason_usage_and_model_as_given() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 1, "cost": 0.5}
    answer = answer_of({"content": "x", "finish_reason": "length", "usage": usage, "model": "other"})
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (answer["usage"], answer["model"]) == (usage, "other")
    answer = answer_of({"content": "x", "finish_reason": None, "usage": None})
    assert answer["choices"][0]["finish_reason"] is None
    assert "usage" not in answer


def test_a_raw_message() -> None:
    message = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "a", "arguments": {"an": "object"}}}],
        "odd": 1,
    }
    answer = answer_of({"message": message})["choices"][0]
    assert answer == {"index": 0, "message": message, "finish_reason": "tool_calls"}


@pytest.mark.parametrize(
    ("body", "sent"), [({"choices": None}, b'{"choices": null}'), ("no JSON <", b"no JSON <"), ("", b"")]
)
def test_a_raw_body(body: Any, sent: bytes) -> None:
    with endpoint({"body": body}) as served:
        connection = connect(served)
        assert ask(connection).read() == sent
        connection.close()


@pytest.mark.parametrize(
    ("line", "status", "error"),
    [
        ({"status": 402, "error": "no credit"}, 402, {"message": "no credit", "type": "scripted", "code": 402}),
        ({"status": 429}, 429, {"message": "Too Many Requests", "type": "scripted", "code": 429}),
        ({"status": 529}, 529, {"message": "Unknown", "type": "scripted", "code": 529}),
        ({"status": 400, "error": {"code": "bad", "param": "n"}}, 400, {"code": "bad", "param": "n"}),
        ({"error": "upstream"}, 200, {"message": "upstream", "type": "scripted", "code": 200}),
    ],
)
def test_errors(line: Json, status: int, error: Json) -> None:
    with endpoint(line) as served:
        connection = connect(served)
        response = ask(connection)
        assert (response.status, json.loads(response.read())) == (status, {"error": error})
        connection.close()


def test_headers_and_content_type() -> None:
    with endpoint(
        {"status": 429, "headers": {"Retry-After": "7"}, "content_type": "text/html", "body": "<p>"}
    ) as served:
        connection = connect(served)
        response = ask(connection)
        assert (response.headers["Retry-After"], response.headers["Content-Type"]) == ("7", "text/html")
        assert response.read() == b"<p>"
        connection.close()


# How it travels


def test_gzip_and_chunks() -> None:
    line = {"content": "x" * 50_000, "gzip": True, "chunked": True}
    with endpoint(line) as served:
        connection = connect(served)
        response = ask(connection)
        assert (response.headers["Content-Encoding"], response.headers["Transfer-Encoding"]) == ("gzip", "chunked")
        answer = json.loads(gzip.decompress(response.read()))
        assert answer["choices"][0]["message"]["content"] == line["content"]
        connection.close()


def test_a_very_large_reply() -> None:
    content = message_of({"content": "abc", "content_chars": 10_000_000, "chunked": True})["content"]
    assert len(content) == 10_000_000
    assert content.startswith("abcabc")
    assert message_of({"content_chars": 5})["content"] == "xxxxx"


def test_a_connection_serves_many_requests() -> None:
    with endpoint({"content": "x"}) as served:
        connection = connect(served)
        for _ in range(3):
            assert ask(connection).read()
            first = connection.sock
            assert ask(connection).read()
            assert connection.sock is first
        connection.close()


@pytest.mark.parametrize("length", [3, 100_000])
def test_a_false_content_length(length: int) -> None:
    with endpoint({"content": "x", "content_length": length}) as served, raw(served) as client:
        data, problem = read_all(client)
    head, _, body = data.partition(b"\r\n\r\n")
    assert problem is None
    assert b"Content-Length: %d" % length in head
    assert json.loads(body)["choices"]


def test_stalls_before_the_headers() -> None:
    with endpoint({"content": "x", "stall": "headers"}) as served, raw(served, timeout=0.3) as client:
        assert read_all(client) == (b"", TimeoutError)


def test_stalls_in_the_middle_of_the_body() -> None:
    with endpoint({"content": "x" * 1000, "stall": "body"}) as served, raw(served, timeout=1.0) as client:
        data, problem = read_all(client)
    assert problem is TimeoutError
    head, _, body = data.partition(b"\r\n\r\n")
    assert 0 < len(body) < int(head.partition(b"Content-Length: ")[2].split()[0])


@pytest.mark.parametrize(("where", "sent"), [("before", b""), ("headers", b"\r\n\r\n"), ("body", b'\r\n\r\n{"id": ')])
def test_resets(where: str, sent: bytes) -> None:
    with endpoint({"content": "x" * 1000, "reset": where}) as served, raw(served) as client:
        data, problem = read_all(client)
    assert problem is ConnectionResetError
    assert sent in data
    assert not data.endswith(b"}")


@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_without_end(chunked: bool) -> None:
    with endpoint({"content": "x", "endless": True, "chunked": chunked}) as served, raw(served) as client:
        received = b""
        while len(received) < 300_000:
            received += client.recv(65536)
    assert b" " * 1000 in received[-50_000:]


def test_delays() -> None:
    lines: list[Json] = [
        {"prompt": "a", "content": "x", "delay_seconds": 0.3},
        {"prompt": "b", "content": "x", "delay_seconds": [0.1, 0.2]},
    ]
    with endpoint(*lines) as served:
        connection = connect(served)
        started = time.monotonic()
        ask(connection, messages=[{"role": "user", "content": "a"}]).read()
        assert time.monotonic() - started >= 0.3
        started = time.monotonic()
        ask(connection, messages=[{"role": "user", "content": "b"}]).read()
        assert time.monotonic() - started >= 0.1
        connection.close()


# The server


def test_turns_and_errors_over_http() -> None:
    lines: list[Json] = [{"status": 500}, {"tool_calls": [{"name": "terminal"}]}, {"content": "done"}]
    later = [*PROMPT, {"role": "assistant", "tool_calls": [{}]}, {"role": "tool", "content": "x"}]
    with endpoint(*lines) as served:
        connection = connect(served)
        first = ask(connection)
        first.read()
        assert first.status == 500
        assert json.loads(ask(connection).read())["choices"][0]["finish_reason"] == "tool_calls"
        assert json.loads(ask(connection, messages=later).read())["choices"][0]["message"]["content"] == "done"
        connection.close()
        assert [request.body["messages"] for request in served.requests] == [PROMPT, PROMPT, later]


def test_requests_are_recorded() -> None:
    before = time.time()
    with endpoint({"content": "x"}) as served:
        client = openai.OpenAI(base_url=served.base_url, api_key="secret", timeout=PATIENCE_SECONDS)
        with client:
            reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], seed=3)
        assert reply.choices[0].message.content == "x"
        (request,) = served.requests
    assert request.headers["authorization"] == "Bearer secret"
    assert request.body == {"model": "m", "messages": PROMPT, "seed": 3}
    assert before <= request.time <= time.time()


def test_only_the_newest_requests_are_kept() -> None:
    with ScriptedEndpoint([ScriptedReply(content="x")], record=2) as served:
        connection = connect(served)
        for number in range(4):
            ask(connection, number=number).read()
        connection.close()
        assert [request.body["number"] for request in served.requests] == [2, 3]


def images(*lines: Json, prompt: Any = "a cat") -> tuple[int, Json]:
    with endpoint(*lines) as served:
        connection = connect(served)
        connection.request("POST", "/v1/images/generations", json.dumps({"prompt": prompt, "size": "64x64"}))
        response = connection.getresponse()
        value: Json = json.loads(response.read())
        connection.close()
        assert [request.path for request in served.requests] == ["/v1/images/generations"] * isinstance(prompt, str)
    return response.status, value


def test_images() -> None:
    status, answer = images({"to": "images", "image": "", "usage": {"cost": 0.5}})
    assert status == 200
    assert answer["usage"] == {"cost": 0.5}
    assert base64.b64decode(answer["data"][0]["b64_json"]) == picture("a cat") != picture("a dog")
    shown = Image.open(io.BytesIO(picture("a cat")))
    shown.load()
    assert (shown.format, shown.size) == ("PNG", (64, 64))
    assert images({"to": "images", "image": "aaaa"})[1]["data"] == [{"b64_json": "aaaa"}]
    assert images({"to": "images", "image": "http://a/b.png"})[1]["data"] == [{"url": "http://a/b.png"}]
    assert images({"to": "images", "body": {"data": []}})[1] == {"data": []}


def test_images_that_are_not_made() -> None:
    assert images({"to": "images", "status": 429, "error": "slow down"})[0] == 429
    assert images({"content": "x"})[0] == 400  # a chat is no picture
    assert images({"to": "images", "image": ""}, prompt=3)[0] == 400


def test_a_chat_that_tools_ask_for() -> None:
    lines = {"content": "chat"}, {"to": "auxiliary", "content": "seen"}
    assert answer_of(*lines)["choices"][0]["message"]["content"] == "seen"
    tools = [{"type": "function", "function": {"name": "terminal"}}]
    assert answer_of(*lines, tools=tools)["choices"][0]["message"]["content"] == "chat"


def test_models() -> None:
    with endpoint({"content": "x"}, limits={"models": ["a", "b"]}) as served:
        client = openai.OpenAI(base_url=served.base_url, api_key="k", timeout=PATIENCE_SECONDS)
        with client:
            assert [model.id for model in client.models.list()] == ["a", "b"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{", "not JSON"),
        ("[]", '"messages"'),
        ('{"messages": [1]}', '"messages"'),
        ('{"messages": [], "stream": true}', "does not stream"),
        ('{"messages": [{"role": "user", "content": "other"}]}', "no line for this prompt"),
    ],
)
def test_requests_that_make_no_sense(body: str, words: str) -> None:
    with endpoint({"prompt": "only this", "content": "x"}) as served:
        connection = connect(served)
        connection.request("POST", "/v1/chat/completions", body)
        response = connection.getresponse()
        assert response.status == 400
        assert words in json.loads(response.read())["error"]["message"]
        connection.close()


def test_other_paths() -> None:
    with endpoint({"content": "x"}) as served:
        connection = connect(served)
        connection.request("GET", "/")
        response = connection.getresponse()
        assert response.status == 404
        assert "POST /v1/chat/completions" in json.loads(response.read())["error"]["message"]
        connection.close()


@pytest.mark.parametrize("head", [b"x" * 100_000, b"POST / HTTP/1.1\r\nContent-Length: many\r\n\r\n"])
def test_what_is_not_http_is_hung_up_on(head: bytes) -> None:
    with endpoint({"content": "x"}) as served:
        host, port = served.base_url.split("/")[2].split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as client:
            client.sendall(head)
            assert read_all(client) in [(b"", None), (b"", ConnectionResetError)]  # or it did not read all of it


def test_too_many_at_once() -> None:
    line = {"content": "x", "stall": "headers"}
    with endpoint(line, limits={"max_concurrent": 2}) as served, raw(served), raw(served):
        wait_until_asked(served, 2)
        connection = connect(served)
        response = ask(connection)
        response.read()
        assert (response.status, response.headers["Retry-After"]) == (429, "1")
        connection.close()


def test_too_fast() -> None:
    with endpoint({"content": "x"}, limits={"requests_per_second": 2}) as served:
        connection = connect(served)
        responses = []
        started = time.monotonic()
        for _ in range(8):
            responses.append(ask(connection))
            responses[-1].read()
        allowed = 2 + 2 * (time.monotonic() - started)
        statuses = [response.status for response in responses]
        assert 2 <= statuses.count(200) <= allowed
        assert statuses.count(429) == 8 - statuses.count(200)
        assert {response.headers["Retry-After"] for response in responses if response.status == 429} <= {"1"}
        time.sleep(0.6)
        assert ask(connection).status == 200
        connection.close()


def wait_until_asked(served: ScriptedEndpoint, number: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(served.requests) < number and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(served.requests) == number


def test_a_taken_port() -> None:
    with endpoint({"content": "x"}) as served:
        port = int(served.base_url.split("/")[2].split(":")[1])
        with pytest.raises(EndpointError, match=rf"port {port} cannot be used \(Address already in use\)"):
            ScriptedEndpoint([ScriptedReply(content="y")], port=port).start()


def test_stopping_ends_what_is_open_and_leaves_no_thread() -> None:
    threads = threading.active_count()
    served = endpoint({"content": "x", "stall": "body"}).start()
    with raw(served) as client:
        wait_until_asked(served, 1)
        served.stop()
        read_all(client)
    assert threading.active_count() == threads


def test_hundreds_in_flight() -> None:
    async def flight(base_url: str) -> int:
        http_client = openai.DefaultAioHttpClient(timeout=PATIENCE_SECONDS)
        async with openai.AsyncOpenAI(base_url=base_url, api_key="k", http_client=http_client) as client:
            requests = [
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": f"{number}"}])
                for number in range(200)
            ]
            return len([reply for reply in await asyncio.gather(*requests) if reply.choices[0].message.content == "x"])

    with endpoint({"content": "x", "delay_seconds": [0.1, 0.2]}) as served:
        assert asyncio.run(flight(served.base_url)) == 200


# The process


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "endpoints.scripted", *words]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_the_process_says_where_it_is_and_ends_with_its_stdin(tmp_path: Path) -> None:
    path = tmp_path / "replies.jsonl"
    path.write_text('{"content": "x"}\n', encoding="utf-8")
    with start(str(path)) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())["ready"]
        assert ready["model"] == ""
        with openai.OpenAI(base_url=ready["base_url"], api_key="k", timeout=PATIENCE_SECONDS) as client:
            reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        assert reply.choices[0].message.content == "x"
        assert process.poll() is None
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, output) == (0, "")


@pytest.mark.parametrize(
    ("content", "words"), [('{"conten": 1}', 'replies.jsonl:1: unknown key "conten"'), ("", "no reply")]
)
def test_the_process_tells_a_mistake(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "replies.jsonl"
    path.write_text(content, encoding="utf-8")
    with start(str(path)) as process:
        assert process.stdout is not None
        output = process.stdout.read()  # communicate would close its stdin, at which it ends whatever it does
        assert process.wait(PATIENCE_SECONDS) == 2
    assert words in json.loads(output)["error"]
