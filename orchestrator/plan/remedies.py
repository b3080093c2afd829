"""What helps a trainer that does not fit its GPUs: tried by the same arithmetic, the least change first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from orchestrator.plan.machines import has_room, of_trainer
from orchestrator.plan.models import KnownModel
from orchestrator.plan.workload import grpo
from policies.model.spec import RunSpec, generates_itself, model_settings, processes_of
from policies.sizing.gpus import Gpu
from policies.sizing.training import divides_weights

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
        yield f"{count} GPUs, over which the weights are divided", replace(spec, trainer=more)
        count *= 2


def _fits(spec: RunSpec, model: KnownModel, gpu: Gpu) -> bool:
    memory = of_trainer(spec, model)
    return memory is not None and has_room(memory.gpu.total_bytes, gpu)
