"""Ray's driver: a process that submits workers as Ray tasks and passes bytes between their sockets and the pool's.

Each task connects back to a port of this machine and proves itself with a secret that is good for one connection;
whoever else comes is let go without an answer. A connection that ends is a worker that died, for whatever reason: its
process, its node, the network. Tasks are never tried again by Ray, which knows nothing of samples.

Ends when its control socket is closed, that is, with the parent, in no more than WORKER_EXIT_SECONDS and a little; by
then the tasks are over, and so is the Ray instance where it is this process's own.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout import ray_worker
from rollout.spawner import WORKER_EXIT_SECONDS, leave_it_to_the_parent
from rollout.wire import READ_BYTES, Frame

WAIT_SECONDS = 6.0  # without a connection, after which a worker is taken to wait for a CPU
PROOF_SECONDS = 10.0  # to send the secret
CHECK_SECONDS = 60.0  # for every node to import what workers need
_LAST_BYTES_SECONDS = 2.0  # from a task's end to that of its connection
_STORE_BYTES = 80 << 20  # the least that Ray takes; nothing of ours goes there
_SHIPPED = ("rollout", "tools", "sandboxes", "toolsets.py", "model_tools.py")
_ROOT = Path(__file__).resolve().parent.parent
_SECRET_BYTES = 32


@dataclass(eq=False)
class _Link:
    """Two sockets: the pool's, and the worker's once it is there."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(_SECRET_BYTES))
    worker: asyncio.StreamWriter | None = None
    early: bytearray = field(default_factory=bytearray)  # what the pool says before: the settings
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def outward(self) -> None:
        """Pass on what the pool says, until it lets go of the worker."""
        with suppress(OSError):
            while data := await self.reader.read(READ_BYTES):
                if self.worker is None:
                    self.early += data
                else:
                    self.worker.write(data)
                    await self.worker.drain()
        self.over.set()

    async def inward(self, reader: asyncio.StreamReader, worker: asyncio.StreamWriter) -> None:
        """Pass on what the worker says, until its connection ends."""
        self.worker = worker
        worker.write(self.early)
        with suppress(OSError):
            while data := await reader.read(READ_BYTES):
                self.writer.write(data)
                await self.writer.drain()
        self.over.set()

    def tell_to_wait(self, number: int) -> None:
        text = f"worker {number} has not begun yet; it may be waiting for a free CPU of the cluster"
        for header in ({"type": "waits"}, {"type": "log", "level": "info", "text": text}):
            self.writer.write(Frame(header).encode())

    def close(self) -> None:
        self.writer.close()
        if self.worker:
            self.worker.close()


