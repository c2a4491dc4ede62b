"""A container's network that is limited to some hosts, by attack."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sandboxes import docker_owners
from sandboxes.base import Sandbox
from sandboxes.docker import DockerBackend
from tests import engines
from tests.sandboxes.containers import SPEC, api, ours, output, run
from tests.sandboxes.support import MINUTE, descriptors, wait_until

pytestmark = pytest.mark.docker
FETCH = """python3 - <<'END' 2>&1 | tail -n 3
import os, urllib.error, urllib.request
for name in ("no_proxy", "NO_PROXY"):
    os.environ.pop(name)
try:
    print(urllib.request.urlopen({url!r}, timeout=10).read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
END"""
CONNECT = """python3 - <<'END' 2>&1 | tail -n 1
import socket
socket.create_connection(({host!r}, {port}), 1)
print("reached")
END"""


class Quiet(SimpleHTTPRequestHandler):
    """A web server that says nothing of what it does."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A web server of the host on all its addresses, and on no list; its port."""
    (tmp_path / "page").write_text("of the server")
    monkeypatch.chdir(tmp_path)
    with ThreadingHTTPServer(("0.0.0.0", 0), Quiet) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.05,))
        thread.start()
        yield http.server_address[1]
        http.shutdown()
        thread.join()


def addresses_of_the_host() -> list[str]:
    """Where a container might look for the host: its bridges, its own name, loopback."""
    found = [line.split()[1] for line in Path("/proc/net/fib_trie").read_text("ascii").splitlines() if "|--" in line]
    return sorted({address for address in found if not address.endswith((".0", ".255"))})


