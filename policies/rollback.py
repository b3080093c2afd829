"""The choices of a rollback: where to, with what changed, and whether once more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from policies.spec import OnRollback, RollbackBudget
from policies.state import Rollback
from policies.timelines import Fork, lineage, on_lineage
from policies.vocabulary import Cause, PolicyVersion

# GRPOConfig's own, of TRL 1.16, for keys that run.yaml leaves out.
TRL_DEFAULTS: Mapping[str, float] = {
    "beta": 0.0,
    "epsilon": 0.2,
    "learning_rate": 1e-6,
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "max_completion_length": 512,
}
# Below this a group's mean says too little of its prompt; then completions are made shorter instead.
LEAST_GROUP = 4
LEAST_COMPLETION_TOKENS = 16


def choose_start(
    checkpoints: Sequence[PolicyVersion], forks: Sequence[Fork], timeline: int, before_step: int | None
) -> PolicyVersion | None:
    """Return the newest checkpoint on the line of `timeline` whose step is below `before_step`.

    None where there is none: then the run's start is the target. Without `before_step` the newest one.
    """
    stretches = lineage(forks, timeline)
    found = [
        version
        for version in checkpoints
        if on_lineage(version, stretches) and (before_step is None or version.step < before_step)
    ]
    return max(found, key=lambda version: version.step, default=None)


def before_step_of(onset_step: int, rollback: Rollback | None) -> int:
    """Return the step that the next target must lie before.

    A timeline that trips in its probation has shown that what it started from was too late, so the next target
    lies before that one, too.
    """
    if rollback is None or rollback.cause is not Cause.DIVERGED:
        return onset_step
    start = rollback.fork.start_at
    return 0 if start is None else min(onset_step, start.step)


def changes_after(grpo: Mapping[str, Any], rules: OnRollback) -> dict[str, float]:
    """Return the keys of `grpo` that a rollback changes, with their new values.

    Without a KL term (beta 0) there is none to strengthen. `epsilon_high` follows `epsilon` where it is set.
    """
    factors = {
        "beta": rules.beta_factor,
        "epsilon": rules.epsilon_factor,
        "epsilon_high": rules.epsilon_factor,
        "learning_rate": rules.learning_rate_factor,
    }
    values = {key: grpo.get(key) if grpo.get(key) is not None else TRL_DEFAULTS.get(key) for key in factors}
    # Ten digits, so that 0.1 x 3 is not told as 0.30000000000000004.
    changed = {key: float(f"{value * factors[key]:.10g}") for key, value in values.items() if value}
    return {key: value for key, value in changed.items() if value != values[key]}


def halved(grpo: Mapping[str, Any]) -> dict[str, int] | None:
    """Return smaller settings for a trainer that ran out of memory, or None where nothing is left to halve.

    The group first, and the batch on each device with it, so that as many prompts share it as before and every
    divisibility stays; then the completion length.
    """
    values = {key: int(grpo.get(key) or default) for key, default in TRL_DEFAULTS.items()}
    group, batch = values["num_generations"], values["per_device_train_batch_size"]
    whole = grpo.get("generation_batch_size")
    if group % 2 == 0 and group // 2 >= LEAST_GROUP and batch % 2 == 0 and (not whole or int(whole) % 2 == 0):
        smaller = {"num_generations": group // 2, "per_device_train_batch_size": batch // 2}
        return {**smaller, "generation_batch_size": int(whole) // 2} if whole else smaller
    length = values["max_completion_length"]
    return {"max_completion_length": length // 2} if length // 2 >= LEAST_COMPLETION_TOKENS else None


def spent(rollbacks: Sequence[Rollback], step: int, budget: RollbackBudget) -> str:
    """Return why there may be no further rollback for a trip at `step`; empty where there may.

    Counted are those for divergence since a person last decided.
    """
    counted: list[Rollback] = []
    for one in rollbacks:
        counted = [] if one.cause is Cause.USER else [*counted, one]
    counted = [one for one in counted if one.cause is Cause.DIVERGED]
    recent = [one for one in counted if abs(step - one.from_step) < budget.recent_steps]
    if len(counted) >= budget.total:
        return f"rolled back {len(counted)} times, which is all that policies.kl.budget.total allows"
    if len(recent) >= budget.recent:
        return f"rolled back {len(recent)} times within {budget.recent_steps} steps, as policies.kl.budget allows"
    return ""
