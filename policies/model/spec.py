"""The run's specification: run.yaml after validation, run.json in the store.

Only data and its defaults. `orchestrator.config` reads YAML, reports lines and checks keys against TRL and vLLM.
Keys of other projects (`grpo`, `peft`, `vllm`, `resources`) keep those projects' names.

The comments above or behind fields are their descriptions for users, in docs/run-yaml.md and in the JSON Schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_orch.policies.model.vocabulary import Recovery

# The number of training processes: one for each GPU of the trainer's node, unless run.yaml sets another.

# SkyPilot's lists of machines. Each entry overrides the keys next to the list.
ALTERNATIVES = ("any_of", "ordered")


def processes_in(accelerate: Mapping[str, Any], resources: Mapping[str, Any]) -> int:
    """Return the number of training processes from these sections of `trainer`: the smallest of alternatives."""
    count = accelerate.get("num_processes")
    if isinstance(count, int) and count > 0:
        return count
    return min((count for count in gpu_counts(resources) if count), default=1)


def gpu_counts(resources: Mapping[str, Any]) -> set[int | None]:
    """Return the counts in SkyPilot's `accelerators`: `H100:8`, `H100`, `{H100: 8}`, or a list of alternatives.

    One for each alternative, those of `any_of` and `ordered` included; None for an alternative without a count.
    """
    machines = alternatives_of(resources)
    return {count for machine in machines for _, count in accelerators_of(machine) or [("", None)]}


def alternatives_of(resources: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the machines that SkyPilot's `resources` allows, in order.

    Each entry of `any_of` or `ordered` overrides the keys next to the list. Without a list there is one machine.
    """
    nested = [entry for key in ALTERNATIVES for entry in _listed(resources.get(key)) if isinstance(entry, Mapping)]
    common = {key: value for key, value in resources.items() if key not in ALTERNATIVES}
    return [{**common, **entry} for entry in nested or [{}]]


def place_of(machine: Mapping[str, Any]) -> tuple[str, str]:
    """Return cloud and region of one machine, in lower case; `*` if it names none."""
    infra = machine.get("infra") or "/".join(str(machine.get(key) or "*") for key in ("cloud", "region"))
    cloud, region, *_ = (part.strip().lower() or "*" for part in f"{infra}/*".split("/"))
    return cloud, region


def clouds_of(resources: Mapping[str, Any]) -> set[str]:
    """Return the clouds that the resources and their alternatives name."""
    return {place_of(machine)[0] for machine in alternatives_of(resources)} - {"*"}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def accelerators_of(machine: Mapping[str, Any]) -> list[tuple[str, int | None]]:
    """Return name and count of each GPU in one machine's `accelerators`."""
    accelerators = machine.get("accelerators")
    if isinstance(accelerators, Mapping):
        accelerators = [f"{name}:{count}" for name, count in accelerators.items()]
    listed = [accelerators] if isinstance(accelerators, str) else _listed(accelerators)
    return [(text.partition(":")[0], _count(text)) for text in listed if isinstance(text, str)]


def _count(text: str) -> int | None:
    """Read the count of `NAME` or `NAME:COUNT` as SkyPilot does; None if it is no whole number of GPUs."""
    name, _, count = text.partition(":")
    if name.lower().startswith("tpu"):
        return None
    try:
        number = float(count or 1)
    except ValueError:
        return None
    return int(number) if number.is_integer() and number >= 0 else None


