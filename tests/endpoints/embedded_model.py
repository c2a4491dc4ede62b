"""The real model in tests: whether it can be had here, and how to start it beside other tests."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from endpoints.child import EndpointError
from endpoints.launch import check_endpoint

PATIENCE_SECONDS = 600.0  # of a model on a processor that has other things to do


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
    """Start processes that leave the processor to other tests."""
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 19)
        yield
    finally:
        with suppress(PermissionError):  # only root may take it back
            os.setpriority(os.PRIO_PROCESS, 0, mine)
