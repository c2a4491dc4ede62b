"""Images as files: built once per image and machine, into a cache, however many samples and workers want them.

The cache is $TERMINAL_SCRATCH_DIR, else ``batch-runner`` in the user's cache folder; removing files there is safe when
no run is on. A file appears under its name when it is whole. Image files and folders that the user names are used where
they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import BoundedSemaphore

from sandboxes import image_notes
from sandboxes.base import SandboxError, Tell, tell_nobody
from sandboxes.resident import launch, wait
from sandboxes.singularity_instance import program, program_environment, words

BUILD_SECONDS = 1800  # an image may be large
MAX_CHECKS = 64  # at the same time, of one process: most of them only look, or wait for others
MAX_BUILDS = 2  # they take all processors
_BUILDING = "building-"  # the names of folders in the cache begin with it
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://|(docker-daemon|docker-archive|oci|oci-archive):")
_CREDENTIALS = re.compile(
    r"(APPTAINER|SINGULARITY)_DOCKER_(USERNAME|PASSWORD|HOST)|DOCKER_CONFIG|(?i:https?_proxy|no_proxy)|SSL_CERT_(FILE|DIR)"
)

# Arguments: file for what is said, seconds, what to run. It ends with us, too.
_BUILD = """log=$1 seconds=$2; shift 2
exec >"$log" 2>&1
timeout -k 5 "$seconds" "$@" </dev/null &
build=$!
exec 3<&0
{ cat <&3 >/dev/null; kill "$build"; } >/dev/null 2>&1 &
watch=$!
wait "$build"; code=$?
kill "$watch"
exit "$code"
"""


class Images:
    """The images of this machine, as one process knows them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(MAX_CHECKS, thread_name_prefix="image")
        self._builds = BoundedSemaphore(MAX_BUILDS)
        self._checks: dict[str, Future[str]] = {}

    async def ensure(self, name: str, tell: Tell = tell_nobody) -> str:
        """Return the path of an image's file or folder, built if need be. Raises SandboxError."""
        source = source_of(name)
        if not source:
            return await asyncio.to_thread(_named_by_user, name)
        check = self._checks.get(source)
        if check is None or _is_no_verdict(check):
            check = self._checks[source] = self._pool.submit(self._check, source, image_notes.from_a_thread(tell))
        return await asyncio.shield(asyncio.wrap_future(check))

    def _check(self, source: str, tell: Tell) -> str:
        cache = cache_folder()
        file = cache / f"{hashlib.sha256(source.encode(errors='surrogatepass')).hexdigest()}.sif"
        if file.exists():
            return str(file)
        _clear(cache)
        with image_notes.locked(str(cache), source) as notes, self._builds:
            if file.exists():
                return str(file)
            try:
                complaint = notes.complaint()
                if not complaint:
                    tell(f"building image {source}, once for this machine; that may take minutes")
                    complaint = _build(source, file)
            except OSError as error:
                raise SandboxError(f"the folder of images cannot be used: {error}") from error
            if complaint:
                notes.leave(complaint)
                raise image_error(source, complaint)
        tell(f"image {source} is here")
        return str(file)


def _is_no_verdict(check: Future[str]) -> bool:
    """Tell whether a check failed for another reason than the image: then it is made again."""
    error = check.exception() if check.done() else None
    return error is not None and not (isinstance(error, SandboxError) and error.kind == "image_unavailable")


def source_of(name: str) -> str:
    """Return what is to be built for an image's name, "" when it names a file or folder of this machine."""
    if _SCHEME.match(name):
        return name
    return "" if name.endswith(".sif") or name.startswith(("/", "./", "../", "~/")) else f"docker://{name}"


def cache_folder() -> Path:
    """Return the folder of built images, made when it is not there. Raises SandboxError."""
    scratch = os.environ.get("TERMINAL_SCRATCH_DIR", "").strip()
    usual = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 (never raises)
    folder = Path(scratch) if scratch else Path(usual, "batch-runner")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SandboxError(f"no folder for images: {error}") from error
    return folder


def image_error(name: str, complaint: str) -> SandboxError:
    """Return the error of a sample whose image cannot be had."""
    return SandboxError(f"Singularity image not available: {name}: {complaint}", kind="image_unavailable")


def _clear(cache: Path) -> None:
    """Remove what builds have left that cannot be going on any more, on any machine that uses the cache."""
    for folder in cache.glob(f"{_BUILDING}*"):
        with contextlib.suppress(OSError):  # somebody else did
            if time.time() - folder.stat().st_mtime > 2 * BUILD_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _named_by_user(name: str) -> str:
    path = Path(os.path.expanduser(name))  # noqa: PTH111 (never raises)
    if path.is_file():
        return str(path.absolute())
    if not path.is_dir():
        raise image_error(name, "no such file or folder")
    if not (path / ".singularity.d").is_dir():  # any other folder is the host's own, and no image
        raise image_error(name, "the folder is no image (it has no .singularity.d)")
    return str(path.absolute())


def _build(source: str, file: Path) -> str:
    """Make an image's file; return the program's complaint, "" when it is there."""
    with tempfile.TemporaryDirectory(prefix=_BUILDING, dir=file.parent, ignore_cleanup_errors=True) as folder:
        part, log = Path(folder, "image.sif"), Path(folder, "log")
        command = ["/bin/sh", "-c", _BUILD, "sh", str(log), str(BUILD_SECONDS), program(), "build", str(part), source]
        credentials = {name: value for name, value in os.environ.items() if _CREDENTIALS.fullmatch(name)}
        code = _run(command, {**program_environment(), **credentials})
        if code == 0:
            part.replace(file)
            return ""
        if code == 124:  # noqa: PLR2004 (what timeout says)
            return f"it was not built within {BUILD_SECONDS} s"
        return words(log.read_text(encoding="utf-8", errors="replace")) or f"exit code {code}"


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run a command that ends early when its stdin does, that is, when this process is gone."""
    process = launch(command, environment)
    try:
        wait(process)
    finally:
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe:
                pipe.close()
    return int(process.returncode)
