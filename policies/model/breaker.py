"""A circuit breaker for buying machines of one kind, so that machines that never work are not bought forever.

A kind is shared by the machines of several slots: role, market, resources. After REFUSALS failures in a row
(refused, preempted before they served, never worked, or soon broke permanently) no more are requested, except one
at a time to test whether the kind works again. A refusal costs nothing and capacity returns within minutes, so the
next try is soon. A machine that never serves costs money, and waiting rarely fixes the cause.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from grpo_orch.policies.model.events import NodeMoved
from grpo_orch.policies.model.vocabulary import NodePhase, Refusal

REFUSALS = 3
PROBE_FIRST_S = 600.0  # after machines that never served; doubled with each try
PROBE_MAX_S = 4 * 3600.0
CREDENTIALS_MAX_S = 3600.0  # after refused credentials: once the user has fixed them, `resume` tries immediately
WORKS_S = 600.0  # a machine that serves this long after the last that soon broke shows that the kind works
SPOT_STABLE_S = 600.0  # a spot machine that has served this long counts as stable
BACK_OFF_FIRST_S = 2.0  # after refusals; doubled with each in a row
BACK_OFF_MAX_NEEDED_S = 15.0
BACK_OFF_MAX_EXTRA_S = 120.0  # in a parked run, which needs no node immediately


@dataclass(frozen=True, slots=True)
class MachineKind:
    """The recent history of buying machines of one kind, over all slots."""

    refused_in_a_row: int = 0  # refused, or preempted before they served, since the last machine came
    preempted_in_a_row: int = 0  # preempted before they served, since one last served
    unserved_in_a_row: int = 0  # came and never worked, since one last served
    broke_in_a_row: int = 0  # served and soon broke permanently, since buying was last resumed
    failed_at_s: float = 0.0  # the last failure
    last_failure: str = ""
    last_refusal: Refusal | None = None  # of that failure; None: it was preempted before it served
    stopped: str = ""  # why buying is stopped; empty: it is not
    stopped_at_s: float = 0.0
    probes: int = 0  # machines requested since then
    served: int = 0  # machines that ever served
    boot_s: float | None = None  # from request to service, of the last that served

    @property
    def fails(self) -> bool:
        """Whether too many have failed in a row to buy more."""
        return self.failures_in_a_row >= REFUSALS

    @property
    def failures_in_a_row(self) -> int:
        return max(self.refused_in_a_row, self.preempted_in_a_row, self.unserved_in_a_row, self.broke_in_a_row)

    @property
    def machines_never_work(self) -> bool:
        """Whether machines are available and the last one never worked."""
        return self.never_serves or (self.unserved_in_a_row > 0 and not self.refused_in_a_row)

    @property
    def never_serves(self) -> bool:
        """Whether its machines stay and do not work, as those of another market would not."""
        return max(self.unserved_in_a_row, self.broke_in_a_row) >= REFUSALS

    @property
    def is_always_preempted(self) -> bool:
        """Whether its machines are preempted before they serve. They cost money, too."""
        return self.preempted_in_a_row >= REFUSALS


def back_off_s(failures: int, needed: bool) -> float:
    """Return the seconds to wait after refusals in a row: doubling, up to a limit that depends on the need."""
    if failures == 0:
        return 0.0
    max_s = BACK_OFF_MAX_NEEDED_S if needed else BACK_OFF_MAX_EXTRA_S
    return float(min(max_s, BACK_OFF_FIRST_S * 2 ** min(failures - 1, 10)))


def probe_wait_s(kind: MachineKind, needed: bool) -> float:
    """Return the seconds from the last failure of a stopped kind until one machine is requested again."""
    costs_money = kind.never_serves or kind.is_always_preempted
    if costs_money or kind.last_refusal is Refusal.CREDENTIALS:
        max_s = PROBE_MAX_S if costs_money else CREDENTIALS_MAX_S
        return float(min(max_s, PROBE_FIRST_S * 2 ** min(kind.probes, 10)))
    return back_off_s(kind.probes + 1, needed)


def after_move(
    kind: MachineKind,
    move: NodeMoved,
    time_s: float,
    *,
    arrived: bool,
    served: bool,
    lost: bool,
    requested_at_s: float,
) -> MachineKind:
    """Return the kind after one of its machines moved.

    Args:
        kind: before the move.
        move: of the machine's node.
        time_s: of the move.
        arrived: whether the machine existed before the move.
        served: whether it had served before the move.
        lost: whether the cloud takes it by this move before its first work.
        requested_at_s: when the machine was requested.
    """
    failed = replace(kind, failed_at_s=time_s, last_failure=move.reason, last_refusal=move.refusal)
    if move.refusal is Refusal.NEVER_SERVED:
        return replace(failed, unserved_in_a_row=kind.unserved_in_a_row + 1)
    if move.refusal is Refusal.SOON_BROKEN:
        return replace(failed, broke_in_a_row=kind.broke_in_a_row + 1)
    if move.phase is NodePhase.REFUSED or lost:
        is_new = lost and arrived and time_s > kind.failed_at_s  # simultaneous preemptions count as one in a row
        taken = kind.preempted_in_a_row + is_new
        return replace(failed, refused_in_a_row=kind.refused_in_a_row + 1, preempted_in_a_row=taken)
    if move.phase is NodePhase.BOOTING and not arrived:
        return replace(kind, refused_in_a_row=0)
    if move.phase is NodePhase.SERVING and not served:
        boot_s = max(0.0, time_s - requested_at_s)
        works = replace(kind, served=kind.served + 1, boot_s=boot_s)
        return replace(works, refused_in_a_row=0, preempted_in_a_row=0, unserved_in_a_row=0)
    return kind
