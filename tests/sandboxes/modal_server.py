"""Stands in for Modal: a server of the few calls the program makes through the real client, on loopback.

Sandboxes are instances of the stand-in for Apptainer, so what runs behind them is real. ``python -m`` with that one's
folder: it says its port, and ends with its stdin. What was asked is written down in ``modal.log``.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from grpclib import GRPCError, Status
from grpclib.server import Server
from modal_proto import api_pb2
from modal_proto import task_command_router_pb2 as router_pb2
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

BUILDER_VERSION = "2025.06"
TOKEN = ("ak-for-tests", "as-for-tests")
GONE = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_TERMINATED)
APPTAINERS = ("APPTAINER_NAME", "SINGULARITY_NAME", "LD_LIBRARY_PATH", "PS1")  # variables of the stand-in
DONE = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)


@dataclass
class Remote:
    """One sandbox."""

    name: str
    tags: list[Any]
    created_at: float
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    gone: bool = False


class Modal:
    """Its state, and its calls, named as in the protocol but for the case."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.port = 0
        self.images: dict[str, Path] = {}
        self.sandboxes: dict[str, Remote] = {}
        self.numbers = itertools.count(1)
        self.watchers: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        server = Server([_service(ModalClientBase, self), _service(TaskCommandRouterBase, self)])
        await server.start("127.0.0.1", 0)
        listening: Any = server._server
        self.port = listening.sockets[0].getsockname()[1]
        print(self.port, flush=True)  # noqa: T201 (to who started it)
        await asyncio.to_thread(sys.stdin.read)
        for remote in list(self.sandboxes.values()):
            await self.end(remote)
        server.close()
        await server.wait_closed()

    async def app_get_or_create(self, request: Any) -> Any:
        self.write_down("AppGetOrCreate", request)
        return api_pb2.AppGetOrCreateResponse(app_id="ap-1")

    async def auth_token_get(self, _: Any) -> Any:
        claims = base64.urlsafe_b64encode(json.dumps({"exp": time.time() + 3600}).encode()).decode()
        return api_pb2.AuthTokenGetResponse(token=f"e30.{claims}.e30")

    async def environment_get_or_create(self, _: Any) -> Any:
        settings = api_pb2.EnvironmentSettings(image_builder_version=BUILDER_VERSION)
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    async def image_get_or_create(self, request: Any) -> Any:
        self.write_down("ImageGetOrCreate", request)
        name = request.image.dockerfile_commands[0].removeprefix("FROM ")
        path = self.top / "images" / f"docker://{name}".replace("/", "%")
        image_id = f"im-{next(self.numbers)}"
        if not path.exists():
            words = f"manifest for {name} not found: manifest unknown"
            failed = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_FAILURE, exception=words)
            return api_pb2.ImageGetOrCreateResponse(image_id=image_id, result=failed)
        self.images[image_id] = path
        return api_pb2.ImageGetOrCreateResponse(image_id=image_id, result=DONE)

    async def sandbox_create_v2(self, request: Any) -> Any:
        self.write_down("SandboxCreate", request)
        number = next(self.numbers)
        remote = Remote(f"sb-{number}", list(request.tags), time.time())
        folder = self.top / "remote" / remote.name
        (folder / "overlay").mkdir(parents=True)
        blocked = request.definition.network_access.network_access_type == api_pb2.NetworkAccess.BLOCKED
        options = [
            *("--containall", "--no-home", "--hostname", "modal", "--workdir", str(folder)),
            *(
                "--scratch",
                "/run/channel",
                "--overlay",
                str(folder / "overlay"),
                *(("--net", "--network", "none") if blocked else ()),
            ),
        ]
        image = self.images[request.definition.image_id]
        await self.command("instance", "start", *options, str(image), remote.name)
        self.sandboxes[remote.name] = remote
        main = await self.enter(remote, list(request.definition.entrypoint_args))
        watcher = asyncio.create_task(self.end_with(main, remote))
        self.watchers.add(watcher)
        watcher.add_done_callback(self.watchers.discard)
        return api_pb2.SandboxCreateV2Response(
            sandbox_id=remote.name, task_id=f"ta-{remote.name}", command_router_access=self.access()
        )

    async def sandbox_get_task_id_v2(self, request: Any) -> Any:
        remote = self.sandboxes[request.sandbox_id]
        return api_pb2.SandboxGetTaskIdResponse(task_id=f"ta-{remote.name}", task_result=GONE if remote.gone else None)

    async def sandbox_wait_v2(self, request: Any) -> Any:
        return api_pb2.SandboxWaitResponse(result=GONE if self.sandboxes[request.sandbox_id].gone else None)

    async def sandbox_terminate_v2(self, request: Any) -> Any:
        self.write_down("SandboxTerminate", request)
        await self.end(self.sandboxes[request.sandbox_id])
        return api_pb2.SandboxTerminateResponse()

    async def sandbox_list_v2(self, request: Any) -> Any:
        wanted = [(tag.tag_name, tag.tag_value) for tag in request.tags]
        found = [] if request.before_timestamp else [item for item in self.sandboxes.values() if not item.gone]
        shown = [item for item in found if {(t.tag_name, t.tag_value) for t in item.tags}.issuperset(wanted)]
        infos = [api_pb2.SandboxInfo(id=item.name, created_at=item.created_at) for item in shown]
        return api_pb2.SandboxListResponse(sandboxes=infos)

    async def sandbox_tags_get_v2(self, request: Any) -> Any:
        return api_pb2.SandboxTagsGetResponse(tags=self.sandboxes[request.sandbox_id].tags)

    async def sandbox_get_command_router_access(self, _: Any) -> Any:
        access = self.access()
        return api_pb2.SandboxGetCommandRouterAccessResponse(url=access.url, jwt=access.jwt)

    async def task_exec_start(self, request: Any) -> Any:
        remote = self.remote(request)
        remote.processes[request.exec_id] = await self.enter(remote, list(request.command_args))
        return router_pb2.TaskExecStartResponse()

    async def task_exec_stdio_read(self, stream: Any) -> None:
        request = await stream.recv_message()
        process = self.remote(request).processes[request.exec_id]
        is_output = request.file_descriptor == router_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT
        output = process.stdout if is_output else process.stderr
        while output and (data := await output.read(1 << 16)):
            await stream.send_message(router_pb2.TaskExecStdioReadResponse(data=data))

    async def task_exec_stdin_write(self, request: Any) -> Any:
        stdin = self.remote(request).processes[request.exec_id].stdin
        assert stdin
        try:
            stdin.write(request.data)
            await stdin.drain()
        except OSError as error:
            raise GRPCError(Status.FAILED_PRECONDITION, "stdin is closed") from error
        if request.eof:
            stdin.close()
        return router_pb2.TaskExecStdinWriteResponse()

    def access(self) -> Any:
        return api_pb2.CommandRouterAccess(url=f"http://127.0.0.1:{self.port}", jwt="e30.e30.e30")

    def remote(self, request: Any) -> Remote:
        remote = self.sandboxes[request.task_id.removeprefix("ta-")]
        if remote.gone:
            raise GRPCError(Status.NOT_FOUND, "the task has finished")
        return remote

    async def enter(self, remote: Remote, arguments: list[str]) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        door = [str(self.top / "bin/apptainer"), "exec", "--cleanenv", f"instance://{remote.name}"]
        door += ["/usr/bin/env", *(word for name in APPTAINERS for word in ("-u", name)), "MODAL_TASK_ID=ta-1"]
        return await asyncio.create_subprocess_exec(*door, *arguments, stdin=pipe, stdout=pipe, stderr=pipe)

    async def end_with(self, main: asyncio.subprocess.Process, remote: Remote) -> None:
        await main.wait()
        await self.end(remote)

    async def end(self, remote: Remote) -> None:
        if not remote.gone:
            remote.gone = True
            await self.command("instance", "stop", "--force", remote.name)

    async def command(self, *arguments: str) -> None:
        process = await asyncio.create_subprocess_exec(self.top / "bin/apptainer", *arguments, stderr=-3)
        assert await process.wait() == 0, arguments

    def write_down(self, name: str, request: Any) -> None:
        with (self.top / "modal.log").open("a") as log:
            log.write(json.dumps({"call": name, **MessageToDict(request)}) + "\n")


def _service(base: type[Any], modal: Modal) -> Any:
    """Return a service whose calls are ``modal``'s, as far as it has them, for those who show the token."""

    def method(name: str) -> Callable[[Any, Any], Any]:
        async def serve(_: Any, stream: Any) -> None:
            call = getattr(modal, re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", name).lower(), None)
            if call is None:
                raise GRPCError(Status.UNIMPLEMENTED, name)
            shown = (stream.metadata.get("x-modal-token-id"), stream.metadata.get("x-modal-token-secret"))
            if base is ModalClientBase and shown != TOKEN:
                raise GRPCError(Status.UNAUTHENTICATED, "Token ID is malformed")
            if name == "TaskExecStdioRead":
                await call(stream)
            else:
                await stream.send_message(await call(await stream.recv_message()))

        return serve

    return type(base.__name__, (base,), {name: method(name) for name in base.__abstractmethods__})()


if __name__ == "__main__":
    asyncio.run(Modal(Path(sys.argv[1])).serve())
