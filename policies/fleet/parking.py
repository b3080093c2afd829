"""When a run whose trainer waits for rollout nodes returns the trainer's machine, too.

Nobody knows how long there will be none. Once the waiting trainer has cost what its restart costs, it goes: that
is at most twice the best choice, whatever comes. Its restart is its boot, in which the first rollout node waits.
"""

from __future__ import annotations

IDLE_MIN_S = 300.0  # a machine is often found again within minutes, and returning one takes about as long


def idle_limit_s(trainer_boot_s: float, trainer_usd_per_h: float, node_usd_per_h: float) -> float:
    """Seconds of a waiting trainer that cost what its restart does: boot x (1 + p/P).

    Where a price is not known, 0 or less, a node counts as much as the trainer: so it is waited for longer.
    """
    known = trainer_usd_per_h > 0 and node_usd_per_h > 0
    share = node_usd_per_h / trainer_usd_per_h if known else 1.0
    return max(IDLE_MIN_S, trainer_boot_s * (1 + share))
