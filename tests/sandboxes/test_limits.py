"""What a command may take of time, memory and descriptors, and what happens when it takes more."""

from __future__ import annotations

import asyncio
import time

import pytest

from sandboxes.base import ExecResult, Sandbox
from tests.sandboxes.support import MINUTE, descriptors, exec_all, run, running, until, wait_until


class TestTimeLimit:
    def test_partial_output(self, any_shell: str) -> None:
        started = time.monotonic()
        result = exec_all(any_shell, "echo part; sleep 1000.1", timeout_seconds=0.5)[0]
        assert (result.output, result.exit_code, result.timed_out) == ("part\n", 124, True)
        assert time.monotonic() - started < 4
        assert not running("1000.1")

    def test_descendants_go_too(self, any_shell: str) -> None:
        command = (
            "sleep 1000.2 & setsid sleep 1000.2 & (sleep 1000.2; :) & sh -c 'setsid sleep 1000.2; :' & sleep 1000.2"
        )

        async def body(sandbox: Sandbox) -> None:
            result = await sandbox.exec(command, timeout_seconds=1)
            assert result.timed_out
            assert wait_until(lambda: not running("1000.2"))
            assert (await sandbox.exec("echo next", timeout_seconds=MINUTE)).output == "next\n"

        run(any_shell, body)

    def test_signals_that_are_ignored(self, any_shell: str) -> None:
        result = exec_all(any_shell, "trap '' TERM INT HUP; while :; do sleep 1; done", timeout_seconds=0.5)[0]
        assert result.timed_out

    def test_many_processes(self, any_shell: str) -> None:
        command = "i=0; while [ $i -lt 60 ]; do (while :; do sleep 1000.3; done) & i=$((i+1)); done; wait"
        assert exec_all(any_shell, command, timeout_seconds=1.5)[0].timed_out
        assert not running("1000.3")

    def test_a_stopped_watcher(self, any_shell: str) -> None:
        started = time.monotonic()
        first, second = exec_all(any_shell, "kill -STOP $PPID; echo x", "echo next", timeout_seconds=0.5)
        assert (first.timed_out, first.output, second.output) == (True, "x\n", "next\n")
        assert time.monotonic() - started < 4

    def test_a_stopped_command(self, any_shell: str) -> None:
        assert exec_all(any_shell, "kill -STOP $$", timeout_seconds=0.5)[0].timed_out

    def test_cancelled(self, any_shell: str) -> None:
        async def body(sandbox: Sandbox) -> None:
            task = asyncio.create_task(sandbox.exec("sleep 1000.4", timeout_seconds=MINUTE))
            assert await until(lambda: bool(running("1000.4")))
            started = time.monotonic()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert time.monotonic() - started < 0.5
            assert await until(lambda: not running("1000.4"))
            assert (await sandbox.exec("echo next", timeout_seconds=MINUTE)).output == "next\n"

        run(any_shell, body)

    def test_cancelled_at_once(self, any_shell: str) -> None:
        async def body(sandbox: Sandbox) -> None:
            for _ in range(5):
                task = asyncio.create_task(sandbox.exec("sleep 1000.5", timeout_seconds=MINUTE))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await sandbox.exec("sleep 0.3", timeout_seconds=MINUTE)
            assert await until(lambda: not running("1000.5"))

        run(any_shell, body)


class TestChildrenInTheBackground:
    def test_do_not_hold_the_call(self, kind: str) -> None:
        started = time.monotonic()
        first, second = exec_all(kind, "sleep 1000.6 & echo started", "echo next")
        assert (first.output, first.exit_code, second.output) == ("started\n", 0, "next\n")
        assert time.monotonic() - started < 4
        assert not running("1000.6")

    def test_go_on_writing_to_nobody(self, kind: str) -> None:
        async def body(sandbox: Sandbox) -> None:
            writer = "(i=0; while [ $i -lt 30000 ]; do echo late $i || exit; i=$((i+1)); done; touch done) & echo first"
            first = await sandbox.exec(writer, timeout_seconds=MINUTE)
            assert first.output.startswith("first") or "first\n" in first.output
            second = await sandbox.exec("echo second; while [ ! -e done ]; do sleep 0.1; done", timeout_seconds=MINUTE)
            assert (second.output, second.exit_code) == ("second\n", 0)

        run(kind, body)

    def test_a_flood_does_not_hold_the_call(self, kind: str) -> None:
        started = time.monotonic()
        first, second = exec_all(kind, "echo first; yes &", "echo second")
        assert "first" in first.output
        assert second.output == "second\n"
        assert time.monotonic() - started < 30  # it would be for ever

    def test_many_keep_few_descriptors(self, kind: str) -> None:
        async def body(sandbox: Sandbox) -> None:
            before = descriptors()
            for _ in range(60):
                assert (await sandbox.exec("sleep 1000.7 & echo x", timeout_seconds=MINUTE)).output == "x\n"
            assert descriptors() - before < 50

        run(kind, body)
        assert not running("1000.7")


class TestFloods:
    def test_numbers(self, kind: str) -> None:
        result = exec_all(kind, "seq 1 2000000; echo LAST_LINE", timeout_seconds=MINUTE)[0]
        assert result.total_chars == 14_888_896 + len("LAST_LINE\n")
        assert result.omitted_chars == result.total_chars - 50_000
        notice = f"\n\n[OUTPUT TRUNCATED - {result.omitted_chars} chars omitted out of {result.total_chars} total]\n\n"
        head, _, tail = result.output.partition(notice)
        assert (len(head), len(tail)) == (20_000, 30_000)
        assert head.startswith("1\n2\n3\n")
        assert tail.endswith("2000000\nLAST_LINE\n")

    def test_bytes_that_are_no_text(self, kind: str) -> None:
        result = exec_all(kind, "head -c 3000000 /dev/urandom", timeout_seconds=MINUTE)[0]
        assert result.exit_code == 0
        assert len(result.output) < 50_200
        result.output.encode()

    def test_characters_are_not_torn(self, kind: str) -> None:
        result = exec_all(kind, "yes é | head -n 200000 | tr -d '\\n'", timeout_seconds=MINUTE)[0]
        assert result.total_chars == 200_000
        assert set(result.output.partition("[")[0].strip()) == {"é"}
        assert "\ufffd" not in result.output

    def test_without_end(self, kind: str) -> None:
        result = exec_all(kind, "yes", timeout_seconds=0.7)[0]
        assert result.timed_out
        assert len(result.output) < 50_200

    def test_a_cap_of_the_callers(self, kind: str) -> None:
        async def body(sandbox: Sandbox) -> ExecResult:
            return await sandbox.exec("echo 0123456789; echo x", timeout_seconds=MINUTE, max_output_chars=10)

        result = run(kind, body)
        assert result.output == "0123\n\n[OUTPUT TRUNCATED - 3 chars omitted out of 13 total]\n\n789\nx\n"

    def test_others_are_served_meanwhile(self, kind: str) -> None:
        async def body(sandbox: Sandbox) -> float:
            flood = asyncio.create_task(sandbox.exec("cat /dev/zero", timeout_seconds=1))
            await asyncio.sleep(0.5)
            started = time.monotonic()
            await asyncio.gather(*(asyncio.sleep(0.01) for _ in range(5)))
            pause = time.monotonic() - started
            await flood
            return pause

        assert run(kind, body) < 0.3
