"""Rules that warn about known problems of a plan. `validate` reports other mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from grpo_orch.orchestrator.plan.machines import (
    PLANNED_SHARE,
    KnownModel,
    completion_tokens,
    fits,
    grpo,
    has_room,
    prompt_tokens,
    supports_dtype,
)
from grpo_orch.orchestrator.plan.model import MachinePlan, Plan, PlanWarning
from grpo_orch.policies.model.gpus import VISIBLE, engine_gpus
from grpo_orch.policies.model.spec import (
    RunSpec,
    clouds_of,
    generates_itself,
    model_settings,
    processes_of,
    sharding_of,
    shards_weights,
)
from grpo_orch.policies.model.vocabulary import Market, Role
from grpo_orch.policies.sizing.engine import engine_of
from grpo_orch.policies.sizing.memory import GIB
from grpo_orch.policies.sizing.speed import Gpu, gpu_named
from grpo_orch.policies.sizing.training import training_of

# Half the distance between typical weights of about 0.02 and their neighbours in bfloat16, which has 8 significant
# bits: a smaller update is rounded away. AdamW's updates are about as large as the learning rate.
UPDATE_MIN = 2**-6 * 2**-7 / 2
TENSOR_PARALLEL = "tensor-parallel-size"
LISTED_SIZES = 6
CHECKPOINT_S_MAX = 1800.0  # between two checkpoints of a trainer on spot
EGRESS_USD_PER_GB = 0.09  # AWS to the internet, list price of the first 10 TB a month, 2025
STORE_CLOUDS = {"s3": "aws", "gs": "gcp", "az": "azure"}


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """The input of a rule."""

    spec: RunSpec
    model: KnownModel
    plan: Plan

    def gpu(self, machine: MachinePlan | None) -> Gpu | None:
        """Return the machine's GPU if run.yaml names it, else None."""
        return gpu_named(machine.gpu) if machine is not None and machine.gpu_is_named else None


def find_pitfalls(run: PlannedRun) -> tuple[PlanWarning, ...]:
    """Return the warnings of all rules."""
    return tuple(warning for rule in RULES for warning in rule(run))


def bfloat16_missing(run: PlannedRun) -> Iterator[PlanWarning]:
    """GPUs before Ampere lack bfloat16, which is the default of TRL and the type of most models."""
    for machine in (run.plan.trainer, run.plan.rollout):
        gpu = run.gpu(machine)
        if machine is None or gpu is None or supports_dtype(run.spec, machine.role, gpu):
            continue
        remedy = "grpo.fp16: true" if machine.role is Role.TRAINER else "rollout.vllm.dtype: half"
        yield PlanWarning(_accelerators(machine), f"{gpu.name} has no bfloat16; set {remedy}, or use a newer GPU")


def trainer_out_of_memory(run: PlannedRun) -> Iterator[PlanWarning]:
    gpu, needed = run.gpu(run.plan.trainer), run.plan.trainer.memory_bytes
    if gpu is None or needed is None or has_room(needed, gpu):
        return
    available = f"{gpu.name} has {gpu.memory_bytes / GIB:.0f}, of which {PLANNED_SHARE:.0%} are usable"
    problem = f"training needs {needed / GIB:.0f} GiB on each GPU, but {available}"
    yield PlanWarning(_accelerators(run.plan.trainer), f"{problem}; {remedy_of(run.spec, run.model, gpu)}")


def too_few_processes(run: PlannedRun) -> Iterator[PlanWarning]:
    """The trainer would refuse the extra GPUs, on a machine that is already paid for."""
    spec, gpus = run.spec, run.plan.trainer.gpus
    if gpus < 2 or processes_of(spec) > 1 or spec.grpo.get("use_cpu") or VISIBLE in spec.trainer.env:
        return
    problem = f"the single training process would see {gpus} GPUs, but TRL uses one GPU per process"
    remedy = f"set num_processes to {gpus}, or {VISIBLE}: '0' in trainer.env"
    yield PlanWarning("trainer.accelerate.num_processes", f"{problem}; {remedy}")


def frozen_weights_in_float32(run: PlannedRun) -> Iterator[PlanWarning]:
    """Frozen weights do not benefit from float32, which is TRL 1.16's default."""
    settings, shape = model_settings(run.spec.grpo), run.model.shape
    if run.spec.trainer.peft is None or shape is None or settings.get("dtype") or settings.get("torch_dtype"):
        return
    width = training_of(run.spec, shape, prompt_tokens(run.spec)).stored_bytes
    if width == 4 and not grpo(run.spec, "use_cpu"):
        size = shape.params * width / GIB
        problem = f"TRL loads the frozen base model in float32, {size:.1f} GiB"
        yield PlanWarning("grpo.model_init_kwargs", f"{problem}; {{dtype: bfloat16}} halves it")


