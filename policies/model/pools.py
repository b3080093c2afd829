"""Spot and on-demand pools, and the history of machines in each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from grpo_orch.policies.model.vocabulary import Market, Role


@dataclass(frozen=True, slots=True, order=True)
class Pool:
    """Machines of one instance type in one zone on one market, by the cloud's names.

    `zone` is empty where the cloud chooses it (on Azure, on Kubernetes).
    """

    cloud: str  # aws
    region: str  # us-east-1
    zone: str  # us-east-1b
    instance_type: str  # p5.48xlarge
    accelerators: str  # H100:8; empty: none
    market: Market

    @property
    def zone_path(self) -> str:
        """`aws/us-east-1/us-east-1b`, as in SkyPilot's `infra`."""
        return "/".join(part for part in (self.cloud, self.region, self.zone) if part)

    @property
    def machine(self) -> str:
        """`p5.48xlarge H100:8`: the hardware."""
        return f"{self.instance_type} {self.accelerators}".strip()

    @property
    def in_region(self) -> Pool:
        """The same pool without its zone: the scope of a quota."""
        return replace(self, zone="")

    def __str__(self) -> str:
        """`aws/us-east-1/us-east-1b p5.48xlarge H100:8 spot`; no two pools share it."""
        return f"{self.zone_path} {self.machine} {'spot' if self.market is Market.SPOT else 'on demand'}"


@dataclass(frozen=True, slots=True)
class PoolOffer:
    """A pool that run.yaml allows for a role, with the cloud's list price."""

    role: Role
    pool: Pool
    usd_per_h: float
    rank: int = 0  # position in run.yaml's `ordered`: lower ranks are tried first, at any price


# A run's history in one pool: launches, stays, refusals and losses, the newest of each.

KEPT = 32  # launches and stays of a pool; older ones count for little
STAYED_S = 3600.0  # a machine that stayed this long shows that the pool is stable again


@dataclass(frozen=True, slots=True)
class LaunchAttempt:
    """A request for a machine in the pool, and whether it came."""

    at_s: float
    succeeded: bool


@dataclass(frozen=True, slots=True)
class Stay:
    """A machine's stay until `until_s`, ended by the cloud (`preempted`) or by its release."""

    until_s: float
    hours: float
    preempted: bool


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """A pool's recent history."""

    pool: Pool
    launches: tuple[LaunchAttempt, ...] = ()
    stays: tuple[Stay, ...] = ()
    refused_in_a_row: int = 0  # since it last gave a machine
    refused_at_s: float = 0.0
    preempted_in_a_row: int = 0  # each within STAYED_S
    preempted_at_s: float = 0.0
    rebalances: int = 0  # machines that left after a rebalance recommendation
    rebalances_preempted: int = 0  # of these, preempted ones


def with_refusal(record: PoolRecord, requested_at_s: float, time_s: float) -> PoolRecord:
    """Return the record after the pool refused a machine. Simultaneous refusals count as one in a row."""
    launches = (*record.launches, LaunchAttempt(time_s, False))[-KEPT:]
    is_new = not record.refused_in_a_row or requested_at_s >= record.refused_at_s
    count = record.refused_in_a_row + is_new
    return replace(record, launches=launches, refused_in_a_row=count, refused_at_s=time_s)


def with_launch(record: PoolRecord, time_s: float) -> PoolRecord:
    """Return the record after the pool gave a machine."""
    launches = (*record.launches, LaunchAttempt(time_s, True))[-KEPT:]
    return replace(record, launches=launches, refused_in_a_row=0)


def with_stay(
    record: PoolRecord, since_s: float, time_s: float, *, preempted: bool, rebalance_recommended: bool = False
) -> PoolRecord:
    """Return the record after a machine that came at `since_s` was preempted (`preempted`) or released."""
    stay_s = max(0.0, time_s - since_s)
    stays = (*record.stays, Stay(time_s, stay_s / 3600, preempted))[-KEPT:]
    before = 0 if stay_s >= STAYED_S else record.preempted_in_a_row
    count, at_s = (before + 1, time_s) if preempted else (before, record.preempted_at_s)
    return replace(
        record,
        stays=stays,
        preempted_in_a_row=count,
        preempted_at_s=at_s,
        rebalances=record.rebalances + rebalance_recommended,
        rebalances_preempted=record.rebalances_preempted + (rebalance_recommended and preempted),
    )
