"""Plan a step's work, the model's shape, and the machines of each role with the memory that they need.

A step's work follows GRPOConfig (TRL 1.16, `GRPOConfig.__post_init__`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_orch.orchestrator.config.foreign_keys import grpo_value
from grpo_orch.orchestrator.config.model_size import SizeUnknown, find_config, json_in
from grpo_orch.orchestrator.plan.model import MachinePlan, Prices
from grpo_orch.policies.fleet.market import market_of
from grpo_orch.policies.model.gpus import engine_gpus, gpus_of
from grpo_orch.policies.model.spec import (
    RunSpec,
    accelerators_of,
    alternatives_of,
    deepspeed_file,
    generates_itself,
    processes_of,
)
from grpo_orch.policies.model.vocabulary import Role
from grpo_orch.policies.sizing.engine import engine_memory, engine_of, whole_number
from grpo_orch.policies.sizing.memory import EngineMemory, Memory, host_memory, trainer_memory
from grpo_orch.policies.sizing.shapes import Shape, UnknownShape, shape_of, with_all_params
from grpo_orch.policies.sizing.speed import GPUS, Gpu, Passes, StepWork, gpu_named
from grpo_orch.policies.sizing.training import batches_per_generation, training_of
from grpo_orch.policies.weights.adapters import QUANTISED_WORDS
from grpo_orch.policies.weights.disk_sizes import ModelSize

# Assumed, because the length of prompts depends on the data: about 100 tokens for GSM8K, several hundred for
# programs with their tests.
PROMPT_TOKENS = 512


def grpo(spec: RunSpec, key: str) -> Any:
    """Return a GRPOConfig key from run.yaml, else TRL's default."""
    return grpo_value(spec.grpo, key)


def completion_tokens(spec: RunSpec) -> int:
    """Return the maximum tokens of a completion."""
    return int(grpo(spec, "max_completion_length"))


def prompt_tokens(spec: RunSpec) -> int:
    """Return the assumed tokens of a prompt: PROMPT_TOKENS, or less if the engines' context is shorter."""
    context = whole_number(spec.rollout.vllm.get("max-model-len"))
    if generates_itself(spec) or not context:
        return PROMPT_TOKENS
    return max(1, min(PROMPT_TOKENS, context - completion_tokens(spec)))


def work_of(spec: RunSpec) -> StepWork:
    """Return the work of an optimizer step with completions of maximum length."""
    accumulated = int(grpo(spec, "gradient_accumulation_steps"))
    trained = int(grpo(spec, "per_device_train_batch_size")) * processes_of(spec) * accumulated
    generated = trained / int(grpo(spec, "num_iterations"))
    return StepWork(
        generated=generated,
        trained=trained,
        prompts=generated / int(grpo(spec, "num_generations")),
        prompt_tokens=prompt_tokens(spec),
        completion_tokens=completion_tokens(spec),
    )


def passes_of(spec: RunSpec) -> Passes:
    """Return the trainer's passes over each token.

    The policy's log-probabilities are recomputed before the first update if vLLM generated and importance sampling
    correction is on, or if several steps use a window (`_generate_and_score_completions`).
    """
    uses_vllm = not generates_itself(spec)
    micro_batches = batches_per_generation(spec) * int(grpo(spec, "num_iterations"))
    is_window_split = int(grpo(spec, "gradient_accumulation_steps")) % micro_batches
    return Passes(
        all_weights=spec.trainer.peft is None,
        recomputed=bool(grpo(spec, "gradient_checkpointing")),
        reference=float(grpo(spec, "beta")) != 0,
        old=bool(is_window_split) or (uses_vllm and bool(grpo(spec, "vllm_importance_sampling_correction"))),
    )


def steps_of(spec: RunSpec) -> int | None:
    """Return the optimizer steps of the run; None if they depend on the dataset's number of rows."""
    steps = int(grpo(spec, "max_steps"))
    return steps if steps > 0 else None


# The model: its size, and its shape from its config.json.

FindSize = Callable[[RunSpec], ModelSize]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """The known facts about a model; `unknown` is a line about the missing ones."""

    params: int | None = None
    stored_bytes: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    shape: Shape | None = None
    unknown: str = ""


