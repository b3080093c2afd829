"""What the controller may conclude from what a gateway wrote on a machine with another clock; and prices."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import GatewayAddress
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.run_store import Entry, Store
from grpo_orch.checkpoint.stream.catalog import Catalog, Checkpoint
from grpo_orch.orchestrator.clouds.protocol import CloudUnavailable, Offer
from grpo_orch.orchestrator.control.observe import (
    COMMANDS_EVERY_S,
    FRESH_S,
    GATEWAYS_EVERY_S,
    MAX_FAILURES,
    GatewayWatch,
    Observer,
    Prices,
    TrainerWatch,
)
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import Diverged
from grpo_orch.policies.model.pools import PoolOffer
from grpo_orch.policies.model.state import Money, RunState
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.model.vocabulary import MachineState, Market, PolicyVersion, Role
from grpo_orch.policies.serving.gateway_status import GatewayStatus, MemberStatus
from grpo_orch.policies.serving.joining import Stage
from grpo_orch.policies.tick.snapshot import Command, Machine, Trainer
from tests.budget import until
from tests.stand_ins.world import spec

names = itertools.count()
TICK_S = 1.0
BY = (0, 1, 1)  # the trainer that the gateway stands beside


class World:
    """A store, a gateway that writes to it when told, and the watcher's own clock."""

    def __init__(self, *, gateway: str | None = "g1") -> None:
        self.store = Store(f"memory://observe-{next(names)}")
        self.now_s = 1000.0
        self.watch = self.watcher()
        if gateway is not None:
            self.starts(gateway)

    def watcher(self, *, trust_first: bool = False) -> GatewayWatch:
        return GatewayWatch(self.store, trust_first=trust_first, clock=lambda: self.now_s)

    def starts(self, boot_id: str) -> None:
        documents.gateway(BY).write(self.store, GatewayAddress("http://10.0.0.1:1", boot_id))

    def writes(self, seq: int, boot_id: str = "g1", *nodes: str) -> None:
        members = [MemberStatus(node, "b", "10.0.0.2:1", "0-1", True, False, 4, 0.1) for node in nodes]
        documents.members(BY).write(self.store, GatewayStatus(boot_id, "0-1", members, seq=seq, up_s=7.0))

    def looks(self, after_s: float = TICK_S) -> int | None:
        """The number of what is believed, or None."""
        self.now_s += after_s
        status = self.watch.observe()
        return None if status is None else status.seq


def test_nothing_is_known_without_a_gateway() -> None:
    world = World(gateway=None)
    assert [world.looks(), world.looks()] == [None, None]


def test_status_new_between_two_looks_is_trusted_until_old() -> None:
    world = World()
    assert world.looks() is None
    world.writes(1)
    assert world.looks() == 1
    looks = [world.looks() for _ in range(10)]
    assert looks == [1] * 4 + [None] * 6  # it may have been written right after the look before the first
    world.writes(2)
    assert world.looks() == 2


def test_gateway_counts_as_heard_while_no_look_missed_it() -> None:
    world = World()
    for beat in range(10):
        world.looks()
        world.writes(beat)
    assert (world.watch.contact_s, world.watch.silent_s) == (8 * TICK_S, 0.0)
    while world.looks() is not None:
        pass
    assert world.watch.contact_s == 0.0
    assert world.watch.silent_s == TICK_S
    world.writes(10)
    world.looks()
    assert world.watch.contact_s == 0.0
    world.writes(11)
    world.looks()
    assert world.watch.contact_s == TICK_S


def test_status_from_before_watching_is_trusted_once_it_changes() -> None:
    world = World()
    world.writes(70)
    assert [world.looks() for _ in range(20)] == [None] * 20
    world.writes(71)
    assert world.looks() == 71


def test_change_during_a_gap_in_looks_proves_nothing() -> None:
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


def test_replaced_gateway_is_not_trusted_though_it_writes() -> None:
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


def test_a_write_that_lands_after_its_successor_changes_nothing() -> None:
    world = World()
    world.looks()
    world.writes(5, "g1", "rollout-0-i1")
    assert world.looks() == 5
    world.writes(4)
    assert world.looks() == 5
    assert [world.looks() for _ in range(6)][-1] is None, "nor is it a sign of life"