def test_only_what_is_listed(engine: str, server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = f"listed.example,127.0.0.1:{server}"
    monkeypatch.setenv("TERMINAL_DOCKER_NETWORK", listed)

    async def body(sandbox: Sandbox) -> list[str]:
        wanted = (f"http://127.0.0.1:{server}/page", f"http://localhost:{server}/page", "http://169.254.169.254/")
        commands = [FETCH.format(url=url) for url in wanted]
        return [(await sandbox.exec(command, timeout_seconds=MINUTE)).output for command in commands]

    allowed, unlisted, metadata = run(body)
    assert allowed == "of the server\n"
    assert unlisted.startswith(f"403 this sandbox reaches only {listed}; localhost:{server} is not among them")
    assert metadata.startswith("403 ")
    assert engine


def test_no_way_around(engine: str, server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMINAL_DOCKER_NETWORK", "listed.example")
    bridge = {"docker": "172.17.0.1", "podman": "10.88.0.1"}[engine]

    cards = "tail -n +3 /proc/net/dev | cut -d: -f1 | xargs; tail -n +2 /proc/net/route; ls /proc/sys/net/ipv4/conf"
    resolve = "python3 -c 'import socket; socket.gethostbyname(\"listed.example\")' 2>&1 | tail -n 1"
    targets = [*addresses_of_the_host(), bridge, "1.1.1.1", "::1"]

    async def body(sandbox: Sandbox) -> list[str]:
        commands = [cards, resolve, *(CONNECT.format(host=host, port=server) for host in targets)]
        return [(await sandbox.exec(command, timeout_seconds=MINUTE)).output for command in commands]

    there, resolved, *reached = run(body)
    assert there.split() == ["lo", "all", "default", "lo"]
    assert "gaierror" in resolved
    assert "reached" not in "".join(reached)


@pytest.mark.usefixtures("docker")
def test_each_container_has_a_proxy_of_its_own(server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMINAL_DOCKER_NETWORK", f"127.0.0.1:{server}")
    backend = DockerBackend()

    async def main() -> list[str]:
        first, second = await asyncio.gather(backend.open(SPEC), backend.open(SPEC))
        try:
            await serving(first)
            reach = CONNECT.format(host="127.0.0.1", port=4000)
            others = (await second.exec(reach, timeout_seconds=MINUTE)).output
            await first.close()
            fetch = FETCH.format(url=f"http://127.0.0.1:{server}/page")
            still = (await second.exec(fetch, timeout_seconds=MINUTE)).output
            return [others, still]
        finally:
            await asyncio.gather(first.close(), second.close())

    others, still = asyncio.run(main())
    assert "refused" in others
    assert still == "of the server\n"


@pytest.mark.usefixtures("docker")
def test_variables_and_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMINAL_DOCKER_NETWORK", "listed.example")
    monkeypatch.setenv("TERMINAL_DOCKER_ENV", '{"ALL_PROXY": "mine"}')
    shown = output('echo "$HTTP_PROXY $https_proxy $ALL_PROXY $NO_PROXY"', image=engines.BUSYBOX)
    assert shown == "http://127.0.0.1:3128 http://127.0.0.1:3128 mine localhost,127.0.0.1,::1\n"


@pytest.mark.usefixtures("docker")
def test_nothing_is_left_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMINAL_DOCKER_NETWORK", "listed.example")
    backend = DockerBackend()

    async def body(sandbox: Sandbox) -> None:
        await sandbox.start(
            "python3 -c 'import socket, time; socket.create_connection((\"127.0.0.1\", 3128)); time.sleep(99)'"
        )

    run(body, backend)
    before = descriptors()
    for _ in range(2):
        run(body, backend)
    assert wait_until(lambda: descriptors() <= before)
    assert ours() == []


@pytest.mark.usefixtures("docker")
@pytest.mark.parametrize("delay", [0.1, 0.15, 0.2])
def test_cancelled_while_it_is_made(delay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMINAL_DOCKER_NETWORK", "listed.example")

    async def main() -> None:
        opening = asyncio.create_task(DockerBackend().open(SPEC))
        await asyncio.sleep(delay)
        opening.cancel()
        (end,) = await asyncio.gather(opening, return_exceptions=True)
        if not isinstance(end, BaseException):
            await end.close()

    asyncio.run(main())
    assert ours() == []


def test_where_it_cannot_be_enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{elsewhere.getsockname()[1]}")
        monkeypatch.setenv("TERMINAL_DOCKER_NETWORK", "listed.example")
        assert "TERMINAL_DOCKER_NETWORK=listed.example cannot be enforced" in DockerBackend().unavailable()


@pytest.mark.usefixtures("docker")
def test_with_a_network_they_do_not_reach_each_other() -> None:
    backend = DockerBackend()

    async def main() -> tuple[str, str]:
        first, second = await asyncio.gather(backend.open(SPEC), backend.open(SPEC))
        try:
            address = (await first.exec("tail -n 1 /etc/hosts | cut -f1", timeout_seconds=MINUTE)).output.strip()
            await serving(first)
            reach = CONNECT.format(host=address, port=4000)
            results = [await each.exec(reach, timeout_seconds=MINUTE) for each in (first, second)]
            return results[0].output, results[1].output
        finally:
            await asyncio.gather(first.close(), second.close())

    own, other = asyncio.run(main())
    assert own == "reached\n"
    assert "timed out" in other


@pytest.mark.usefixtures("docker")
def test_the_network_goes_with_its_last_user_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = DockerBackend()
    name, labels = docker_owners.network()
    assert not backend.unavailable()

    async def main() -> None:
        for _ in range(2):
            await (await backend.open(SPEC)).close()
            with api("docker") as client:  # as when two processes make it at the same moment
                client.create_network(name, labels=labels)
            await (await backend.open(SPEC)).close()
            assert await asyncio.to_thread(backend.sweep) == []
            assert name in networks(), "this process lives"
            with monkeypatch.context() as patch:
                patch.setattr("sandboxes.docker_owners.in_use", lambda _host: False)
                for _ in range(60):  # other tests may have containers on it
                    await asyncio.to_thread(backend.sweep)
                    if name not in networks():
                        break
                    await asyncio.sleep(0.5)
            assert name not in networks()

    asyncio.run(main())


async def serving(sandbox: Sandbox) -> None:
    """Have it serve on all its addresses."""
    await sandbox.start("python3 -m http.server 4000 --bind 0.0.0.0")
    for _ in range(100):
        reach = CONNECT.format(host="127.0.0.1", port=4000)
        if (await sandbox.exec(reach, timeout_seconds=MINUTE)).output == "reached\n":
            return


def networks() -> list[str]:
    with api() as client:
        return [found["Name"] for found in client.networks()]
