"""Count the steps of a run that could teach something, from the reward metrics that TRL logs."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_orch.checkpoint.records.metrics import NONFINITE, read_chunk
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.detect.symptoms import NO_VARIANCE

REWARD = "reward"
ALL = 1.0 - 1e-6  # tolerance for a mean of shares that are all 1


@dataclass(frozen=True, slots=True)
class RewardCounts:
    """Counts of logged training rows, up to the first row that could teach something."""

    rows: int = 0
    rewarded: int = 0  # rows with a reward for some completion
    varied: int = 0  # rows with a group whose rewards differ


def count_rewards(store: Store) -> RewardCounts:
    """Count the run's metric rows up to the first row that could teach something. Raises StoreError."""
    rows = rewarded = 0
    for entry in store.entries(layout.METRICS):
        for row in read_chunk(store, entry.key):
            has_reward = REWARD in row.values
            if has_reward and row.values.get(NO_VARIANCE, 0.0) < ALL:
                return RewardCounts(rows + 1, rewarded + 1, 1)
            rows += has_reward or NONFINITE + REWARD in row.values
            rewarded += has_reward
    return RewardCounts(rows, rewarded, 0)
