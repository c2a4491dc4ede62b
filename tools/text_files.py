"""Files of a sandbox as the file tools see them: where a path leads, whether it is text, what may be written.

Owns: resolving a path inside the sandbox, telling text from images and other binaries by content, the list of files
that are never written, and what a rollout's file tools remember. Text keeps every byte: a byte that is no UTF-8 stands
as a lone surrogate and is written back as it was; a BOM is taken off for the model and put back. What the model sends
is cleaned of surrogates first, so that it can never forge such a byte.
"""

from __future__ import annotations

import codecs
import posixpath
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from sandboxes.base import Sandbox, SandboxFileError
from tools.base import ToolContext, ToolError

PROBE_TIMEOUT_SECONDS = 60.0
MAX_TEXT_BYTES = 10_000_000  # a larger file is not edited as one text
JUDGED_BYTES = 8192  # at the start of a file; they decide between text and binary
_BOM = codecs.BOM_UTF8.decode()
_IMAGE = re.compile(
    rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|RIFF.{4}WEBP|BM.{4}\0\0\0\0|II\*\0|MM\0\*|\0\0\x01\0", re.DOTALL
)
_SURROGATE = re.compile("[\ud800-\udfff]")

_NEVER_WRITTEN_AT_HOME = re.compile(
    r"/(\.(ssh|aws|gnupg|kube|docker|azure|config/(gh|gcloud))(/.*)?"
    r"|\.(bashrc|bash_profile|bash_login|bash_logout|profile|zshrc|zshenv|zprofile|zlogin|zlogout)"
    r"|\.(netrc|pgpass|npmrc|pypirc|git-credentials))"
)
_NEVER_WRITTEN = re.compile(r"/etc/(passwd|shadow|gshadow|sudoers)-?|/etc/sudoers\.d(/.*)?")
_HOMES = re.compile(r"/root|/home/[^/]+")

# Prints kind, home, stamp, the missing end of the path, and the existing start of it: as it is, and links resolved.
_LOCATE = r"""
case $p in /*) ;; *) p=$(pwd)/$p ;; esac
rest= kind=missing
while [ ! -e "$p" ] && [ ! -L "$p" ]; do
  rest=/${p##*/}$rest p=${p%/*}
  [ -n "$p" ] || { p=/; break; }
done
real=$(readlink -f "$p")
if [ -n "$rest" ]; then :
elif [ -d "$real" ]; then kind=folder
elif [ -f "$real" ]; then kind=file
elif [ -e "$real" ]; then kind=other
fi
stamp=$(stat -c '%s %i %y %z' "$real" || stat -f '%z %i %m %c' "$real")
printf '%s\n' "$kind" "$(readlink -f "$HOME")" "$stamp" "$rest" "$p" "$real"
"""

Kind = Literal["file", "folder", "other", "missing"]
_KINDS: dict[str, Kind] = {"file": "file", "folder": "folder", "other": "other", "missing": "missing"}


@dataclass(frozen=True)
class Place:
    """Where a path leads."""

    given: str  # as the model wrote it
    path: str  # absolute, links resolved: what is read and written
    entry: str  # absolute, links as they are: what is moved or removed
    kind: Kind
    size: int  # bytes; 0 unless it is a file
    stamp: str  # another one whenever the file was written
    parents_missing: bool
    home: str


@dataclass(frozen=True)
class TextFile:
    """A text file's content."""

    text: str  # without its BOM; line ends as they are
    bom: bool = False

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        return ((_BOM if self.bom else "") + self.text).encode("utf-8", "surrogateescape")


@dataclass
class FileState:
    """What one rollout's file tools remember. Keys are resolved paths."""

    reads: dict[tuple[str, int, int], tuple[str, int]] = field(default_factory=dict)  # range → version, times asked
    failed_patches: dict[str, int] = field(default_factory=dict)  # in a row

    def forget_reads(self, path: str) -> None:
        """Let every range of a file be read again: it was written."""
        self.reads = {key: seen for key, seen in self.reads.items() if key[0] != path}


@contextmanager
def told_to_model() -> Iterator[None]:
    """Turn a failed file operation into a tool error."""
    try:
        yield
    except SandboxFileError as error:
        raise ToolError(str(error)) from None


