"""Where a step's time goes, from what the trainer logged of the last steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from checkpoint.records import metrics
from checkpoint.records.metrics import Row


@dataclass(frozen=True, slots=True)
class StepSplit:
    """Seconds of a step, the mean of several; together they are all of it."""

    wait_s: float  # no node could serve
    publish_s: float  # until the policy was in the store
    generate_s: float  # completions were made
    train_s: float  # the rest: rewards, gradients, the pause for a checkpoint, evaluations

    @property
    def step_s(self) -> float:
        return self.wait_s + self.publish_s + self.generate_s + self.train_s


def step_split(rows: Sequence[Row]) -> StepSplit | None:
    """The mean of the steps among `rows`, in the order of time, that were generated and not replayed; None of
    none."""
    steps = took_s = wait_s = publish_s = generate_s = 0.0
    for before, row in pairwise(rows):
        same_life = (row.timeline, row.attempt) == (before.timeline, before.attempt)
        if not same_life or row.step <= before.step or row.values.get(metrics.REPLAYED):
            continue
        steps += row.step - before.step
        took_s += max(0.0, row.time_s - before.time_s)
        wait_s += row.values.get(metrics.WAIT_S, 0.0)
        publish_s += row.values.get(metrics.PUBLISH_S, 0.0)
        generate_s += row.values.get(metrics.GENERATE_S, 0.0)
    known_s = wait_s + publish_s + generate_s
    if not steps or not known_s:
        return None
    # Of several processes, a row's seconds may be a little more than those between two rows.
    share = min(1.0, took_s / known_s) / steps
    return StepSplit(wait_s * share, publish_s * share, generate_s * share, max(0.0, took_s - known_s) / steps)
