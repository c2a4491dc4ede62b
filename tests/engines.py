"""Container engines for the tests: starts those that are installed, and makes images of this machine's files.

``python -m tests.engines start`` needs root, dockerd or podman (with catatonit), and busybox-static; what is missing is
told and left out, and what runs already is used as it is. ``stop`` ends what ``start`` began. Every wait has a limit.
"""

from __future__ import annotations

import io
import json
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import docker
import requests
from docker.errors import DockerException

STATE = Path("/tmp/batch-runner-engines")  # noqa: S108 (one for the whole machine, of root's)
HOSTS = {"docker": "unix:///var/run/docker.sock", "podman": "unix:///run/podman/podman.sock"}
BUSYBOX = "localhost/batch-runner-tests/busybox:1"  # nothing but a static busybox
TOOLS = "localhost/batch-runner-tests/tools:1"  # bash, the usual programs, Python
START_SECONDS = 60
STOP_SECONDS = 20
PROGRAMS_OF_ENGINES = ("dockerd", "podman")
PROGRAMS = (
    *("bash", "dash", "cat", "chmod", "chown", "cp", "date", "dd", "env", "expr", "find", "grep", "head", "id", "kill"),
    *("ln", "ls", "mkdir", "mkfifo", "mktemp", "mv", "nohup", "printf", "ps", "pwd", "readlink", "rm", "rmdir", "sed"),
    *(
        "seq",
        "setsid",
        "sh",
        "sleep",
        "sort",
        "stat",
        "tail",
        "tee",
        "touch",
        "tr",
        "tty",
        "uname",
        "wc",
        "xargs",
        "yes",
    ),
    *(
        "[",
        "basename",
        "cut",
        "diff",
        "dirname",
        "rg",
        "sync",
        "timeout",
        "test",
        "true",
        "false",
        "uniq",
        "du",
        "echo",
    ),
)
LEFT_OUT = ("__pycache__", "site-packages", "test", "tests", "idlelib", "ensurepip", "tkinter", "turtledemo", "lib2to3")
ACCOUNTS = "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"


