"""The program with the sandboxes that stand-ins serve: chosen by flag and by variable, with images of samples."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from endpoints.scripted import ScriptedEndpoint
from sandboxes.base import Sandbox
from tests.program import Ended, Json, Workplace, answer, script, terminal
from tests.sandboxes.instances import StandIn
from tests.sandboxes.remote import TOKEN, FakeModal
from tests.sandboxes.support import MINUTE, run, until, wait_until

ROWS = [
    {"prompt": "which flavour?", "image": "some/image:1"},
    {"prompt": "and without?"},
    {"prompt": "never asked", "image": "no/such"},
]
SCENES = {
    "which flavour?": [terminal("echo $FLAVOUR"), answer("vanilla")],
    "and without?": [terminal("echo plain$FLAVOUR; env"), answer("none")],
}


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


def environ_of(stand_in: StandIn, more: Mapping[str, str]) -> dict[str, str]:
    return {
        "PATH": f"{stand_in.root / 'bin'}:{os.environ['PATH']}",
        "TERMINAL_SCRATCH_DIR": str(stand_in.root / "cache"),
        "OPENROUTER_API_KEY": "sk-of-the-model",
        **more,
    }


def ended(work: Workplace, **flags: str | None) -> Ended:
    work.dataset(ROWS)
    with ScriptedEndpoint(script(SCENES)) as endpoint:
        return work.run(endpoint.base_url, **flags)


def by_prompt(work: Workplace) -> dict[int, Json]:
    return {row["prompt_index"]: row for row in work.rows()}


def check(work: Workplace, over: Ended, words: str) -> None:
    assert over.code == 1, over.stderr  # one sample's image cannot be had
    rows = by_prompt(work)
    assert rows[0]["completed"]
    assert "vanilla" in json.dumps(rows[0]["conversations"][3])
    assert rows[1]["completed"]
    assert "plain" in json.dumps(rows[1]["conversations"][3])
    assert rows[2]["error"]["kind"] == "image_unavailable"
    assert words in rows[2]["error"]["message"]
    assert not [secret for secret in ("sk-of-the-model", *TOKEN.values()) if secret in json.dumps(list(rows.values()))]


def test_singularity_by_flag(work: Workplace, tmp_path: Path) -> None:
    stand_in = StandIn.install(tmp_path / "apptainer")
    stand_in.add_image("docker://some/image:1", "export FLAVOUR=vanilla")
    work.env = environ_of(stand_in, {})
    check(work, ended(work, sandbox="singularity"), "requested access to the resource is denied")
    assert wait_until(lambda: not stand_in.instances())


def test_modal_by_variable(work: Workplace, fake_modal: FakeModal) -> None:
    fake_modal.stand_in.add_image("docker://some/image:1", "export FLAVOUR=vanilla")
    server = {"MODAL_SERVER_URL": f"http://127.0.0.1:{fake_modal.port}", "MODAL_CONFIG_PATH": "/no/such/file"}
    work.env = environ_of(fake_modal.stand_in, {**TOKEN, **server, "TERMINAL_ENV": "modal"})
    check(work, ended(work, sandbox=None), "manifest for no/such not found")
    assert not fake_modal.stand_in.instances()


@pytest.mark.parametrize(
    ("kind", "words"), [("singularity", "install Apptainer"), ("modal", "set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET")]
)
def test_one_line_where_it_cannot_be_had(work: Workplace, kind: str, words: str) -> None:
    work.env = {"MODAL_CONFIG_PATH": "/no/such/file", "PATH": "/usr/bin:/bin"}
    over = ended(work, sandbox=kind)
    assert over.code == 2
    assert words in over.stderr
    assert len(over.stderr.splitlines()) == 1


def test_killed_with_everything(work: Workplace, tmp_path: Path) -> None:
    stand_in = StandIn.install(tmp_path / "apptainer")
    work.env = environ_of(stand_in, {})
    work.dataset(["how long?"])
    with ScriptedEndpoint(script({"how long?": [terminal("sleep 1000.79"), answer("long")]})) as endpoint:
        process = work.start(endpoint.base_url, sandbox="singularity")
        assert wait_until(lambda: bool(stand_in.instances()), 20)
        process.kill()
        work.ended(process)
    assert wait_until(lambda: not stand_in.instances(), 15)
    assert subprocess.run(["pgrep", "-f", "sleep 1000.79"], check=False, stdout=subprocess.DEVNULL).returncode == 1


@pytest.mark.parametrize("kind", ["singularity", "modal"])
def test_the_contract_in_short(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_modal: FakeModal
) -> None:
    fake_modal.use(monkeypatch)
    StandIn.install(tmp_path).use(monkeypatch)
    data = os.urandom(3_000_000)

    async def body(sandbox: Sandbox) -> None:
        await sandbox.exec("cd /usr; export A='x y'", timeout_seconds=MINUTE)
        result = await sandbox.exec("pwd; echo $A >&2; exit 3", timeout_seconds=MINUTE)
        assert (result.output, result.exit_code) == ("/usr\nx y\n", 3)
        late = await sandbox.exec("echo part; sleep 1000.76", timeout_seconds=0.5)
        assert (late.output, late.exit_code) == ("part\n", 124)
        flood = await sandbox.exec("seq 1 300000; kill -9 $PPID; sleep 5", timeout_seconds=MINUTE)
        assert flood.total_chars > 1_900_000
        assert (await sandbox.exec("echo next", timeout_seconds=MINUTE)).output == "next\n"
        await sandbox.write_file("/tmp/a 'b", data)  # noqa: S108 (inside)
        assert await sandbox.read_file("/tmp/a 'b", max_bytes=len(data)) == data  # noqa: S108
        process = await sandbox.start("read -r line; echo got $line; exec sleep 1000.77")
        await process.write(b"this\n")
        assert await until(lambda: process.output() == "got this\n")
        await process.kill()
        assert process.exit_code() == 137

    run(kind, body)
