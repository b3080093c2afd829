"""How buying machines of one kind goes, and when it stops, so that what never works is not bought for ever.

A kind is what the machines of several slots share: role, market, resources. After REFUSALS of them in a row that
were refused, taken before they served, never worked, or soon broke for good, no more are requested, except one at
a time to see whether the kind works again. A refusal costs nothing and capacity comes back within minutes, so the
next try is soon; a machine that never serves is paid for, and waiting rarely repairs the cause.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from policies.model.events import NodeMoved
from policies.model.vocabulary import NodePhase, Refusal

REFUSALS = 3
PROBE_FIRST_S = 600.0  # after machines that never served; doubled with each try
PROBE_MAX_S = 4 * 3600.0
CREDENTIALS_MAX_S = 3600.0  # refused credentials: the user mends them, and a `resume` tries at once
WORKS_S = 600.0  # one that serves this long after the last that soon broke shows that the kind works
SPOT_STABLE_S = 600.0  # a spot machine that has served so long is taken to stay
BACK_OFF_FIRST_S = 2.0  # after refusals; doubled with each in a row
BACK_OFF_MAX_NEEDED_S = 15.0  # for nodes below `replicas.min`
BACK_OFF_MAX_EXTRA_S = 120.0  # for those above it


@dataclass(frozen=True, slots=True)
class MachineKind:
    """How buying machines of one kind has gone lately, whichever slots they were for."""

    refused_in_a_row: int = 0  # by the cloud, or taken back before they served, since it last gave one
    taken_in_a_row: int = 0  # came, and were taken back before they served, since one last served
    unserved_in_a_row: int = 0  # came, and never seen to work, since one last served
    broke_in_a_row: int = 0  # served, and soon broken for good, since the buying was last resumed
    failed_at_s: float = 0.0  # the last of them
    last_failure: str = ""
    last_refusal: Refusal | None = None  # of that failure; None: it was taken back before it served
    stopped: str = ""  # why none is bought; empty: they are
    stopped_at_s: float = 0.0
    probes: int = 0  # machines requested since then
    served: int = 0  # machines, ever
    boot_s: float | None = None  # of the last that served, from its request on

    @property
    def fails(self) -> bool:
        """Whether so many have failed in a row that no more are to be bought."""
        return self.failures_in_a_row >= REFUSALS

    @property
    def failures_in_a_row(self) -> int:
        return max(self.refused_in_a_row, self.taken_in_a_row, self.unserved_in_a_row, self.broke_in_a_row)

    @property
    def machines_never_work(self) -> bool:
        """Whether it is to be had, and the last of it never worked."""
        return self.never_serves or (self.unserved_in_a_row > 0 and not self.refused_in_a_row)

    @property
    def never_serves(self) -> bool:
        """Whether it fails with machines that stay and do not work, as those of another market would."""
        return max(self.unserved_in_a_row, self.broke_in_a_row) >= REFUSALS

    @property
    def is_always_preempted(self) -> bool:
        """Whether the cloud takes its machines back before they serve. They are paid for, too."""
        return self.taken_in_a_row >= REFUSALS


def back_off_s(failures: int, needed: bool) -> float:
    """Seconds to wait after so many refusals in a row: doubling, to a limit that the need sets."""
    if failures == 0:
        return 0.0
    most = BACK_OFF_MAX_NEEDED_S if needed else BACK_OFF_MAX_EXTRA_S
    return float(min(most, BACK_OFF_FIRST_S * 2 ** min(failures - 1, 10)))


def probe_wait_s(kind: MachineKind, needed: bool) -> float:
    """Seconds from the last failure of a stopped kind until one machine is requested again."""
    costs_money = kind.never_serves or kind.is_always_preempted
    if costs_money or kind.last_refusal is Refusal.CREDENTIALS:
        most_s = PROBE_MAX_S if costs_money else CREDENTIALS_MAX_S
        return float(min(most_s, PROBE_FIRST_S * 2 ** min(kind.probes, 10)))
    return back_off_s(kind.probes + 1, needed)


def after_move(
    kind: MachineKind, move: NodeMoved, time_s: float, *, came: bool, served: bool, lost: bool, asked_at_s: float
) -> MachineKind:
    """Return the kind after one of its machines moved.

    Args:
        kind: as it was.
        move: of the machine's node.
        time_s: of the move.
        came: it was there before the move.
        served: it had served before the move.
        lost: the cloud takes it by this move, while its first work is waited for.
        asked_at_s: when the machine was requested.
    """
    failed = replace(kind, failed_at_s=time_s, last_failure=move.reason, last_refusal=move.refusal)
    if move.refusal is Refusal.NEVER_SERVED:
        return replace(failed, unserved_in_a_row=kind.unserved_in_a_row + 1)
    if move.refusal is Refusal.SOON_BROKEN:
        return replace(failed, broke_in_a_row=kind.broke_in_a_row + 1)
    if move.phase is NodePhase.REFUSED or lost:
        again = lost and came and time_s > kind.failed_at_s  # machines that a zone takes at once are one in a row
        taken = kind.taken_in_a_row + again
        return replace(failed, refused_in_a_row=kind.refused_in_a_row + 1, taken_in_a_row=taken)
    if move.phase is NodePhase.BOOTING and not came:
        return replace(kind, refused_in_a_row=0)
    if move.phase is NodePhase.SERVING and not served:
        boot_s = max(0.0, time_s - asked_at_s)
        works = replace(kind, served=kind.served + 1, boot_s=boot_s)
        return replace(works, refused_in_a_row=0, taken_in_a_row=0, unserved_in_a_row=0)
    return kind
