"""What a run is made of: a step's work, the model's shape, and each role's machines with the memory that they
need.

A step's work is GRPOConfig's arithmetic (TRL 1.16, `GRPOConfig.__post_init__`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.config.foreign_keys import grpo_table
from orchestrator.config.model_size import NotKnown, find_config, json_in
from orchestrator.plan.model import MachinePlan
from policies.fleet.market import market_of
from policies.model.gpus import engine_gpus, gpus_of
from policies.model.spec import RunSpec, alternatives_of, generates_itself, processes_of
from policies.model.vocabulary import Role
from policies.sizing.engine import engine_memory, engine_of, whole_number
from policies.sizing.memory import EngineMemory, TrainerMemory
from policies.sizing.money import Prices
from policies.sizing.shapes import Shape, UnknownShape, shape_of, with_all_params
from policies.sizing.speed import GPUS, Gpu, Passes, StepWork, gpu_named
from policies.sizing.trainer import trainer_memory
from policies.sizing.training import training_of
from policies.weights.adapters import QUANTISED_WORDS
from policies.weights.disks import ModelSize

# Only the data tells how long prompts are: GSM8K's about 100 tokens, programs with their tests several hundred.
PROMPT_TOKENS = 512


def grpo(spec: RunSpec, key: str) -> Any:
    """A GRPOConfig key: what run.yaml says, or TRL's default."""
    value = spec.grpo.get(key)
    return grpo_table().default(key) if value is None else value


def completion_tokens(spec: RunSpec) -> int:
    """Of the longest completion."""
    return int(grpo(spec, "max_completion_length"))


def prompt_tokens(spec: RunSpec) -> int:
    """Of a prompt: PROMPT_TOKENS, or less where the engines' context is shorter."""
    flags = {name.replace("_", "-"): value for name, value in spec.rollout.vllm.items()}
    room = whole_number(flags.get("max-model-len"))
    if generates_itself(spec) or not room:
        return PROMPT_TOKENS
    return max(1, min(PROMPT_TOKENS, room - completion_tokens(spec)))


def window(spec: RunSpec) -> tuple[int, int]:
    """Completions of one generation, and how many batches a process makes of its share."""
    each = int(grpo(spec, "per_device_train_batch_size")) * processes_of(spec)
    if explicit := spec.grpo.get("generation_batch_size"):
        return int(explicit), int(explicit) // each
    batches = int(spec.grpo.get("steps_per_generation") or grpo(spec, "gradient_accumulation_steps"))
    return each * batches, batches


def work_of(spec: RunSpec, mean_tokens: float | None = None) -> StepWork:
    """What one optimizer step takes. `mean_tokens`: of a completion; None: each is as long as it may be."""
    accumulated = int(grpo(spec, "gradient_accumulation_steps"))
    trained = int(grpo(spec, "per_device_train_batch_size")) * processes_of(spec) * accumulated
    generated = trained / int(grpo(spec, "num_iterations"))
    return StepWork(
        generated=generated,
        trained=trained,
        prompts=generated / int(grpo(spec, "num_generations")),
        prompt_tokens=prompt_tokens(spec),
        completion_tokens=mean_tokens or completion_tokens(spec),
    )


def passes_of(spec: RunSpec) -> Passes:
    """What the trainer computes of each token.

    The policy's log-probabilities are computed anew before the first update where vLLM generated and its sampling
    is corrected for, or where a window is used up by several steps (`_generate_and_score_completions`).
    """
    apart = not generates_itself(spec)
    several = int(grpo(spec, "gradient_accumulation_steps")) % (
        window(spec)[1] * int(grpo(spec, "num_iterations"))
    )
    return Passes(
        all_weights=spec.trainer.peft is None,
        recomputed=bool(grpo(spec, "gradient_checkpointing")),
        reference=float(grpo(spec, "beta")) != 0,
        old=bool(several) or (apart and bool(grpo(spec, "vllm_importance_sampling_correction"))),
    )


def steps_of(spec: RunSpec) -> int | None:
    """Optimizer steps of the whole run; None where only the number of the dataset's rows would tell."""
    steps = int(grpo(spec, "max_steps"))
    return steps if steps > 0 else None


