"""Effects of `grpo` keys on the objective, by loss type, from `GRPOTrainer._compute_loss` of TRL 1.16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The defaults of TRL 1.16's GRPOConfig, for keys that run.yaml leaves out.
TRL_DEFAULTS: Mapping[str, float] = {
    "beta": 0.0,
    "epsilon": 0.2,
    "learning_rate": 1e-6,
    "num_generations": 8,
    "num_iterations": 1,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": True,
    "max_completion_length": 512,
    "entropy_coef": 0.0,
    "top_entropy_quantile": 1.0,
}
DEFAULT_LOSS = "dapo"
# These clip the policy ratio at 1 - epsilon and 1 + epsilon_high. `cispo` weighs each token by the ratio up to
# epsilon_high; `sapo` and `vespo` use neither.
CLIPPING_LOSSES = frozenset({"grpo", "bnpo", "dr_grpo", "dapo", "luspo"})

# The numbers of completions computed, accumulated and generated at a time.
BATCH_KEYS = frozenset(
    {"per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"}
)


def value_of(grpo: Mapping[str, Any], key: str) -> float:
    """Return a key's value, or TRL's default."""
    value = grpo.get(key)
    return TRL_DEFAULTS[key] if value is None else float(value)


def loss_of(grpo: Mapping[str, Any]) -> str:
    return str(grpo.get("loss_type") or DEFAULT_LOSS)


def is_on_policy(grpo: Mapping[str, Any], processes: int) -> bool:
    """Whether each completion is trained on only by the weights that generated it, so that the ratio is 1."""
    return value_of(grpo, "num_iterations") == 1 and steps_of_generation(grpo, processes) <= 1


def steps_of_generation(grpo: Mapping[str, Any], processes: int) -> float:
    """Return the number of optimizer steps that train on one generation."""
    accumulated = int(value_of(grpo, "gradient_accumulation_steps"))
    batches = int(grpo.get("steps_per_generation") or accumulated)
    if (batch_size := grpo.get("generation_batch_size")) is not None:
        batches = int(batch_size) // (int(value_of(grpo, "per_device_train_batch_size")) * processes)
    return batches / accumulated * value_of(grpo, "num_iterations")


def weight_cap(grpo: Mapping[str, Any]) -> float:
    """Return `epsilon_high`, or TRL's default for it; for `cispo` the largest weight of a token."""
    high = grpo.get("epsilon_high")
    return value_of(grpo, "epsilon") if high is None else float(high)


def pieces_keep_gradient(grpo: Mapping[str, Any]) -> bool:
    """Whether smaller batches on each device, with more accumulation, give the same gradient.

    `bnpo` weighs a completion by the tokens of its device's batch. The entropy bonus and the selection of tokens
    by entropy are computed over that batch, too.
    """
    plain = value_of(grpo, "entropy_coef") == 0 and not grpo.get("use_adaptive_entropy")
    return plain and value_of(grpo, "top_entropy_quantile") == 1 and loss_of(grpo) != "bnpo"


def effects(changes: Mapping[str, float], before: Mapping[str, Any], processes: int) -> dict[str, str]:
    """Describe the effect of each change, by key.

    Args:
        changes: keys of `grpo` with their new values.
        before: `grpo` as it was.
    """
    after = {**before, **changes}
    of_group = BATCH_KEYS if "num_generations" in changes else frozenset()
    return {
        key: _effect("num_generations" if key in of_group else key, before, after, processes) for key in changes
    }


def _effect(key: str, before: Mapping[str, Any], after: Mapping[str, Any], processes: int) -> str:
    match key:
        case "beta":
            return _of_beta(value_of(before, key), value_of(after, key))
        case "learning_rate" if value_of(before, key) > 0:
            return f"updates of {_times(value_of(after, key) / value_of(before, key))} the size"
        case "epsilon" | "epsilon_high":
            return _of_epsilon(key, after, processes)
        case "max_grad_norm":
            return f"gradients with a norm above {after[key]:g} are scaled down to it"
        case "temperature":
            return f"completions are sampled at temperature {after[key]:g}"
        case _ if key in BATCH_KEYS:
            if pieces_keep_gradient(after):
                return "the same batch and gradient, computed in smaller pieces"
            return "the same batch in smaller pieces; this loss's averages over a piece change"
        case "gradient_checkpointing":
            return "the same gradient: activations are computed again instead of kept"
        case "num_generations":
            return f"{after[key]:g} completions for each prompt, with the same number of prompts"
        case "max_completion_length":
            return f"completions end after {after[key]:g} tokens"
    return "passed to TRL"


def _of_beta(before: float, after: float) -> str:
    if after == 0:
        return "no KL term"
    if before == 0:
        return "adds a KL term, which loads a reference model in addition to the trained one"
    return f"the KL term pulls {_times(after / before)} as hard towards the reference model"


def _of_epsilon(key: str, after: Mapping[str, Any], processes: int) -> str:
    loss, cap = loss_of(after), weight_cap(after)
    if loss == "cispo" and key == "epsilon" and after.get("epsilon_high") is not None:
        return "nothing: loss_type cispo has no lower bound"
    if loss not in CLIPPING_LOSSES and loss != "cispo":
        return f"nothing: loss_type {loss} does not clip the ratio"
    if loss == "cispo" and not (is_on_policy(after, processes) and cap >= 1):
        return f"the ratio weighs a token by at most {cap:g}"
    if is_on_policy(after, processes):
        return "nothing: each completion is trained on once, by the weights that made it, so the ratio is 1"
    return f"the ratio is clipped below {1 - value_of(after, 'epsilon'):g} and above {1 + cap:g}"


def _times(ratio: float) -> str:
    return "half" if ratio == 0.5 else f"{ratio:.3g} times"
