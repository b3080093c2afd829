"""What may go wrong in the simulated world: each fault strikes, and some have an end.

A fault returns how it is undone, or None where there is nothing to undo.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from orchestrator.simulate.cloud import Box
from orchestrator.simulate.store import Trouble
from orchestrator.simulate.world import World
from policies.model.vocabulary import Role

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
    slow_launches,
    rebalance,
)
# What may stay for good: the run ends all the same where the first do, and where the others do is left waiting,
# for a stated reason and with a try now and then.
BEARABLE: tuple[Fault, ...] = (zone_lost, clocks_set, second_daemon)
STARVING: tuple[Fault, ...] = (no_spot, never_work)
