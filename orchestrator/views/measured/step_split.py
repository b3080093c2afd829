"""Where a step's time goes, from what the trainer logged of the last steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checkpoint.records.metrics import PARTS, REPLAYED, STARTED_AGAIN, Row, split

WAITING, PUBLISHING, GENERATING = "waiting for nodes", "publishing weights", "generating"  # of PARTS


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
    made = [one for one in split(rows) if not one.seconds[STARTED_AGAIN] and not one.row.values.get(REPLAYED)]
    steps = sum(one.steps for one in made)
    if not steps:
        return None
    mean_s = {part: sum(one.seconds[part] for one in made) / steps for part in PARTS}
    wait_s, publish_s, generate_s = (mean_s.pop(part) for part in (WAITING, PUBLISHING, GENERATING))
    return (
        StepSplit(wait_s, publish_s, generate_s, sum(mean_s.values())) if wait_s + publish_s + generate_s else None
    )
