"""A story: faults of every party, drawn from a seed; then all but one of them end, and the run must converge."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from orchestrator.simulate.cloud import BRISK, Prices
from orchestrator.simulate.faults import BEARABLE, FAULTS, STARVING, Undo
from orchestrator.simulate.weather import ZONES, Weather, Zone
from orchestrator.simulate.world import DT_S, World
from policies.control.fleet.markets import market_of, may_stand_in
from policies.model.phases import LIVE_RUN
from policies.model.spec import Budget, RunSpec, generates_itself
from policies.model.vocabulary import Market, NodePhase, Role, RunPhase, role_of

FAULTS_MAX = 8
OUTAGES_S = (10.0, 121.0, 1800.0)
QUIET_S = (0.0, 30.0, 120.0, 400.0)  # between two faults
PEACE_S = 8 * 3600.0  # the longest wait between two tries of what never worked is half of it
DRY_LOOK_S = 60.0
STARVES_S = 2 * 3600.0
# What may be bought in a story, by the places in the fleet: a fault costs each of them a machine or two, and what
# never works is tried ever more rarely.
BOUGHT_FIRST, BOUGHT_A_PLACE = 15, 6


@dataclass(frozen=True, slots=True)
class Told:
    """How a story went."""

    seed: int
    phase: RunPhase
    reason: str
    hours: float
    usd: float
    bought: int
    digest: str


def tell(seed: int, spec: RunSpec, *, weather: Weather | None = None, prices: Prices | None = None) -> Told:
    """Live through the story of a seed. Raises Broken, which names the seed, where a promise is broken."""
    spec = _enduring(_budgeted(seed, spec, prices or Prices()))
    world = World(seed, spec, weather=weather or _enough(spec), physics=BRISK, prices=prices)
    random = world.random
    _trouble(world, random)
    if not world.is_over and not world.stopping:
        _stays(world, random)
    if not _starves(world):
        world.run_to_end(PEACE_S)
    most = BOUGHT_FIRST + BOUGHT_A_PLACE * (1 + spec.rollout.replicas.max)
    if weather is None:  # in bad weather machines come and go
        world.safety.check(len(world.cloud.bought) <= most, f"bought {world.cloud.bought}")
    assert world.newest is not None
    state = world.newest.controller.state
    hours = (world.time_s - 1000.0) / 3600
    return Told(
        seed, state.phase, state.reason, hours, world.cloud.spent_usd, len(world.cloud.bought), world.digest
    )


def _enduring(spec: RunSpec) -> RunSpec:
    """The run, without a limit on the trainer's ends: here they are the story's doing."""
    return replace(spec, policies=replace(spec.policies, trainer_restarts=10**6))


def _budgeted(seed: int, spec: RunSpec, prices: Prices) -> RunSpec:
    """The run, in every fourth story with a budget that it reaches soon, or after a fault or two."""
    if spec.budget != Budget() or seed % 4:
        return spec
    hour_usd = prices.trainer_usd_per_h + spec.rollout.replicas.max * prices.spot_usd_per_h
    return replace(spec, budget=Budget(usd=hour_usd * Random(f"budget {seed}").uniform(0.6, 1.2)))


def _trouble(world: World, random: Random) -> None:
    ends: list[tuple[float, Undo]] = []
    for _ in range(FAULTS_MAX):
        world.run_for(random.choice(QUIET_S))
        if world.is_over:
            break
        fault = random.choice(FAULTS)
        undo = fault(world, random)
        if undo is not None:
            ends.append((world.time_s + random.choice(OUTAGES_S), undo))
        for at_s, end in list(ends):
            if at_s <= world.time_s or random.random() < 0.5:
                world.run_for(max(DT_S, at_s - world.time_s))
                end()
                ends.remove((at_s, end))
    for _, end in ends:
        end()


def _stays(world: World, random: Random) -> None:
    """One thing that never ends; or a user who wants the run to."""
    match random.randrange(6):
        case 0:
            random.choice(BEARABLE)(world, random)
        case 1:
            world.note("and for good:")
            random.choice(STARVING)(world, random)
            for box in world.cloud.of(Role.ROLLOUT):
                if box.market is Market.SPOT and not box.gone:
                    world.cloud.lose(box)
        case 2:
            world.note("asked to stop")
            world.ask_to_stop()
        case _:
            pass


def _starves(world: World) -> bool:
    """Where no rollout node will ever work again the run cannot end: it must wait, say why, and buy next to
    nothing."""
    lacks_spot = _needs_spot(world.spec) and (world.cloud.refusing_spot or _is_dry(world))
    starving = world.cloud.never_work or lacks_spot
    if not starving or world.is_over or generates_itself(world.spec):
        return False
    world.rest()
    world.run_for(STARVES_S)
    newest = world.newest
    assert newest is not None
    state, safety = newest.controller.state, world.safety
    if newest.controller.finished or state.phase not in LIVE_RUN:
        return False
    working = [node.id for node in state.live(Role.ROLLOUT) if node.phase is NodePhase.SERVING]
    told = [name for name, kind in state.kinds.items() if kind.stopped]
    safety.check(bool(working or told), "no rollout node comes, and no reason is stated")
    before = len(world.cloud.bought)
    world.run_for(STARVES_S)
    tried = [node for node in world.cloud.bought[before:] if role_of(node) is Role.ROLLOUT]
    most = 4 if may_stand_in(world.spec) else 2  # two on each market: the wait has doubled to an hour by now
    safety.check(len(tried) <= most, "what never works is bought again and again")
    trainers = len(world.cloud.bought) - before - len(tried)
    safety.check(trainers <= most, "what cannot work is bought with it")  # a parked run's, one with each try
    return True


def _needs_spot(spec: RunSpec) -> bool:
    """Whether the run cannot end without spot machines: else some on demand stand in, if there is money."""
    if market_of(Role.TRAINER, spec) is Market.SPOT or spec.budget != Budget():
        return True
    return market_of(Role.ROLLOUT, spec) is Market.SPOT and not may_stand_in(spec)


def _is_dry(world: World) -> bool:
    """Whether the weather has no spot machine for long."""
    looks = range(int(world.time_s), int(world.time_s + PEACE_S), int(DRY_LOOK_S))
    return all(world.cloud.is_without_spot(at_s) for at_s in looks)


def _enough(spec: RunSpec) -> Weather:
    """Two zones with room for everybody."""
    return tuple(Zone(name, 300.0, (spec.rollout.replicas.max,)) for name in ZONES[:2])
