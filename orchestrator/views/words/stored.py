"""What a plan says of checkpoints, in a line."""

from __future__ import annotations

from orchestrator.plan.model import CheckpointPlan
from orchestrator.views.words.numbers import duration, short, usd

GB = 10**9


def stored_words(plan: CheckpointPlan) -> str:
    """`6.44 GB every 50 steps (1:12 h), stored in 1:04 min at 100 MB/s, 6 s at 1,000 MB/s; ...`."""
    every = "" if plan.every_s is None else f" ({duration(plan.every_s)})"
    took = ", ".join(f"{duration(seconds)} at {speed:,} MB/s" for speed, seconds in plan.stored_s.items())
    told = f"{short(plan.size_bytes / GB)} GB every {plan.save_steps} steps{every}, stored in {took}"
    return f"{told}; {_stay_words(plan)}" if plan.stay_bytes is not None else told


def _stay_words(plan: CheckpointPlan) -> str:
    base = " and the base model" if plan.base_bytes else ""
    stay = f"at most {plan.most}{base} stay, {short((plan.stay_bytes or 0) / GB)} GB"
    if plan.stay_usd_per_month is None:
        return f"{stay}; the store's price is not known"
    if not plan.stay_usd_per_month:
        return stay
    return f"{stay}, {usd(plan.stay_usd_per_month)} a month"
