"""The run's specification as every room sees it: run.yaml after validation, run.json in the store.

Only data and its defaults. Reading YAML, naming lines and checking keys against TRL and vLLM is done in
`orchestrator.config`. Keys of other projects (`grpo`, `peft`, `vllm`, `resources`) keep those projects' names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from policies.model.vocabulary import Recovery

# How many processes train: one for each GPU of the trainer's node, unless run.yaml says another number.

ALTERNATIVES = ("any_of", "ordered")  # SkyPilot's: lists of machines, each over the keys beside the list


def processes_in(accelerate: Mapping[str, Any], resources: Mapping[str, Any]) -> int:
    """How many processes train, by these sections of `trainer`; of alternatives the smallest decides."""
    count = accelerate.get("num_processes")
    if isinstance(count, int) and count > 0:
        return count
    return min((count for count in gpu_counts(resources) if count), default=1)


def gpu_counts(resources: Mapping[str, Any]) -> set[int | None]:
    """The counts in SkyPilot's `accelerators`: `H100:8`, `H100`, `{H100: 8}`, or a list of alternatives.

    One for each alternative, those of `any_of` and `ordered` too; None for one that names none.
    """
    return {count for one in alternatives_of(resources) for count in _counts(one)}


def alternatives_of(resources: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The machines that SkyPilot's `resources` allows, in their order: each entry of `any_of` or `ordered` over
    the keys beside the list; without such a list the one that is named."""
    nested = [one for key in ALTERNATIVES for one in _listed(resources.get(key)) if isinstance(one, Mapping)]
    beside = {key: value for key, value in resources.items() if key not in ALTERNATIVES}
    return [{**beside, **one} for one in nested or [{}]]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _counts(resources: Mapping[str, Any]) -> Iterator[int | None]:
    accelerators = resources.get("accelerators")
    if isinstance(accelerators, Mapping):
        accelerators = [f"{name}:{count}" for name, count in accelerators.items()]
    elif isinstance(accelerators, str):
        accelerators = [accelerators]
    for one in _listed(accelerators) or (None,):
        yield _count(one) if isinstance(one, str) else None


def _count(text: str) -> int | None:
    """Of `NAME` or `NAME:COUNT`, read as SkyPilot does; None for what is no whole count of GPUs, which is its to
    judge."""
    name, _, count = text.partition(":")
    if name.lower().startswith("tpu"):
        return None
    try:
        number = float(count or 1)
    except ValueError:
        return None
    return int(number) if number.is_integer() and number >= 0 else None