def test_view_trusts_its_first_status_as_long() -> None:
    world = World()
    world.writes(70)
    world.watch = world.watcher(trust_first=True)
    looks = [world.looks() for _ in range(8)]
    assert looks == [70] * 5 + [None] * 3


class Counted(Store):
    """Counts what is listed."""

    listed = 0

    def entries(self, prefix: str, *, after: str | None = None) -> list[Entry]:
        self.listed += 1
        return super().entries(prefix, after=after)


def test_heard_gateway_is_not_listed_at_each_look() -> None:
    world = World()
    world.store = store = Counted(world.store.url)
    world.watch = world.watcher()
    for beat in range(100):
        world.writes(beat)
        world.looks()
    assert store.listed <= 2 + 100 * TICK_S / GATEWAYS_EVERY_S


@pytest.mark.parametrize("writes_on", [True, False])
def test_another_trainers_gateway_is_found_next_to_and_after_one(writes_on: bool) -> None:
    world, newer = World(), (0, 2, 1)
    for beat in range(3):
        world.writes(beat)
        world.looks()
    documents.gateway(newer).write(world.store, GatewayAddress("http://10.0.0.9:1", "g9"))
    seen = []
    for beat in range(3, 3 + int(GATEWAYS_EVERY_S / TICK_S) + 2):
        documents.members(newer).write(world.store, GatewayStatus("g9", "0-1", [], seq=70 + beat))
        if writes_on:
            world.writes(beat)
        seen.append(world.looks())
    assert seen[-1] == 70 + beat
    assert max(one or 0 for one in seen[:2]) < 70


def test_second_gateway_is_no_younger_than_the_last_listing() -> None:
    world, newer = World(), (0, 2, 1)
    world.writes(0)
    world.looks()
    world.writes(1)
    world.looks()  # listed for the last time before
    documents.gateway(newer).write(world.store, GatewayAddress("http://10.0.0.9:1", "g9"))
    documents.members(newer).write(world.store, GatewayStatus("g9", "0-1", [], seq=70))
    listed_s, believed = world.now_s, []
    while world.now_s < listed_s + 3 * FRESH_S:
        world.writes(int(world.now_s))
        if world.looks() == 70:
            believed.append(world.now_s - listed_s)
    assert believed
    assert max(believed) < FRESH_S


MACHINES = {"rollout-0-i1": Machine("rollout-0-i1", MachineState.UP)}


class OneMachine:
    """A cloud that answers, or not."""

    answers = True
    exit_code: int | None = None

    def machines(self) -> dict[str, Machine]:
        if not self.answers:
            raise CloudUnavailable("try again")
        return {name: replace(machine, exit_code=self.exit_code) for name, machine in MACHINES.items()}

    def offers(self) -> list[Offer]:
        return []

    def pools(self) -> list[PoolOffer]:
        return []


def test_snapshot_distinguishes_absent_from_unknown() -> None:
    world, cloud = World(), OneMachine()
    observer = Observer(world.store, cloud, spec(), lambda: world.now_s)  # type: ignore[arg-type]  # of a cloud it wants the machines alone
    before = observer.observe(1.0, (), RunState())
    assert (before.members, before.gateway.boot_id) == (None, None)
    world.writes(1)
    nobody = observer.observe(2.0, (), RunState())
    assert (nobody.members, nobody.gateway.boot_id, nobody.gateway.age_s) == ({}, "g1", 7.0)
    world.writes(2, "g1", "rollout-0-i1")
    cloud.answers = False
    full = observer.observe(3.0, (), RunState())
    assert full.members == {
        "rollout-0-i1": MemberStatus("rollout-0-i1", "b", "10.0.0.2:1", "0-1", True, False, 4, 0.1)
    }
    assert (nobody.machines, full.machines) == (MACHINES, None)
    assert (nobody.steady_s, full.steady_s) == (math.inf, 0.0)


