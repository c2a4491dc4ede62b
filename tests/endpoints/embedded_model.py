"""The real model in tests: whether it can be had here, and how to start it beside other tests."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from endpoints.child import EndpointError
from endpoints.launch import check_endpoint

PATIENCE_SECONDS = 600.0  # of a model on a processor that has other things to do
_NICE = 5


def why_not() -> str:
    if importlib.util.find_spec("xllamacpp") is None:
        return "xllamacpp is not installed"
    try:
        check_endpoint("embedded", "")
    except EndpointError as error:
        return str(error)
    return ""


@contextmanager
def politely() -> Iterator[None]:
    """Start processes that leave most of the processor to other tests.

    On one core: threads of the engine that wait for each other burn twice the time of all on a busy machine.
    """
    mine, cores = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    core = sorted(cores)[worker % len(cores)]
    try:
        os.setpriority(os.PRIO_PROCESS, 0, max(mine, _NICE))
        os.sched_setaffinity(0, {core})
        yield
    finally:
        os.sched_setaffinity(0, cores)
        with suppress(PermissionError):  # only root may take it back
            os.setpriority(os.PRIO_PROCESS, 0, mine)