def bfloat16_loses_updates(run: PlannedRun) -> Iterator[PlanWarning]:
    settings, rate = model_settings(run.spec.grpo), float(grpo(run.spec, "learning_rate"))
    dtype = str(settings.get("dtype") or settings.get("torch_dtype") or "").removeprefix("torch.")
    if run.spec.trainer.peft is not None or dtype != "bfloat16" or rate >= UPDATE_MIN:
        return
    if sharding_of(run.spec)[0] != "none":  # DeepSpeed's optimizer and FSDP keep trained weights in float32
        return
    problem = f"weights trained in bfloat16 lose most updates at a learning rate of {rate:g}"
    yield PlanWarning("grpo.model_init_kwargs", f"{problem}; remove dtype to train in float32, or train adapters")


def engine_out_of_memory(run: PlannedRun) -> Iterator[PlanWarning]:
    rollout, gpu = run.plan.rollout, run.gpu(run.plan.rollout)
    if rollout is None or gpu is None or run.model.shape is None or rollout.sequences is None:
        return
    engine = engine_of(run.spec, run.model.shape, run.model.config)
    if rollout.cache_tokens == 0:
        problem = f"the weights leave no memory for the KV cache on {gpu.name}"
        yield PlanWarning(_accelerators(rollout), f"{problem}; set tensor-parallel-size, or use a larger GPU")
    elif rollout.sequences < 1:
        needed_tokens = prompt_tokens(run.spec) + completion_tokens(run.spec)
        problem = f"the KV cache holds {rollout.cache_tokens:,} tokens, but vLLM must fit one sequence of"
        yield PlanWarning(
            "rollout.vllm.max-model-len",
            f"{problem} {engine.max_tokens:,} to start; set e.g. max-model-len: {needed_tokens}",
        )
    elif (needed := rollout.memory_bytes) is not None and needed > gpu.memory_bytes:
        available = f"{gpu.name} has {gpu.memory_bytes / GIB:.0f}"
        problem = f"an engine then takes {needed / GIB:.0f} GiB, but {available}"
        yield PlanWarning(
            "rollout.vllm.kv-cache-memory-bytes", f"{problem}; remove it, and vLLM uses the available memory"
        )


def heads_not_divisible(run: PlannedRun) -> Iterator[PlanWarning]:
    """vLLM only starts if an engine's GPUs evenly divide the attention heads (0.32, `config/model.py`)."""
    size = run.spec.rollout.vllm.get(TENSOR_PARALLEL)
    rollout, shape = run.plan.rollout, run.model.shape
    if rollout is None or shape is None or not isinstance(size, int) or size < 1 or shape.heads % size == 0:
        return
    divisors = [str(count) for count in range(1, shape.heads + 1) if shape.heads % count == 0][:LISTED_SIZES]
    problem = f"vLLM does not start: the model's {shape.heads} attention heads are not divisible by {size}"
    yield PlanWarning(f"rollout.vllm.{TENSOR_PARALLEL}", f"{problem}; expected one of {', '.join(divisors)}")


