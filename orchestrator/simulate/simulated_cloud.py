"""The simulated cloud: machines, preemptions, prices, costs, and the durations of every operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from grpo_orch.checkpoint.records.metrics import MetricsWriter
from grpo_orch.checkpoint.stream.catalog import Catalog
from grpo_orch.orchestrator.clouds.protocol import CloudRefused, CloudUnavailable, LaunchOrder
from grpo_orch.orchestrator.simulate.market_trace import SPOT_PRICE_MAX_FACTOR, MarketTrace, Zone
from grpo_orch.orchestrator.simulate.store import Objects, SimulatedStore, Trouble
from grpo_orch.policies.model.node_contract import TIMELINE_ENV
from grpo_orch.policies.model.pools import Pool, PoolOffer
from grpo_orch.policies.model.vocabulary import (
    MachineState,
    Market,
    PolicyVersion,
    Precedence,
    Refusal,
    Role,
    kind_of,
    precedence_of,
    role_of,
)
from grpo_orch.policies.tick.snapshot import Machine

EPOCH_S = 1.7e9  # seconds since the epoch at simulated time 0


@dataclass(frozen=True, slots=True)
class Physics:
    """Durations. A step takes `fixed_s + generation_node_s / n` seconds on n nodes.

    A machine is up `launch_s` after its request and set up `setup_s` later. A rollout node then loads the weights:
    the first of a fleet from the store in `first_weights_s`, others from that node in `weights_s`. Each time
    varies between machines by up to the share `spread`.
    """

    fixed_s: float = 60.0
    generation_node_s: float = 120.0
    launch_s: float = 60.0
    setup_s: float = 120.0
    first_weights_s: float = 120.0
    weights_s: float = 30.0
    spread: float = 0.3
    take_back_s: float = 120.0  # from preemption notice to preemption
    noticed: float = 0.7  # share of preemptions with a notice
    save_steps: int = 5
    behind_steps: int = 100  # steps that a trainer may be ahead of the store

    def step_s(self, nodes: float) -> float:
        """Return the seconds of a step on `nodes` nodes; a slower node counts as a fraction."""
        return self.fixed_s + self.generation_node_s / nodes

    def about(self, usual_s: float, random: Random) -> float:
        return usual_s * random.uniform(1 - self.spread, 1 + self.spread)


@dataclass(frozen=True, slots=True)
class Prices:
    """USD per hour of one machine. Defaults: an on-demand H200, and half of a spot pair of H200."""

    trainer_usd_per_h: float = 3.96
    node_usd_per_h: float = 3.96
    spot_usd_per_h: float = 1.19


# Steps of seconds, machines within minutes: for scenarios whose duration is mostly faults.
BRISK = Physics(
    fixed_s=3.0,
    generation_node_s=4.0,
    launch_s=30.0,
    setup_s=40.0,
    first_weights_s=20.0,
    weights_s=10.0,
    spread=0.2,
)


# The state of a machine; its cloud reports it as a `Machine`.


@dataclass
class SimulatedMachine:
    """A machine and its work."""

    node: str
    store: SimulatedStore
    market: Market
    zone: str  # empty for on-demand machines outside pools
    up_at_s: float
    works_in_s: float  # after up_at_s, or after the start of a later attempt
    attempt: int
    timeline: int
    works_at_s: float
    key: str = ""  # of its zone
    pool: Pool | None = None
    speed: float = 1.0
    never_works: bool = False
    exit_code: int | None = None
    reported_code: int | None = None  # the exit code written to the store
    gone: bool = False
    notice: bool = False
    taken_at_s: float | None = None  # time of its preemption
    rebalance_recommended: bool = False
    step: float = -1.0  # -1 before the start
    writes: int = 0  # by its gateway
    listens_as: str = ""  # boot ID of the gateway whose address is in the store
    cut_off_s: float = 0.0
    sealed: PolicyVersion | None = None  # newest checkpoint, perhaps still in the spool
    spool: list[PolicyVersion] = field(default_factory=list)
    generated_s: float = 0.0  # in the current step
    generated_node_s: float = 0.0

    def __post_init__(self) -> None:
        self.role = role_of(self.node)
        self.catalog = Catalog(self.store, self.node)
        self.log = MetricsWriter(self.store)

    @property
    def precedence(self) -> Precedence:
        return precedence_of(self.timeline, self.node, self.attempt)

    @property
    def is_cut_off(self) -> bool:
        return self.store.trouble is not Trouble.NONE

    @property
    def uses_capacity(self) -> bool:
        """Whether it counts against the capacity of its zone."""
        return not self.gone and not (self.notice and self.taken_at_s is not None)

    def is_up(self, time_s: float) -> bool:
        return not self.gone and time_s >= self.up_at_s

    def is_working(self, time_s: float) -> bool:
        alive = not self.gone and self.exit_code is None and not self.never_works
        return alive and time_s >= self.works_at_s

    def begin(self, attempt: int, timeline: int, time_s: float) -> None:
        """Start an attempt, once the machine is up."""
        self.attempt, self.timeline = attempt, timeline
        self.exit_code, self.reported_code, self.step = None, None, -1.0
        self.works_at_s = max(time_s, self.up_at_s) + self.works_in_s

    def lose(self) -> None:
        """Lose the machine and its disk."""
        self.gone = True
        self.spool.clear()

    def as_machine(self, time_s: float, usd_per_h: float, on_demand_usd_per_h: float) -> Machine:
        """Return the machine as its cloud reports it."""
        if time_s < self.up_at_s and not self.gone:
            return Machine(self.node, MachineState.STARTING, attempt=0)
        return Machine(
            self.node,
            MachineState.GONE if self.gone else MachineState.UP,
            self.attempt,
            self.reported_code,
            "preempted" if self.gone else "",
            self.notice,
            self.market,
            usd_per_h,
            on_demand_usd_per_h,
            self.zone if self.pool is None else f"{self.pool.zone_path} {self.pool.machine}",
            self.pool,
            self.rebalance_recommended,
        )


# The cloud.

PRICES_EVERY_S = 3600.0  # as in `orchestrator.control.observe`: the age of pool prices
REFUSED_S = 20.0  # per refusal, when the cloud tries one zone after the other


class SimulatedCloud:
    """The machines of one run. Faults are injected by setting attributes.

    Args:
        trace: the market trace, from time 0 on.
        objects: the store that its machines use.
        random: the simulation's.
    """

    def __init__(
        self, trace: MarketTrace, physics: Physics, prices: Prices, objects: Objects, random: Random
    ) -> None:
        self.trace, self.physics, self.prices = trace, physics, prices
        self.nodes: dict[str, SimulatedMachine] = {}
        self.held = Counter[str]()  # machines that use capacity, by zone key
        self._zones = {zone.key: zone for zone in trace}
        self.bought: list[str] = []
        self.spent_usd = 0.0
        self.disk_usd_per_h: dict[Role, float] = {}  # on top of each machine's price
        self.refusing = False
        self.refusing_spot = False
        self.refusing_rollouts = False  # on both markets
        self.away = False
        self.answers_lost = False  # launches succeed, but their answers are lost
        self.stale: dict[str, Machine] = {}  # returned by listings until stale_until_s
        self.stale_until_s = 0.0
        self.never_work = False  # new rollout machines never work
        self.takes_early = False  # new spot rollout machines are preempted before they work
        self.slow_by_s = 0.0  # added to launches
        self.closed_zones: set[str] = set()
        self.time_s = 0.0
        self.on_loss: Callable[[SimulatedMachine], None] = lambda _: None
        self._objects, self._random = objects, random

    def pass_time(self, time_s: float) -> None:
        """Charge machines up to `time_s`, and preempt those beyond the zones' capacity."""
        hours = (time_s - self.time_s) / 3600
        self.spent_usd += hours * sum(
            self.charged_usd_per_h(machine) for machine in self.nodes.values() if not machine.gone
        )
        self.time_s = time_s
        for zone in self.trace:
            if zone.market is Market.SPOT:
                self._take_back(zone, hours)
        for machine in self.nodes.values():
            if machine.taken_at_s is not None and time_s >= machine.taken_at_s and not machine.gone:
                self.lose(machine)

    def usd_per_h(self, machine: SimulatedMachine) -> float:
        zone = self._zones.get(machine.key)
        return self._list_usd_per_h(machine.role, machine.market) * (zone.price_at(self.time_s) if zone else 1.0)

    def _list_usd_per_h(self, role: Role, market: Market) -> float:
        return self.prices.spot_usd_per_h if market is Market.SPOT else self.on_demand_usd_per_h(role)

    def charged_usd_per_h(self, machine: SimulatedMachine) -> float:
        """Return the price of the machine and its disk."""
        return self.usd_per_h(machine) + self.disk_usd_per_h.get(machine.role, 0.0)

    def on_demand_usd_per_h(self, role: Role) -> float:
        return self.prices.trainer_usd_per_h if role is Role.TRAINER else self.prices.node_usd_per_h

    @property
    def max_usd_per_h(self) -> dict[str, float]:
        """Highest price of a machine of each kind, by `kind_of`."""
        spot = SPOT_PRICE_MAX_FACTOR * self.prices.spot_usd_per_h
        return {
            kind_of(role, market): spot if market is Market.SPOT else self.on_demand_usd_per_h(role)
            for role in Role
            for market in Market
        }

    def pools(self) -> tuple[PoolOffer, ...]:
        """Return pools with the prices of the last full hour; none for a trace without regions."""
        priced_at_s = self.time_s // PRICES_EVERY_S * PRICES_EVERY_S
        return tuple(
            PoolOffer(role, zone.pool, self._list_usd_per_h(role, zone.market) * zone.price_at(priced_at_s))
            for role in Role
            for zone in self.trace
            if zone.pool is not None
        )

    def machines(self) -> dict[str, Machine]:
        """Return a listing. Raises CloudUnavailable."""
        if self.away:
            raise CloudUnavailable("try again")
        return dict(self.stale) if self.is_stale else self.truth()

    @property
    def is_stale(self) -> bool:
        return self.time_s < self.stale_until_s

    def truth(self) -> dict[str, Machine]:
        return {
            node: machine.as_machine(self.time_s, self.usd_per_h(machine), self.on_demand_usd_per_h(machine.role))
            for node, machine in self.nodes.items()
        }

    def launch(self, order: LaunchOrder) -> None:
        """As `Cloud.launch`. Raises CloudRefused, CloudUnavailable."""
        machine, timeline = self.nodes.get(order.node), int(order.environment.get(TIMELINE_ENV, "0"))
        if machine is None:
            self._buy(order, timeline)
        elif not machine.gone and machine.attempt < order.attempt:
            machine.begin(order.attempt, timeline, self.time_s)
        if self.answers_lost:
            raise CloudUnavailable("the answer is lost")

    def is_without_spot(self, time_s: float) -> bool:
        """Return whether the trace has no spot machine then, held or free; lost zones have none."""
        zones = [zone for zone in self.trace if zone.market is Market.SPOT and zone.name not in self.closed_zones]
        return not any(zone.count_at(time_s) for zone in zones)

    def lose(self, machine: SimulatedMachine) -> None:
        """Lose a machine and its disk."""
        self._release(machine)
        machine.lose()
        self.on_loss(machine)

    def warn(self, machine: SimulatedMachine, taken_at_s: float | None) -> None:
        """Send a preemption notice; with None the machine is not preempted."""
        if taken_at_s is not None:
            self._release(machine)
        machine.notice, machine.taken_at_s = True, taken_at_s

    def terminate(self, node: str) -> SimulatedMachine | None:
        """Terminate and return a machine; None if there is none."""
        machine = self.nodes.pop(node, None)
        if machine is not None:
            self._release(machine)
        return machine

    def lose_zone(self, name: str) -> None:
        for machine in self.nodes.values():
            if machine.zone == name and not machine.gone:
                self.lose(machine)

    def of(self, role: Role) -> list[SimulatedMachine]:
        return [machine for machine in self.nodes.values() if machine.role is role]

    def _buy(self, order: LaunchOrder, timeline: int) -> None:
        refuses_role = self.refusing_rollouts and order.role is Role.ROLLOUT
        if self.refusing or refuses_role or (self.refusing_spot and order.market is Market.SPOT):
            raise CloudRefused(Refusal.NO_CAPACITY, "no capacity")
        zone, late_s = self._zone_for(order)
        draw = self._random
        up_at_s = self.time_s + self.physics.about(self.physics.launch_s, draw) + self.slow_by_s + late_s
        works_in_s = self.physics.about(self.physics.setup_s, draw)
        if order.role is Role.ROLLOUT:
            is_first = not any(machine.is_working(self.time_s) for machine in self.of(Role.ROLLOUT))
            weights_s = self.physics.first_weights_s if is_first else self.physics.weights_s
            works_in_s += self.physics.about(weights_s, draw)
        store = SimulatedStore(self._objects)
        machine = SimulatedMachine(
            order.node, store, order.market, "", up_at_s, works_in_s, order.attempt, timeline, 0.0
        )
        if zone is not None:
            machine.zone, machine.key, machine.pool, machine.speed = zone.name, zone.key, zone.pool, zone.speed
            self.held[zone.key] += 1
        machine.never_works = self.never_work and order.role is Role.ROLLOUT
        machine.begin(order.attempt, timeline, self.time_s)
        self.nodes[order.node] = machine
        self.bought.append(order.node)
        if self.takes_early and order.role is Role.ROLLOUT and order.market is Market.SPOT:
            self._take_early(machine)

    def _take_early(self, machine: SimulatedMachine) -> None:
        """Schedule a preemption before the machine works, with an immediate notice or without."""
        taken_at_s = self._random.uniform(machine.up_at_s, machine.works_at_s)
        if self._random.random() < self.physics.noticed:
            self.warn(machine, taken_at_s)
        else:
            machine.taken_at_s = taken_at_s

    def _zone_for(self, order: LaunchOrder) -> tuple[Zone | None, float]:
        """Return the zone of a new machine and the seconds lost to refusals. Raises CloudRefused.

        The zone is None for on-demand machines outside pools.
        """
        zones = [zone for zone in self.trace if zone.market is order.market]
        if order.pool is not None:
            zones = [zone for zone in zones if zone.pool == order.pool]
        elif zones and zones[0].region:
            zones = self._in_one_region(zones)
        elif order.market is Market.ON_DEMAND:
            return None, 0.0
        refusals: list[Refusal] = []
        for zone in sorted(
            zones, key=lambda zone: (zone.price_at(self.time_s), -self._free_count(zone), zone.name)
        ):
            if (refusal := self._refusal(zone)) is None:
                return zone, REFUSED_S * len(refusals)
            refusals.append(refusal)
        is_quota = bool(refusals) and all(refusal is Refusal.QUOTA for refusal in refusals)
        raise CloudRefused(Refusal.QUOTA if is_quota else Refusal.NO_CAPACITY, f"no {order.market} machine")

    def _in_one_region(self, zones: list[Zone]) -> list[Zone]:
        """Return the zones of the run's region; all zones if it has no machine."""
        regions = {
            machine.pool.region for machine in self.nodes.values() if machine.pool is not None and not machine.gone
        }
        return [zone for zone in zones if zone.region in regions] if regions else zones

    def _refusal(self, zone: Zone) -> Refusal | None:
        """Return why the zone refuses a machine now, or None."""
        if zone.quota is not None:
            quota_key = (zone.region, zone.machine, zone.market)
            keys = [other.key for other in self.trace if (other.region, other.machine, other.market) == quota_key]
            if sum(self.held[key] for key in keys) >= zone.quota:
                return Refusal.QUOTA
        refuses = self._free_count(zone) <= 0 or (zone.refuses and self._random.random() < zone.refuses)
        return Refusal.NO_CAPACITY if refuses else None

    def _free_count(self, zone: Zone) -> int:
        count = 0 if zone.name in self.closed_zones else zone.count_at(self.time_s)
        return count - self.held[zone.key]

    def _release(self, machine: SimulatedMachine) -> None:
        """Free the machine's capacity in its zone."""
        if machine.uses_capacity:
            self.held[machine.key] -= 1

    def _take_back(self, zone: Zone, hours: float) -> None:
        excess = max(0, -self._free_count(zone))
        if not self.held[zone.key] or not (excess or zone.losses_per_h):
            return
        held = [machine for machine in self.nodes.values() if machine.key == zone.key and machine.uses_capacity]
        taken = self._random.sample(held, min(len(held), excess))
        lost = zone.losses_per_h * hours
        taken += [machine for machine in held if lost and self._random.random() < lost and machine not in taken]
        for machine in taken:
            self._preempt(machine)

    def _preempt(self, machine: SimulatedMachine) -> None:
        if self._random.random() < self.physics.noticed:
            self.warn(machine, self.time_s + self.physics.take_back_s)
        else:
            self.lose(machine)
