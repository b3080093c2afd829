"""What is known to go wrong, and is not an error: each rule by itself. `validate` has told of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orchestrator.clouds.sky.work import places
from orchestrator.plan.machines import (
    KnownModel,
    completion_tokens,
    computes,
    grpo,
    has_room,
    of_trainer,
    prompt_tokens,
)
from orchestrator.plan.model import LostPlan, MachinePlan, MoneyPlan, StepPlan, SyncPlan, Warned
from policies.model.gpus import VISIBLE, engine_gpus
from policies.model.spec import RunSpec, generates_itself, model_settings, processes_of, sharding_of
from policies.model.vocabulary import Market, Role
from policies.sizing.engine import context_problem, engine_of
from policies.sizing.memory import GIB
from policies.sizing.speed import Gpu, gpu_named
from policies.sizing.training import divides_weights, training_of
from policies.weights.adapters import QUANTISED, why_whole

# Half of what lies between a weight of about 0.02, as most are, and its neighbours in bfloat16, which keeps 8
# binary digits: an update below it changes nothing. AdamW's updates are about as large as the learning rate.
KEPT_UPDATE = 2**-6 * 2**-7 / 2
DIVIDED_BY = "tensor-parallel-size"
LISTED_SIZES = 6
LONG_S = 1800.0  # between two checkpoints of a trainer that may be taken away
EGRESS_USD_PER_GB = 0.09  # AWS to the internet, list price of the first 10 TB a month, 2025
STORE_CLOUDS = {"s3": "aws", "gs": "gcp", "az": "azure"}


@dataclass(frozen=True, slots=True)
class Seen:
    """What a rule looks at."""

    spec: RunSpec
    model: KnownModel
    trainer: MachinePlan
    rollout: MachinePlan | None
    syncs: tuple[SyncPlan, ...] = ()
    step: StepPlan | None = None
    lost: LostPlan | None = None
    money: tuple[MoneyPlan, ...] = ()

    def gpu(self, machine: MachinePlan | None) -> Gpu | None:
        """The machine's GPU as run.yaml names it; None where it names none."""
        return gpu_named(machine.gpu) if machine is not None and machine.gpu_is_named else None


def find_pitfalls(seen: Seen) -> tuple[Warned, ...]:
    """Return what every rule says."""
    return tuple(warned for rule in RULES for warned in rule(seen))


def type_is_missing(seen: Seen) -> Iterator[Warned]:
    """GPUs before Ampere have no bfloat16, which is TRL's default and most models' type."""
    for machine in (seen.trainer, seen.rollout):
        gpu = seen.gpu(machine)
        if machine is None or gpu is None or computes(seen.spec, machine.role, gpu):
            continue
        remedy = "grpo.fp16: true" if machine.role is Role.TRAINER else "rollout.vllm.dtype: half"
        yield Warned(_accelerators(machine), f"{gpu.name} has no bfloat16; set {remedy}, or take a newer GPU")


def trainer_is_too_small(seen: Seen) -> Iterator[Warned]:
    gpu, needed = seen.gpu(seen.trainer), seen.trainer.memory_bytes
    if gpu is None or needed is None or has_room(needed, gpu):
        return
    told = f"training needs {needed / GIB:.0f} GiB of each GPU, and {gpu.name} has {gpu.memory_bytes / GIB:.0f}"
    yield Warned(_accelerators(seen.trainer), f"{told}; {remedy_of(seen.spec, seen.model, gpu)}")


def one_process_sees_several(seen: Seen) -> Iterator[Warned]:
    """The trainer refuses them, on a machine that is paid for by then."""
    spec, gpus = seen.spec, seen.trainer.gpus
    if gpus < 2 or processes_of(spec) > 1 or spec.grpo.get("use_cpu") or VISIBLE in spec.trainer.env:
        return
    told = f"one process trains, and would see {gpus} GPUs: TRL trains on one in each"
    helps = f"set it to {gpus}, or {VISIBLE}: '0' in trainer.env"
    yield Warned("trainer.accelerate.num_processes", f"{told}; {helps}")


