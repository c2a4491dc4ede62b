"""The door: everything that can be known to be wrong before anything is written, sent or paid for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from model_tools import toolset_availability
from rollout.config import RunConfig
from rollout.samples import Dataset
from sandboxes import BACKENDS, resolve
from tools.base import ToolLimits
from toolsets import TOOLSETS, Distribution, load_distribution

_IMAGE_BACKENDS = tuple(name for name, backend in BACKENDS.items() if backend.takes_images)


class PreflightError(ValueError):
    """The run cannot start; the message is one line that says why and what to do."""


@dataclass(frozen=True)
class Plan:
    """What the checks found out."""

    dataset: Dataset
    distribution: Distribution
    unavailable: dict[str, str]  # toolset → why it cannot be used here; all toolsets, drawn or not
    sandbox: str  # the backend of samples without an image
    limits: ToolLimits
    warnings: tuple[str, ...]


def prepare(config: RunConfig, environ: Mapping[str, str] = os.environ) -> Plan:
    """Check the run. Raises PreflightError, DatasetError, DistributionError."""
    distribution = load_distribution(config.distribution)
    limits = tool_limits(environ)
    unavailable = unavailable_toolsets()
    missing = {name: unavailable[name] for name in distribution.probabilities if name in unavailable}
    if len(missing) == len(distribution.probabilities):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        raise PreflightError(f"distribution {distribution.name!r} leaves no toolset that works here ({reasons})")
    warnings = [f"toolset {name} is not available: {reason}" for name, reason in missing.items()]
    with ExitStack() as on_error:
        dataset = on_error.enter_context(Dataset.open(config.dataset_file, config.max_samples))
        sandbox, warning = _choose_sandbox(config, dataset)
        on_error.pop_all()
    return Plan(dataset, distribution, unavailable, sandbox, limits, tuple(filter(None, [warning, *warnings])))


def unavailable_toolsets() -> dict[str, str]:
    """Return every toolset that cannot be used here, with the reason and what to do about it."""
    reasons = {name: toolset_availability(name) for name in TOOLSETS}
    return {name: reason for name, reason in reasons.items() if reason}


def tool_limits(environ: Mapping[str, str]) -> ToolLimits:
    """Return the tools' bounds with what the environment says of them. Raises PreflightError on a bad number."""
    names = {"TERMINAL_TIMEOUT": "terminal_timeout_seconds", "TERMINAL_MAX_FOREGROUND_TIMEOUT": "max_foreground_seconds"}
    limits = ToolLimits()
    for variable, name in names.items():
        text = environ.get(variable, "").strip()
        if not text:
            continue
        if not text.replace(".", "", 1).isdecimal() or float(text) <= 0:
            raise PreflightError(f"{variable}={text} must be a number of seconds above 0")
        limits = replace(limits, **{name: float(text)})
    return limits


def _choose_sandbox(config: RunConfig, dataset: Dataset) -> tuple[str, str]:
    """Return the backend for samples without an image, and a warning ("" when there is none)."""
    choice = resolve(config.sandbox)
    if choice.error:
        raise PreflightError(choice.error)
    if dataset.first_image_index is None or choice.name in _IMAGE_BACKENDS:
        return choice.name, choice.warning
    sample = f"sample {dataset.first_image_index} of {config.dataset_file} names an image"
    if config.sandbox != "auto":
        kinds = ", ".join(("auto", *_IMAGE_BACKENDS))
        raise PreflightError(f"{sample}, and --sandbox={config.sandbox} has none; choose from {kinds}")
    images = resolve("docker")
    if images.error:
        raise PreflightError(f"{sample}: {images.error}")
    return choice.name, choice.warning
