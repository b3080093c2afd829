"""What may happen to a run and its daemons: faults of every party, drawn from a seed, then peace."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from policies.model.vocabulary import Role
from tests.stand_ins.steered_world import DT_S, Box, SteeredWorld
from tests.stand_ins.weather_store import Weather

HOUR_S = 3600.0
OUTAGES_S = (10.0, 121.0, 1800.0)
FAULTS = 8
PEACE_S = 8 * HOUR_S  # the longest wait between two tries of what never worked is half of it


def tell(seed: int) -> SteeredWorld:
    """Live through the story of a seed. Raises AssertionError, which names the seed, where a promise is broken."""
    world = SteeredWorld(seed)
    ends: list[tuple[float, Callable[[], None]]] = []
    for _ in range(FAULTS):
        world.run_for(world.random.choice((0.0, 30.0, 120.0, 400.0)))
        if world.is_over:
            break
        fault = world.random.choice(_FAULTS)
        end = fault(world, world.random)
        if end is not None:
            ends.append((world.time_s + world.random.choice(OUTAGES_S), end))
        for at_s, undo in list(ends):
            if at_s <= world.time_s or world.random.random() < 0.5:
                world.run_for(max(DT_S, at_s - world.time_s))
                undo()
                ends.remove((at_s, undo))
    for _, undo in ends:
        undo()
    world.run_to_end(PEACE_S)
    return world


def _outage(world: SteeredWorld, random: Random) -> Callable[[], None]:
    world.sky.weather = random.choice((Weather.NO_WRITES, Weather.AWAY))
    world.note(f"the store: {world.sky.weather.value}")
    return world.sky.clear


def _cut_off(world: SteeredWorld, random: Random) -> Callable[[], None] | None:
    stores = [box.store for box in world.boxes.values()] + [one.store for one in world.daemons if not one.dead]
    if not stores:
        return None
    store = random.choice(stores)
    store.weather = random.choice((Weather.NO_WRITES, Weather.AWAY))
    world.note("one party is cut off from the store")

    def back() -> None:
        store.weather = Weather.FAIR

    return back


def _clock(world: SteeredWorld, random: Random) -> None:
    world.skew_s = random.choice((-HOUR_S, 0.0, HOUR_S))
    for daemon in world.daemons:
        daemon.ahead_s += random.choice((-HOUR_S, HOUR_S))
    world.note("clocks are set")


def _stop(world: SteeredWorld, random: Random) -> None:
    for daemon in [one for one in world.daemons if not one.dead]:
        daemon.stop_in = random.randrange(12)
        daemon.stop_for_s = random.choice((20.0, 121.0, HOUR_S))
        world.note(f"{daemon.name} is stopped in {daemon.stop_in} operations for {daemon.stop_for_s:.0f} s")


def _kill(world: SteeredWorld, random: Random) -> None:
    world.skew_s = random.choice((-HOUR_S, 0.0, HOUR_S))
    for daemon in world.daemons:
        daemon.dead = True
    world.note("the controller dies")


def _lose(world: SteeredWorld, random: Random) -> None:
    if box := _any(world, random):
        world.lose(box)
        world.note(f"{box.node} is lost")


def _notice(world: SteeredWorld, random: Random) -> None:
    if box := _any(world, random):
        box.notice = True
        world.note(f"{box.node} has a notice, and stays")


def _exit(world: SteeredWorld, random: Random) -> None:
    box = _any(world, random)
    if box is not None and world.at_work(box):
        box.exit_code = 1
        world.note(f"{box.node}: its work ends")


def _refuse(world: SteeredWorld, random: Random) -> Callable[[], None]:  # noqa: ARG001
    world.refusing = True
    world.note("no capacity")
    if trainers := [box for box in world.boxes.values() if box.role is Role.TRAINER]:
        world.lose(trainers[-1])

    def back() -> None:
        world.refusing = False

    return back


def _cloud_away(world: SteeredWorld, random: Random) -> Callable[[], None]:  # noqa: ARG001
    world.cloud_away = True
    world.note("the cloud does not answer")

    def back() -> None:
        world.cloud_away = False

    return back


def _never_work(world: SteeredWorld, random: Random) -> Callable[[], None]:
    world.never_work = True
    world.note("rollout machines come, and never work")
    _lose(world, random)

    def back() -> None:
        world.never_work = False

    return back


def _slow_launch(world: SteeredWorld, random: Random) -> Callable[[], None]:
    world.launch_s = 1000.0
    world.note("launches take longer than the deadline")
    _lose(world, random)

    def back() -> None:
        world.launch_s = 30.0

    return back


def _any(world: SteeredWorld, random: Random) -> Box | None:
    up = [box for box in world.boxes.values() if not box.gone]
    return random.choice(up) if up else None


_FAULTS: tuple[Callable[[SteeredWorld, Random], Callable[[], None] | None], ...] = (
    _outage,
    _outage,
    _cut_off,
    _clock,
    _stop,
    _stop,
    _kill,
    _lose,
    _notice,
    _exit,
    _refuse,
    _cloud_away,
    _never_work,
    _slow_launch,
)
