"""What the store costs counts towards the cap, and is forgotten by no controller that takes over."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.control.snapshot import Snapshot
from policies.fleet.store_costs import Place, Stored
from policies.ledger.rentals import spent_over_time
from policies.model.events import BudgetSet, StoreCharged
from policies.model.vocabulary import Role, RunPhase
from tests.policies.control.fleet.worlds import Priced, capped, with_disks

ACTS = st.sampled_from(["lose", "daemon", "wait", "wait", "wait"])
POLICY_BYTES, POLICY_GB = 65.6e9, 65.6  # of 32 billion parameters
PUBLISHED_EVERY_S = 300.0
SENT_USD_PER_GB, FETCHED_USD_PER_GB = 0.09, 0.12  # from AWS to Google's store, and back


class Publishing(Priced):
    """Its store is in another cloud: each policy is sent there, and fetched from there by every node; so is the
    checkpoint with which it stops, six times as large. Its size is known, as from the first policy on. What that
    costs is reckoned here, apart from the run."""

    store_usd = 0.0
    rows: list[float]
    joined: set[str]

    def snapshot(self) -> Snapshot:
        new = [time_s for time_s in self.rows if time_s > self.state.store_until_s]
        size = POLICY_BYTES * len(new)
        until_s = max(new, default=0.0)
        stored = Stored(len(new), 0, size, POLICY_BYTES, until_s)
        return replace(super().snapshot(), store_place=Place("gcp", "us-east4"), stored=stored)

    def advance(self, dt_s: float = 1.0) -> None:
        published, kept = int(self.steps / PUBLISHED_EVERY_S), len(self.checkpoints)
        super().advance(dt_s)
        if int(self.steps / PUBLISHED_EVERY_S) > published:
            self.rows.append(self.now_s)
            self.store_usd += POLICY_GB * (SENT_USD_PER_GB + FETCHED_USD_PER_GB * len(self.up(Role.ROLLOUT)))
        for node in self.state.nodes.values():
            if node.served and node.id not in self.joined:
                self.joined.add(node.id)
                size_gb = POLICY_GB * (6 if node.role is Role.TRAINER else 1)
                self.store_usd += FETCHED_USD_PER_GB * size_gb
        self.store_usd += SENT_USD_PER_GB * 6 * POLICY_GB * (len(self.checkpoints) - kept)

    @property
    def spent(self) -> float:
        """Machines by the state's own reckoning, and the store by what it took."""
        return super().spent - self.state.store_usd + self.store_usd


@settings(max_examples=30)
@given(st.floats(90.0, 400.0), st.lists(st.tuples(ACTS, st.floats(1.0, 240.0)), max_size=25))
def test_the_cap_is_never_passed_where_each_policy_crosses_clouds(
    usd: float, acts: list[tuple[str, float]]
) -> None:
    run = with_disks(capped(usd, max_replicas=3))
    world = Publishing(run, max_steps=10**6, save_steps=10**6, storing_s=600.0)
    world.rows, world.joined = [], set()
    for act, passes_s in acts:
        world.tick()
        if act == "daemon":
            world.take_over()
        elif act == "lose" and (names := sorted(world.machines)):
            world.lose(names[-1])
        for _ in range(5):
            world.advance(passes_s / 5)
            world.tick()
            assert world.spent <= usd
    for _ in range(5000):
        if world.tick():
            break
        world.advance(20.0)
        assert world.spent <= usd
    assert world.state.phase is RunPhase.PAUSED
    told = sum(event.usd for event in world.of(StoreCharged))
    assert world.state.store_usd == pytest.approx(told)
    assert world.state.store_usd >= world.store_usd * (1 - 1e-9)
    if over_time := spent_over_time(world.history, world.now_s):
        assert over_time[-1].store_usd == pytest.approx(told)


@pytest.mark.parametrize(("behind_s", "counted_s"), [(0.0, 2000.0), (600.0, 1400.0)])
def test_what_the_store_has_cost_outlives_the_controller_that_counted_it(
    behind_s: float, counted_s: float
) -> None:
    """Half an hour after it was last journalled another one takes over, on a host whose clock may be behind."""
    world = Priced(capped(10**4), max_steps=10**6)
    world.journal((StoreCharged(0.1, 1, 1, 1, 0.0),))
    world.now_s += 1800.0
    world.journal((BudgetSet(10**4),))
    world.now_s += 200.0 - behind_s
    world.take_over()
    assert world.now_s - world.state.store_charged_at_s == max(1800.0, counted_s)


def test_nobody_asks_the_store_for_a_run_that_is_over_nor_for_longer_than_an_hour() -> None:
    for ends in (True, False):
        world = Priced(capped(5.0) if ends else capped(100.0), max_steps=10**6)
        for _ in range(5):
            world.tick()
            world.advance(5.0)
        assert (world.state.phase is RunPhase.PAUSED) is ends
        world.now_s += 30 * 86400.0
        world.take_over()
        assert world.now_s - world.state.store_charged_at_s == (0.0 if ends else 3600.0)
