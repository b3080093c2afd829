"""What the controller may conclude from what a gateway wrote on a machine with another clock."""

from __future__ import annotations

import itertools
from dataclasses import replace

from checkpoint import documents
from checkpoint.documents import GatewayAddress
from checkpoint.store import Store
from orchestrator.clouds.protocol import CloudUnavailable
from orchestrator.observe import FRESH_S, GatewayWatch, Observer, TrainerWatch
from policies.snapshot import Machine, Member, Trainer
from policies.vocabulary import MachineState
from policies.wire import GatewayStatus, MemberStatus

names = itertools.count()
TICK_S = 1.0


class World:
    """A store, a gateway that writes to it when told, and the watcher's own clock."""

    def __init__(self, *, gateway: str | None = "g1") -> None:
        self.store = Store(f"memory://observe-{next(names)}")
        self.now_s = 1000.0
        self.watch = self.watcher()
        if gateway is not None:
            self.starts(gateway)

    def watcher(self, *, believe_first: bool = False) -> GatewayWatch:
        return GatewayWatch(self.store, believe_first=believe_first, clock=lambda: self.now_s)

    def starts(self, boot_id: str) -> None:
        documents.write_gateway(self.store, GatewayAddress("http://10.0.0.1:1", boot_id))

    def writes(self, seq: int, boot_id: str = "g1", *nodes: str) -> None:
        members = [MemberStatus(node, "b", "10.0.0.2:1", "0-1", True, False, 4, 0.1) for node in nodes]
        documents.write_members(self.store, GatewayStatus(boot_id, "0-1", members, seq=seq, up_s=7.0))

    def looks(self, after_s: float = TICK_S) -> int | None:
        """The number of what is believed, or None."""
        self.now_s += after_s
        status = self.watch.look()
        return None if status is None else status.seq


def test_nothing_is_known_without_a_gateway() -> None:
    world = World(gateway=None)
    assert [world.looks(), world.looks()] == [None, None]


def test_what_appears_between_two_looks_is_believed_until_it_is_old() -> None:
    world = World()
    assert world.looks() is None
    world.writes(1)
    assert world.looks() == 1
    looks = [world.looks() for _ in range(10)]
    assert looks == [1] * 4 + [None] * 6  # it may have been written right after the look before the first
    world.writes(2)
    assert world.looks() == 2


def test_a_status_that_beats_stays_believed() -> None:
    world = World()
    world.looks()
    for beat in range(1, 20):
        world.writes(beat)
        assert [world.looks(), world.looks()] == [beat, beat]


def test_what_was_there_before_the_watching_began_is_believed_only_once_it_changes() -> None:
    world = World()
    world.writes(70)
    assert [world.looks() for _ in range(20)] == [None] * 20
    world.writes(71)
    assert world.looks() == 71


def test_a_change_during_a_long_time_without_looks_proves_nothing() -> None:
    """A laptop slept, or the store was away: the gateway may have died soon after the last look."""
    world = World()
    world.looks()
    world.writes(1)
    assert world.looks() == 1
    world.writes(2)
    assert world.looks(after_s=3600.0) is None
    assert world.looks() is None
    world.writes(3)
    assert world.looks() == 3


def test_the_limit_counts_from_the_look_before_the_change() -> None:
    for gap_s, believed in ((FRESH_S - 0.1, 1), (FRESH_S + 0.1, None)):
        world = World()
        world.looks()
        world.writes(1)
        assert world.looks(after_s=gap_s) == believed


def test_a_replaced_gateway_is_not_believed_though_it_writes_on() -> None:
    world = World()
    world.looks()
    world.writes(40)
    assert world.looks() == 40
    world.starts("g2")
    for seq in (41, 42):
        world.writes(seq)
        assert world.looks() is None
    world.writes(1, "g2")
    assert world.looks() == 1
    world.writes(43)  # the old one's, over the new one's
    assert world.looks() == 1
    world.writes(2, "g2")
    assert world.looks() == 2


def test_a_write_that_lands_behind_its_successor_changes_nothing() -> None:
    world = World()
    world.looks()
    world.writes(5, "g1", "rollout-0-i1")
    assert world.looks() == 5
    world.writes(4)
    assert world.looks() == 5
    assert [world.looks() for _ in range(6)][-1] is None, "nor is it a sign of life"


def test_a_view_believes_what_it_finds_first_for_as_long() -> None:
    world = World()
    world.writes(70)
    world.watch = world.watcher(believe_first=True)
    looks = [world.looks() for _ in range(8)]
    assert looks == [70] * 5 + [None] * 3


MACHINES = {"rollout-0-i1": Machine("rollout-0-i1", MachineState.UP)}


class OneMachine:
    """A cloud that answers, or not."""

    answers = True

    def machines(self) -> dict[str, Machine]:
        if not self.answers:
            raise CloudUnavailable("try again")
        return MACHINES


def test_a_snapshot_tells_absent_from_unknown() -> None:
    world, cloud = World(), OneMachine()
    observer = Observer(world.store, cloud)  # type: ignore[arg-type]  # of a cloud it wants the machines alone
    before = observer.look(1.0, ())
    assert (before.members, before.gateway_boot_id) == (None, None)
    world.writes(1)
    nobody = observer.look(2.0, ())
    assert (nobody.members, nobody.gateway_boot_id, nobody.gateway_age_s) == ({}, "g1", 7.0)
    world.writes(2, "g1", "rollout-0-i1")
    cloud.answers = False
    full = observer.look(3.0, ())
    assert full.members == {"rollout-0-i1": Member("rollout-0-i1", "b", "0-1", True, 4)}
    assert (nobody.machines, full.machines) == (MACHINES, None)


def test_a_trainers_beat_is_dated_by_this_machines_clock() -> None:
    store = Store("memory://beats")
    watch = TrainerWatch(store)
    assert watch.look(1000.0) is None
    beat = Trainer("trainer-0-i1", 1, 0, 5, 10, "training", beat_at_s=99.0)  # its clock is far behind
    documents.write_trainer(store, beat)
    seen = watch.look(1001.0)
    assert seen is not None
    assert seen.beat_at_s == 1001.0
    assert watch.look(1010.0) == seen  # silent since
    documents.write_trainer(store, replace(beat, beat_at_s=101.0))
    assert watch.look(1011.0) == replace(seen, beat_at_s=1011.0)
