"""Build the run specification of an evaluation: machines, model and rewards of the evaluated run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from grpo_orch.policies.model.spec import Dataset, KlPolicy, RunSpec, generates_itself, processes_of, settings_in

# The keys of `grpo` that affect completions or their scores. The others affect training only.
KEPT = frozenset(
    {
        "bf16",
        "cast_lm_head_to_fp32",
        "chat_template_kwargs",
        "fp16",
        "max_completion_length",
        "max_tool_calling_iterations",
        "model_init_kwargs",
        "per_device_eval_batch_size",
        "remove_unused_columns",
        "repetition_penalty",
        "reward_weights",
        "seed",
        "tf32",
        "trust_remote_code",
        "use_cpu",
        "vllm_structured_outputs_regex",
    }
)
# Greedy decoding, one completion per prompt. TRL requires training groups of two; an evaluation does not train.
GREEDY: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "num_generations_eval": 1,
    "num_generations": 2,
    "per_device_train_batch_size": 2,
    "max_steps": 1,
    "beta": 0.0,
    "save_strategy": "no",
    "gradient_checkpointing": False,
}
SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "seed", "n"})


def as_run(spec: RunSpec, storage: str, dataset: Dataset | tuple[Dataset, ...]) -> RunSpec:
    """Return the specification of a run that evaluates `spec`'s policies on a dataset.

    A single process loads the weights. If several processes trained them, they may not fit on one GPU and are held
    in main memory; the nodes generate.
    """
    grpo = {key: value for key, value in spec.grpo.items() if key in KEPT} | GREEDY
    if settings := settings_in(spec.grpo, "generation_kwargs"):
        grpo["generation_kwargs"] = {key: value for key, value in settings.items() if key not in SAMPLING}
    if processes_of(spec) > 1 and not generates_itself(spec):
        grpo["use_cpu"] = True
    return replace(
        spec,
        name=f"{spec.name}-eval",
        storage=storage,
        trainer=replace(spec.trainer, dataset=dataset, eval_dataset=None, accelerate=None),
        grpo=grpo,
        policies=replace(spec.policies, kl=KlPolicy(action="alert")),
        rehearse=None,
    )
