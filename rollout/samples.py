"""The dataset: one line, one sample. Names bad lines, keeps none of the text in memory.

The file is read once from end to end, before anything is run: every line is checked, and what stays is 32 bytes a
sample. A sample's text is read again when it is asked for, and checked to be the same still.
"""

from __future__ import annotations

import io
import json
import os
import stat
from array import array
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from posixpath import normpath
from types import TracebackType
from typing import Any, Self

from rollout.content import Keys, content_key, prompt_text
from rollout.jsonl import JsonObject, Problems, parse_object, read_lines
from rollout.texts import clean_text, one_line
from rollout.trajectory import json_text

_ASKED = ("prompt", "image", "docker_image", "cwd")
_BLOCK_BYTES = 1 << 20
_REASONS_SHOWN = 3
_SHOWN_CHARS = 40


class DatasetError(Exception):
    """The dataset cannot be used; the message is one line that names the file and the reason."""


@dataclass(frozen=True)
class Sample:
    """One usable line of the dataset. All strings are valid text: NULs and lone surrogates are replaced."""

    index: int  # among the dataset's usable lines, from 0
    prompt: str
    image: str = ""
    cwd: str = ""
    extra_json: str = ""  # the line's other columns as JSON text; "" when none


@dataclass
class Dataset:
    """The usable samples of one file, in its order. Use as a context manager, or close it."""

    path: Path
    sha256: str = ""  # of the file's bytes, lines past max_samples included
    first_image_index: int | None = None  # the first sample that names an image; None when none does
    keys: Keys = field(default_factory=Keys)  # what each sample asks, see rollout.content
    _file: io.FileIO = field(init=False, repr=False)
    _starts: array[int] = field(default_factory=lambda: array("Q"), repr=False)
    _end: int = 0
    _problems: Problems = field(default_factory=Problems, repr=False)

    @classmethod
    def open(cls, path: Path, max_samples: int | None = None) -> Dataset:
        """Check the whole file and return it; with ``max_samples``, only up to the line of the last sample.

        Raises DatasetError when it cannot be read, or when no line of it is usable.
        """
        dataset = cls(path)
        with ExitStack() as on_error:
            dataset._file = on_error.enter_context(_open_regular(path))
            dataset._read_through(max_samples)
            on_error.pop_all()
        return dataset

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; samples can no longer be read."""
        self._file.close()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Sample:
        """Read one sample. Raises DatasetError when its line is no longer what it was."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = self._starts[index]
        next_start = self._starts[index + 1] if index + 1 < len(self) else self._end
        try:
            line = os.pread(self._file.fileno(), next_start - start, start).partition(b"\n")[0]
        except OSError as error:
            raise DatasetError(f"cannot read {self.path}: {error.strerror}") from error
        try:
            sample = _sample(index, parse_object(line))
        except ValueError:
            sample = None
        if sample is None or content_key(sample.prompt, sample.image, sample.cwd) != self.keys[index]:
            raise DatasetError(f"{self.path} was changed while the run was reading it (sample {index} is another now)")
        return sample

    @property
    def skipped(self) -> int:
        """Lines that are not blank and could not be used."""
        return self._problems.count

    @property
    def warnings(self) -> list[str]:
        """What was wrong with the skipped lines, as ``file:line: what``: the first hundred, and how many more."""
        return self._problems.lines()

    def _read_through(self, max_samples: int | None) -> None:
        source = _HashingReader(self._file)
        with io.BufferedReader(source, _BLOCK_BYTES) as reader:
            try:
                for number, start, line in read_lines(reader):
                    self._take(number, start, line)
                    if len(self) == max_samples:
                        break
                while reader.read(_BLOCK_BYTES):  # what follows counts for the hash alone
                    pass
            except OSError as error:
                raise DatasetError(f"cannot read {self.path}: {error.strerror}") from error
        self.sha256 = source.hash.hexdigest()
        if not self:
            raise DatasetError(f"{self.path} has no usable line{self._reasons()}")

    def _take(self, number: int, start: int, line: bytes) -> None:
        if line.isspace():
            return
        try:
            prompt, image, cwd = _asked(parse_object(line))
        except ValueError as error:
            self._problems.add(f"{self.path}:{number}: {error}")
            return
        if image and self.first_image_index is None:
            self.first_image_index = len(self)
        self._starts.append(start)
        self._end = start + len(line)
        self.keys.append(content_key(prompt, image, cwd))

    def _reasons(self) -> str:
        if not self._problems.count:
            return ": it is empty"
        more = self._problems.count - _REASONS_SHOWN
        return f" ({'; '.join(self._problems.first[:_REASONS_SHOWN])}{f'; and {more:,} more' if more > 0 else ''})"


class _HashingReader(io.RawIOBase):
    """Hashes a file's bytes as they are read. Does not own the file."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.hash = sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        self.hash.update(memoryview(buffer)[:count])
        return count


def _open_regular(path: Path) -> io.FileIO:
    """Open a file that can be read again at any place: a pipe would also hang here."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise DatasetError(f"dataset {path} is a folder, not a JSONL file")
        if not stat.S_ISREG(mode):
            raise DatasetError(f"dataset {path} is not a regular file: save it to one first, it is read more than once")
        return io.FileIO(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise DatasetError(f"cannot read dataset {path}: {reason}") from error


def _asked(row: JsonObject) -> tuple[str, str, str]:
    """Return (prompt, image, cwd) of a line. Raises ValueError with the reason when it is unusable."""
    if "prompt" not in row:
        raise ValueError('no "prompt"')
    return prompt_text(row["prompt"]), _text(row, "image") or _text(row, "docker_image"), _place(row)


def _place(row: JsonObject) -> str:
    """Return the working folder. Raises ValueError when it is a relative one outside the sandbox's own."""
    cwd = _text(row, "cwd")
    if not cwd.startswith("/") and ".." in normpath(cwd).split("/"):
        raise ValueError(f'"cwd" {one_line(cwd, _SHOWN_CHARS)!r} leads out of the sandbox')
    return cwd


def _text(row: JsonObject, name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f'"{name}" must be text, not {json.dumps(value, default=str)[:_SHOWN_CHARS]}')  # noqa: TRY004 - as above
    return clean_text(value) if value.strip() else ""


def _sample(index: int, row: JsonObject) -> Sample:
    prompt, image, cwd = _asked(row)
    extra = {name: value for name, value in row.items() if name not in _ASKED}
    return Sample(index, prompt, image, cwd, json_text(extra) if extra else "")
