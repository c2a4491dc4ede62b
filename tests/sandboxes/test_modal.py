"""What sandboxes of Modal promise beyond the contract: the real client against a server on loopback."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from sandboxes import keys
from sandboxes.base import Sandbox, SandboxError
from sandboxes.docker_settings import DEFAULT_IMAGE
from sandboxes.modal import ModalBackend
from tests.sandboxes.remote import TOKEN, FakeModal
from tests.sandboxes.support import MINUTE, SPEC, in_sandbox, wait_until

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
WORKER = """
import asyncio
from sandboxes import modal, modal_client
from sandboxes.base import SandboxSpec

async def main():
    modal_client.UNFED_SECONDS = {unfed}
    await modal.ModalBackend().open(SandboxSpec(run_name="dead run", rollout_id="r"))
    print("up", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
def fake(fake_modal: FakeModal, monkeypatch: pytest.MonkeyPatch) -> FakeModal:
    return fake_modal.use(monkeypatch)


def run(body: Callable[[Sandbox], Awaitable[T]], **changes: Any) -> T:
    return in_sandbox(ModalBackend(), replace(SPEC, **changes), body)


def output(command: str, **changes: Any) -> str:
    async def body(sandbox: Sandbox) -> str:
        return (await sandbox.exec(command, timeout_seconds=MINUTE)).output

    return run(body, **changes)


def said_by(code: str, **environ: str) -> str:
    """Return what a process prints that has not yet used the client: a process keeps its credentials."""
    command = [sys.executable, "-W", "error", "-c", code]
    variables = {**os.environ, **environ}
    return subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60, check=True
    ).stdout


def other_process(unfed: float) -> subprocess.Popen[str]:
    code = WORKER.format(unfed=unfed)
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)


class TestAtTheDoor:
    def test_costs_nothing_where_it_is_not_chosen(self) -> None:
        code = "import sys, sandboxes, batch_runner; print({'modal', 'grpclib', 'google'} & set(sys.modules))"
        assert said_by(code) == "set()\n"

    def test_no_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "modal", None)
        assert ModalBackend().unavailable() == 'sandbox modal needs the package modal; pip install -e ".[modal]"'
        assert ModalBackend().sweep() == []

    def test_no_credentials(self, fake: FakeModal, monkeypatch: pytest.MonkeyPatch) -> None:
        del fake
        monkeypatch.delenv("MODAL_TOKEN_SECRET")
        problem = ModalBackend().unavailable()
        assert problem.startswith("sandbox modal needs an account; run modal token new, or set MODAL_TOKEN_ID and")
        assert ModalBackend().sweep() == []

    def test_a_token_that_is_wrong(self, fake: FakeModal) -> None:
        del fake
        code = "from sandboxes import select; print(select('modal', wants_image=True).problem)"
        said = said_by(code, MODAL_TOKEN_SECRET="as-wrong")  # noqa: S106 (of nobody)
        assert said == "Modal cannot be used: Token ID is malformed\n"

    @pytest.mark.slow
    def test_nobody_answers(self, fake: FakeModal) -> None:
        del fake
        code = "from sandboxes import modal; modal.PROBE_SECONDS = 1; print(modal.ModalBackend().unavailable())"
        said = said_by(code, MODAL_SERVER_URL="http://127.0.0.1:9")
        assert said.startswith("Modal cannot be used: ")
        assert said.count("\n") == 1

    def test_it_can_be_had(self, fake: FakeModal) -> None:
        del fake
        assert ModalBackend().unavailable() == ""

    def test_hosts_cannot_be_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERMINAL_DOCKER_NETWORK", "docs.example")
        assert "set TERMINAL_DOCKER_NETWORK to true or false" in ModalBackend().unavailable()

    def test_how_many_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TERMINAL_MAX_CONTAINERS", raising=False)
        assert ModalBackend().max_sandboxes() == 100
        monkeypatch.setenv("TERMINAL_MAX_CONTAINERS", "3")
        assert ModalBackend().max_sandboxes() == 3

    def test_workers_get_what_they_need(self) -> None:
        environ = {**TOKEN, "OPENAI_API_KEY": "sk-1", "APPTAINER_DOCKER_PASSWORD": "pw", "HOME": "/"}
        assert keys(["modal", ""], environ) == TOKEN
        assert keys(["singularity"], environ) == {"APPTAINER_DOCKER_PASSWORD": "pw"}
        assert keys(["docker", "local"], environ) == {}


