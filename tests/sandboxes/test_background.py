"""Processes that are started in the background: their output, their stdin, their end."""

from __future__ import annotations

import asyncio
import time

import pytest

from sandboxes.base import BACKGROUND_BUFFER_CHARS, BackgroundProcess, Sandbox, SandboxError, SandboxFileError
from tests.sandboxes.support import MINUTE, run, running, until


async def has_written(process: BackgroundProcess, text: str) -> bool:
    return await until(lambda: text in process.output())


def test_a_life(any_shell: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        before = time.time()
        process = await sandbox.start("echo hi; echo err >&2; sleep 0.3; exit 5")
        assert (process.status(), process.exit_code()) == ("running", None)
        assert process.command.startswith("echo hi")
        assert before <= process.started_at <= time.time()
        assert not await process.wait(0.01)
        assert await process.wait(MINUTE)
        assert (process.status(), process.exit_code(), process.output()) == ("exited", 5, "hi\nerr\n")
        await process.kill()
        assert process.exit_code() == 5

    run(any_shell, body)


def test_it_is_where_the_rollout_is(any_shell: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.exec("cd /usr; export A=1", timeout_seconds=MINUTE)
        process = await sandbox.start("pwd; echo $A; cd /; export A=2")
        other = await sandbox.start("pwd", cwd="bin")
        nowhere = await sandbox.start("echo not run", cwd="/no/such")
        await asyncio.gather(process.wait(MINUTE), other.wait(MINUTE), nowhere.wait(MINUTE))
        assert (process.cwd, process.output()) == ("/usr", "/usr\n1\n")
        assert (other.cwd, other.output()) == ("/usr/bin", "/usr/bin\n")
        assert (nowhere.exit_code(), nowhere.output()) == (1, "cd: /no/such: No such directory\n")
        assert (await sandbox.exec("pwd; echo $A", timeout_seconds=MINUTE)).output == "/usr\n1\n"

    run(any_shell, body)


def test_pid_is_the_one_inside(any_shell: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        process = await sandbox.start("echo $$; exec sleep 1000.41")
        assert await has_written(process, "\n")
        assert process.pid == int(process.output())
        assert (await sandbox.exec(f"kill {process.pid}", timeout_seconds=MINUTE)).exit_code == 0
        assert await process.wait(MINUTE)
        assert process.exit_code() == 143

    run(any_shell, body)


class TestStdin:
    def test_lines(self, any_shell: str) -> None:
        async def body(sandbox: Sandbox) -> None:
            process = await sandbox.start('while read -r line; do echo "<$line>"; done; echo end')
            await process.write(b"one\n")
            assert await has_written(process, "<one>")
            await process.write(b"two\nthree\n")
            assert await has_written(process, "<three>")
            await process.close_stdin()
            assert await process.wait(MINUTE)
            assert process.output() == "<one>\n<two>\n<three>\nend\n"
            with pytest.raises(SandboxFileError, match="closed"):
                await process.write(b"x")
            await process.close_stdin()

        run(any_shell, body)

    def test_much(self, kind: str) -> None:
        async def body(sandbox: Sandbox) -> None:
            process = await sandbox.start("sleep 0.2; wc -c")
            await asyncio.gather(process.write(b"x" * 3_000_000), process.write(b"y" * 1_000_000))
            await process.close_stdin()
            assert await process.wait(MINUTE)
            assert process.output().strip() == "4000000"

        run(kind, body)

    def test_nobody_reads(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sandboxes.host_job.STDIN_SECONDS", 0.3)
        monkeypatch.setattr("sandboxes.container_job.STDIN_SECONDS", 0.3)

        async def body(sandbox: Sandbox) -> None:
            process = await sandbox.start("sleep 1000.42")
            with pytest.raises(SandboxFileError, match="does not read"):
                await process.write(b"x" * 1_000_000)
            await process.kill()

        run(kind, body)

    def test_it_was_closed_by_the_process(self, kind: str) -> None:
        async def body(sandbox: Sandbox) -> None:
            process = await sandbox.start("exec <&-; echo closed; exec sleep 1000.43")
            assert await has_written(process, "closed")
            with pytest.raises(SandboxFileError, match="closed"):
                await process.write(b"x" * 100_000)

        run(kind, body)

    def test_a_process_that_ends_while_it_is_written_to(self, kind: str) -> None:
        async def body(sandbox: Sandbox) -> None:
            process = await sandbox.start("sleep 0.2")
            with pytest.raises(SandboxFileError, match="closed"):
                await process.write(b"x" * 1_000_000)
            assert process.exit_code() in (None, 0)

        run(kind, body)

    def test_each_has_its_own(self, kind: str) -> None:
        async def body(sandbox: Sandbox) -> None:
            first = await sandbox.start("cat & wait")  # its child keeps stdin when it has ended
            await first.kill()
            for index in range(3):
                process = await sandbox.start("read -r line; echo $line")
                await process.write(f"{index}\n".encode())
                assert await process.wait(MINUTE)
                assert process.output() == f"{index}\n"

        run(kind, body)


class TestEnd:
    def test_kill(self, any_shell: str) -> None:
        async def body(sandbox: Sandbox) -> None:
            process = await sandbox.start("trap '' TERM HUP; echo up; sleep 1000.44 & setsid sleep 1000.44 & wait")
            assert await has_written(process, "up")
            assert await until(lambda: len(running("1000.44")) == 2)
            started = time.monotonic()
            await process.kill()
            assert time.monotonic() - started < 3
            assert (process.status(), process.exit_code()) == ("exited", 137)
            assert await until(lambda: not running("1000.44"))
            await process.kill()

        run(any_shell, body)

    def test_kill_at_once(self, kind: str) -> None:
        async def body(sandbox: Sandbox) -> None:
            processes = [await sandbox.start("exec sleep 1000.45") for _ in range(5)]
            await asyncio.gather(*(process.kill() for process in processes))
            assert await until(lambda: not running("1000.45"))

        run(kind, body)

    def test_only_newest_output_is_kept(self, kind: str) -> None:
        async def body(sandbox: Sandbox) -> None:
            process = await sandbox.start("seq 1 100000; echo é")
            assert await process.wait(MINUTE)
            assert len(process.output()) == BACKGROUND_BUFFER_CHARS
            assert process.output().endswith("99999\n100000\né\n")

        run(kind, body)

    def test_with_its_sandbox(self, kind: str) -> None:
        kept: list[BackgroundProcess] = []

        async def body(sandbox: Sandbox) -> None:
            kept.append(await sandbox.start("sleep 1000.46"))

        run(kind, body)
        assert not running("1000.46")
        assert kept[0].status() == "exited"

    def test_a_closed_sandbox_starts_nothing(self, kind: str) -> None:
        async def body(sandbox: Sandbox) -> None:
            await sandbox.close()
            for call in (
                sandbox.start("sleep 1000.47"),
                sandbox.exec("sleep 1000.47", timeout_seconds=MINUTE),
                sandbox.read_file("/etc/hosts", max_bytes=10),
                sandbox.write_file("x", b"x"),
            ):
                with pytest.raises(SandboxError):
                    await call
            assert not running("1000.47")

        run(kind, body)
