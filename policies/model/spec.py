"""The run's specification: run.yaml after validation, run.json in the store.

Only data and its defaults. `orchestrator.config` reads YAML, reports lines and checks keys against TRL and vLLM.
Keys of other projects (`grpo`, `peft`, `vllm`, `resources`) keep those projects' names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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
    return {count for machine in alternatives_of(resources) for count in _counts(machine)}


def alternatives_of(resources: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the machines that SkyPilot's `resources` allows, in order.

    Each entry of `any_of` or `ordered` overrides the keys next to the list. Without a list there is one machine.
    """
    nested = [entry for key in ALTERNATIVES for entry in _listed(resources.get(key)) if isinstance(entry, Mapping)]
    common = {key: value for key, value in resources.items() if key not in ALTERNATIVES}
    return [{**common, **entry} for entry in nested or [{}]]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _counts(resources: Mapping[str, Any]) -> Iterator[int | None]:
    accelerators = resources.get("accelerators")
    if isinstance(accelerators, Mapping):
        accelerators = [f"{name}:{count}" for name, count in accelerators.items()]
    elif isinstance(accelerators, str):
        accelerators = [accelerators]
    for accelerator in _listed(accelerators) or (None,):
        yield _count(accelerator) if isinstance(accelerator, str) else None


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

    path: str  # a hub name, a folder or a file
    name: str | None = None  # configuration of a hub dataset
    split: str = "train"  # the split, in the notation of `datasets`
    revision: str | None = None  # commit, tag or branch of a hub dataset
    prompt: str | tuple[dict[str, str], ...] | None = None  # how to make a prompt; None: the rows have a `prompt`
    streaming: bool = False  # fetch only the rows that the run can use
    weight: float | None = None  # its share of the prompts of several datasets; None: each of its rows once


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """An agent that talks to the policy through an OpenAI client, and the limits of one session.

    `run`: import path of a function `(base_url, api_key, row) -> reward or None`; or a command, which reads
    OPENAI_BASE_URL, OPENAI_API_KEY and the row as JSON in GRPO_ORCH_ROW.
    """

    run: str | tuple[str, ...]
    python: str | None = None  # the function's interpreter, of an environment of its own; None: the trainer's
    time_s: float = 600.0  # limit of a session, without the time waiting for the model
    turns: int = 32  # limit of a session
    tokens: int | None = None  # limit of all turns together; None: grpo.max_completion_length
    memory_gb: float | None = None  # limit of each process of a session


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """The training machine, its model, data and rewards."""

    model: str  # hub name or folder
    dataset: Dataset | tuple[Dataset, ...]  # the prompts
    reward_funcs: tuple[str, ...] = ()  # import paths in TRL's signature; optional if an agent rewards
    reward_args: dict[str, Any] = field(default_factory=dict)  # keyword arguments, by a function's name
    eval_dataset: Dataset | tuple[Dataset, ...] | None = None  # scored every `grpo.eval_steps`; never trained on
    resources: dict[str, Any] = field(default_factory=dict)  # SkyPilot's keys
    setup: str = ""  # shell, run once on the machine before the trainer
    env: dict[str, str] = field(default_factory=dict)  # environment of the trainer process
    peft: dict[str, Any] | None = None  # LoraConfig keys
    accelerate: dict[str, Any] | None = None  # an accelerate config file's keys
    tools: tuple[str, ...] = ()  # import paths of functions that the model may call, in TRL's form
    environment_factory: str | None = None  # import path of a factory, or of a mapping of factories by name
    rollout_func: str | None = None  # import path of a function that makes completions, in TRL's signature
    agent: AgentSpec | None = None  # a program whose conversations with the model are trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The number of rollout nodes: at most `max`; below `min`, more are requested immediately.

    With `max` 0 there are none, and the trainer generates itself.
    """

    min: int = 1  # below this, more nodes are requested immediately
    max: int = 1  # defaults to `min` if that is set; 0: the trainer generates itself


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """The machines that generate."""

    replicas: Replicas = field(default_factory=Replicas)
    resources: dict[str, Any] = field(default_factory=dict)  # SkyPilot's; `use_spot`: policies.fleet.market
    setup: str = ""  # shell, run once on the machine before the node
    vllm: dict[str, Any] = field(default_factory=dict)  # flags of `vllm serve` without their dashes
    env: dict[str, str] = field(default_factory=dict)  # environment of the vLLM process
    deadline_s: float = 3600.0  # how long a generation request may wait, even for an empty fleet
    recovery: Recovery = "continue"  # what happens to a completion whose node was lost
    max_staleness: int = 0  # age in steps of the policy that samples, compared with the one that is trained
    own_generation_after_s: float | None = 300.0  # time without nodes until the trainer generates; None: never


# Defaults of `grpo` where windows are sampled from older policies. TRL's own default masks by the ratio of whole
# sequences, which would discard most long sequences from another policy.
STALE_DEFAULTS: dict[str, Any] = {"vllm_importance_sampling_mode": "token_truncate"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OnRollback:
    """Changes on the timeline after a rollback. A factor multiplies the diverged timeline's value.

    The sampling seeds are always new: they are derived from the timeline.
    """

    beta_factor: float = 2.0  # of grpo.beta
    epsilon_factor: float = 0.5  # of grpo.epsilon
    learning_rate_factor: float = 0.5  # of grpo.learning_rate
    skip_prompts: bool = True  # skip the prompts from the onset to the trip


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackBudget:
    """How often a run rolls back automatically before it gives up."""

    total: int = 3  # in the whole run
    recent: int = 2  # within `recent_steps`
    recent_steps: int = 500  # steps that `recent` looks back


@dataclass(frozen=True, slots=True, kw_only=True)
class KlPolicy:
    """The response to divergence. `pause` returns the machines; `alert` journals it and continues."""

    limit: float | None = None  # KL above its initial value; None: judged by the run's history alone
    task_changes: tuple[int, ...] = ()  # first steps of new tasks, such as the stages of a curriculum
    action: Literal["rollback", "pause", "alert"] = "rollback"  # what follows a divergence
    on_rollback: OnRollback = field(default_factory=OnRollback)
    budget: RollbackBudget = field(default_factory=RollbackBudget)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPolicy:
    """Automatic management of the fleet.

    Losses follow the time of day; capacity changes within hours. For the deadline see policies.fleet.deadline.
    """

    dead_man_min: float = 30.0  # without daemon and gateway for so long a machine shuts down; 0: never
    loss_half_life_h: float = 24.0  # of the weight of a pool's observed losses
    launch_half_life_h: float = 3.0  # of the weight of a pool's observed launches
    deadline: str | None = None  # when the last step should be done, as 2026-11-30T18:00:00Z


@dataclass(frozen=True, slots=True, kw_only=True)
class PoliciesSpec:
    """Limits and responses of the controller."""

    kl: KlPolicy = field(default_factory=KlPolicy)
    fleet: FleetPolicy = field(default_factory=FleetPolicy)
    boot_timeout_s: float = 900.0  # from the request to the first work; then the machine is replaced
    on_bad_prompt: OnBadPrompt = "skip"  # what follows a prompt that no node accepts
    on_bad_reward: OnBadReward = "fail"  # what follows a reward function that raises, hangs or returns no score
    reward_timeout_s: float = 1800.0  # limit of one call of a reward function, over all of a process's completions
    trainer_restarts: int = 5  # trainer exits in a row without a step of progress; then the run fails
    min_completion_length: int | None = None  # when out of memory, shorten completions to this; None: do not


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsSpec:
    """Which checkpoints the store keeps, by `policies.ledger.retention`, and how they are uploaded."""

    keep_last: int = 3  # the newest checkpoints
    keep_every_steps: int | None = None  # keep every checkpoint whose step is a multiple
    keep_rollouts_every_steps: int = 100  # keep a step's stored completions if the step is a multiple
    spool: str = ""  # folder for uploads; empty: /dev/shm if it has room, else the node's folder
    spool_gib: float | None = None  # its maximum size; None: half of its free space at the start
    max_behind_steps: int | None = None  # training waits when the newest stored is this old; None: 10 x save_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of the run's cost in USD, enforced before each launch.

    When a limit is reached, the trainer stores its state, every machine is returned, and the run is paused, or
    stopped as by `down`.
    """

    usd: float | None = None  # of the whole run
    usd_per_h: float | None = None  # of all machines together
    at: Literal["pause", "down"] = "pause"  # what follows when `usd` is reached


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify:
    """Where the daemon sends notifications; nowhere by default."""

    url_env: tuple[str, ...] = ()  # environment variables of the daemon, each with a (secret) apprise URL
    command: tuple[str, ...] = ()  # program and arguments; reads the message as JSON from standard input


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """A fault for the local cloud: exactly one of `kill`, `preempt` and `no_capacity`, whose value is its target.

    A target is a slot (`rollout-0`, or `trainer-0` for its machine), `rollouts`, or, only for kill, a process:
    `gateway`, `trainer`, `daemon`.
    """

    at_step: int  # the fault is injected once the trainer has finished this step
    kill: str | None = None  # SIGKILL
    preempt: str | None = None  # the cloud preempts the machine
    no_capacity: str | None = None  # the cloud refuses new machines
    notice_s: float = 0.0  # preempt: from the notice to the end of the machine
    for_s: float = 3.0  # no_capacity: its duration; kill daemon: time until `resume` is called

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

    on_demand_usd_per_h: float = 0.0  # of one machine
    spot_usd_per_h: float = 0.0  # of one machine


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedPrices:
    """Prices of the machines of each role."""

    trainer: Prices = field(default_factory=Prices)  # of the trainer's machine
    rollout: Prices = field(default_factory=Prices)  # of each rollout node


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Faults and prices with which the local cloud simulates a real one."""

    faults: tuple[Rehearsed, ...] = ()  # injected in the order of their steps
    prices: RehearsedPrices = field(default_factory=RehearsedPrices)  # from which the report's costs follow


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """A whole run."""

    name: str
    storage: str  # the store's URL; the run is this prefix
    trainer: TrainerSpec
    grpo: dict[str, Any]  # GRPOConfig keys
    rollout: RolloutSpec = field(default_factory=RolloutSpec)
    policies: PoliciesSpec = field(default_factory=PoliciesSpec)
    checkpoints: CheckpointsSpec = field(default_factory=CheckpointsSpec)
    budget: Budget = field(default_factory=Budget)
    notify: Notify = field(default_factory=Notify)
    metrics_port: int | None = None  # for Prometheus, on the daemon's machine; None: no metrics
    secrets: tuple[str, ...] = ()  # environment variables passed to the nodes; their values are never stored
    cloud: Literal["local", "sky"] = "local"  # this machine, or machines that SkyPilot buys
    rehearse: Rehearsal | None = None  # faults and prices with which the local cloud simulates a real one
    workdir: str = ""  # the folder of run.yaml, for relative paths and reward modules


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


def computes_in_half(spec: RunSpec) -> bool:
    """Whether passes compute in two bytes an element, as by TRL's default (1.16)."""
    return bool(spec.grpo.get("fp16")) or bool(spec.grpo.get("bf16", True))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _device(offload: Any, default: Any) -> str:
    return str(_mapping(offload).get("device") or default or "none")