def find_model(spec: RunSpec, find_size: FindSize) -> KnownModel:
    """Look up the model in its folder, in the hub's cache, and on the hub."""
    try:
        size = find_size(spec)
        known = KnownModel(size.params, size.stored_bytes, size.config)
    except SizeUnknown as error:
        if not (config := find_config(spec)):
            return KnownModel(unknown=f"{spec.trainer.model}: its size is unknown ({error})")
        known = KnownModel(config=config)
    if problem := _memory_problem(spec, known.config):
        return replace(known, unknown=problem)
    try:
        shape = shape_of(known.config)
    except UnknownShape as error:
        return replace(known, unknown=f"{spec.trainer.model}: its memory is unknown: {error}")
    if known.params is None:  # most models store two bytes per weight
        return KnownModel(shape.params, 2 * shape.params, known.config, shape)
    return replace(known, shape=with_all_params(shape, known.params))


def _memory_problem(spec: RunSpec, config: Mapping[str, Any]) -> str:
    """Return why the memory of a model cannot be planned; empty if it can."""
    problem = f"{spec.trainer.model}: its memory is unknown"
    if not config:
        return f"{problem}: its config.json is not available; for a gated model set HF_TOKEN"
    settings = spec.grpo.get("model_init_kwargs")
    if config.get("quantization_config") or any(word in str(settings) for word in QUANTISED_WORDS):
        return f"{problem}: it is quantised, and the bytes per weight are then not planned"
    return ""


def cached_lookup(find_size: FindSize) -> FindSize:
    """Return `find_size` with a cache for one run, because a query to the hub takes seconds."""
    results: list[ModelSize | SizeUnknown] = []

    def lookup(spec: RunSpec) -> ModelSize:
        if not results:
            try:
                results.append(find_size(spec))
            except SizeUnknown as error:
                results.append(error)
        if isinstance(results[0], SizeUnknown):
            raise results[0]
        return results[0]

    return lookup


def active_params(shape: Shape) -> int:
    """Return the parameters that compute a token: the head and only the chosen experts, without the embedding."""
    active = shape.text_params - (0 if shape.tied else shape.embedding_params)
    if shape.experts is None:
        return active
    experts = shape.experts
    return active - shape.routed_params * (experts.count - experts.chosen) // experts.count


# DeepSpeed's configuration in a separate file: it determines how weights are sharded.


def with_deepspeed(spec: RunSpec) -> RunSpec:
    """Return the run with that file's content as `grpo.deepspeed`, if the file is readable here."""
    config = deepspeed_file(spec)
    if not config:
        return spec
    try:
        found = json.loads(config)
    except ValueError:
        found = json_in(Path(spec.workdir, config))
    return replace(spec, grpo={**spec.grpo, "deepspeed": found}) if isinstance(found, dict) and found else spec


# The machines of each role: their GPUs, the memory that they need, and the kinds of GPU that have it.

# Share of a GPU's memory to plan with; the rest goes to fragmentation and other libraries.
PLANNED_SHARE = 0.95


Kinds = Mapping[str, Gpu]  # by name


def kinds_with(memory_mib: Mapping[str, float]) -> Kinds:
    """Return the table's kinds and a catalog's, of which only the memory is known, in MiB by name."""
    others = {name: Gpu(name, round(mib), 0.0, 0.0) for name, mib in memory_mib.items() if gpu_named(name) is None}
    return {gpu.name: gpu for gpu in GPUS} | others


def named_kinds(resources: Mapping[str, Any]) -> list[str]:
    """Return the kinds of GPUs in SkyPilot's `resources`, in order, including alternatives."""
    machines = alternatives_of(resources)
    return list(dict.fromkeys(name for machine in machines for name, _ in accelerators_of(machine)))


def has_room(used_bytes: int, gpu: Gpu) -> bool:
    """Return whether a GPU has this much memory for a trainer."""
    return used_bytes <= PLANNED_SHARE * gpu.memory_bytes


def supports_dtype(spec: RunSpec, role: Role, gpu: Gpu) -> bool:
    """Return whether the GPU supports the role's type: TRL defaults to bfloat16, vLLM to the model's type."""
    if gpu.has_bf16:
        return True
    if role is Role.TRAINER:
        return bool(grpo(spec, "fp16")) or grpo(spec, "bf16") is False
    return str(spec.rollout.vllm.get("dtype", "auto")).lower() in ("half", "float16", "float", "float32")


