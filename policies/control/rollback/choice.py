"""The choices of a rollback: its target, its changes, and whether the budget allows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_orch.policies.model.loss import CLIPPING_LOSSES, is_on_policy, loss_of, value_of, weight_cap
from grpo_orch.policies.model.spec import OnRollback, RollbackBudget
from grpo_orch.policies.model.state import Rollback
from grpo_orch.policies.model.timelines import Fork, lineage, on_lineage
from grpo_orch.policies.model.vocabulary import Cause, PolicyVersion


@dataclass(frozen=True, slots=True)
class Target:
    """A rollback's target: a checkpoint, or the run's start (`start` None).

    With `missing`, the reason, there is no automatic target.
    """

    start: PolicyVersion | None
    missing: str = ""

    def __str__(self) -> str:
        return self.missing or ("the start" if self.start is None else f"checkpoint {self.start}")


def choose_target(
    checkpoints: Sequence[PolicyVersion],
    forks: Sequence[Fork],
    timeline: int,
    before_step: int | None,
    *,
    ever_stored: bool,
) -> Target:
    """Return the automatic target: the newest checkpoint on the timeline's lineage from before `before_step`.

    The run's start is chosen only if that loses nothing: no checkpoint was ever stored or, without `before_step`,
    a user had the timeline begin there and it has stored none yet.

    Args:
        ever_stored: whether the store has ever listed a checkpoint, even if it lists none now.
    """
    start = choose_start(checkpoints, forks, timeline, before_step)
    if start is not None:
        return Target(start)
    began_at_start = timeline != 0 and all(isinstance(part, int) for part in lineage(forks, timeline))
    if not (checkpoints or ever_stored) or (began_at_start and before_step is None):
        return Target(None)
    if before_step is None:
        return Target(None, "the store no longer has a checkpoint of this timeline")
    stored = ", ".join(map(str, sorted(checkpoints))) or "no checkpoints"
    return Target(None, f"no checkpoint is from before step {before_step}; the store has {stored}")


def choose_start(
    checkpoints: Sequence[PolicyVersion], forks: Sequence[Fork], timeline: int, before_step: int | None
) -> PolicyVersion | None:
    """Return the newest checkpoint on the lineage of `timeline`, with a step below `before_step` if given.

    None if there is none.
    """
    stretches = lineage(forks, timeline)
    found = [
        version
        for version in checkpoints
        if on_lineage(version, stretches) and (before_step is None or version.step < before_step)
    ]
    return max(found, key=lambda version: version.step, default=None)


def target_before_step(onset_step: int, rollbacks: Sequence[Rollback]) -> int:
    """Return the step before which the next target must lie.

    A timeline that trips during its probation started too late, so the next target also lies before that start,
    even if memory ran out in between.
    """
    for rollback in reversed(rollbacks):
        if rollback.passed or rollback.cause is Cause.USER:
            break
        if rollback.cause is Cause.DIVERGED:
            start = rollback.fork.start_at
            return onset_step if start is None else min(onset_step, start.step)
    return onset_step


def changes_on_rollback(grpo: Mapping[str, Any], rules: OnRollback, processes: int = 1) -> dict[str, float]:
    """Return the keys of `grpo` that a rollback changes, with their new values, if the change has an effect.

    Without a KL term (`beta` 0) none is added: it would need memory for a reference model and change the user's
    objective. `epsilon`, and `epsilon_high` where set, change only where they clip a ratio other than 1; `cispo`
    instead caps weights, and its cap moves towards 1.

    Args:
        processes: number of training processes.
    """
    factors = {"learning_rate": rules.learning_rate_factor, "beta": rules.beta_factor}
    off_policy = not is_on_policy(grpo, processes)
    if off_policy and loss_of(grpo) in CLIPPING_LOSSES:
        factors["epsilon"] = rules.epsilon_factor
        if grpo.get("epsilon_high") is not None:
            factors["epsilon_high"] = rules.epsilon_factor
    values = {key: weight_cap(grpo) if key == "epsilon_high" else value_of(grpo, key) for key in factors}
    wanted = {key: value * factors[key] for key, value in values.items()}
    if off_policy and loss_of(grpo) == "cispo" and (cap := weight_cap(grpo)) > 1:
        values["epsilon_high"], wanted["epsilon_high"] = cap, 1 + (cap - 1) * rules.epsilon_factor
    # Ten digits, so that 0.1 x 3 is not shown as 0.30000000000000004.
    changed = {key: float(f"{value:.10g}") for key, value in wanted.items()}
    return {key: value for key, value in changed.items() if value != values[key]}


def budget_spent(rollbacks: Sequence[Rollback], step: int, budget: RollbackBudget) -> str:
    """Return why the budget allows no further rollback for a trip at `step`; empty: it does.

    Rollbacks for divergence count, since the last rollback by a user.
    """
    counted: list[Rollback] = []
    for rollback in rollbacks:
        counted = [] if rollback.cause is Cause.USER else [*counted, rollback]
    counted = [rollback for rollback in counted if rollback.cause is Cause.DIVERGED]
    recent = [rollback for rollback in counted if abs(step - rollback.from_step) < budget.recent_steps]
    if len(counted) >= budget.total:
        return f"rolled back {len(counted)} times, the limit of policies.kl.budget.total"
    if len(recent) >= budget.recent:
        return (
            f"rolled back {len(recent)} times within {budget.recent_steps} steps, the limit of policies.kl.budget"
        )
    return ""