def test_checkpoints_are_read_when_a_rollback_may_be_decided() -> None:
    world, cloud = World(), OneMachine()
    catalog = Catalog(world.store, "test")
    for step in (2, 4):
        catalog.commit(1.0, Checkpoint(f"0-{step}", f"m{step}", "", 1.0, 1), frozenset(), 0)
    documents.write_fork(world.store, Fork(1, "0-2"))
    clock = itertools.count(0.0, COMMANDS_EVERY_S).__next__
    observer = Observer(world.store, cloud, spec(), clock)  # type: ignore[arg-type]  # of a cloud it wants the machines alone
    calm = observer.observe(1.0, (), RunState())
    assert (calm.store.checkpoints, calm.store.timeline) == (None, 0)
    both = (PolicyVersion(0, 2), PolicyVersion(0, 4))
    tripped = observer.observe(2.0, (), RunState(diverged=Diverged(0, 3, 2, (), "trainer")))
    assert (tripped.store.checkpoints, tripped.store.timeline) == (both, 1)
    command = documents.send_command(world.store, "rollback", 5.0, start="0-2", changes={"beta": 0.5})
    asked = observer.observe(3.0, (), RunState())
    assert asked.commands == (Command(command.command_id, "rollback", "0-2", {"beta": 0.5}),)
    assert asked.store.checkpoints == both
    documents.command(command.command_id).drop(world.store)
    assert observer.observe(4.0, (), RunState()).store.checkpoints is None
    cloud.exit_code = exit_codes.OUT_OF_MEMORY
    assert observer.observe(5.0, (), RunState()).store.checkpoints == both


def test_a_catalog_that_cannot_be_read_ends_no_look() -> None:
    """Else a run that has diverged could not even be stopped, and would be paid for ever."""
    world = World()
    world.store.put(layout.catalog_revision(1), b'{"schema": 2, "number": 1}')
    observer = Observer(world.store, OneMachine(), spec())  # type: ignore[arg-type]  # of a cloud it wants the machines alone
    tripped = observer.observe(1.0, (), RunState(diverged=Diverged(0, 3, 2, (), "trainer")))
    assert (tripped.store.checkpoints, tripped.store.ever_stored) == (None, False)
    assert (
        tripped.store.damaged
        == "catalog/000000000001.json: schema 2; this grpo-orch reads up to 1; use a newer one"
    )


def test_a_trainers_beat_is_dated_by_this_machines_clock() -> None:
    store = Store("memory://beats")
    watch = TrainerWatch(store)
    assert watch.observe(1000.0) is None
    beat = Trainer("trainer-0-i1", 1, 0, 5, 10, "training", beat_at_s=99.0)  # its clock is far behind
    documents.TRAINER.write(store, beat)
    seen = watch.observe(1001.0)
    assert seen is not None
    assert seen.beat_at_s == 1001.0
    assert watch.observe(1010.0) == seen  # silent since
    documents.TRAINER.write(store, replace(beat, beat_at_s=101.0))
    assert watch.observe(1011.0) == replace(seen, beat_at_s=1011.0)


def test_storing_progresses_by_twentieths_and_not_by_restarts() -> None:
    store, now_s = Store("memory://gets-on"), 1000.0
    watch = TrainerWatch(store)

    def moved_s(name: str | None, done_bytes: int = 0) -> float:
        """How long ago it got on, where that is told."""
        nonlocal now_s
        now_s += 10.0
        stage = None if name is None else Stage(name, done_bytes, 100)
        documents.TRAINER.write(store, Trainer("trainer-0-i1", 1, 0, 5, 10, "storing", now_s, stage=stage))
        watch.observe(now_s)
        return now_s - watch.moved_at_s

    assert moved_s(None) == math.inf
    assert moved_s("storing checkpoint 0-4") == 0.0
    assert moved_s("storing checkpoint 0-4", 5) == 10.0
    assert moved_s("storing checkpoint 0-4", 6) == 0.0
    assert moved_s("storing checkpoint 0-4", 11) == 10.0
    assert moved_s("storing checkpoint 0-4", 0) == 20.0  # the store was away, and it begins again
    assert moved_s("storing checkpoint 0-4", 11) == 30.0
    assert moved_s("storing checkpoint 0-4", 12) == 0.0
    assert moved_s("storing checkpoint 0-5") == 0.0
    assert moved_s(None) == 10.0


