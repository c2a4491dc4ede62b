"""What a pool is given to do, and what it gives back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rollout.messages import Failure
from rollout.samples import Sample


@dataclass(frozen=True)
class Job:
    """A sample, and the batch its row belongs to."""

    sample: Sample
    batch_num: int


@dataclass(frozen=True)
class Outcome:
    """What became of a job: a row's line as the worker made it, or the failure of the worker itself."""

    job: Job
    line: bytes = b""
    summary: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None


class Jobs:
    """The jobs to give out: can be asked whether there are more, and takes some back. One is taken ahead at most."""

    def __init__(self, jobs: Iterator[Job]) -> None:
        self.returned: deque[Job] = deque()
        self._jobs = jobs
        self._next = next(jobs, None)

    def __bool__(self) -> bool:
        return bool(self.returned) or self._next is not None

    def __next__(self) -> Job:
        if self.returned:
            return self.returned.popleft()
        if self._next is None:
            raise StopIteration
        job, self._next = self._next, next(self._jobs, None)
        return job
