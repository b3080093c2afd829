"""What a step of a run consists of, by GRPOConfig's arithmetic (TRL 1.16, `GRPOConfig.__post_init__`)."""

from __future__ import annotations

from typing import Any

from orchestrator.config.foreign_keys import grpo_table
from policies.model.spec import RunSpec, generates_itself, processes_of
from policies.sizing.engine import whole_number
from policies.sizing.speed import Passes, StepWork

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
