"""The door: everything that can be known to be wrong before anything is written, sent or paid for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec

from model_tools import BUILT_IN, Catalogue, missing_tools, tool_settings, toolset_availability
from rollout.config import RunConfig
from rollout.extras import Extras
from rollout.samples import Dataset
from sandboxes import select
from tools.base import ToolLimits
from toolsets import Distribution, load_distribution


class PreflightError(ValueError):
    """The run cannot start; the message is one line that says why and what to do."""


@dataclass(frozen=True)
class Plan:
    """What the checks found out."""

    dataset: Dataset
    distribution: Distribution
    extras: Extras  # tools that are not the program's; may hold keys
    unavailable: dict[str, str]  # toolset → why it cannot be used here; all toolsets, drawn or not
    missing: dict[str, str]  # tool → why; also of toolsets of which others can be used
    tool_settings: dict[str, str]  # what the tools read of the environment; may hold keys
    sandbox: str  # the backend of samples without an image
    image_sandbox: str  # that of samples with one; "" when there is none
    limits: ToolLimits
    warnings: tuple[str, ...]


def prepare(config: RunConfig, environ: Mapping[str, str] = os.environ) -> Plan:
    """Check the run. Raises PreflightError, DatasetError, DistributionError, ExtrasError."""
    _check_executor(config)
    limits = tool_limits(environ)
    extras = Extras.read(config.tools_file, config.mcp_config, environ)
    catalogue = extras.catalogue()
    distribution = _distribution(config, catalogue)
    settings = tool_settings(environ, catalogue)
    tools_missing = missing_tools(settings, catalogue)
    unavailable = unavailable_toolsets(tools_missing, catalogue)
    missing = {name: unavailable[name] for name in distribution.toolsets if name in unavailable}
    if len(missing) == len(distribution.toolsets):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        raise PreflightError(f"distribution {distribution.name!r} leaves no toolset that works here ({reasons})")
    warnings = [f"toolset {name} is not available: {reason}" for name, reason in missing.items()]
    usable = catalogue.tools_of(name for name in distribution.toolsets if name not in unavailable)
    lacking = [tool.name for tool in usable if tool.name in tools_missing]
    warnings += [f"tool {name} is not available: {tools_missing[name]}" for name in lacking]
    with ExitStack() as on_error:
        dataset = on_error.enter_context(Dataset.open(config.dataset_file, config.max_samples))
        if not config.samples_of(len(dataset)):
            raise PreflightError(f"--shard={config.shard}: {dataset.path} has only {len(dataset)} samples")
        sandbox, image_sandbox, warning = _choose_sandboxes(config, dataset)
        on_error.pop_all()
    return Plan(
        dataset,
        distribution,
        extras,
        unavailable,
        tools_missing,
        settings,
        sandbox,
        image_sandbox,
        limits,
        tuple(filter(None, [warning, *warnings, *extras.warnings])),
    )


def _check_executor(config: RunConfig) -> None:
    if config.executor == "ray" and find_spec("ray") is None:
        raise PreflightError("--executor=ray needs the package ray; install it with: pip install -e '.[ray]'")
    if config.executor != "ray" and config.ray_address is not None:
        raise PreflightError(f"--ray_address={config.ray_address} needs --executor=ray")


def _distribution(config: RunConfig, catalogue: Catalogue) -> Distribution:
    """Return the run's distribution; toolsets that are not the program's and not named in it come with every draw."""
    distribution = load_distribution(config.distribution, catalogue.toolsets)
    added = [name for name in catalogue.added_toolsets if name not in distribution.probabilities]
    return replace(distribution, always=tuple(added))


def unavailable_toolsets(missing: Mapping[str, str], catalogue: Catalogue = BUILT_IN) -> dict[str, str]:
    """Return every toolset that cannot be used here, with the reason and what to do about it.

    ``missing`` is what ``model_tools.missing_tools`` says of single tools.
    """
    reasons = {name: toolset_availability(name, missing, catalogue=catalogue) for name in catalogue.toolsets}
    return {name: reason for name, reason in reasons.items() if reason}


def tool_limits(environ: Mapping[str, str]) -> ToolLimits:
    """Return the tools' bounds with what the environment says of them. Raises PreflightError on a bad number."""

    def seconds(variable: str, default: float) -> float:
        text = environ.get(variable, "").strip()
        if not text:
            return default
        if not text.replace(".", "", 1).isdecimal() or float(text) <= 0:
            raise PreflightError(f"{variable}={text} must be a number of seconds above 0")
        return float(text)

    default = ToolLimits()
    return replace(
        default,
        terminal_timeout_seconds=seconds("TERMINAL_TIMEOUT", default.terminal_timeout_seconds),
        max_foreground_seconds=seconds("TERMINAL_MAX_FOREGROUND_TIMEOUT", default.max_foreground_seconds),
    )


def _choose_sandboxes(config: RunConfig, dataset: Dataset) -> tuple[str, str, str]:
    """Return the backend of samples without an image, that of samples with one ("" when there is none), a warning."""
    plain = select(config.sandbox, wants_image=False)
    if plain.backend is None:
        raise PreflightError(plain.problem)
    if dataset.first_image_index is None:
        return plain.backend.name, "", plain.warning
    images = select(config.sandbox, wants_image=True)
    if images.backend is None:
        sample = f"sample {dataset.first_image_index} of {config.dataset_file} names an image"
        raise PreflightError(f"{sample}: {images.problem}")
    return plain.backend.name, images.backend.name, plain.warning