class TestWhatIsAsked:
    def test_limits_tags_and_lifetime(self, fake: FakeModal) -> None:
        assert output("echo hi", run_name="my run!", rollout_id="r-7") == "hi\n"
        call = fake.calls("SandboxCreate")[-1]
        tags = {tag["tagName"]: tag["tagValue"] for tag in call["tags"]}
        assert tags["batch-runner.run"] == "my-run-"
        assert tags["batch-runner.rollout"] == "r-7"
        assert tags["batch-runner.owner-pid"] == str(os.getpid())
        definition = call["definition"]
        limits = {"memoryMb": 5120, "memoryMbMax": 5120, "milliCpu": 1000, "milliCpuMax": 1000}
        assert limits.items() <= definition["resources"].items()
        assert definition["timeoutSecs"] == 86_400
        assert definition["networkAccess"] == {"networkAccessType": "OPEN"}
        assert "secretIds" not in definition
        assert fake.calls("SandboxTerminate")

    def test_what_the_user_wishes(self, fake: FakeModal, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERMINAL_CONTAINER_CPU", "0.5")
        monkeypatch.setenv("TERMINAL_CONTAINER_MEMORY", "0")
        monkeypatch.setenv("TERMINAL_DOCKER_NETWORK", "false")
        monkeypatch.setenv("TERMINAL_DOCKER_ENV", json.dumps({"COLOUR": "red"}))
        assert output("echo $COLOUR; pwd; grep -c : /proc/net/dev", cwd="/app") == "red\n/app\n1\n"
        definition = fake.calls("SandboxCreate")[-1]["definition"]
        assert definition["resources"]["milliCpuMax"] == 500
        assert "memoryMbMax" not in definition["resources"]
        assert definition["networkAccess"] == {"networkAccessType": "BLOCKED"}

    def test_the_token_stays_here(self, fake: FakeModal, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERMINAL_DOCKER_FORWARD_ENV", json.dumps([*TOKEN, "SHARED"]))
        monkeypatch.setenv("SHARED", "seen")
        env = output("env; cat /proc/*/environ")
        assert "SHARED=seen" in env
        assert not any(value in env for value in TOKEN.values())
        assert not any(value in json.dumps(fake.calls("SandboxCreate")) for value in TOKEN.values())

    @pytest.mark.usefixtures("fake")
    def test_no_variable_of_modals(self) -> None:
        seen = {line.partition("=")[0] for line in output("env").splitlines()}
        assert seen == {"HOME", "OLDPWD", "PATH", "PWD", "SHLVL", "TMPDIR", "_"}


class TestImages:
    def test_built_once_for_many_samples(self, fake: FakeModal) -> None:
        fake.stand_in.add_image("docker://asked/once:1", "export FLAVOUR=vanilla")

        async def many() -> None:
            backend = ModalBackend()
            await asyncio.gather(*(backend.ensure_image("asked/once:1") for _ in range(10)))

        asyncio.run(many())
        asked = [call["image"]["dockerfileCommands"][0] for call in fake.calls("ImageGetOrCreate")]
        assert asked.count("FROM asked/once:1") == 1
        assert output("echo $FLAVOUR", image="asked/once:1") == "vanilla\n"

    def test_what_cannot_be_had(self, fake: FakeModal) -> None:
        async def many() -> list[Any]:
            backend = ModalBackend()
            return await asyncio.gather(
                *(backend.ensure_image("never/there") for _ in range(5)), return_exceptions=True
            )

        errors = asyncio.run(many())
        assert {(type(error), error.kind) for error in errors} == {(SandboxError, "image_unavailable")}
        assert str(errors[0]).startswith("Modal image not available: never/there: Image build for ")
        assert "manifest for never/there not found" in str(errors[0])
        asked = [call["image"]["dockerfileCommands"][0] for call in fake.calls("ImageGetOrCreate")]
        assert asked.count("FROM never/there") == 1

    def test_default(self, fake: FakeModal, monkeypatch: pytest.MonkeyPatch) -> None:
        asyncio.run(ModalBackend().ensure_image(""))
        assert fake.calls("ImageGetOrCreate")[-1]["image"]["dockerfileCommands"] == [f"FROM {DEFAULT_IMAGE}"]
        fake.stand_in.add_image("docker://lab/tools")
        monkeypatch.setenv("TERMINAL_MODAL_IMAGE", "lab/tools")
        asyncio.run(ModalBackend().ensure_image(""))
        assert fake.calls("ImageGetOrCreate")[-1]["image"]["dockerfileCommands"] == ["FROM lab/tools"]


class TestEnd:
    def test_one_that_is_gone_is_noticed(self, fake: FakeModal) -> None:
        async def body(sandbox: Sandbox) -> None:
            (name,) = fake.stand_in.instances()
            task = asyncio.create_task(sandbox.exec("sleep 1000.78", timeout_seconds=MINUTE))
            await asyncio.sleep(0.2)
            await asyncio.to_thread(fake.terminate, name)
            for call in (task, sandbox.exec("echo", timeout_seconds=MINUTE)):
                with pytest.raises(SandboxError, match="the sandbox is gone"):
                    await call

        run(body)

    @pytest.mark.slow
    def test_it_lives_while_it_is_fed(self, fake: FakeModal, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sandboxes.modal_client.UNFED_SECONDS", 1)
        monkeypatch.setattr("sandboxes.modal.FEED_SECONDS", 0.2)

        async def body(sandbox: Sandbox) -> None:
            await asyncio.sleep(2.5)
            assert (await sandbox.exec("echo alive", timeout_seconds=MINUTE)).output == "alive\n"

        run(body)
        assert wait_until(lambda: not fake.stand_in.instances())

    @pytest.mark.slow
    def test_it_ends_by_itself_after_its_owner(self, fake: FakeModal) -> None:
        with other_process(unfed=1) as worker:
            assert worker.stdout
            assert worker.stdout.readline() == "up\n"
            assert fake.stand_in.instances()
            worker.kill()
        assert wait_until(lambda: not fake.stand_in.instances(), 10)

    def test_what_is_left_is_swept(self, fake: FakeModal) -> None:
        async def body(sandbox: Sandbox) -> list[str]:
            with other_process(unfed=300) as worker:
                assert worker.stdout
                assert worker.stdout.readline() == "up\n"
                assert await asyncio.to_thread(ModalBackend().sweep) == []
                worker.kill()
            swept = await asyncio.to_thread(ModalBackend().sweep)
            assert (await sandbox.exec("echo alive", timeout_seconds=MINUTE)).output == "alive\n"
            assert len(fake.stand_in.instances()) == 1
            return swept

        (line,) = run(body)
        assert line.startswith("modal sandbox sb-")
        assert "(run dead-run, rollout r, owner " in line