def trainer_memory_of(spec: RunSpec, model: KnownModel) -> Memory | None:
    """Return the memory of training; None if the model's shape or the sharding of its weights is unknown."""
    if model.shape is None or deepspeed_file(spec):
        return None
    return trainer_memory(model.shape, training_of(spec, model.shape, prompt_tokens(spec)))


def engine_memory_of(spec: RunSpec, model: KnownModel, gpu: Gpu) -> EngineMemory | None:
    """Return the memory of an engine on GPUs of this kind; None if the model's shape is unknown."""
    if model.shape is None:
        return None
    return engine_memory(model.shape, engine_of(spec, model.shape, model.config), gpu.memory_bytes)


def fits(spec: RunSpec, model: KnownModel, role: Role, gpu: Gpu) -> bool | None:
    """Return whether the role fits on run.yaml's number of such GPUs; None if unknown."""
    if not supports_dtype(spec, role, gpu):
        return False
    if role is Role.TRAINER:
        trainer = trainer_memory_of(spec, model)
        return None if trainer is None else has_room(trainer.total_bytes, gpu)
    engine = engine_memory_of(spec, model, gpu)
    return None if engine is None else engine.sequences >= 1 and engine.gpu.total_bytes <= gpu.memory_bytes


def plan_machine(spec: RunSpec, model: KnownModel, role: Role, kinds: Kinds, prices: Prices) -> MachinePlan:
    """Return the plan of a role's machines. If run.yaml names no GPU, use the smallest that fits."""
    section = spec.trainer if role is Role.TRAINER else spec.rollout
    named = named_kinds(section.resources)
    gpu = gpu_named(named[0]) or kinds.get(named[0]) if named else smallest(spec, model, role)
    least, most = (1, 1) if role is Role.TRAINER else (spec.rollout.replicas.min, spec.rollout.replicas.max)
    parts: dict[str, Any] = {}
    if role is Role.TRAINER and (trainer := trainer_memory_of(spec, model)) is not None:
        assert model.shape is not None
        host = host_memory(model.shape, training_of(spec, model.shape, prompt_tokens(spec)))
        parts = {"memory": dict(trainer.parts), "moment": trainer.moment, "host": dict(host.parts)}
    if role is Role.ROLLOUT and gpu is not None and (engine := engine_memory_of(spec, model, gpu)) is not None:
        parts = {"memory": dict(engine.gpu.parts), "moment": engine.gpu.moment}
        parts |= {"cache_tokens": engine.tokens, "sequences": engine.sequences}
    return MachinePlan(
        role=role,
        market=market_of(role, spec),
        min_nodes=least,
        max_nodes=most,
        gpu=named[0] if named else gpu.name if gpu else "",
        gpu_is_named=bool(named),
        gpus=gpus_of(role, spec),
        gpu_bytes=gpu.memory_bytes if gpu else None,
        fits=None if gpu is None else fits(spec, model, role, gpu),
        prices=prices,
        **parts,
    )


def smallest(spec: RunSpec, model: KnownModel, role: Role) -> Gpu | None:
    """Return the fitting kind of GPU with the least memory; None if none fits, if unknown, or without GPUs.

    On the local cloud all roles share one machine, so the kind must fit all of them.
    """
    if grpo(spec, "use_cpu"):
        return None
    roles = [role] if spec.cloud != "local" or generates_itself(spec) else list(Role)
    fitting = [gpu for gpu in GPUS if all(fits(spec, model, needed, gpu) for needed in roles)]
    return min(fitting, key=lambda gpu: (gpu.memory_mib, -gpu.bandwidth_gb_per_s), default=None)


def needed_gpus(spec: RunSpec, role: Role) -> int:
    """Return the GPUs per machine of the role in run.yaml, which also applies to other kinds."""
    if role is Role.TRAINER:
        return max(1, gpus_of(role, spec), processes_of(spec))
    return 0 if generates_itself(spec) else max(1, gpus_of(role, spec), engine_gpus(spec.rollout.vllm))
