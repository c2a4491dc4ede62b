"""What a run is told: every flag and limit, checked once, then passed whole and never changed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]
ProviderSort = Literal["price", "throughput", "latency"]
ExecutorKind = Literal["local", "ray"]
SandboxKind = Literal["auto", "local", "bubblewrap", "docker", "singularity", "modal"]


def is_shard(text: str) -> bool:
    """Tell whether it is i/n with i from 1 to n."""
    found = re.fullmatch("([1-9][0-9]{0,8})/([1-9][0-9]{0,8})", text)
    return found is not None and int(found[1]) <= int(found[2])


def shard_samples(shard: str | None, count: int) -> range:
    """Return which of a dataset's so many samples are a shard's; all of them without one."""
    first, step = map(int, (shard or "1/1").split("/"))
    return range(first - 1, count, step)


def _checked_shard(text: str) -> str:
    if not is_shard(text):
        raise ValueError("must be i/n with i from 1 to n, such as 1/4")
    return text


class PrefillMessage(BaseModel):
    """One message of few-shot priming, sent before the prompt and never saved."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: str


class RunConfig(BaseModel):
    """One run. Field names are flag names; the text under each is what ``--help`` prints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset_file: Path
    """JSONL file of prompts, one JSON object with "prompt" a line."""
    batch_size: Annotated[int, Field(ge=1)]
    """Samples per batch file and checkpoint, 1 or more."""
    run_name: str
    """Names the folder data/<run_name>/; one path component."""
    distribution: str = "default"
    """Toolset distribution: a name from --list_distributions, or a JSON file of the same shape."""
    tools_file: Path | None = None
    """Python file with tools of your own, marked with @tool; their toolsets come with every draw."""
    mcp_config: Path | None = None
    """JSON file of MCP servers ("mcpServers"); each is a toolset mcp_NAME that comes with every draw."""
    model: str = "anthropic/claude-sonnet-4.6"
    """Model name, sent verbatim."""
    base_url: str = "https://openrouter.ai/api/v1"
    """OpenAI-compatible endpoint; or scripted:FILE (prepared replies), or embedded (a small real model)."""
    api_key: SecretStr | None = None
    """Key for the endpoint; else OPENROUTER_API_KEY (openrouter.ai) or OPENAI_API_KEY (any other host)."""
    max_turns: Annotated[int, Field(ge=1)] = 10
    """Tool-calling iterations per prompt, 1 or more; then a summary is asked for."""
    num_workers: Annotated[int, Field(ge=1)] = 4
    """Worker processes, 1 or more."""
    executor: ExecutorKind = "local"
    """Where workers run: local (this machine), or ray (a Ray cluster)."""
    ray_address: str | None = None
    """host:port of the cluster's head; default $RAY_ADDRESS, else a Ray instance on this machine for the run's time."""
    resume: bool = False
    """Continue a run: what is done is not asked again."""
    verbose: bool = False
    """Log every call and result on stderr."""
    max_samples: Annotated[int, Field(ge=1)] | None = None
    """Only the first N samples of the dataset, 1 or more; default all."""
    providers_allowed: tuple[str, ...] = ()
    """OpenRouter providers to use, comma-separated."""
    providers_ignored: tuple[str, ...] = ()
    """OpenRouter providers to leave out, comma-separated."""
    providers_order: tuple[str, ...] = ()
    """OpenRouter providers to try in this order, comma-separated."""
    provider_sort: ProviderSort | None = None
    """OpenRouter's choice among providers: price, throughput or latency."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """max_tokens of each request, 1 or more; default: the endpoint's own."""
    reasoning_effort: ReasoningEffort | None = None
    """none, minimal, low, medium, high, xhigh, max or ultra; default: the endpoint's own."""
    reasoning_disabled: bool = False
    """Ask for no reasoning at all; wins over reasoning_effort."""
    ephemeral_system_prompt: str | None = None
    """System prompt used during execution and never saved."""
    prefill_messages: tuple[PrefillMessage, ...] = ()
    """Few-shot messages sent before the prompt and never saved; the flag is --prefill_messages_file."""
    log_prefix_chars: Annotated[int, Field(ge=0)] = 100
    """Characters of a tool call or result shown in a --verbose line, 0 or more."""
    sandbox: SandboxKind = "auto"
    """Where commands run: auto, local, bubblewrap, docker, singularity or modal; default $TERMINAL_ENV, else auto."""
    concurrency: Annotated[int, Field(ge=1)] | None = None
    """Rollouts in flight per worker, 1 or more, or auto."""
    seed: int = 0
    """Seed of the toolset draws."""
    keep_no_reasoning: bool = False
    """Keep rollouts in which the model showed no reasoning."""
    timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3600
    """Wall time of one rollout in seconds, above 0, from its first request's turn on."""
    shard: Annotated[str, AfterValidator(_checked_shard)] | None = None
    """i/n: only every n-th sample, from the i-th on, i from 1 to n; each shard is a run of its own."""
    merge: tuple[str, ...] = ()
    """Make a new run of these: names in data/ or folders, comma-separated. Needs no other flag but --run_name."""
    max_cost_usd: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Dollars the whole run may cost, as told by the endpoint, above 0; then it ends early."""
    max_total_tokens: Annotated[int, Field(ge=1)] | None = None
    """Prompt and completion tokens the whole run may use, 1 or more; then it ends early."""
    max_hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Hours the whole run may take, all its legs together, above 0; then it ends early."""

    def samples_of(self, count: int) -> range:
        """Return which of a dataset's so many samples are this run's: all of them, or its shard's."""
        return shard_samples(self.shard, count)

    @property
    def bounds_spending(self) -> bool:
        """Whether what rollouts spend is bounded."""
        return self.max_cost_usd is not None or self.max_total_tokens is not None

    @property
    def reasoning_off(self) -> bool:
        """Whether the user asked for no reasoning; the no-reasoning filter is off then."""
        return self.reasoning_disabled or self.reasoning_effort == "none"