# For a prompt that no rollout node accepts: leave it out of its step, or fail the run.
OnBadPrompt = Literal["skip", "fail"]
# For a reward function that raises, hangs or returns no score: continue without the score, or fail the run.
OnBadReward = Literal["none", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Arguments of `datasets.load_dataset`, and how to make a prompt from a row.

    `prompt` is a template with columns in braces, such templates in the messages of a chat, or a function's import
    path.
    """

    # A hub name, a folder or a file: `.jsonl`, `.json`, `.csv`, each also as `.gz`, or `.parquet`.
    path: str
    name: str | None = None  # Configuration of a hub dataset.
    split: str = "train"  # The split, in the notation of `datasets`: `train[:100]`.
    # Commit, tag or branch of a hub dataset; a commit makes the run reproducible.
    revision: str | None = None
    # How a prompt is made from a row: a template, messages or a function. Unset: the rows have a column `prompt`.
    prompt: str | tuple[dict[str, str], ...] | None = None
    streaming: bool = False  # Read only the first rows, as many as the run can use.
    weight: float | None = None  # Share of the prompts, among several datasets.


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """An agent that talks to the policy through an OpenAI client, and the limits of one session.

    A command reads OPENAI_BASE_URL, OPENAI_API_KEY and the row as JSON in GRPO_ORCH_ROW.
    """

    # Import path of a function `(base_url, api_key, row)` that returns a reward or None; or a command, as a list
    # of strings.
    run: str | tuple[str, ...]
    # Interpreter of the function, relative to the folder of run.yaml. Unset: the trainer's.
    python: str | None = None
    time_s: float = 600.0  # Seconds per session, without the time waiting for the model.
    turns: int = 32  # Requests per session.
    tokens: int | None = None  # Tokens of all turns together. Unset: `grpo.max_completion_length`.
    # Address space of each process of a session, in 10^9 bytes. Unset: unlimited.
    memory_gb: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """The training machine, its model, data and rewards."""

    model: str  # A hub name or a folder.
    # The prompts. A string stands for its `path`; a list combines several datasets.
    dataset: Dataset | tuple[Dataset, ...]
    # Import paths of [reward functions](rewards.md), `module.function`; a value with `/` is a reward model.
    # Required without `agent`; `[]` if the environment has `get_reward`.
    reward_funcs: tuple[str, ...] = ()
    # Keyword [arguments](rewards.md) by the function's name without its module.
    reward_args: dict[str, Any] = field(default_factory=dict)
    # Held-out prompts in the same form, scored every `grpo.eval_steps` and never trained on.
    eval_dataset: Dataset | tuple[Dataset, ...] | None = None
    # SkyPilot's keys, without `ports`. `disk_size`, as `500`, `500GB` or `2TB`, by default [follows from the
    # model](spot-machines.md#disks).
    resources: dict[str, Any] = field(default_factory=dict)
    # Shell script, run once on the machine before the trainer, in the folder of this file, with `python` and `pip`
    # of the nodes' environment.
    setup: str = ""
    # Environment of the trainer process; numbers keep their spelling.
    env: dict[str, str] = field(default_factory=dict)
    peft: dict[str, Any] | None = None  # LoraConfig's keys: train an [adapter](#adapters).
    # Keys of an accelerate config file. Without `num_processes`, one process trains for each GPU in
    # `resources.accelerators`, with DDP unless another strategy is set. `num_machines` above 1 is refused.
    accelerate: dict[str, Any] | None = None
    # Import paths of functions that the model may call ([TRL](trl.md#tools-and-environments)).
    tools: tuple[str, ...] = ()
    # Import path of a class or function that creates an [environment](trl.md#tools-and-environments), or of a
    # mapping of these by a row's `environment`.
    environment_factory: str | None = None
    # Import path of a function that makes completions, in TRL's signature; it generates with
    # `trainer.vllm_generation.generate`.
    rollout_func: str | None = None
    agent: AgentSpec | None = None  # An [agent](agents.md); a string stands for its `run`.


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The number of rollout nodes: at most `max`; below `min`, more are requested immediately.

    With `max` 0 there are none, and the trainer generates itself.
    """

    min: int = 1  # Below it, nodes are requested immediately.
    max: int = 1  # Maximum; defaults to `min` if that is set. 0: the trainer generates.


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """The machines that generate."""

    # Number of nodes; a number N stands for `{min: N, max: N}`.
    replicas: Replicas = field(default_factory=Replicas)
    # SkyPilot's keys. Without `use_spot`: spot, and on demand [while spot is
    # unavailable](spot-machines.md#on-demand-fallback); true: spot alone; false: on demand alone.
    resources: dict[str, Any] = field(default_factory=dict)
    setup: str = ""  # Shell script, run once on each machine before vLLM.
    # Flags of `vllm serve` without their dashes. With `load-format`, a node loads the base model's weights before
    # the first policy.
    vllm: dict[str, Any] = field(default_factory=dict)
    # Environment of the vLLM process; numbers keep their spelling. `VLLM_CACHE_ROOT`, `TORCHINDUCTOR_CACHE_DIR` or
    # `TRITON_CACHE_DIR` keeps compiled code out of the store.
    env: dict[str, str] = field(default_factory=dict)
    # Seconds that a generation request may wait without a token and without a node that [makes
    # progress](spot-machines.md#when-buying-stops).
    deadline_s: float = 3600.0
    # A completion whose node was lost continues on another node from its tokens (continue), or starts over with
    # its seed (exact).
    recovery: Recovery = "continue"
    # Completions are generated that many steps ahead, [while the trainer works](staleness.md).
    max_staleness: int = 0


# Defaults of `grpo` where windows are sampled from older policies. TRL's own default masks by the ratio of whole
# sequences, which would discard most long sequences from another policy.
STALE_DEFAULTS: dict[str, Any] = {"vllm_importance_sampling_mode": "token_truncate"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OnRollback:
    """Changes on the timeline after a rollback. A factor multiplies the diverged timeline's value.

    The sampling seeds are always new: they are derived from the timeline.
    """

    beta_factor: float = 2.0  # For `grpo.beta`, the weight of the KL term.
    # For `grpo.epsilon` and, if set, `epsilon_high`, where they have an effect.
    epsilon_factor: float = 0.5
    learning_rate_factor: float = 0.5  # For `grpo.learning_rate`.
    skip_prompts: bool = True  # Replace the prompts of the steps from onset to trip by others.


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackBudget:
    """How often a run rolls back automatically before it gives up."""

    total: int = 3  # Rollbacks because of divergence; 0: give up immediately.
    recent: int = 2  # Of these, within `recent_steps`.
    recent_steps: int = 500  # Steps of training.


@dataclass(frozen=True, slots=True, kw_only=True)
class KlPolicy:
    """The response to divergence. `pause` returns the machines; `alert` journals it and continues."""

    # Also trip when KL rises this far above its initial value; needs `grpo.beta` above 0.
    limit: float | None = None
    # The first step of each [new task](detection.md#rules), as in a curriculum.
    task_changes: tuple[int, ...] = ()
    # rollback: continue from the newest checkpoint from before the divergence; pause: return the machines until
    # `grpo-orch rollback`; alert: record an event and continue.
    action: Literal["rollback", "pause", "alert"] = "rollback"
    on_rollback: OnRollback = field(default_factory=OnRollback)  # Changes on a rollback.
    budget: RollbackBudget = field(default_factory=RollbackBudget)  # Number of automatic rollbacks.


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPolicy:
    """Automatic management of the fleet."""

    # Minutes without contact from the daemon or the gateway after which a machine [shuts itself
    # down](spot-machines.md#dead-man-switch); 0: never.
    dead_man_min: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoliciesSpec:
    """Limits and responses of the controller."""

    kl: KlPolicy = field(default_factory=KlPolicy)  # The response to divergence.
    fleet: FleetPolicy = field(default_factory=FleetPolicy)  # Automatic management of the fleet.
    # Maximum seconds from the request to the machine, from there to its first report, and from there without
    # [progress](spot-machines.md#when-buying-stops); then the machine is replaced.
    boot_timeout_s: float = 900.0
    # For a prompt that every serving node refuses, such as one longer than `rollout.vllm.max-model-len`: leave it
    # out of its step (skip), or fail the run and name it.
    on_bad_prompt: OnBadPrompt = "skip"
    # For a reward function [that fails](rewards.md#what-goes-wrong-in-a-function): the completions get no score
    # from it (none), or the trainer exits (fail). With a `trainer.agent` the default is `none`.
    on_bad_reward: OnBadReward = "fail"
    # Maximum seconds of one call of a reward function, for all completions of a process.
    reward_timeout_s: float = 1800.0
    # How often in a row the trainer may end without one step of progress before the run fails.
    trainer_restarts: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsSpec:
    """Which checkpoints the store keeps, by `policies.ledger.retention`, and how they are uploaded."""

    keep_last: int = 3  # Keep the newest N.
    # Permanently keep checkpoints whose step is a multiple of this.
    keep_every_steps: int | None = None
    # Permanently keep the stored completions of steps that are a multiple of this.
    keep_rollouts_every_steps: int = 100
    # Folder for uploads on the trainer's machine, as an absolute path. Unset: `/dev/shm` if it has room, else the
    # node's working folder.
    spool: str = ""
    # Maximum size of the spool, in GiB. Unset: half of the free space at the start.
    spool_gib: float | None = None
    # Training waits once the store's newest checkpoint is this many steps old. Unset: ten times `grpo.save_steps`.
    max_behind_steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of the run's cost in USD, enforced before each launch.

    When a limit is reached, the trainer stores its state, every machine is returned, and the run is paused.
    """

    usd: float | None = None  # Maximum cost of the run. Unset: no limit.
    usd_per_h: float | None = None  # Maximum cost per hour of all machines together. Unset: no limit.


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify:
    """Where the daemon sends notifications; nowhere by default."""

    # Environment variables that each hold an [apprise](https://appriseit.com/services/) URL.
    url_env: tuple[str, ...] = ()
    # Program and arguments, run without a shell; it reads each message as a line of JSON.
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """A fault for the local cloud: exactly one of `kill`, `preempt` and `no_capacity`, whose value is its target.

    A target is a slot (`rollout-0`, or `trainer-0` for its machine), `rollouts`, or, only for kill, a process:
    `gateway`, `trainer`, `daemon`.
    """

    # The fault is injected once the trainer has finished this step; below `grpo.max_steps`.
    at_step: int
    kill: str | None = None  # SIGKILL
    preempt: str | None = None  # The cloud preempts the machine.
    no_capacity: str | None = None  # The cloud refuses new machines.
    notice_s: float = 0.0  # With `preempt`: seconds from the notice to the preemption; 0: no notice.
    # With `no_capacity`: duration in seconds; with `kill: daemon`: seconds until `resume` is called.
    for_s: float = 3.0

    @property
    def fault(self) -> str:
        """Its kind: `kill`, `preempt` or `no_capacity`."""
        return "kill" if self.kill is not None else "preempt" if self.preempt is not None else "no_capacity"

    @property
    def target(self) -> str:
        return self.kill or self.preempt or self.no_capacity or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Simulated prices of the local cloud in USD an hour; it costs nothing itself."""

    on_demand_usd_per_h: float = 0.0  # USD per hour, on demand.
    spot_usd_per_h: float = 0.0  # USD per hour, spot.


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedPrices:
    """Prices of the machines of each role."""

    trainer: Prices = field(default_factory=Prices)  # Of the trainer's machine.
    rollout: Prices = field(default_factory=Prices)  # Of each rollout node.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Faults and prices with which the local cloud simulates a real one."""

    faults: tuple[Rehearsed, ...] = ()  # injected in the order of their steps
    prices: RehearsedPrices = field(default_factory=RehearsedPrices)  # from which the report's costs follow


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """A whole run."""

    name: str  # 1 to 40 lower-case letters, digits and dashes; part of machine names.
    # The run's [store](store.md): a folder (refused with `cloud: sky`), a URL or a [mapping](#storage).
    storage: str
    trainer: TrainerSpec  # The training machine.
    grpo: dict[str, Any]  # TRL's GRPOConfig.
    rollout: RolloutSpec = field(default_factory=RolloutSpec)  # The rollout machines.
    policies: PoliciesSpec = field(default_factory=PoliciesSpec)  # Limits and responses of the controller.
    # Which checkpoints the store keeps, and how they are uploaded.
    checkpoints: CheckpointsSpec = field(default_factory=CheckpointsSpec)
    budget: Budget = field(default_factory=Budget)  # Limits of the run's cost.
    notify: Notify = field(default_factory=Notify)  # Where notifications are sent.
    # Port of 127.0.0.1 for [Prometheus](monitoring.md#prometheus-and-grafana) metrics of the daemon.
    metrics_port: int | None = None
    secrets: tuple[str, ...] = ()  # [Environment variables](#secrets) for the code on the machines.
    # Run processes on this machine, or buy machines with SkyPilot.
    cloud: Literal["local", "sky"] = "local"
    rehearse: Rehearsal | None = None  # Faults and prices with which the local cloud simulates a real one.
    workdir: str = ""  # Set by the loader: the folder of run.yaml, for relative paths and reward modules.


def datasets_of(datasets: Dataset | tuple[Dataset, ...] | None) -> tuple[Dataset, ...]:
    """Return the datasets of `dataset` or `eval_dataset`."""
    return (datasets,) if isinstance(datasets, Dataset) else datasets or ()


def generates_itself(spec: RunSpec) -> bool:
    """Whether the trainer generates, because the run has no rollout nodes."""
    return spec.rollout.replicas.max == 0


def may_overlap(spec: RunSpec) -> bool:
    """Whether nodes can generate while the trainer works: the run may have a `rollout.max_staleness` above 0."""
    trainer = spec.trainer
    return not generates_itself(spec) and trainer.environment_factory is None and trainer.rollout_func is None


def stores_checkpoints(spec: RunSpec) -> bool:
    """Whether a trainer stores checkpoints from which it can continue. An evaluation does not."""
    return spec.grpo.get("save_strategy") != "no"


def processes_of(spec: RunSpec) -> int:
    """Return the number of training processes."""
    return processes_in(spec.trainer.accelerate or {}, spec.trainer.resources)


def fixes_accumulation(spec: RunSpec) -> bool:
    """Whether the accelerate config sets DeepSpeed's accumulation; another one in `grpo` would contradict it."""
    deepspeed = (spec.trainer.accelerate or {}).get("deepspeed_config") or {}
    return bool(deepspeed.get("gradient_accumulation_steps", "auto") != "auto")


def model_settings(grpo: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of from_pretrained for the model."""
    return settings_in(grpo, "model_init_kwargs")


def settings_in(grpo: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping at a key of `grpo`, which may also be JSON text."""
    value = grpo.get(key) or {}
    try:
        settings = json.loads(value) if isinstance(value, str) else value
    except ValueError:  # TRL will report it
        return {}
    return settings if isinstance(settings, Mapping) else {}


# How weights, gradients and the optimizer's states are sharded over the training processes.

# DeepSpeed's stages, or FSDP2, which shards all of them.
Sharding = Literal["none", "zero1", "zero2", "zero3", "fsdp"]


def sharding_of(spec: RunSpec) -> tuple[Sharding, bool, bool]:
    """Return the run's sharding, and whether its optimizer and its weights are offloaded to host memory."""
    accelerate, grpo = spec.trainer.accelerate or {}, spec.grpo
    if not accelerate and not grpo.get("fsdp") and not grpo.get("deepspeed"):
        return "none", False, False
    kind = accelerate.get("distributed_type")
    if grpo.get("fsdp") or kind == "FSDP":
        config = {**_mapping(accelerate.get("fsdp_config")), **_mapping(grpo.get("fsdp_config"))}
        is_offloaded = bool(config.get("fsdp_offload_params") or config.get("cpu_offload"))
        return "fsdp", is_offloaded, is_offloaded
    deepspeed, plugin = _mapping(grpo.get("deepspeed")), _mapping(accelerate.get("deepspeed_config"))
    zero = _mapping(deepspeed.get("zero_optimization"))
    has_deepspeed = bool(deepspeed) or kind == "DEEPSPEED"
    stage = zero.get("stage", plugin.get("zero_stage", 0 if deepspeed else 2)) if has_deepspeed else 0
    optimizer = _device(zero.get("offload_optimizer"), plugin.get("offload_optimizer_device"))
    weights = _device(zero.get("offload_param"), plugin.get("offload_param_device"))
    stages: dict[str, Sharding] = {"1": "zero1", "2": "zero2", "3": "zero3"}
    return stages.get(str(stage), "none"), optimizer in ("cpu", "nvme"), weights in ("cpu", "nvme")


def shards_weights(spec: RunSpec) -> bool:
    """Whether the weights are sharded over the processes, by ZeRO-3 or FSDP2."""
    return sharding_of(spec)[0] in ("zero3", "fsdp")


def deepspeed_file(spec: RunSpec) -> str:
    """Return DeepSpeed's configuration if it is in a separate file or JSON text, so that its stage is unknown."""
    if deepspeed := spec.grpo.get("deepspeed"):
        return deepspeed if isinstance(deepspeed, str) else ""
    plugin = _mapping((spec.trainer.accelerate or {}).get("deepspeed_config"))
    return str(plugin.get("deepspeed_config_file") or "")


def computes_in_half(spec: RunSpec) -> bool:
    """Whether passes compute in two bytes an element, as by TRL's default (1.16)."""
    return bool(spec.grpo.get("fp16")) or bool(spec.grpo.get("bf16", True))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _device(offload: Any, default: Any) -> str:
    return str(_mapping(offload).get("device") or default or "none")
