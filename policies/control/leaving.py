"""When a trainer leaves a machine that will be taken from it, and whether what it has is worth a checkpoint."""

from __future__ import annotations

NOTICE_S = 30.0  # the shortest that a cloud gives between its notice and the end: GCP, Azure, Kubernetes
# How long a checkpoint takes varies with what trainer and store do meanwhile.
MARGIN = 1.25
END_S = 1.0  # for the processes to end


def leave_by_s(told_at_s: float, lasts_s: float, closing_s: float | None) -> float | None:
    """When to stop training, so that a checkpoint is in the store when the notice is over.

    Args:
        told_at_s: when the notice came, on any clock; the answer is on the same.
        lasts_s: from the notice to the end.
        closing_s: how long saving and storing takes; None where it was never measured.

    Returns None where the notice is too short for that: then it is better to train on, since what is generated is
    stored with each step.
    """
    if closing_s is None:
        return told_at_s + lasts_s / 2
    if closing_s + END_S > lasts_s:
        return None
    return max(told_at_s, told_at_s + lasts_s - MARGIN * closing_s - END_S)


def is_worth_storing(again_s: float, closing_s: float | None, *, machine_stays: bool) -> bool:
    """Whether steps are stored before the trainer ends.

    Args:
        again_s: how long it takes to repeat the steps since the newest checkpoint, without generating: their
            completions are stored already.
        closing_s: how long saving and storing them takes; None where it was never measured.
        machine_stays: the machine waits for this alone. One that is taken anyway costs the same either way.
    """
    return not machine_stays or closing_s is None or again_s >= closing_s