# The model: its size, and its shape by its config.json.

FindSize = Callable[[RunSpec], ModelSize]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """What is known of it; `unknown` says in a line what is not, and why."""

    params: int | None = None
    stored_bytes: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    shape: Shape | None = None
    unknown: str = ""


def know_model(spec: RunSpec, find_size: FindSize) -> KnownModel:
    """Look for the model: in its folder, in the hub's cache, at the hub."""
    try:
        size = find_size(spec)
    except NotKnown as error:
        config = find_config(spec)
        if not config:
            return KnownModel(unknown=f"{spec.trainer.model}: its size is not known ({error})")
        return _by_shape(spec, config)
    if why := _not_told(spec, size.config):
        return KnownModel(size.params, size.stored_bytes, size.config, None, why)
    try:
        shape = with_all_params(shape_of(size.config), size.params)
    except UnknownShape as error:
        why = f"{spec.trainer.model}: its memory is not known: {error}"
        return KnownModel(size.params, size.stored_bytes, size.config, None, why)
    return KnownModel(size.params, size.stored_bytes, size.config, shape)


def _not_told(spec: RunSpec, config: Mapping[str, Any]) -> str:
    """Why no memory is planned for a model whose size is known; empty where nothing is in the way."""
    told = f"{spec.trainer.model}: its memory is not known"
    if not config:
        return f"{told}: its config.json cannot be had; of a gated model the hub shows it with HF_TOKEN alone"
    asked = spec.grpo.get("model_init_kwargs")
    if config.get("quantization_config") or any(word in str(asked) for word in QUANTISED_WORDS):
        return f"{told}: it is quantised, and how many bytes a weight then takes is not planned"
    return ""


def _by_shape(spec: RunSpec, config: Mapping[str, Any]) -> KnownModel:
    """Without its weights, by its config.json alone; stored in two bytes each, as most are."""
    if why := _not_told(spec, config):
        return KnownModel(config=config, unknown=why)
    try:
        shape = shape_of(config)
    except UnknownShape as error:
        return KnownModel(config=config, unknown=f"{spec.trainer.model}: its size is not known: {error}")
    return KnownModel(shape.params, 2 * shape.params, config, shape)


def cached_lookup(find_size: FindSize) -> FindSize:
    """The same for one run, with its answer kept: the hub is asked for seconds."""
    answers: list[ModelSize | NotKnown] = []

    def ask(spec: RunSpec) -> ModelSize:
        if not answers:
            try:
                answers.append(find_size(spec))
            except NotKnown as error:
                answers.append(error)
        if isinstance(answers[0], NotKnown):
            raise answers[0]
        return answers[0]

    return ask


def active_params(shape: Shape) -> int:
    """Parameters that a token goes through: of a mixture only the experts that are chosen, and the head, but not
    the embedding, which is looked up."""
    through = shape.text_params - (0 if shape.tied else shape.embedding_params)
    if shape.experts is None:
        return through
    one = shape.experts
    return through - shape.routed_params * (one.count - one.chosen) // one.count


# DeepSpeed's configuration in a file of its own: it decides how weights are divided.


def with_deepspeed(spec: RunSpec) -> RunSpec:
    """Return the run with that file's content in its place (`grpo.deepspeed`), where it can be read from here."""
    said = _elsewhere(spec)
    if said is None:
        return spec
    try:
        found = json.loads(said)
    except ValueError:
        found = json_in(Path(spec.workdir, said))
    return replace(spec, grpo={**spec.grpo, "deepspeed": found}) if isinstance(found, dict) and found else spec


def unread_deepspeed(spec: RunSpec) -> str:
    """The file that says how weights are divided, and could not be read; empty where there is none."""
    return _elsewhere(spec) or ""


def _elsewhere(spec: RunSpec) -> str | None:
    own: Any = (spec.trainer.accelerate or {}).get("deepspeed_config")
    theirs = spec.grpo.get("deepspeed")
    if theirs:
        return theirs if isinstance(theirs, str) else None
    named = own.get("deepspeed_config_file") if isinstance(own, Mapping) else None
    return str(named) if named else None


# The machines of each role: their GPUs, what these have to hold, and which kinds could hold it.

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