def kv_cache_too_small(run: PlannedRun) -> Iterator[PlanWarning]:
    rollout, step = run.plan.rollout, run.plan.step
    if rollout is None or step is None or not rollout.cache_tokens or not rollout.gpu_is_named:
        return
    engines = max(1, rollout.gpus // engine_gpus(run.spec.rollout.vllm)) * max(1, step.nodes)
    share = step.completions / engines
    capacity = rollout.cache_tokens / (prompt_tokens(run.spec) + completion_tokens(run.spec))
    if 1 <= capacity < share:
        problem = (
            f"an engine's KV cache holds {capacity:.0f} completions of full length, but a step is {share:.0f}"
        )
        yield PlanWarning("rollout.vllm", f"{problem} per engine: vLLM queues some, or preempts and repeats them")


def store_in_other_cloud(run: PlannedRun) -> Iterator[PlanWarning]:
    """Clouds charge for outgoing traffic: checkpoints and policies go to the store, and policies come from it."""
    store = STORE_CLOUDS.get(urlsplit(run.spec.storage).scheme)
    if run.spec.cloud != "sky" or store is None:
        return
    for machine, resources in (
        (run.plan.trainer, run.spec.trainer.resources),
        (run.plan.rollout, run.spec.rollout.resources),
    ):
        others = sorted(clouds_of(resources) - {store})
        if machine is None or not others:
            continue
        cost = f"{EGRESS_USD_PER_GB} $/GB"
        if run.plan.sync is not None and machine.role is Role.ROLLOUT:
            cost += f", {run.plan.sync.size_bytes / 1e9:.2g} GB a step for each node"
        problem = f"the {machine.role} may be in {', '.join(others)}, but the store is in {store}"
        yield PlanWarning("storage", f"{problem}: traffic between clouds costs about {cost}; use one cloud")


def rare_checkpoints(run: PlannedRun) -> Iterator[PlanWarning]:
    lost = run.plan.lost
    if run.plan.trainer.market is not Market.SPOT or lost is None or lost.max_s <= CHECKPOINT_S_MAX:
        return
    problem = f"the trainer is on spot: a preemption without notice costs up to {lost.max_s / 60:.0f} minutes"
    yield PlanWarning("grpo.save_steps", f"{problem} of training; lower save_steps to lose less")


def budget_too_small(run: PlannedRun) -> Iterator[PlanWarning]:
    """Machines that exceed a budget are not bought, and a run that reaches its budget stops."""
    caps, used = run.spec.budget, next((way.cost for way in run.plan.money if way.used), None)
    if used is None:
        return
    if caps.usd_per_h is not None and used.usd_per_h > caps.usd_per_h:
        problem = f"the machines cost {used.usd_per_h:.2f} USD an hour, so not all of them will be bought"
        yield PlanWarning("budget.usd_per_h", f"{problem}; expected at least that")
    if (
        caps.usd is not None
        and used.to_end_usd is not None
        and used.to_end_usd > caps.usd
        and run.plan.step is not None
    ):
        step = int(caps.usd / (used.usd_per_h * run.plan.step.step_s / 3600))
        problem = f"the run costs about {used.to_end_usd:.2f} USD, so it stops at about step {step}"
        yield PlanWarning("budget.usd", f"{problem}; raise it, or lower grpo.max_steps")


RULES: tuple[Callable[[PlannedRun], Iterator[PlanWarning]], ...] = (
    bfloat16_missing,
    trainer_out_of_memory,
    too_few_processes,
    frozen_weights_in_float32,
    bfloat16_loses_updates,
    engine_out_of_memory,
    heads_not_divisible,
    kv_cache_too_small,
    store_in_other_cloud,
    rare_checkpoints,
    budget_too_small,
)


def _accelerators(machine: MachinePlan) -> str:
    return f"{machine.role}.resources.accelerators"


# Remedies for a trainer that does not fit its GPUs, smallest change first, checked with the same memory estimate.
BFLOAT16 = {"dtype": "bfloat16"}
MACHINE_GPUS = 8  # of the largest machines that clouds rent


def remedy_of(spec: RunSpec, model: KnownModel, gpu: Gpu) -> str:
    """Return the smallest change with which training fits these GPUs, else the larger alternatives."""
    fitting = [text for text, lighter in _lighter(spec) if fits(lighter, model, Role.TRAINER, gpu)]
    if fitting:
        return f"it would fit with {fitting[0]}"
    options = ["a larger GPU"]
    if spec.trainer.peft is None:
        options.append("adapters")
    if not shards_weights(spec) and not generates_itself(spec):  # generating needs the whole model
        options.append("more GPUs that shard the weights, with ZeRO-3 or FSDP2")
    return f"use {' or '.join(options)}"


def with_grpo(spec: RunSpec, **changes: Any) -> RunSpec:
    """Return the run with changed settings of `grpo`."""
    return replace(spec, grpo={**spec.grpo, **changes})


def _lighter(spec: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    """Yield changes that need less memory and the changed run, smallest change first, all changes last."""
    settings = dict(model_settings(spec.grpo))
    half = with_grpo(spec, model_init_kwargs={**settings, **BFLOAT16})
    single = with_grpo(spec, per_device_train_batch_size=1)
    if not grpo(spec, "gradient_checkpointing"):
        yield "gradient_checkpointing: true", with_grpo(spec, gradient_checkpointing=True)
    if spec.trainer.peft is not None:
        yield "model_init_kwargs: {dtype: bfloat16}", half
    yield "per_device_train_batch_size: 1 and more gradient accumulation", single
    if spec.trainer.peft is None:
        yield "optim: adamw_8bit", with_grpo(spec, optim="adamw_8bit")
    yield from _more_gpus(spec)
    lightest = with_grpo(half if spec.trainer.peft is not None else spec, gradient_checkpointing=True)
    yield (
        "gradient checkpointing, one completion at a time and bfloat16 for frozen weights",
        with_grpo(lightest, per_device_train_batch_size=1),
    )


def _more_gpus(spec: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    """Yield the run with more GPUs on its machine, if it shards its weights already."""
    accelerate, count = spec.trainer.accelerate or {}, 2 * processes_of(spec)
    while shards_weights(spec) and count <= MACHINE_GPUS:
        more = replace(spec.trainer, accelerate={**accelerate, "num_processes": count})
        yield f"{count} GPUs that shard the weights", replace(spec, trainer=more)
        count *= 2
