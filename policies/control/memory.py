"""What to change for a trainer that ran out of memory: first what keeps the objective, then what does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policies.control.objective import pieces_keep_gradient, value_of

# The mean of a smaller group says too little about its prompt.
LEAST_GROUP = 4

Changes = dict[str, bool | int | float]


def changes_to_save_memory(
    grpo: Mapping[str, Any], min_completion_length: int | None, *, accumulates: bool = True
) -> Changes | None:
    """Return the next changes of `grpo` that need less memory, or None where nothing is left that may change.

    In order: smaller batches on each device with more accumulation; gradient checkpointing; smaller groups; and
    shorter completions, as far as `min_completion_length` allows. Where smaller batches change the gradient,
    checkpointing comes first.

    Args:
        accumulates: whether the accumulation may be changed.
    """
    pieces, checkpointing = _in_smaller_pieces(grpo) if accumulates else None, _with_checkpointing(grpo)
    exact = (pieces, checkpointing) if pieces_keep_gradient(grpo) else (checkpointing, pieces)
    groups = _with_smaller_groups(grpo) if accumulates else None
    for changes in (*exact, groups, _with_shorter_completions(grpo, min_completion_length)):
        if changes is not None:
            return changes
    return None


def _in_smaller_pieces(grpo: Mapping[str, Any]) -> Changes | None:
    """Divide the batch on each device by its least divisor, and multiply the accumulation by that: a generation
    and an optimizer step have as many completions as before."""
    batch = int(value_of(grpo, "per_device_train_batch_size"))
    if batch == 1:
        return None
    parts = next(part for part in range(2, batch + 1) if batch % part == 0)
    changes: Changes = {
        "per_device_train_batch_size": batch // parts,
        "gradient_accumulation_steps": int(value_of(grpo, "gradient_accumulation_steps")) * parts,
    }
    # Where it is not set, TRL derives it from the accumulation or from generation_batch_size.
    if (steps := grpo.get("steps_per_generation")) is not None:
        changes["steps_per_generation"] = int(steps) * parts
    return changes


def _with_checkpointing(grpo: Mapping[str, Any]) -> Changes | None:
    return None if value_of(grpo, "gradient_checkpointing") else {"gradient_checkpointing": True}


def _with_smaller_groups(grpo: Mapping[str, Any]) -> Changes | None:
    """Halve the group, for as many prompts: a generation and an optimizer step have half the completions."""
    group = int(value_of(grpo, "num_generations"))
    halved: Changes = {"num_generations": group // 2}
    whole = [group, int(value_of(grpo, "gradient_accumulation_steps"))]
    halved["gradient_accumulation_steps"] = whole[1] // 2
    for key in ("steps_per_generation", "generation_batch_size"):
        if (value := grpo.get(key)) is not None:
            halved[key] = int(value) // 2
            whole.append(int(value))
    possible = group // 2 >= LEAST_GROUP and all(value % 2 == 0 for value in whole)
    return halved if possible else None


def _with_shorter_completions(grpo: Mapping[str, Any], least: int | None) -> Changes | None:
    length = int(value_of(grpo, "max_completion_length"))
    if least is None or length <= least:
        return None
    return {"max_completion_length": max(least, length // 2)}
