"""What the steps of a run could teach, by what TRL has logged of their rewards."""

from __future__ import annotations

from dataclasses import dataclass

from checkpoint.records.metrics import NONFINITE, read_chunk
from checkpoint.store import layout
from checkpoint.store.run_store import Store
from policies.detect.symptoms import NO_VARIANCE

REWARD = "reward"
ALL = 1.0 - 1e-6  # a mean of shares that are all 1


@dataclass(frozen=True, slots=True)
class Lessons:
    """Logged training rows, counted up to the first that could teach something."""

    rows: int = 0
    rewarded: int = 0  # in which a completion had a reward
    varied: int = 0  # in which a group had rewards that differ


def lessons_of(store: Store) -> Lessons:
    """Read the run's metrics up to the first row that could teach something. Raises StoreError."""
    rows = rewarded = 0
    for entry in store.entries(layout.METRICS):
        for row in read_chunk(store, entry.key):
            has_reward = REWARD in row.values
            if has_reward and row.values.get(NO_VARIANCE, 0.0) < ALL:
                return Lessons(rows + 1, rewarded + 1, 1)
            rows += has_reward or NONFINITE + REWARD in row.values
            rewarded += has_reward
    return Lessons(rows, rewarded, 0)
