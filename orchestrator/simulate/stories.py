"""A story: faults of every party, drawn from a seed; then all but one of them end, and the run must converge.

Each fault strikes, and some have an end: a fault returns how it is undone, or None where there is nothing to
undo.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from orchestrator.simulate.cloud import BRISK, Box, Prices
from orchestrator.simulate.store import Trouble
from orchestrator.simulate.weather import ZONES, Weather, Zone
from orchestrator.simulate.world import DT_S, World
from policies.fleet.market import market_of, may_fall_back
from policies.model.phases import LIVE_RUN
from policies.model.spec import Budget, RunSpec, generates_itself
from policies.model.vocabulary import Market, NodePhase, Role, RunPhase, role_of

HOUR_S = 3600.0
STALE_S = 180.0  # as late as clouds' listings are at worst
OPERATIONS = 16  # on the store and the cloud, that a tick has at most

Undo = Callable[[], None]
Fault = Callable[[World, Random], Undo | None]


def store_away(world: World, random: Random) -> Undo:
    world.objects.trouble = random.choice((Trouble.NO_WRITES, Trouble.AWAY))
    world.note(f"the store: {world.objects.trouble.value}")
    return world.objects.clear


def cut_off(world: World, random: Random) -> Undo | None:
    stores = [box.store for box in world.cloud.boxes.values()]
    stores += [one.store for one in world.daemons if not one.dead]
    if not stores:
        return None
    store = random.choice(stores)
    store.trouble = random.choice((Trouble.NO_WRITES, Trouble.AWAY))
    world.note("one party is cut off from the store")

    def back() -> None:
        store.trouble = Trouble.NONE

    return back


def clocks_set(world: World, random: Random) -> None:
    world.skew_s = random.choice((-HOUR_S, 0.0, HOUR_S))
    for daemon in world.daemons:
        daemon.ahead_s += random.choice((-HOUR_S, HOUR_S))
    world.note("clocks are set")


def suspended(world: World, random: Random) -> None:
    for daemon in [one for one in world.daemons if not one.dead]:
        daemon.stop_for_s = random.choice((20.0, 121.0, HOUR_S))
        if random.random() < 0.5:
            daemon.stops_at_action = True
            world.note(f"{daemon.name} is stopped at its next action for {daemon.stop_for_s:.0f} s")
        else:
            daemon.stop_in = random.randrange(OPERATIONS)
            world.note(f"{daemon.name} is stopped in {daemon.stop_in} operations for {daemon.stop_for_s:.0f} s")


def daemon_dies(world: World, random: Random) -> None:
    """In its next tick, after any line of it."""
    world.skew_s = random.choice((-HOUR_S, 0.0, HOUR_S))
    for daemon in [one for one in world.daemons if not one.dead]:
        daemon.die_in = random.randrange(OPERATIONS)


def second_daemon(world: World, random: Random) -> None:  # noqa: ARG001  # a fault's signature
    world.note("somebody resumes a run that has a daemon")
    world.resume()


def machine_lost(world: World, random: Random) -> None:
    if box := _any(world, random):
        world.cloud.lose(box)
        world.note(f"{box.node} is lost")


def zone_lost(world: World, random: Random) -> Undo:
    zone = random.choice(world.cloud.weather).name
    world.cloud.lose_zone(zone)
    world.cloud.closed_zones.add(zone)
    world.note(f"{zone} is lost, and everything in it")
    return lambda: world.cloud.closed_zones.discard(zone)


def notice(world: World, random: Random) -> None:
    if box := _any(world, random):
        stays = random.random() < 0.5
        world.cloud.warn(box, None if stays else world.time_s + world.cloud.physics.take_back_s)
        world.note(f"{box.node} has a notice{', and stays' if stays else ''}")


def rebalance(world: World, random: Random) -> None:
    """A rebalance recommendation, perhaps with a notice at the same moment."""
    if not (box := _any(world, random)):
        return
    box.rebalance_recommended = True
    noticed = random.random() < 0.5
    if noticed:
        world.cloud.warn(box, world.time_s + world.cloud.physics.take_back_s)
    world.note(f"{box.node} has a rebalance recommendation{' and a notice' if noticed else ''}")


def work_ends(world: World, random: Random) -> None:
    box = _any(world, random)
    if box is not None and box.at_work(world.time_s):
        box.exit_code = 1
        world.note(f"{box.node}: its work ends")


def diverges(world: World, random: Random) -> None:
    """The newest timeline will, soon."""
    trainers = [box for box in world.cloud.of(Role.TRAINER) if box.step > 0]
    if trainers and world.spec.policies.kl.action != "alert":
        at = max(trainers, key=lambda box: box.precedence)
        trip = int(at.step) + random.randint(1, 60)
        onset = max(1, trip - random.randrange(40))
        world.work.trips = {**world.work.trips, at.timeline: (trip, onset)}
        world.note(f"timeline {at.timeline} diverges from step {onset}, and trips at {trip}")


def no_capacity(world: World, random: Random) -> Undo:  # noqa: ARG001  # a fault's signature
    world.cloud.refusing = True
    world.note("no capacity")
    if trainers := world.cloud.of(Role.TRAINER):
        world.cloud.lose(trainers[-1])

    def back() -> None:
        world.cloud.refusing = False

    return back


def no_spot(world: World, random: Random) -> Undo:
    world.cloud.refusing_spot = True
    world.note("no spot capacity")
    machine_lost(world, random)

    def back() -> None:
        world.cloud.refusing_spot = False

    return back


def drought(world: World, random: Random) -> Undo:  # noqa: ARG001  # a fault's signature
    world.cloud.refusing_rollouts = True
    for box in world.cloud.of(Role.ROLLOUT):
        if not box.gone:
            world.cloud.lose(box)
    world.note("no rollout machine on any market")

    def back() -> None:
        world.cloud.refusing_rollouts = False

    return back


def cloud_away(world: World, random: Random) -> Undo:  # noqa: ARG001  # a fault's signature
    world.cloud.away = True
    world.note("the cloud does not answer")

    def back() -> None:
        world.cloud.away = False

    return back


def answers_lost(world: World, random: Random) -> Undo:
    world.cloud.answers_lost = True
    world.note("launches are done, and nobody hears of it")
    machine_lost(world, random)

    def back() -> None:
        world.cloud.answers_lost = False

    return back


def stale_listing(world: World, random: Random) -> None:
    world.cloud.stale = world.cloud.truth()
    world.cloud.stale_until_s = world.time_s + STALE_S
    world.note("listings are stale")
    machine_lost(world, random)


def never_work(world: World, random: Random) -> Undo:
    world.cloud.never_work = True
    world.note("rollout machines come, and never work")
    machine_lost(world, random)

    def back() -> None:
        world.cloud.never_work = False

    return back


def taken_early(world: World, random: Random) -> Undo:
    world.cloud.takes_early = True
    world.note("spot machines for rollouts come, and are taken before they work")
    machine_lost(world, random)

    def back() -> None:
        world.cloud.takes_early = False

    return back


def slow_launches(world: World, random: Random) -> Undo:
    world.cloud.slow_by_s = 1000.0
    world.note("launches take longer than the deadline")
    machine_lost(world, random)

    def back() -> None:
        world.cloud.slow_by_s = 0.0

    return back


def _any(world: World, random: Random) -> Box | None:
    there = [box for box in world.cloud.boxes.values() if not box.gone]
    return random.choice(there) if there else None


FAULTS: tuple[Fault, ...] = (
    store_away,
    store_away,
    cut_off,
    clocks_set,
    suspended,
    suspended,
    daemon_dies,
    daemon_dies,
    daemon_dies,
    second_daemon,
    machine_lost,
    zone_lost,
    notice,
    work_ends,
    diverges,
    diverges,
    no_capacity,
    no_spot,
    drought,
    cloud_away,
    answers_lost,
    stale_listing,
    never_work,
    taken_early,
    slow_launches,
    rebalance,
)
# What may stay for good: the run ends all the same where the first do, and where the others do is left waiting,
# for a stated reason and with a try now and then.
BEARABLE: tuple[Fault, ...] = (zone_lost, clocks_set, second_daemon)
STARVING: tuple[Fault, ...] = (no_spot, never_work, taken_early)


# Stories.

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
    cloud = world.cloud
    lacks_spot = _needs_spot(world.spec) and (cloud.refusing_spot or cloud.takes_early or _is_dry(world))
    starving = cloud.never_work or lacks_spot
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
    most = 4 if may_fall_back(world.spec) else 2  # two on each market: the wait has doubled to an hour by now
    safety.check(len(tried) <= most, "what never works is bought again and again")
    trainers = len(world.cloud.bought) - before - len(tried)
    safety.check(trainers <= most, "what cannot work is bought with it")  # a parked run's, one with each try
    return True


def _needs_spot(spec: RunSpec) -> bool:
    """Whether the run cannot end without spot machines: else some on demand stand in, if there is money."""
    if market_of(Role.TRAINER, spec) is Market.SPOT or spec.budget != Budget():
        return True
    return market_of(Role.ROLLOUT, spec) is Market.SPOT and not may_fall_back(spec)


def _is_dry(world: World) -> bool:
    """Whether the weather has no spot machine for long."""
    looks = range(int(world.time_s), int(world.time_s + PEACE_S), int(DRY_LOOK_S))
    return all(world.cloud.is_without_spot(at_s) for at_s in looks)


def _enough(spec: RunSpec) -> Weather:
    """Two zones with room for everybody."""
    return tuple(Zone(name, 300.0, (spec.rollout.replicas.max,)) for name in ZONES[:2])
