"""Where a machine is bought: what is had, refused and taken back together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from policies.model.vocabulary import Market, Role


@dataclass(frozen=True, slots=True, order=True)
class Pool:
    """Machines of one kind in one zone on one market, in the cloud's own words.

    `zone` is empty where the cloud chooses it by itself (on Azure, on Kubernetes).
    """

    cloud: str  # aws
    region: str  # us-east-1
    zone: str  # us-east-1b
    instance_type: str  # p5.48xlarge
    accelerators: str  # H100:8; empty: none
    market: Market

    @property
    def place(self) -> str:
        """`aws/us-east-1/us-east-1b`, as SkyPilot's `infra` has it."""
        return "/".join(part for part in (self.cloud, self.region, self.zone) if part)

    @property
    def machine(self) -> str:
        """`p5.48xlarge H100:8`: what differs in speed."""
        return f"{self.instance_type} {self.accelerators}".strip()

    @property
    def anywhere(self) -> Pool:
        """The same in the whole region, which is what a quota is for."""
        return replace(self, zone="")

    def __str__(self) -> str:
        """`aws/us-east-1/us-east-1b p5.48xlarge H100:8 spot`; no two pools share it."""
        return f"{self.place} {self.machine} {'spot' if self.market is Market.SPOT else 'on demand'}"


@dataclass(frozen=True, slots=True)
class PoolOffer:
    """A pool that run.yaml allows for a role, what a machine costs there by the cloud's list, and what it does."""

    role: Role
    pool: Pool
    usd_per_h: float
    rank: int = 0  # place in run.yaml's `ordered`: a lower one is tried first, whatever it costs
