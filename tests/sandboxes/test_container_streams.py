"""Bytes on their way between a worker and a container, wherever they are cut."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes.base import SandboxFileError
from sandboxes.container_job import LaneJob
from sandboxes.container_lane import Marks
from sandboxes.container_shell import escaped
from sandboxes.container_stream import Connection, ContainerStream
from sandboxes.output import Newest
from tests.sandboxes.support import wait_until

MARK = b"\0f00d"
CUTS = st.lists(st.integers(0, 400), max_size=12)
OUTPUT = st.lists(st.sampled_from([b"\0", b"\0f00", b"f00d", b"x", b"\0\0", b"0d", b"m", b"e"]), max_size=12).map(
    b"".join
)
FRAMES = st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=40)), max_size=8)


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    """Return the pieces of data cut at these places."""
    edges = sorted({0, len(data), *(place for place in places if place < len(data))})
    return [data[start:end] for start, end in pairwise(edges)]


class TestMarks:
    @given(st.lists(st.tuples(OUTPUT.filter(lambda data: MARK not in data), st.sampled_from([b"m", b"e"]))), CUTS)
    def test_are_found_wherever_it_is_cut(self, parts: list[tuple[bytes, bytes]], places: list[int]) -> None:
        parts = [(output, kind) for output, kind in parts if MARK not in output + MARK[:-1]]
        stream = b"".join(output + MARK + kind for output, kind in parts)
        marks = Marks(MARK)
        found: list[tuple[bytes, bytes]] = []
        text = b""
        for piece in cut(stream, places):
            for output, kind in marks.split(piece):
                text += output
                if kind:
                    found.append((text, kind))
                    text = b""
        assert found == parts
        assert text == b""

    @given(OUTPUT.filter(lambda data: MARK not in data), CUTS)
    def test_nothing_but_a_begun_mark_is_held_back(self, output: bytes, places: list[int]) -> None:
        marks = Marks(MARK)
        shown = b"".join(part for piece in cut(output, places) for part, _ in marks.split(piece))
        assert output.startswith(shown)
        assert MARK.startswith(output[len(shown) :])


class TestEscaped:
    @pytest.mark.parametrize("name", ["bash", "dash", "busybox"])
    @settings(max_examples=60, deadline=None)
    @given(
        data=st.one_of(st.binary(max_size=300), st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace")))
    )
    def test_any_bytes_come_back(self, name: str, data: bytes) -> None:
        program = shutil.which(name)
        if not program:
            pytest.skip(f"{name} is not installed")
        line = escaped(data)
        assert b"\n" not in line
        assert b"\0" not in line
        shell = [program, "sh"] if name == "busybox" else [program]
        script = 'LC_ALL=C; read -r verb name third; printf %b "$third"'
        ended = subprocess.run([*shell, "-c", script], input=b"put it " + line + b"\n", capture_output=True, check=True)
        assert ended.stdout == data


def streamed(body: Callable[[ContainerStream, socket.socket], object], early: bytes = b"") -> tuple[bytes, bytes, int]:
    """Connect a stream, run ``body`` with it and its far end in a thread; return stdout, stderr, ends."""
    stdout, stderr, ends = bytearray(), bytearray(), 0

    async def main() -> None:
        nonlocal ends
        here, there = socket.socketpair()
        ended = asyncio.Event()

        def end() -> None:
            nonlocal ends
            ends += 1
            ended.set()

        with there:
            stream = ContainerStream(stdout.extend, stderr.extend, end)
            await stream.connect(Connection(here, early))
            await asyncio.to_thread(body, stream, there)
            there.shutdown(socket.SHUT_RDWR)
            async with asyncio.timeout(10):
                await ended.wait()

    asyncio.run(main())
    return bytes(stdout), bytes(stderr), ends


def frame(stream: int, data: bytes) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(data).to_bytes(4, "big") + data


class TestStream:
    @settings(max_examples=40, deadline=None)
    @given(FRAMES, CUTS, st.integers(0, 30))
    def test_streams_are_taken_apart(self, frames: list[tuple[int, bytes]], places: list[int], early: int) -> None:
        data = b"".join(frame(of, payload) for of, payload in frames)

        def body(_: ContainerStream, there: socket.socket) -> None:
            for piece in cut(data[early:], places):
                there.sendall(piece)

        expected = tuple(b"".join(payload for of, payload in frames if of == number) for number in (1, 2))
        assert streamed(body, data[:early]) == (*expected, 1)

    def test_a_flood_is_held_back(self) -> None:
        sent = 0

        def body(_: ContainerStream, there: socket.socket) -> None:
            nonlocal sent
            there.settimeout(0.5)
            data = frame(1, bytes(1 << 20))
            for _round in range(40):
                there.sendall(data)
                sent += 1

        stdout, _, _ = streamed(body)
        assert len(stdout) == sent << 20 == 40 << 20

    def test_input_arrives_and_ends(self) -> None:
        received = bytearray()

        async def main() -> None:
            here, there = socket.socketpair()
            stream = ContainerStream(lambda _: None, lambda _: None, lambda: None)
            await stream.connect(Connection(here))
            job = LaneJob(stream, Newest(10), lambda _: None, stdin=True)
            with there:
                reading = asyncio.create_task(asyncio.to_thread(read_all, there))
                await job.pour(b"x" * 3_000_000)
                job.close_stdin()
                received.extend(await reading)
                with pytest.raises(SandboxFileError, match="stdin is closed"):
                    await job.write(b"more")
            job.release()
            stream.close()

        asyncio.run(main())
        assert len(received) == 3_000_000

    def test_nothing_is_handed_over_after_the_close(self) -> None:
        def body(stream: ContainerStream, there: socket.socket) -> None:
            stream._loop.call_soon_threadsafe(stream.close)
            assert wait_until(lambda: not stream.is_open)
            with pytest.raises(OSError, match=r"Broken pipe|reset"):  # noqa: PT012 (whichever comes to notice)
                for _ in range(3):
                    there.sendall(frame(1, b"late" * 100_000))

        async def main() -> None:
            here, there = socket.socketpair()
            seen: list[bytes] = []
            stream = ContainerStream(seen.append, seen.append, lambda: None)
            await stream.connect(Connection(here))
            with there:
                await asyncio.to_thread(body, stream, there)
            assert seen == []

        asyncio.run(main())


def read_all(connection: socket.socket) -> bytes:
    data = bytearray()
    while piece := connection.recv(1 << 16):
        data += piece
    return bytes(data)
