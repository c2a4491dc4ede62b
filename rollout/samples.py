"""The dataset: one line, one sample. Names bad lines, keeps none of the text in memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One usable line of the dataset."""

    index: int  # among the dataset's usable lines, from 0
    prompt: str
    image: str = ""
    cwd: str = ""
    extra_json: str = ""  # the line's other columns as JSON text; "" when none