# What is done about a prompt that no rollout node takes: it is left out of its step, or the run fails.
OnBadPrompt = Literal["skip", "fail"]
# What is done about a reward function that raises, hangs or returns no score: its completions have none, or the
# run fails.
OnBadReward = Literal["none", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Arguments of `datasets.load_dataset`: a hub name or a folder or file, and which part of it; and how a prompt
    is made of a row: by a template with columns in braces, one in each message of a chat, or a function's import
    path. None: the rows have a column `prompt`."""

    path: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    prompt: str | tuple[dict[str, str], ...] | None = None
    streaming: bool = False  # only the rows that the run can use are fetched
    weight: float | None = None  # of several: its share of the prompts; None: each of its rows once


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """An agent that makes conversations with the policy through an OpenAI client, and the limits of one session.

    `run`: import path of a function `(base_url, api_key, row) -> reward or None`; or a command, which reads
    OPENAI_BASE_URL, OPENAI_API_KEY and the row as JSON in GRPO_ORCH_ROW.
    """

    run: str | tuple[str, ...]
    python: str | None = None  # the function's interpreter, of an environment of its own; None: the trainer's
    time_s: float = 600.0  # without the time in which it waits for the model
    turns: int = 32
    tokens: int | None = None  # that all turns may have together; None: grpo.max_completion_length
    memory_gb: float | None = None  # of each process of a session


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """The machine that trains: what it is, what it trains, on what, for what reward."""

    model: str  # hub name or folder
    dataset: Dataset | tuple[Dataset, ...]
    reward_funcs: tuple[str, ...] = ()  # import paths in TRL's signature; none are needed where an agent rewards
    reward_args: dict[str, Any] = field(default_factory=dict)  # by a function's name: its arguments, by theirs
    eval_dataset: Dataset | tuple[Dataset, ...] | None = None  # scored every `grpo.eval_steps`; never trained on
    resources: dict[str, Any] = field(default_factory=dict)  # SkyPilot's keys
    setup: str = ""  # shell, run once on the machine before the trainer
    env: dict[str, str] = field(default_factory=dict)  # environment of the trainer process
    peft: dict[str, Any] | None = None  # LoraConfig keys
    accelerate: dict[str, Any] | None = None  # an accelerate config file's keys
    tools: tuple[str, ...] = ()  # import paths of functions that the model may call, in TRL's form
    environment_factory: str | None = None  # import path of what makes one, or of a mapping of those by name
    rollout_func: str | None = None  # import path of what makes completions, in TRL's signature
    agent: AgentSpec | None = None  # makes whole conversations, each a session of the gateway


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """How many rollout nodes: never more than `max`; below `min`, more are requested at once.

    With `max` 0 there are none, and the trainer generates by itself.
    """

    min: int = 1
    max: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """The machines that generate."""

    replicas: Replicas = field(default_factory=Replicas)
    resources: dict[str, Any] = field(default_factory=dict)  # SkyPilot's; `use_spot`: policies.fleet.market
    setup: str = ""
    vllm: dict[str, Any] = field(default_factory=dict)  # flags of `vllm serve` without their dashes
    env: dict[str, str] = field(default_factory=dict)  # environment of the vLLM process
    deadline_s: float = 3600.0  # how long a generation request may wait, even for an empty fleet
    recovery: Recovery = "continue"  # what happens to a completion whose node was lost
    max_staleness: int = 0  # steps that a policy is older than the one that is trained on its completions
    own_generation_after_s: float | None = 300.0  # so long without a node, and the trainer generates; None: never


# Of `grpo`, where windows are sampled from older policies and the file says nothing. TRL's own default masks by
# the ratio of whole sequences, and of long ones from another policy it would leave little.
STALE_DEFAULTS: dict[str, Any] = {"vllm_importance_sampling_mode": "token_truncate"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OnRollback:
    """What differs on the timeline after a rollback. A factor multiplies the diverged timeline's value.

    The sampling seeds are always new: they are derived from the timeline.
    """

    beta_factor: float = 2.0
    epsilon_factor: float = 0.5
    learning_rate_factor: float = 0.5
    skip_prompts: bool = True  # leave out the prompts from the onset to the trip


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackBudget:
    """How often a run rolls back by itself before it gives up."""

    total: int = 3
    recent: int = 2  # within `recent_steps`
    recent_steps: int = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class KlPolicy:
    """What is done about a run that diverges. `pause` returns the machines, `alert` journals it and continues."""

    limit: float | None = None  # KL above the run's own start; None: judged by the run's own history alone
    task_changes: tuple[int, ...] = ()  # first steps of new tasks, such as the stages of a curriculum
    action: Literal["rollback", "pause", "alert"] = "rollback"
    on_rollback: OnRollback = field(default_factory=OnRollback)
    budget: RollbackBudget = field(default_factory=RollbackBudget)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPolicy:
    """What the fleet does by itself. `dead_man_min`: a machine ends by itself when neither daemon nor gateway has
    been heard for so many minutes; 0: never. Half-lives of what was seen where machines are bought: losses
    follow the hours of a day; capacity comes and goes within hours. `deadline`: when the last step is to be made,
    as `2026-11-30T18:00:00Z`; see policies.fleet.deadline."""

    dead_man_min: float = 30.0
    loss_half_life_h: float = 24.0
    launch_half_life_h: float = 3.0
    deadline: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoliciesSpec:
    """What the controller watches and how far it may go."""

    kl: KlPolicy = field(default_factory=KlPolicy)
    fleet: FleetPolicy = field(default_factory=FleetPolicy)
    boot_timeout_s: float = 900.0  # from the request to the first work; then the machine is replaced
    on_bad_prompt: OnBadPrompt = "skip"  # one prompt of many thousands is no reason to lose a night
    on_bad_reward: OnBadReward = "fail"  # what is wrong with a function is mostly wrong with all of its scores
    reward_timeout_s: float = 1800.0  # one call of a reward function, over all of a process's completions
    trainer_restarts: int = 5  # trainer exits in a row without one step of progress; then the run fails
    min_completion_length: int | None = None  # completions may become this short when memory runs out; None: never


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsSpec:
    """Which checkpoints the store keeps, by `policies.ledger.retention`, and how they get there."""

    keep_last: int = 3  # the newest stay
    keep_every_steps: int | None = None  # a checkpoint whose step is a multiple of it stays for good
    keep_rollouts_every_steps: int = 100  # a step's stored completions stay for good if it is a multiple of it
    spool: str = ""  # folder for what is on its way to the store; empty: /dev/shm if it has room, else the node's
    spool_gib: float | None = None  # how much may lie there; None: half of what is free there at the start
    max_behind_steps: int | None = None  # training waits when the newest stored is so old; None: 10 x save_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What the run may cost in USD, enforced before each launch. Where it is reached, the trainer stores what it
    has and every machine goes back; the run is then paused, or stopped as by `down`."""

    usd: float | None = None
    usd_per_h: float | None = None
    at: Literal["pause", "down"] = "pause"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify:
    """Where the daemon sends notifications. Unset: nowhere."""

    url_env: tuple[
        str, ...
    ] = ()  # environment variables of the daemon, each with an apprise URL, which is a secret
    command: tuple[str, ...] = ()  # program and arguments; reads the message as JSON from standard input


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """One fault for the local cloud. `target` is a slot (`rollout-0`, `trainer-0`: its machine), `rollouts`, or,
    for kill alone, one process: `gateway`, `trainer`, `daemon`."""

    fault: Literal["kill", "preempt", "no_capacity"]
    at_step: int
    target: str = "rollouts"
    notice_s: float = 0.0  # preempt: how long before the machine goes its notice comes
    for_s: float = 3.0  # no_capacity: how long; kill daemon: after how long `resume` is called


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """USD an hour for the rehearsal's bill; the local cloud itself costs nothing."""

    on_demand_usd_per_h: float = 0.0
    spot_usd_per_h: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Faults and prices with which the local cloud plays a real one."""

    faults: tuple[Rehearsed, ...] = ()
    trainer_prices: Prices = field(default_factory=Prices)
    rollout_prices: Prices = field(default_factory=Prices)


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
    metrics_port: int | None = None  # of the daemon's machine, for Prometheus there; None: none
    secrets: tuple[str, ...] = ()  # environment variables that reach the nodes; their values are stored nowhere
    cloud: Literal["local", "sky"] = "local"
    rehearse: Rehearsal | None = None
    workdir: str = ""  # the folder of run.yaml: relative paths and reward modules are found from here


def datasets_of(named: Dataset | tuple[Dataset, ...] | None) -> tuple[Dataset, ...]:
    """What `dataset` or `eval_dataset` names, one by one."""
    return (named,) if isinstance(named, Dataset) else named or ()


def generates_itself(spec: RunSpec) -> bool:
    """Whether the trainer generates, for the run has no rollout nodes."""
    return spec.rollout.replicas.max == 0


def may_overlap(spec: RunSpec) -> bool:
    """Whether nodes can generate while the trainer works: the run may have a `rollout.max_staleness` above 0."""
    trainer = spec.trainer
    return not generates_itself(spec) and trainer.environment_factory is None and trainer.rollout_func is None


def stores_checkpoints(spec: RunSpec) -> bool:
    """Whether a trainer that ends can be continued from where it was. An evaluation stores none."""
    return spec.grpo.get("save_strategy") != "no"


def processes_of(spec: RunSpec) -> int:
    """How many processes train."""
    return processes_in(spec.trainer.accelerate or {}, spec.trainer.resources)


def fixes_accumulation(spec: RunSpec) -> bool:
    """Whether the accelerate config names DeepSpeed's accumulation: another one in `grpo` would contradict it."""
    deepspeed = (spec.trainer.accelerate or {}).get("deepspeed_config") or {}
    return bool(deepspeed.get("gradient_accumulation_steps", "auto") != "auto")


def model_settings(grpo: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the model is loaded with, by the names of from_pretrained's arguments."""
    return settings_in(grpo, "model_init_kwargs")


def settings_in(grpo: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """What stands at a key of `grpo` that takes a mapping, or JSON."""
    given = grpo.get(key) or {}
    try:
        read = json.loads(given) if isinstance(given, str) else given
    except ValueError:  # which TRL will say
        return {}
    return read if isinstance(read, Mapping) else {}


# How weights, gradients and the optimizer's states are divided over the processes that train.

# DeepSpeed's stages, or FSDP2, which divides all of them.
Sharding = Literal["none", "zero1", "zero2", "zero3", "fsdp"]


def sharding_of(spec: RunSpec) -> tuple[Sharding, bool, bool]:
    """How a run divides, and whether its optimizer and its weights stay in the machine's own memory."""
    accelerate, grpo = spec.trainer.accelerate or {}, spec.grpo
    if not accelerate and not grpo.get("fsdp") and not grpo.get("deepspeed"):
        return "none", False, False
    kind = accelerate.get("distributed_type")
    if grpo.get("fsdp") or kind == "FSDP":
        config = {**_mapping(accelerate.get("fsdp_config")), **_mapping(grpo.get("fsdp_config"))}
        away = bool(config.get("fsdp_offload_params") or config.get("cpu_offload"))
        return "fsdp", away, away
    theirs, own = _mapping(grpo.get("deepspeed")), _mapping(accelerate.get("deepspeed_config"))
    zero = _mapping(theirs.get("zero_optimization"))
    stage = zero.get("stage", own.get("zero_stage", 0 if theirs else 2)) if theirs or kind == "DEEPSPEED" else 0
    optimizer = _device(zero.get("offload_optimizer"), own.get("offload_optimizer_device"))
    weights = _device(zero.get("offload_param"), own.get("offload_param_device"))
    stages: dict[str, Sharding] = {"1": "zero1", "2": "zero2", "3": "zero3"}
    return stages.get(str(stage), "none"), optimizer in ("cpu", "nvme"), weights in ("cpu", "nvme")


def computes_in_half(spec: RunSpec) -> bool:
    """Whether passes compute in two bytes an element: TRL's default (1.16)."""
    return bool(spec.grpo.get("fp16")) or bool(spec.grpo.get("bf16", True))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _device(theirs: Any, own: Any) -> str:
    return str(_mapping(theirs).get("device") or own or "none")