@dataclass
class _Driver:
    control: socket.socket
    host: str
    share: int  # workers on one node at most
    expected: set[_Link] = field(default_factory=set)
    bridges: set[asyncio.Task[None]] = field(default_factory=set)
    port: int = 0

    async def serve(self) -> None:
        """Bridge until the parent is gone, and a little longer."""
        over = asyncio.Event()
        self.control.setblocking(False)
        asyncio.get_running_loop().add_reader(self.control, self._obey, over)
        server = await asyncio.start_server(self._greet, self.host, 0)
        async with server:
            self.port = server.sockets[0].getsockname()[1]
            await over.wait()
            asyncio.get_running_loop().remove_reader(self.control)
            if self.bridges:  # they see that the pool has let go of them
                await asyncio.wait(self.bridges, timeout=WORKER_EXIT_SECONDS)

    def _obey(self, over: asyncio.Event) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(self.control, 64, 1)
        except BlockingIOError:
            return
        except ConnectionError:
            message = b""
        if not message:
            over.set()
        elif message == b"log":
            os.dup2(descriptors[0], sys.stderr.fileno())
            os.close(descriptors[0])
        else:
            bridge = asyncio.create_task(self._bridge(int(message), socket.socket(fileno=descriptors[0])))
            self.bridges.add(bridge)
            bridge.add_done_callback(self.bridges.discard)

    async def _bridge(self, number: int, pool: socket.socket) -> None:
        """Have a worker, as long as the pool wants it and it lives."""
        link = _Link(*await asyncio.open_connection(sock=pool))
        self.expected.add(link)
        options = _TASK.options(name=f"batch runner's worker {number}")
        task = options.remote(self.host, self.port, link.secret, self.share)
        ended: asyncio.Future[Any] = asyncio.wrap_future(task.future())
        outward = asyncio.create_task(link.outward())
        over: asyncio.Future[Any] = asyncio.create_task(link.over.wait())
        await asyncio.wait({ended, over}, timeout=WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if link.worker is None and not over.done():
            link.tell_to_wait(number)
        await asyncio.wait({ended, over}, return_when=asyncio.FIRST_COMPLETED)
        if link.worker:  # what it said last may still be on its way
            await asyncio.wait({over}, timeout=_LAST_BYTES_SECONDS)
        self.expected.discard(link)
        link.close()
        outward.cancel()
        over.cancel()
        await _see_out(number, task, ended)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Find out whose worker it is that comes."""
        link = None
        with suppress(OSError, asyncio.IncompleteReadError):
            secret = await asyncio.wait_for(reader.readexactly(_SECRET_BYTES), PROOF_SECONDS)
            link = next((each for each in self.expected if hmac.compare_digest(each.secret, secret)), None)
        if link:
            self.expected.discard(link)
            ray_worker.keep_alive(writer.get_extra_info("socket"))
            await link.inward(reader, writer)
        writer.close()


async def _see_out(number: int, task: Any, ended: asyncio.Future[Any]) -> None:
    """Wait for a task whose socket is closed; kill it when it takes too long. Its last words go to the log."""
    done, _ = await asyncio.wait({ended}, timeout=WORKER_EXIT_SECONDS)
    if not done:
        ray.cancel(task, force=True)
        await asyncio.wait({ended}, timeout=1)
    if ended.done() and (error := ended.exception()):
        sys.stderr.write(f"worker {number}: {error}\n")
        sys.stderr.flush()
    ended.cancel()


_TASK = ray.remote(num_cpus=1, max_retries=0, max_calls=1, scheduling_strategy="SPREAD")(ray_worker.run)
_VERSIONS = ray.remote(num_cpus=0, max_retries=0)(ray_worker.versions)


def _join(address: str, num_workers: int, folder: str, stack: ExitStack) -> dict[str, Any]:
    """Join the cluster, or begin one; return the line for the parent. The code goes where the workers will be."""
    shipped = {"py_modules": [str(_ROOT / name) for name in _SHIPPED]}
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "runtime_env": shipped}
    if not address:
        own: dict[str, Any] = {"num_cpus": num_workers, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        ray.init("local", _temp_dir=folder, **own, **quiet)
    else:
        host, _, port = address.rpartition(":")
        if port.isdecimal():  # Ray itself tries for long where nobody listens
            socket.create_connection((host.strip("[]"), int(port)), timeout=ray_worker.CONNECT_SECONDS).close()
        ray.init(address, **quiet)
    signal.alarm(0)
    stack.callback(ray.shutdown)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if address and (problem := _mismatch(nodes)):
        return {"error": problem}
    here = ray.util.get_node_ip_address()
    most_cpus = max(int(node["Resources"].get("CPU", 0)) for node in nodes)
    return {
        "host": here,
        "others": sorted({node["NodeManagerAddress"] for node in nodes} - {here}),
        "share": max(min(num_workers, most_cpus), 1),
    }


def _mismatch(nodes: list[dict[str, Any]]) -> str:
    """Say which node cannot run workers as this machine would; "" when all can."""
    asked = {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked[_VERSIONS.options(scheduling_strategy=there).remote()] = node["NodeManagerAddress"]
    _, late = ray.wait(list(asked), num_returns=len(asked), timeout=CHECK_SECONDS)
    if late:
        return f"node {asked[late[0]]} has begun no task after {CHECK_SECONDS:g} seconds"
    ours = ray_worker.versions()
    for task, node in asked.items():
        theirs = ray.get(task)
        if differing := [f"{name} {theirs[name]} and not {ours[name]}" for name in ours if theirs[name] != ours[name]]:
            return f"node {node} has {', '.join(differing)}"
    return ""


def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """Make the folder of an instance of our own. Its name is short: sockets lie deep in it."""
    return tempfile.TemporaryDirectory(prefix="batch-runner-ray-", dir="/tmp", ignore_cleanup_errors=True)


def _end_with_parent(control: int, folder: str) -> None:
    """End the process when the parent has been gone for long, whatever Ray waits for; what it began ends with it."""
    poll = select.poll()
    poll.register(control, 0)  # hang-ups alone
    poll.poll()
    time.sleep(WORKER_EXIT_SECONDS + 0.5)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # the group is this process's own, and that of an instance that is only half begun


def _told(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Be the driver: control socket's number, number of workers, seconds to join in, address ("" for its own)."""
    control_number, num_workers, seconds, address = sys.argv[-4:]
    with socket.socket(fileno=int(control_number)) as control, ExitStack() as stack:
        folder = "" if address else stack.enter_context(_own_folder())
        threading.Thread(target=_end_with_parent, args=(control.fileno(), folder), daemon=True).start()
        signal.alarm(int(seconds))  # until it has joined: Ray waits for minutes
        try:
            answer = _join(address, int(num_workers), folder, stack)
        except (OSError, RuntimeError, ValueError, ImportError, ray.exceptions.RayError) as error:
            said = (isinstance(error, OSError) and error.strerror) or str(error)
            answer = {"error": " ".join(said.split())[:400]}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, leave_it_to_the_parent)
        _told(answer)
        if "error" not in answer:
            asyncio.run(_Driver(control, answer["host"], answer["share"]).serve())
