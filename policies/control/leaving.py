"""When a trainer leaves a machine that will be taken from it, and whether what it has is worth a checkpoint."""

from __future__ import annotations

NOTICE_S = 30.0  # the shortest that a cloud gives between its notice and the end: GCP, Azure, Kubernetes
# A checkpoint is measured beside a trainer at work and a store as it was then; both differ from time to time.
MARGIN = 1.25
END_S = 1.0  # for the processes to end


def leave_by_s(told_at_s: float, lasts_s: float, closing_s: float | None) -> float | None:
    """When to stop training, so that a checkpoint is in the store when the notice is over.

    Args:
        told_at_s: when the notice came, on any clock; the answer is on the same.
        lasts_s: what the cloud gives.
        closing_s: what saving and storing takes; None where it was never measured.

    Returns None where the notice is too short for that: then the time is better spent on training on, for what is
    generated in it is stored with each step.
    """
    if closing_s is None:
        return told_at_s + lasts_s / 2
    if closing_s + END_S > lasts_s:
        return None
    return max(told_at_s, told_at_s + lasts_s - MARGIN * closing_s - END_S)


def is_worth_storing(again_s: float, closing_s: float | None, *, machine_stays: bool) -> bool:
    """Whether steps are stored before the trainer ends.

    Args:
        again_s: what the steps since the newest checkpoint would take again: their time without what was spent
            on generating, for the completions are stored already.
        closing_s: what saving and storing them takes; None where it was never measured.
        machine_stays: nothing but this is waited for. A machine that is taken anyway costs the same without.
    """
    return not machine_stays or closing_s is None or again_s >= closing_s