def clean(text: str) -> str:
    """Return text a file can hold: lone surrogates become U+FFFD, paired ones their character."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace") if _SURROGATE.search(text) else text


def shown(text: str) -> str:
    """Return file text as a model may see it: U+FFFD for what is no UTF-8."""
    return _SURROGATE.sub("\ufffd", text)


def shell_word(path: str) -> str:
    """Return the shell word for a path: a leading ``~`` means home, nothing else is expanded, and it is no option."""
    if path == "~" or path.startswith("~/"):
        return '"$HOME"' + (shlex.quote(path[1:]) if path[1:] else "")
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def checked_path(path: str) -> str:
    """Return a path without trailing slashes. Raises ToolError where no file can have it."""
    if not path.strip():
        raise ToolError("path is empty")
    if re.search(r"[\0\r\n]", path):
        raise ToolError(f"path {path!r} holds a line break or a NUL")
    return clean(path).rstrip("/") or "/"


async def locate(sandbox: Sandbox, path: str) -> Place:
    """Find out where a path leads. Raises ToolError."""
    word = shell_word(checked_path(path))
    done = await sandbox.exec_plain(f"(p={word}\n{_LOCATE}) 2>/dev/null", timeout_seconds=PROBE_TIMEOUT_SECONDS)
    answer = done.output.rstrip("\n").split("\n")
    if len(answer) != 6 or answer[0] not in _KINDS or not answer[5]:  # noqa: PLR2004 - the six lines of _LOCATE
        raise ToolError(f"{path} leads nowhere: a broken or circular link, or a folder that is gone")
    kind, home, stamp, rest, start, real = answer
    if ".." in rest.split("/"):
        raise ToolError(f"{path} leads through a folder that does not exist")
    return Place(
        given=path,
        path=re.sub("/+", "/", real + rest),
        entry=re.sub("/+", "/", start + rest),
        kind=_KINDS[kind],
        size=int(stamp.split()[0]) if kind == "file" and stamp else 0,
        stamp=stamp,
        parents_missing=rest.strip("/").count("/") > 0,
        home=home,
    )


def refuse_unless_file(place: Place) -> None:
    """Raise ToolError unless the place is a regular file."""
    if place.kind == "folder":
        raise ToolError(f'{place.given} is a folder; list it with search_files(pattern="*", target="files")')
    if place.kind == "other":
        raise ToolError(f"{place.given} is a device, socket or pipe, not a file")
    if place.kind == "missing":
        raise ToolError(f"File not found: {place.given}")


def refuse_protected(place: Place) -> None:
    """Raise ToolError for a place that is never written: credentials, shell start files, accounts."""
    if any(_is_protected(path, place.home) for path in (place.path, posixpath.normpath(place.entry))):
        raise ToolError(f"Write denied: {place.given} is a protected system or credential file")


def _is_protected(path: str, own_home: str) -> bool:
    home = _HOMES.match(path)
    rests = [path.removeprefix(base) for base in (own_home, home and home[0]) if base and path.startswith(f"{base}/")]
    return bool(_NEVER_WRITTEN.fullmatch(path)) or any(_NEVER_WRITTEN_AT_HOME.fullmatch(rest) for rest in rests)


async def read_bytes(sandbox: Sandbox, place: Place, max_bytes: int) -> bytes:
    """Return the first bytes of a file. Raises ToolError."""
    with told_to_model():
        return await sandbox.read_file(place.path, max_bytes=max_bytes)


def is_image(head: bytes) -> bool:
    """Tell whether a file that starts like this is an image."""
    return bool(_IMAGE.match(head))


def is_binary(head: bytes) -> bool:
    """Tell whether the first bytes of a file hold a NUL or are no UTF-8; later ones do not matter."""
    judged = head[:JUDGED_BYTES]
    try:
        codecs.getincrementaldecoder("utf-8")().decode(judged, final=len(head) < JUDGED_BYTES)
    except UnicodeDecodeError:
        return True
    return b"\0" in judged


def refuse_binary(place: Place, head: bytes) -> None:
    """Raise ToolError when the first bytes of a file are not those of a text."""
    if is_image(head):
        raise ToolError(
            f"{place.given} is an image; look at it with vision_analyze", is_image=True, file_size=place.size
        )
    if is_binary(head):
        raise ToolError(
            f"{place.given} is a binary file, not UTF-8 text; use the terminal, or vision_analyze for an image",
            is_binary=True,
            file_size=place.size,
        )


def decode(data: bytes) -> TextFile:
    """Return the text of a file's bytes."""
    text = data.decode("utf-8", "surrogateescape")
    return TextFile(text.removeprefix(_BOM), bom=text.startswith(_BOM))


async def load(sandbox: Sandbox, place: Place) -> TextFile:
    """Return a whole file. Raises ToolError when it is none, no text, or larger than ``MAX_TEXT_BYTES``."""
    refuse_unless_file(place)
    data = await read_bytes(sandbox, place, MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise ToolError(f"{place.given} is larger than {MAX_TEXT_BYTES:,} bytes; edit it in the terminal")
    refuse_binary(place, data)
    return decode(data)


async def store(context: ToolContext, place: Place, file: TextFile) -> int:
    """Write a file and forget what was read of it; returns its bytes. Raises ToolError."""
    sandbox = await context.open_sandbox()
    data = file.encode()
    context.state(FileState).forget_reads(place.path)
    with told_to_model():
        await sandbox.write_file(place.path, data)
    return len(data)


def parent_of(place: Place) -> str:
    """Return the folder a place is in."""
    return posixpath.dirname(place.path)