class Layer:
    """A file system under construction."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        self._tar = tarfile.open(fileobj=self._buffer, mode="w")  # noqa: SIM115 (closed by ``data``)
        self._folders = {""}

    def folder(self, path: str, mode: int = 0o755, uid: int = 0) -> None:
        if path in self._folders:
            return
        self._folders.add(path)
        self.folder(path.rpartition("/")[0])
        entry = tarfile.TarInfo(path)
        entry.type, entry.mode, entry.uid = tarfile.DIRTYPE, mode, uid
        self._tar.addfile(entry)

    def file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        self.folder(path.rpartition("/")[0])
        entry = tarfile.TarInfo(path)
        entry.size, entry.mode = len(data), mode
        self._tar.addfile(entry, io.BytesIO(data))

    def link(self, path: str, target: str) -> None:
        self.folder(path.rpartition("/")[0])
        entry = tarfile.TarInfo(path)
        entry.type, entry.linkname = tarfile.SYMTYPE, target
        self._tar.addfile(entry)

    def data(self) -> bytes:
        self._tar.close()
        return self._buffer.getvalue()


def busybox_layer(more: Iterable[tuple[str, bytes]] = (), without: Iterable[str] = ()) -> bytes:
    """Return busybox under all its names but some, a few folders, and other files."""
    busybox = Path(shutil.which("busybox") or "/bin/busybox")
    layer = skeleton()
    layer.file("bin/busybox", busybox.read_bytes(), 0o755)
    for name in subprocess.run(
        [busybox, "--list"], capture_output=True, text=True, check=True, timeout=10
    ).stdout.split():
        if name not in {"busybox", *without}:
            layer.link(f"bin/{name}", "busybox")
    for path, data in more:
        layer.file(path, data)
    return layer.data()


def tools_layer() -> bytes:
    """Return programs of this machine with the libraries they need, and this Python."""
    layer = skeleton()
    libraries: set[str] = set()
    for name in PROGRAMS:
        if path := shutil.which(name, path="/usr/bin:/bin:/usr/local/bin"):
            layer.file(f"usr/bin/{name}", Path(path).read_bytes(), 0o755)
            libraries |= needed(path)
    layer.link("bin/sh", "../usr/bin/dash")
    layer.link("bin/bash", "../usr/bin/bash")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    python = Path(sys.base_prefix, "bin", version)
    layer.file(f"usr/local/bin/{version}", python.read_bytes(), 0o755)
    layer.link("usr/local/bin/python3", version)
    libraries |= needed(str(python))
    stdlib = Path(sysconfig.get_path("stdlib"))
    for module in sorted(stdlib.rglob("*")):
        inside = module.relative_to(stdlib)
        if module.is_file() and not set(inside.parts) & set(LEFT_OUT) and "config-" not in str(inside):
            layer.file(f"usr/local/lib/{version}/{inside}", module.read_bytes(), 0o755)
            if module.suffix == ".so":
                libraries |= needed(str(module))
    for library in sorted(libraries):
        layer.file(library.lstrip("/"), Path(library).read_bytes(), 0o755)
    return layer.data()


def skeleton() -> Layer:
    layer = Layer()
    for path in ("bin", "usr/bin", "usr/local/bin", "etc", "root", "home", "proc", "sys", "dev", "run"):
        layer.folder(path)
    layer.folder("tmp", 0o1777)
    layer.folder("home/user", 0o755, 1000)
    layer.file("etc/passwd", ACCOUNTS.encode())
    layer.file("etc/group", b"root:x:0:\nnobody:x:65534:\nuser:x:1000:\n")
    return layer


def needed(program: str) -> set[str]:
    """Return the libraries a program is linked with."""
    told = subprocess.run(["ldd", program], capture_output=True, text=True, check=False, timeout=10).stdout
    return {word for line in told.splitlines() for word in line.split() if word.startswith("/")}


def image_archive(name: str, layer: bytes, config: Mapping[str, Any] | None = None, architecture: str = "") -> bytes:
    """Return an image as ``docker load`` takes it."""
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    description = {
        "architecture": architecture or machine,
        "os": "linux",
        "config": dict(config or {}),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha256(layer).hexdigest()}"]},
    }
    encoded = json.dumps(description).encode()
    files = Layer()
    config_name = f"{sha256(encoded).hexdigest()}.json"
    files.file(config_name, encoded)
    files.file("layer.tar", layer)
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]
    files.file("manifest.json", json.dumps(manifest).encode())
    return files.data()


def client(engine: str) -> docker.APIClient:
    return docker.APIClient(HOSTS[engine], version="auto", timeout=60)


def answers(engine: str) -> bool:
    """Tell whether an engine runs."""
    try:
        with socket.socket(socket.AF_UNIX) as trial:  # the package leaves a socket behind where nobody listens
            trial.connect(HOSTS[engine].removeprefix("unix://"))
        with closing(docker.APIClient(HOSTS[engine], version="auto", timeout=5)) as api:
            return bool(api.ping())
    except (DockerException, requests.RequestException, OSError):
        return False


def load(engine: str, archive: bytes) -> None:
    with closing(client(engine)) as api:
        for message in api.load_image(archive) or ():  # type: ignore[no-untyped-call]
            assert "error" not in message, message


def start() -> int:
    """Start what is installed, and see to the images; tell what there is. Returns how many engines run."""
    STATE.mkdir(mode=0o700, exist_ok=True)
    commands = {"docker": ["dockerd"], "podman": ["podman", "system", "service", "--time", "0", HOSTS["podman"]]}
    for engine, command in commands.items():
        problem = "" if answers(engine) else launch(engine, command)
        if not problem:
            see_to_images(engine)
        print(f"{engine}: {problem or HOSTS[engine]}")  # noqa: T201 (a command)
    return sum(answers(engine) for engine in commands)


def launch(engine: str, command: list[str]) -> str:
    """Start an engine in the background; return what kept it from running."""
    if os.geteuid():
        return "only root can start it"
    if not shutil.which(command[0]):
        return f"{command[0]} is not installed"
    Path(HOSTS[engine].removeprefix("unix://")).parent.mkdir(parents=True, exist_ok=True)
    conf = STATE / "containers.conf"
    conf.write_text(podman_settings())
    log = STATE / f"{engine}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=STATE,  # some leave notes of what ran out of memory where they were started
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "CONTAINERS_CONF": str(conf)},
        )
    (STATE / f"{engine}.pid").write_text(str(process.pid))
    if wait_for(lambda: answers(engine) or process.poll() is not None) and process.poll() is None:
        return ""
    return f"it does not start: {log.read_text(errors='replace')[-400:].strip()}"


def podman_settings() -> str:
    """Return settings for machines that grant less than Podman's own ask for, or have cgroups that crun refuses."""
    limits = {"nofile": min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 20_000), "nproc": 20_000}
    runtime = '[engine]\nruntime = "runc"\n' if shutil.which("runc") else ""
    ulimits = json.dumps([f"{name}={limit}:{limit}" for name, limit in limits.items()])
    return f"[containers]\ndefault_ulimits = {ulimits}\n{runtime}"


def see_to_images(engine: str) -> None:
    with closing(client(engine)) as api:
        there = {tag for image in api.images() for tag in image["RepoTags"] or ()}
    for name, layer in {BUSYBOX: busybox_layer, TOOLS: tools_layer}.items():
        if name not in there:
            load(engine, image_archive(name, layer()))


def stop() -> int:
    """End what ``start`` began."""
    for file in STATE.glob("*.pid"):
        pid = int(file.read_text())
        for end in (signal.SIGTERM, signal.SIGKILL):
            if is_engine(pid):
                os.kill(pid, end)
                wait_for(lambda pid=pid: not is_engine(pid), STOP_SECONDS)  # type: ignore[misc]
        file.unlink()
    return 0


def is_engine(pid: int) -> bool:
    """Tell whether a process that was started as an engine is still that."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="ascii").strip() in PROGRAMS_OF_ENGINES
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = START_SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


if __name__ == "__main__":
    if sys.argv[1:] not in (["start"], ["stop"]):
        sys.exit("usage: python -m tests.engines start|stop")
    sys.exit(stop() if sys.argv[1] == "stop" else int(not start()))
