"""Where the time of the logged steps went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from checkpoint.records.metrics import AHEAD_S, GENERATE_S, PUBLISH_S, REWARDS_S, STORE_S, WAIT_S, Row

# What rows tell, in the order of a step; what is left of it is training and whatever is not told.
TOLD = {
    "waiting for nodes": WAIT_S,
    "generating": GENERATE_S,
    "rewards": REWARDS_S,
    "publishing weights": PUBLISH_S,
    "storing": STORE_S,
}
GENERATING = "generating"
TRAINING, STARTED_AGAIN = "training", "started again"
PARTS = (*TOLD, TRAINING, STARTED_AGAIN)


@dataclass(frozen=True, slots=True)
class StepSplit:
    """The time until one row since the row before it. `seconds` has every one of PARTS."""

    row: Row
    steps: int  # that the row is of
    seconds: dict[str, float]


def split(rows: Sequence[Row]) -> list[StepSplit]:
    """Return where the time between each two of `rows`, in the order of time, went.

    Between two lives of a trainer it is all put down to the new start, with the steps that were made again. Parts
    are never more than the whole: where they overlap, as publishing does with training, the later in PARTS is cut.
    """
    found = []
    for before, row in pairwise(rows):
        left_s = max(0.0, row.time_s - before.time_s)
        seconds = dict.fromkeys(PARTS, 0.0)
        if (row.timeline, row.attempt) != (before.timeline, before.attempt):
            seconds[STARTED_AGAIN] = left_s
        else:
            for part, name in TOLD.items():
                part_s = row.values.get(name, 0.0)
                if part == GENERATING:  # not what the trainer's work hides
                    part_s -= row.values.get(AHEAD_S, 0.0)
                seconds[part] = min(left_s, max(0.0, part_s))
                left_s -= seconds[part]
            seconds[TRAINING] = left_s
        found.append(StepSplit(row, max(1, row.step - before.step), seconds))
    return found
