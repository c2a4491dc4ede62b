"""One sample in, one row out: the toolset draw, the sandbox, the agent, and whatever can go wrong around them.

Owns the life of the rollout's sandbox (gone when ``close`` is over) and the wall time of the rollout. A failure here is
a row that says so; only faults of the program come out as exceptions.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from model_tools import Catalogue, Toolbox, offered
from rollout.agent import Agent, AgentLimits, AgentResult
from rollout.auxiliary import AuxiliaryModels
from rollout.budget import Spending
from rollout.chat_model import ChatModel, OpenAIChatModel
from rollout.config import RunConfig
from rollout.extras import Extras
from rollout.filters import NO_REASONING, no_reasoning
from rollout.gate import Gate
from rollout.keys import PLACEHOLDER_KEY
from rollout.messages import Failure, Usage
from rollout.on_demand import SandboxOnDemand
from rollout.rows import Row, RowFacts, build_row, discarded_row, summary
from rollout.samples import Sample
from rollout.wall import OvertimeError, wall_time
from sandboxes import BACKENDS
from sandboxes.base import SandboxError, SandboxSpec, has_images
from sandboxes.places import PlaceQueue
from tools.base import ToolContext, ToolLimits
from tools.services import Services
from toolsets import Distribution, draw

THINKING_SECONDS = 0.2  # an answer that takes longer leaves the time to make a sandbox meanwhile
RETRIES_TOLD_SECONDS = 30.0
Log = Callable[[str, str], None]  # level, text


@dataclass(frozen=True)
class Stage:
    """What all rollouts of a worker share."""

    config: RunConfig
    model: ChatModel
    distribution: Distribution
    catalogue: Catalogue
    unavailable: dict[str, str]  # toolset → why it cannot be used here
    missing: dict[str, str]  # tool → why
    services: Services  # of the tools
    auxiliary: AuxiliaryModels  # that the services ask
    sandbox: str  # the backend of samples without an image
    image_sandbox: str  # that of samples with one
    places: PlaceQueue | None  # for sandboxes of which there are only so many at once
    secrets: tuple[str, ...]
    limits: ToolLimits
    log: Log
    gate: Gate  # that requests to the run's endpoint pass

    @classmethod
    def from_settings(cls, settings: dict[str, Any], log: Log, gate: Gate) -> Stage:
        """Make it of the pool's first frame: its keys are read here, and what they hold is said by the fields above."""
        config = RunConfig.model_validate(settings["config"])
        asked = config.model_copy(update={"base_url": settings["base_url"]})
        key, told = settings["api_key"], _RetryLog(log)
        os.environ.update(settings["sandbox_keys"])  # what was kept from this process when it was started
        auxiliary = AuxiliaryModels(asked, key, settings["tool_settings"], log=told)
        auxiliary.gate = gate
        return cls(
            config=config,
            model=OpenAIChatModel(asked, key, gate=gate, log=told),
            distribution=Distribution(**settings["distribution"]),
            catalogue=Extras.from_json(settings["extras"]).catalogue(),
            unavailable=settings["unavailable"],
            missing=settings["missing"],
            services=Services(
                settings["tool_settings"],
                models=auxiliary,
                endpoints=auxiliary,
                base_url=asked.base_url,
                model=asked.model,
            ),
            auxiliary=auxiliary,
            sandbox=settings["sandbox"],
            image_sandbox=settings["image_sandbox"],
            places=PlaceQueue(Path(settings["places"])) if settings["places"] else None,
            secrets=tuple(settings["secrets"]),
            limits=ToolLimits(**settings["limits"]),
            log=log,
            gate=gate,
        )

    @staticmethod
    def warm_up() -> None:
        """Import what a first rollout would import, and learn of the machine what each worker would ask anew."""
        from rollout.transport import Connection  # noqa: PLC0415 - most of a second, paid once before workers are forked

        Connection("http://localhost/v1", PLACEHOLDER_KEY, max_body_bytes=1)  # the client looks at what machine this is

    async def close(self) -> None:
        """Close the connections to the endpoint, and what the tools share."""
        await self.services.close()
        await self.auxiliary.close()
        if isinstance(self.model, OpenAIChatModel):
            await self.model.close()


@dataclass
class _RetryLog:
    """Tells of repeated requests: all with --verbose and in the log file, one every so often on the screen."""

    log: Log
    told_at: float = float("-inf")

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        due = now - self.told_at >= RETRIES_TOLD_SECONDS
        if due:
            self.told_at = now
        self.log("warning" if due else "debug", text)


