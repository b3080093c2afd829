"""Worlds whose machines cost something, and what a stretch of time buys in them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from policies.control.snapshot import Action, Launch, LaunchRefused, Snapshot
from policies.fleet.budget import spent_usd
from policies.fleet.how_many import StepShape
from policies.model.events import NodeRequested
from policies.model.spec import Budget, RunSpec
from policies.model.vocabulary import Market, NodePhase, Refusal, Role
from tests.stand_ins.world import World, spec

HOUR_S = 3600.0
USD_PER_H = {Role.TRAINER: 36.0, Role.ROLLOUT: 3.6}
# SkyPilot's `best` on AWS: 1.82 USD an hour for the disk of each machine.
DISKS = {"infra": "aws/us-east-1", "disk_tier": "best"}
ON_DEMAND = "rollout on demand"
USD = {
    (Role.TRAINER, Market.ON_DEMAND): 4.0,
    (Role.ROLLOUT, Market.ON_DEMAND): 4.0,
    (Role.ROLLOUT, Market.SPOT): 1.0,
}


def capped(
    usd: float | None = None, usd_per_h: float | None = None, max_replicas: int = 2, at: str = "pause"
) -> RunSpec:
    return replace(spec(max_replicas), budget=Budget(usd=usd, usd_per_h=usd_per_h, at=at))  # type: ignore[arg-type]


def with_disks(run: RunSpec) -> RunSpec:
    sections = replace(run.trainer, resources=DISKS), replace(run.rollout, resources=DISKS)
    return replace(run, cloud="sky", trainer=sections[0], rollout=sections[1])


@dataclass
class Priced(World):
    """Its machines cost something, and the cloud says how much; `away`: it does not answer."""

    known: bool = True
    away: bool = False
    kinds: dict[str, float] = field(
        default_factory=lambda: {"trainer on demand": 40.0, "rollout on spot": 4.0}  # the dearest of each
    )

    def snapshot(self) -> Snapshot:
        looked = super().snapshot()
        machines = {
            name: replace(one, price_usd_per_h=USD_PER_H[Role(name.partition("-")[0])])
            for name, one in self.machines.items()
        }
        return replace(looked, machines=None if self.away else machines, prices=self.kinds if self.known else None)

    @property
    def spent(self) -> float:
        return spent_usd(self.state, self.now_s)


@dataclass
class TwoMarkets(World):
    """Spot may be away. Its machines cost something, and the cloud says at most how much."""

    max_steps: int = 10**9
    proved: bool = True
    no_spot: bool = True
    refused_after_s: float = 0.0  # how long a refusal takes on spot
    no_demand: bool = False
    shape: StepShape | None = None
    markets: dict[str, Market] = field(default_factory=dict)
    asked_at_s: dict[str, float] = field(default_factory=dict)
    most: dict[str, float] | None = field(
        default_factory=lambda: {"trainer on demand": 5.0, "rollout on spot": 2.0, ON_DEMAND: 5.0}
    )

    def snapshot(self) -> Snapshot:
        looked, priced = super().snapshot(), {}
        for name, one in self.machines.items():
            role, market = Role(name.partition("-")[0]), self.markets[name]
            usd, on_demand_usd = USD[role, market], USD[role, Market.ON_DEMAND]
            priced[name] = replace(one, market=market, price_usd_per_h=usd, on_demand_usd_per_h=on_demand_usd)
        return replace(looked, machines=priced, prices=self.most, step_shape=self.shape)

    def act(self, action: Action) -> None:
        if isinstance(action, Launch):
            self.markets[action.node] = action.market
            if self.no_spot and action.market is Market.SPOT:
                asked_at_s = self.asked_at_s.setdefault(action.node, self.now_s)
                if self.now_s - asked_at_s >= self.refused_after_s:
                    self.refused.append(LaunchRefused(action.node, Refusal.NO_CAPACITY, "nothing to be had"))
                return
            if self.no_demand and action.market is Market.ON_DEMAND and action.node.startswith("rollout"):
                self.refused.append(LaunchRefused(action.node, Refusal.NO_CAPACITY, "nothing to be had"))
                return
        super().act(action)

    def let_pass(self, hours: float, dt_s: float = 20.0) -> None:
        end_s = self.now_s + hours * HOUR_S
        while self.now_s < end_s:
            self.tick()
            self.advance(dt_s)

    @property
    def stood_in(self) -> list[str]:
        return [event.node for event in self.of(NodeRequested) if event.stand_in]


def serving_on_spot(world: TwoMarkets) -> list[str]:
    serving = [one for one in world.state.live(Role.ROLLOUT) if one.phase is NodePhase.SERVING]
    return [one.id for one in serving if one.market is Market.SPOT]


@dataclass
class Bought:
    """What machines a stretch of time took."""

    machines: set[str] = field(default_factory=set)
    hours: float = 0.0  # of rollout machines


def let_pass(world: World, hours: float, dt_s: float = 10.0) -> Bought:
    bought = Bought()
    end_s = world.now_s + hours * HOUR_S
    while world.now_s < end_s:
        world.tick()
        rollouts = [name for name in world.machines if name.startswith(Role.ROLLOUT)]
        bought.machines |= set(rollouts)
        bought.hours += dt_s / HOUR_S * len(rollouts)
        world.advance(dt_s)
    return bought