def test_replaced_gateways_late_write_changes_nothing() -> None:
    world = World(gateway=None)
    for by, boot_id in (((0, 1, 1), "g1"), ((0, 2, 1), "g2"), ((0, 1, 1), "g1"), ((0, 1, 9), "g1 once more")):
        documents.gateway(by).write(world.store, GatewayAddress(f"http://{boot_id}", boot_id))
        documents.members(by).write(world.store, GatewayStatus(boot_id, "0-1", [], seq=99))
    found, status = documents.read_gateway(world.store), documents.read_members(world.store)
    assert found is not None
    assert status is not None
    assert (found.url, found.boot_id, status.boot_id) == ("http://g2", "g2", "g2")
    # The timeline counts more than the machine, and the machine more than the attempt; by number, not by name.
    order = [(0, 2, 3), (0, 10, 1), (0, 999_999, 1), (0, 1_000_000, 1), (3, 1, 1), (3, 1, 2), (10_000, 1, 1)]
    for by in [*order, *order[:-1]]:
        documents.gateway(by).write(world.store, GatewayAddress("http://x", str(by)))
    assert documents.newest_gateway(world.store) == order[-1]


# Prices: on both markets, for a node may be bought on either.

TRAINER = Offer(Role.TRAINER, Market.ON_DEMAND, "a machine", 4.0, max_usd_per_h=5.0)  # never on spot
ROLLOUT = Offer(
    Role.ROLLOUT, Market.SPOT, "a machine", 1.0, 4.0, max_usd_per_h=2.0, other_market_max_usd_per_h=6.0
)


class Telling:
    """What is asked of a cloud here."""

    def __init__(self, *offers: Offer) -> None:
        self.priced = list(offers)

    def offers(self) -> list[Offer]:
        if not self.priced:
            raise CloudUnavailable("try again")
        return self.priced

    def pools(self) -> list[PoolOffer]:
        return []


def heard(*offers: Offer) -> object:
    prices = Prices(Telling(*offers))  # type: ignore[arg-type]  # the rest of a cloud is not asked
    prices.fetch()
    return prices.observe()


def test_the_dearest_of_both_markets_is_known() -> None:
    found = heard(TRAINER, ROLLOUT)
    assert found == {"trainer on demand": 5.0, "rollout on spot": 2.0, "rollout on demand": 6.0}


def test_a_cloud_that_does_not_answer_makes_nothing_known() -> None:
    assert heard() is None


class Odd(Telling):
    """Its answer breaks what reads it, `times` times."""

    def __init__(self, times: int) -> None:
        super().__init__(TRAINER)
        self.times = times

    def pools(self) -> list[PoolOffer]:
        self.times -= 1
        if self.times >= 0:
            raise KeyError("zone")
        return []


def test_unexpected_error_is_logged_retried_and_stops_blocking() -> None:
    prices = Prices(Odd(MAX_FAILURES))  # type: ignore[arg-type]  # the rest of a cloud is not asked
    for _ in range(MAX_FAILURES - 1):
        prices.fetch()
    assert (prices.pools(), prices.trouble()) == (None, "")
    prices.fetch()
    assert (prices.pools(), prices.trouble()) == ((), "KeyError: 'zone'")
    assert prices.observe() == {"trainer on demand": 5.0}  # which it did answer
    prices.fetch()
    assert (prices.pools(), prices.trouble()) == ((), "")


def test_known_prices_stay_while_the_cloud_is_away() -> None:
    cloud = Telling(TRAINER)
    prices = Prices(cloud)  # type: ignore[arg-type]  # the rest of a cloud is not asked
    prices.fetch()
    cloud.priced.clear()
    for _ in range(MAX_FAILURES):
        prices.fetch()
    assert (prices.observe(), prices.trouble()) == ({"trainer on demand": 5.0}, "")


class Empty(Telling):
    """It has no machine yet."""

    def machines(self) -> dict[str, Machine]:
        return {}


def test_a_budget_that_a_user_sets_later_needs_prices_too() -> None:
    """`resume --budget-usd` of a run whose run.yaml has none."""
    world = World()
    spot_alone = replace(spec(), rollout=replace(spec().rollout, resources={"use_spot": True}))
    observer = Observer(world.store, Empty(TRAINER), spot_alone)  # type: ignore[arg-type]  # the rest of a cloud is not asked
    assert observer.observe(world.now_s, (), RunState()).prices is None
    capped = RunState(money=Money(cap_usd=50.0))
    assert until("prices", lambda: observer.observe(world.now_s, (), capped).prices) == {"trainer on demand": 5.0}