class Session:
    """One rollout over one sample."""

    def __init__(self, sample: Sample, batch_num: int, stage: Stage) -> None:
        self.sample = sample
        self.batch_num = batch_num
        self.stage = stage
        self.drawn = draw(stage.distribution, stage.config.seed, sample_key(sample))
        self.kind = stage.image_sandbox if sample.image else stage.sandbox
        spec = SandboxSpec(stage.config.run_name, rollout_id(stage.config.run_name, sample), sample.image, sample.cwd)
        self.sandbox = SandboxOnDemand(self.kind, spec, stage.places, stage.gate.sandbox_started)
        usable = [name for name in self.drawn if name not in stage.unavailable]
        self.tools = ToolContext(self.sandbox.open, stage.limits, stage.services, log=stage.log)
        names = offered(usable, stage.missing, stage.catalogue)
        self.toolbox = Toolbox(names, self.tools, stage.secrets, stage.catalogue.tools)
        limits = AgentLimits(max_turns=stage.config.max_turns, log_prefix_chars=stage.config.log_prefix_chars)
        log = self._log_call if stage.config.verbose else None
        self.agent = Agent(sample.prompt, stage.model, self.toolbox, limits, log)
        self.started = time.monotonic()

    async def run(self) -> Row:
        """Run the rollout and return its row, discarded and failed ones included."""
        if not self.toolbox.definitions:
            reasons = "; ".join(f"{name}: {self.stage.unavailable.get(name, '')}" for name in self.drawn)
            return self.failed(Failure("bad_request", f"no tool is left of the toolsets drawn ({reasons})"))
        seconds = self.stage.config.timeout_seconds
        try:
            async with wall_time(seconds):
                result = await self._checked_run()
        except OvertimeError as error:
            told = f"the rollout took longer than --timeout_seconds={seconds:g}{error}"
            return self.failed(Failure("timeout", told))
        return self._row(result)

    async def close(self) -> None:
        """End what the rollout started, and its sandbox. To be called once ``run`` is over, however it ended."""
        try:
            await self.tools.close()
        finally:
            await self.sandbox.close()

    async def _checked_run(self) -> AgentResult:
        """Run the agent, after making sure of the image: the model costs money, and is no use without it.

        The sandbox is made while the model thinks about its first answer: one that takes its time at once, one that is
        this machine's work when the requests of all rollouts are on their way.
        """
        backend = BACKENDS[self.kind]
        if has_images(backend):
            try:
                await backend.ensure_image(self.sample.image, partial(self.stage.log, "info"))
            except SandboxError as error:
                return self.agent.failed(Failure(error.kind, str(error)))
        if self.toolbox.needs_sandbox:
            self.sandbox.begin_later(0 if has_images(backend) else THINKING_SECONDS)
        return await self.agent.run()

    def _log_call(self, text: str) -> None:
        self.stage.log("call", f"[B{self.batch_num}:P{self.sample.index}] {text}")

    def failed(self, failure: Failure) -> Row:
        """Return the row of a rollout that gave no result, with what was said and spent until then."""
        return self._row(self.agent.failed(failure))

    def _row(self, result: AgentResult) -> Row:
        config = self.stage.config
        facts = RowFacts(
            batch_num=self.batch_num,
            timestamp=datetime.now(UTC).astimezone(),
            model=config.model,
            sandbox=self.kind,
            duration_seconds=time.monotonic() - self.started,
            toolsets_used=self.drawn,
            definitions=self.toolbox.definitions,
        )
        row = build_row(self.sample, self._with_auxiliary(result), facts)
        wants_reasoning = not (config.reasoning_off or config.keep_no_reasoning)
        came_to_an_end = result.failure is None and not result.partial  # else it may not have got to its reasoning
        if wants_reasoning and came_to_an_end and no_reasoning(row):
            return discarded_row(row, NO_REASONING)
        return row

    def _with_auxiliary(self, result: AgentResult) -> AgentResult:
        """Count what auxiliary models cost as the rollout's own."""
        spent = self.tools.spent
        tokens = Usage(spent.prompt_tokens, spent.completion_tokens, spent.reasoning_tokens, spent.cached_tokens)
        return replace(
            result,
            api_calls=result.api_calls + spent.requests,
            usage=result.usage + tokens,
            cost_usd=result.cost_usd + spent.cost_usd,
        )

    @property
    def spent(self) -> Spending:
        """What the rollout has cost until now, its tools' questions included."""
        agent, tools = self.agent, self.tools.spent
        tokens = agent.usage.prompt_tokens + agent.usage.completion_tokens
        return Spending(agent.cost_usd + tools.cost_usd, tokens + tools.prompt_tokens + tools.completion_tokens)

    @property
    def asked(self) -> bool:
        """Whether any request was answered, or paid for: else the rollout may as well not have begun."""
        return bool(self.agent.api_calls) or self.spent != Spending()

    def summary(self, row: Row) -> dict[str, Any]:
        """Return what the parent shows and counts of the row, so that it need not parse it."""
        return {**summary(row), "masked": self.toolbox.masked}


def sample_key(sample: Sample) -> str:
    """Return what a sample asks, as one short text: equal samples draw equal toolsets, wherever they stand."""
    asked = f"{sample.prompt}\0{sample.image}\0{sample.cwd}"
    return hashlib.sha256(asked.encode(errors="surrogatepass")).hexdigest()


def rollout_id(run_name: str, sample: Sample) -> str:
    """Return a name for the rollout's sandbox that no other on this machine has."""
    run = hashlib.sha256(run_name.encode()).hexdigest()[:8]
    return f"{run}-{sample.index}-{time.monotonic_ns():x}"
