"""The machines of each role: which GPUs they have, what these have to hold, and which kinds could hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.plan.deepspeed_file import unread_deepspeed
from orchestrator.plan.model import MachinePlan
from orchestrator.plan.models import KnownModel
from orchestrator.plan.workload import grpo, prompt_tokens
from policies.control.fleet.markets import market_of
from policies.model.gpus import engine_gpus, gpus_of
from policies.model.spec import RunSpec, alternatives_of, generates_itself, processes_of
from policies.model.vocabulary import Role
from policies.sizing.engine import engine_memory, engine_of
from policies.sizing.memory import EngineMemory, TrainerMemory
from policies.sizing.money import Prices
from policies.sizing.speed import GPUS, Gpu, gpu_named
from policies.sizing.trainer import trainer_memory
from policies.sizing.training import training_of

# Of a GPU's memory: what is planned with; the rest is lost to fragments and to what other libraries keep.
PLANNED_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Kinds:
    """GPUs by name: those of the table, and others whose memory a catalog tells."""

    all: Mapping[str, Gpu]

    def named(self, name: str) -> Gpu | None:
        return gpu_named(name) or self.all.get(name)


def kinds_with(memory_mib: Mapping[str, float]) -> Kinds:
    """The table's kinds, and a catalog's of which only the memory is known, in MiB by name."""
    others = {name: Gpu(name, round(mib), 0.0, 0.0) for name, mib in memory_mib.items() if gpu_named(name) is None}
    return Kinds({one.name: one for one in GPUS} | others)


def named_kinds(resources: Mapping[str, Any]) -> list[str]:
    """The kinds of GPUs that SkyPilot's `resources` names, alternatives too, in their order."""
    found = [name for one in alternatives_of(resources) for name in kinds_in(one.get("accelerators"))]
    return list(dict.fromkeys(found))


def kinds_in(accelerators: Any) -> list[str]:
    """The kinds in `accelerators`: `H100:8`, `{H100: 8}`, or a list of them."""
    listed = [accelerators] if isinstance(accelerators, str) else accelerators or ()
    return [str(one).partition(":")[0] for one in listed]


def has_room(used_bytes: int, gpu: Gpu) -> bool:
    """Whether a GPU holds so many bytes of a trainer."""
    return used_bytes <= PLANNED_SHARE * gpu.memory_bytes


def computes(spec: RunSpec, role: Role, gpu: Gpu) -> bool:
    """Whether it has the type that the role computes in: TRL's default is bfloat16, and vLLM's the model's own."""
    if gpu.has_bf16:
        return True
    if role is Role.TRAINER:
        return bool(grpo(spec, "fp16")) or grpo(spec, "bf16") is False
    return str(spec.rollout.vllm.get("dtype", "auto")).lower() in ("half", "float16", "float", "float32")


def of_trainer(spec: RunSpec, model: KnownModel) -> TrainerMemory | None:
    """What training takes; None where the model's shape is not known, or how its weights are divided."""
    if model.shape is None or unread_deepspeed(spec):
        return None
    return trainer_memory(model.shape, training_of(spec, model.shape, prompt_tokens(spec)))


def of_engine(spec: RunSpec, model: KnownModel, gpu: Gpu) -> EngineMemory | None:
    """What an engine takes of GPUs of this kind; None where the model's shape is not known."""
    if model.shape is None:
        return None
    engines = max(1, gpus_of(Role.ROLLOUT, spec) // engine_gpus(spec.rollout.vllm))
    return engine_memory(model.shape, engine_of(spec, model.shape, model.config), gpu.memory_bytes, engines)


def fits(spec: RunSpec, model: KnownModel, role: Role, gpu: Gpu) -> bool | None:
    """Whether machines of the role can have such GPUs, as many as run.yaml names; None where nobody can tell."""
    if not computes(spec, role, gpu):
        return False
    if role is Role.TRAINER:
        trainer = of_trainer(spec, model)
        return None if trainer is None else has_room(trainer.gpu.total_bytes, gpu)
    engine = of_engine(spec, model, gpu)
    return None if engine is None else engine.sequences >= 1 and engine.gpu.total_bytes <= gpu.memory_bytes


def plan_machine(spec: RunSpec, model: KnownModel, role: Role, kinds: Kinds, prices: Prices) -> MachinePlan:
    """Return the plan of a role's machines. Where run.yaml names no GPU, the smallest that fits stands in."""
    section = spec.trainer if role is Role.TRAINER else spec.rollout
    named = named_kinds(section.resources)
    gpu = kinds.named(named[0]) if named else smallest(spec, model, role)
    least, most = (1, 1) if role is Role.TRAINER else (spec.rollout.replicas.min, spec.rollout.replicas.max)
    parts: dict[str, Any] = {}
    if role is Role.TRAINER and (trainer := of_trainer(spec, model)) is not None:
        parts = {"memory": dict(trainer.gpu.parts), "moment": trainer.gpu.moment, "host": dict(trainer.host.parts)}
    if role is Role.ROLLOUT and gpu is not None and (engine := of_engine(spec, model, gpu)) is not None:
        parts = {"memory": dict(engine.gpu.parts), "moment": engine.gpu.moment, "host": dict(engine.host.parts)}
        parts |= {"cache_tokens": engine.tokens, "sequences": engine.sequences}
    return MachinePlan(
        role=role,
        market=market_of(role, spec),
        least=least,
        most=most,
        gpu=named[0] if named else gpu.name if gpu else "",
        gpu_is_named=bool(named),
        gpus=gpus_of(role, spec),
        gpu_bytes=gpu.memory_bytes if gpu else None,
        fits=None if gpu is None else fits(spec, model, role, gpu),
        prices=prices,
        **parts,
    )


def smallest(spec: RunSpec, model: KnownModel, role: Role) -> Gpu | None:
    """The kind with the least memory that fits; None where none does, nobody can tell, or nothing is computed on
    GPUs. One machine's are of one kind, whichever role has them."""
    if grpo(spec, "use_cpu"):
        return None
    roles = [role] if spec.cloud != "local" or generates_itself(spec) else list(Role)
    fitting = [gpu for gpu in GPUS if all(fits(spec, model, one, gpu) for one in roles)]
    return min(fitting, key=lambda gpu: (gpu.memory_mib, -gpu.bandwidth_gb_per_s), default=None)


def needed_gpus(spec: RunSpec, role: Role) -> int:
    """GPUs of one machine of the role, as run.yaml has it: with other kinds as many are asked for."""
    if role is Role.TRAINER:
        return max(1, gpus_of(role, spec), processes_of(spec))
    return 0 if generates_itself(spec) else max(1, gpus_of(role, spec), engine_gpus(spec.rollout.vllm))