def only_with_checkpointing(seen: Seen) -> Iterator[Warned]:
    gpu = seen.gpu(seen.trainer)
    if gpu is None or not seen.trainer.fits or not grpo(seen.spec, "gradient_checkpointing"):
        return
    without = of_trainer(with_grpo(seen.spec, gradient_checkpointing=False), seen.model)
    if without is not None and not has_room(without.gpu.total_bytes, gpu):
        needed = f"{without.gpu.total_bytes / GIB:.0f} GiB"
        yield Warned("grpo.gradient_checkpointing", f"leave it on: without it training needs {needed} of each GPU")


def frozen_in_float32(seen: Seen) -> Iterator[Warned]:
    """Frozen weights gain nothing from float32, in which TRL 1.16 loads them unless it is told."""
    settings, shape = model_settings(seen.spec.grpo), seen.model.shape
    if seen.spec.trainer.peft is None or shape is None or settings.get("dtype") or settings.get("torch_dtype"):
        return
    width = training_of(seen.spec, shape, prompt_tokens(seen.spec)).stored_bytes
    if width == 4 and not grpo(seen.spec, "use_cpu"):
        size = shape.params * width / GIB
        told = f"TRL loads the frozen base model in float32, {size:.1f} GiB"
        yield Warned("grpo.model_init_kwargs", f"{told}; {{dtype: bfloat16}} halves it")


def updates_are_lost(seen: Seen) -> Iterator[Warned]:
    settings, rate = model_settings(seen.spec.grpo), float(grpo(seen.spec, "learning_rate"))
    dtype = str(settings.get("dtype") or settings.get("torch_dtype") or "").removeprefix("torch.")
    if seen.spec.trainer.peft is not None or dtype != "bfloat16" or rate >= KEPT_UPDATE:
        return
    if sharding_of(seen.spec)[0] != "none":  # DeepSpeed's optimizer and FSDP keep what they update in float32
        return
    told = f"weights that are trained in bfloat16 lose most updates at a learning rate of {rate:g}"
    yield Warned("grpo.model_init_kwargs", f"{told}; leave dtype out, for float32, or train adapters")


def engine_is_too_small(seen: Seen) -> Iterator[Warned]:
    rollout, gpu = seen.rollout, seen.gpu(seen.rollout)
    if rollout is None or gpu is None or seen.model.shape is None or rollout.sequences is None:
        return
    engine = engine_of(seen.spec, seen.model.shape, seen.model.config)
    if rollout.cache_tokens == 0:
        told = f"the weights leave no room for keys and values on {gpu.name}"
        yield Warned(_accelerators(rollout), f"{told}; set tensor-parallel-size, or take a larger GPU")
    elif rollout.sequences < 1:
        told = f"the KV cache holds {rollout.cache_tokens:,} tokens, and vLLM starts only if one sequence"
        least = prompt_tokens(seen.spec) + completion_tokens(seen.spec)
        yield Warned(
            "rollout.vllm.max-model-len", f"{told} of {engine.max_tokens:,} fits; set e.g. max-model-len: {least}"
        )
    elif (needed := rollout.memory_bytes) is not None and needed > gpu.memory_bytes:
        told = f"with it an engine takes {needed / GIB:.0f} GiB, and {gpu.name} has {gpu.memory_bytes / GIB:.0f}"
        yield Warned(
            "rollout.vllm.kv-cache-memory-bytes", f"{told}; leave it out, and vLLM takes what there is room for"
        )


def heads_do_not_divide(seen: Seen) -> Iterator[Warned]:
    """vLLM divides an engine's heads over its GPUs evenly, or does not start (0.32, `config/model.py`)."""
    size = {name.replace("_", "-"): value for name, value in seen.spec.rollout.vllm.items()}.get(DIVIDED_BY)
    shape = seen.model.shape
    if seen.rollout is None or shape is None or not isinstance(size, int) or size < 1 or shape.heads % size == 0:
        return
    fitting = [str(one) for one in range(1, shape.heads + 1) if shape.heads % one == 0][:LISTED_SIZES]
    told = f"the model's {shape.heads} attention heads are no multiple of {size}, and vLLM does not start"
    yield Warned(f"rollout.vllm.{DIVIDED_BY}", f"{told}; expected one of {', '.join(fitting)}")


