"""A run's plan: what `grpo-orch plan` and `up` show, and its JSON twin. What is not known is None."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from policies.model.vocabulary import Market, Role
from policies.sizing.money import Cost, Prices

# Where a figure comes from: the run's own log, arithmetic, or what is usual.
Source = Literal["measured", "estimated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """The run's model. `params` is None where neither its files nor the hub can be had."""

    name: str
    params: int | None = None
    stored_bytes: int | None = None
    method: str = ""  # how it is trained, in words


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePlan:
    """The machines of one role.

    Attributes:
        gpu: its kind, by SkyPilot's name; empty where none is named and none is known to fit.
        gpu_is_named: whether run.yaml names it; else it is the smallest that fits.
        gpus: of one machine.
        memory: bytes of one GPU by what they are for; empty where the model's shape is not known.
        moment: when that is, in a few words.
        host: bytes of the machine's own memory, by what they are for.
        fits: whether the memory suffices.
        cache_tokens: that the KV cache of one engine holds.
        sequences: of the longest kind, that it holds.
    """

    role: Role
    market: Market
    least: int
    most: int
    gpu: str = ""
    gpu_is_named: bool = False
    gpus: int = 0
    gpu_bytes: int | None = None
    memory: dict[str, int] = field(default_factory=dict)
    moment: str = ""
    host: dict[str, int] = field(default_factory=dict)
    fits: bool | None = None
    cache_tokens: int | None = None
    sequences: float | None = None
    prices: Prices = field(default_factory=Prices)

    @property
    def memory_bytes(self) -> int | None:
        return sum(self.memory.values()) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPlan:
    """One form in which new weights may travel. `seconds`: by the link's Gbit/s."""

    form: Literal["all weights", "delta", "adapter"]
    used: bool
    size_bytes: float
    share: float  # of the bytes of all weights
    seconds: dict[int, float]
    source: Source = "estimated"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One optimizer step. Seconds; generation with `nodes` rollout nodes, or by the trainer itself.

    `in_turns_s`: where the nodes generate, then the trainer trains. `overlapped_s`: where they work at the same
    time (`rollout.max_staleness`). None: not known, or the run cannot overlap.
    """

    completions: float  # generated for it
    prompt_tokens: float
    completion_tokens: float
    generate_s: float | None
    train_s: float | None
    sync_s: float | None
    step_s: float  # with `nodes` rollout nodes
    nodes: int
    max_staleness: int
    in_turns_s: float | None
    overlapped_s: float | None
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesPlan:
    """How many rollout nodes pay. `steps`: number of nodes, seconds of a step, USD of a step or None."""

    best: int
    exact: float | None  # not rounded; None without prices
    steps: tuple[tuple[int, float, float | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePlan:
    """The deadline, and when the run would end that begins now; seconds since the epoch.

    `nodes`: rollout nodes with which it runs. Where they cannot keep it, `end_s` is with the most there may be.
    `end_s`, `kept`: None where nobody knows how long a step takes, or how many there are.
    """

    deadline_s: float
    nodes: int
    end_s: float | None
    kept: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LostPlan:
    """What is made again after the trainer is lost: steps since its last checkpoint, without their completions."""

    step_s: float
    step_usd: float | None
    steps_most: int  # between two checkpoints
    most_s: float
    most_usd: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """A checkpoint on its way to the store, and what stays there. None: what is not known.

    Attributes:
        save_steps, every_s: from one to the next.
        stored_s: how long it is on its way, by the MB/s that a store takes; training goes on meanwhile.
        most: how many of a healthy run stay at a time, at most.
        base_bytes: of the base model, if it is the store's too.
        stay_bytes: of both, beside published policies and completions.
    """

    size_bytes: int
    save_steps: int
    every_s: float | None
    stored_s: dict[int, float]
    most: int | None
    base_bytes: int
    stay_bytes: int | None
    stay_usd_per_month: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoneyPlan:
    """What one way of buying the same machines costs. `cost` is None where a price is not known."""

    name: str
    used: bool
    trainer: Market
    rollout: Market
    cost: Cost | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudPrice:
    """What machines with such GPUs cost at one cloud: the least on each market, which two machines may have.

    `instance_type` and `region` are those of the cheapest on the market that the role is bought on.
    """

    cloud: str
    instance_type: str
    region: str
    on_demand_usd_per_h: float | None
    spot_usd_per_h: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KindPlan:
    """A kind of GPU, and for which roles it is large enough. `clouds`: the cheapest first."""

    gpu: str
    memory_bytes: int
    trainer_gpus: int | None  # of one machine; None where the trainer does not fit
    rollout_gpus: int | None
    trainer_prices: tuple[CloudPrice, ...] = ()
    rollout_prices: tuple[CloudPrice, ...] = ()


@dataclass(frozen=True, slots=True)
class Warned:
    """Something that is known to go wrong, and what helps. `key` of run.yaml."""

    key: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All of it.

    Attributes:
        steps, hours: to the end.
        deadline: None where the run has none.
        bought: rollout nodes that dollars are counted with: as many as pay, or as the deadline takes.
        most_usd_per_h: of all machines that run.yaml allows.
        usd_per_step, usd_per_million_tokens: as run.yaml buys, the tokens being those trained on.
        disks_usd_per_h: of the machines' disks by list price, beside all other dollars here.
        unknown: what could not be told, and why.
        notes: where figures come from.
    """

    name: str
    cloud: str
    storage: str
    model: ModelPlan
    trainer: MachinePlan
    rollout: MachinePlan | None
    syncs: tuple[SyncPlan, ...]
    step: StepPlan | None
    nodes: NodesPlan | None
    lost: LostPlan | None
    checkpoints: CheckpointPlan | None
    steps: int | None
    hours: float | None
    deadline: DeadlinePlan | None
    bought: int
    most_usd_per_h: float | None
    usd_per_step: float | None
    usd_per_million_tokens: float | None
    disks_usd_per_h: float
    money: tuple[MoneyPlan, ...]
    kinds: tuple[KindPlan, ...]
    warnings: tuple[Warned, ...]
    unknown: tuple[str, ...]
    notes: tuple[str, ...]


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON data. Every key is always there; what is not known is null."""
    return asdict(plan)
