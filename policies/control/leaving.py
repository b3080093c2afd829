"""Decide when a trainer stops on a machine that is about to be preempted, and whether to store a checkpoint."""

from __future__ import annotations

NOTICE_S = 30.0  # the shortest time between a cloud's notice and the end: GCP, Azure, Kubernetes
MARGIN = 1.25  # the time for a checkpoint varies with the load of trainer and store
END_S = 1.0  # for the processes to end


def leave_by_s(notice_at_s: float, lasts_s: float, store_s: float | None) -> float | None:
    """Return when to stop training, so that a checkpoint is in the store when the notice expires.

    Args:
        notice_at_s: when the notice came, on any clock; the result is on the same.
        lasts_s: from the notice to the end.
        store_s: how long saving and storing takes; None if never measured.

    Returns None if the notice is too short. It then trains on, because completions are stored with each step.
    """
    if store_s is None:
        return notice_at_s + lasts_s / 2
    if store_s + END_S > lasts_s:
        return None
    return max(notice_at_s, notice_at_s + lasts_s - MARGIN * store_s - END_S)


def is_worth_storing(repeat_s: float, store_s: float | None, *, machine_stays: bool) -> bool:
    """Whether to store a checkpoint before the trainer ends.

    Args:
        repeat_s: how long it takes to repeat the steps since the newest checkpoint, whose completions are stored.
        store_s: how long saving and storing takes; None if never measured.
        machine_stays: whether the machine would be kept only for this. A preempted one costs the same either way.
    """
    return not machine_stays or store_s is None or repeat_s >= store_s