def quantised(seen: Seen) -> Iterator[Warned]:
    """`validate` has no config.json of a model that is not in a folder here; its trainer would refuse it."""
    if not generates_itself(seen.spec) and seen.model.config.get("quantization_config"):
        told = f"{QUANTISED}, and the run ends at its first start"
        yield Warned("trainer.model", f"{told}; name the model as it was before")


def cache_makes_rounds(seen: Seen) -> Iterator[Warned]:
    rollout, step = seen.rollout, seen.step
    if rollout is None or step is None or not rollout.cache_tokens or not rollout.gpu_is_named:
        return
    engines = max(1, rollout.gpus // engine_gpus(seen.spec.rollout.vllm)) * max(1, step.nodes)
    each = step.completions / engines
    held = rollout.cache_tokens / (prompt_tokens(seen.spec) + completion_tokens(seen.spec))
    if 1 <= held < each:
        told = f"an engine's KV cache holds {held:.0f} completions of full length, and its share of a step is"
        yield Warned("rollout.vllm", f"{told} {each:.0f}: vLLM makes them in turns, or drops and repeats some")


def context_is_too_long(seen: Seen) -> Iterator[Warned]:
    """`validate` has no config.json of a model that is not in a folder here."""
    spec = seen.spec
    flags = {} if generates_itself(spec) else spec.rollout.vllm
    if found := context_problem(flags, spec.rollout.env, completion_tokens(spec), seen.model.config):
        yield Warned(".".join(found[0]), found[1])


def adapter_is_merged(seen: Seen) -> Iterator[Warned]:
    """`validate` has no config.json of a model that is not in a folder here."""
    spec, model = seen.spec, seen.model
    if spec.trainer.peft is None or generates_itself(spec) or Path(spec.workdir, spec.trainer.model).is_dir():
        return
    if (why := why_whole(spec, model.config)) and not why_whole(spec, {}):
        yield Warned("trainer.peft", f"each step publishes merged weights, not the adapter alone: {why}")


def store_is_elsewhere(seen: Seen) -> Iterator[Warned]:
    """What leaves a cloud is paid for: checkpoints and policies go to the store, and come from it."""
    store = STORE_CLOUDS.get(urlsplit(seen.spec.storage).scheme)
    if seen.spec.cloud != "sky" or store is None:
        return
    for machine, resources in (
        (seen.trainer, seen.spec.trainer.resources),
        (seen.rollout, seen.spec.rollout.resources),
    ):
        clouds = {place.split("/")[0].lower() for place in places(resources) if place} - {"*"}
        others = sorted(clouds - {store})
        if machine is None or not others:
            continue
        used = next((one for one in seen.syncs if one.used), None)
        each = f", a node {used.size_bytes / 1e9:.2g} GB a step" if used and machine.role is Role.ROLLOUT else ""
        told = f"the {machine.role} may be at {', '.join(others)} and the store is at {store}: what leaves a cloud"
        yield Warned("storage", f"{told} costs about {EGRESS_USD_PER_GB} $/GB{each}; keep both at one")


def checkpoints_are_rare(seen: Seen) -> Iterator[Warned]:
    if seen.trainer.market is not Market.SPOT or seen.lost is None or seen.lost.most_s <= LONG_S:
        return
    told = f"the trainer is on spot, and up to {seen.lost.most_s / 60:.0f} minutes of training are made again"
    yield Warned("grpo.save_steps", f"{told} when it is taken without notice; a lower one loses less")


def step_outlasts_its_deadline(seen: Seen) -> Iterator[Warned]:
    step = seen.step
    if seen.rollout is None or step is None or step.generate_s is None:
        return
    if step.generate_s > seen.spec.rollout.deadline_s:
        told = f"a step's completions take about {step.generate_s:.0f} s"
        yield Warned("rollout.deadline_s", f"{told}, and a request may wait {seen.spec.rollout.deadline_s:.0f} s")


def budget_ends_it(seen: Seen) -> Iterator[Warned]:
    """Nothing is bought that does not fit under a budget, and a run that reaches it stops."""
    caps, used = seen.spec.budget, next((one.cost for one in seen.money if one.used), None)
    if used is None:
        return
    if caps.usd_per_h is not None and used.usd_per_h > caps.usd_per_h:
        told = f"the machines cost {used.usd_per_h:.2f} USD an hour, so not all of them are bought"
        yield Warned("budget.usd_per_h", f"{told}; expected at least that")
    if (
        caps.usd is not None
        and used.to_end_usd is not None
        and used.to_end_usd > caps.usd
        and seen.step is not None
    ):
        step = int(caps.usd / (used.usd_per_h * seen.step.step_s / 3600))
        told = f"the run costs about {used.to_end_usd:.2f} USD, so it stops at step {step} or so"
        yield Warned("budget.usd", f"{told}; more, or fewer steps, lets it end")


RULES: tuple[Callable[[Seen], Iterator[Warned]], ...] = (
    type_is_missing,
    trainer_is_too_small,
    one_process_sees_several,
    only_with_checkpointing,
    frozen_in_float32,
    updates_are_lost,
    engine_is_too_small,
    heads_do_not_divide,
    quantised,
    cache_makes_rounds,
    context_is_too_long,
    adapter_is_merged,
    store_is_elsewhere,
    checkpoints_are_rare,
    step_outlasts_its_deadline,
    budget_ends_it,
)


def _accelerators(machine: MachinePlan) -> str:
    return f"{machine.role}.resources.accelerators"


# What helps a trainer that does not fit its GPUs: tried by the same arithmetic, the least change first.
BFLOAT16 = {"dtype": "bfloat16"}
MACHINE_GPUS = 8  # of the largest machines that clouds rent


def remedy_of(spec: RunSpec, model: KnownModel, gpu: Gpu) -> str:
    """The first change with which training fits such GPUs, else what is left once nothing lighter does."""
    fitting = [words for words, lighter in _lighter(spec) if _fits(lighter, model, gpu)]
    if fitting:
        return f"it would fit with {fitting[0]}"
    ways = ["a larger GPU"]
    if spec.trainer.peft is None:
        ways.append("adapters")
    if not divides_weights(spec) and not generates_itself(spec):  # which needs the whole model
        ways.append("more GPUs that divide the weights, with ZeRO-3 or FSDP2")
    return f"take {' or '.join(ways)}"


def with_grpo(spec: RunSpec, **changes: Any) -> RunSpec:
    """The run with other settings of `grpo`."""
    return replace(spec, grpo={**spec.grpo, **changes})


def _lighter(spec: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    """The run with less memory, the least change first, and all of it at the end."""
    settings = dict(model_settings(spec.grpo))
    half = with_grpo(spec, model_init_kwargs={**settings, **BFLOAT16})
    single = with_grpo(spec, per_device_train_batch_size=1)
    if not grpo(spec, "gradient_checkpointing"):
        yield "gradient_checkpointing: true", with_grpo(spec, gradient_checkpointing=True)
    if spec.trainer.peft is not None:
        yield "model_init_kwargs: {dtype: bfloat16}", half
    yield "per_device_train_batch_size: 1 and as much more accumulation", single
    if spec.trainer.peft is None:
        yield "optim: adamw_8bit", with_grpo(spec, optim="adamw_8bit")
    yield from _divided_further(spec)
    lightest = with_grpo(half if spec.trainer.peft is not None else spec, gradient_checkpointing=True)
    yield (
        "gradient checkpointing, one completion at a time and bfloat16 for frozen weights",
        with_grpo(lightest, per_device_train_batch_size=1),
    )


def _divided_further(spec: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    """Over more GPUs of one machine, where they divide the weights already."""
    accelerate, count = spec.trainer.accelerate or {}, 2 * processes_of(spec)
    while divides_weights(spec) and count <= MACHINE_GPUS:
        more = replace(spec.trainer, accelerate={**accelerate, "num_processes": count})
        yield f"{count} GPUs, over which the weights are sharding_of", replace(spec, trainer=more)
        count *= 2


def _fits(spec: RunSpec, model: KnownModel, gpu: Gpu) -> bool:
    memory = of_trainer(spec, model)
    return memory is not None and has_room(memory.gpu.total_bytes, gpu)
