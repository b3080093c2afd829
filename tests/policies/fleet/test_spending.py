"""The cap is never passed in any history, and a run that reaches it loses nothing."""

from __future__ import annotations

from dataclasses import replace
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_orch.policies.control.decide import decide
from grpo_orch.policies.fleet.budget import BUDGET, on_demand_usd
from grpo_orch.policies.ledger.rentals import bill, rentals, spent_over_time
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import BudgetReached, BudgetRefused, BudgetSet, NodeMoved, NodeRequested
from grpo_orch.policies.model.pools import Pool
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Refusal, Role, RunPhase
from grpo_orch.policies.tick.snapshot import Command, LaunchRefused, Snapshot
from tests.stand_ins.world import DISKS, capped, priced, with_disks


def patient(run: RunSpec) -> RunSpec:
    """One that waits for hours for a machine."""
    return replace(run, policies=replace(run.policies, boot_timeout_s=10.0**6))


def test_a_run_that_reaches_its_cap_stores_and_pauses() -> None:
    world = priced(capped(30.0), max_steps=10**6, save_steps=10**6)
    world.run(10**5)
    assert world.state.phase is RunPhase.PAUSED
    assert "`budget.usd`" in world.state.reason  # by which `status` knows what helps
    assert world.machines == {}
    assert world.checkpoints[-1].step == int(world.steps) > 0
    assert 9.0 < world.spent <= 30.0  # a trainer's end is kept 15 minutes and the way back for
    (reached,) = world.of(BudgetReached)
    assert "30.00" in reached.reason


def test_larger_budget_resumes_and_same_budget_stops_again() -> None:
    world = priced(capped(30.0), max_steps=10**6)
    world.run(10**5)
    world.resume()
    bought = len(world.of(NodeRequested))
    world.run(10**5)
    assert (world.state.phase, len(world.of(NodeRequested))) == (RunPhase.PAUSED, bought)
    world.commands.append(Command("1", BUDGET, changes={"usd": 60.0}))
    world.resume()
    while not world.tick():
        world.advance(5.0)
    assert world.of(BudgetSet) == [BudgetSet(60.0)]
    assert 30.0 < world.spent <= 60.0


def test_hourly_cap_keeps_the_fleet_small_and_reports_it_once() -> None:
    world = priced(capped(usd_per_h=44.0, max_replicas=4), max_steps=200)
    world.run(10**4)
    assert world.state.phase is RunPhase.FINISHED
    assert len({node.slot for node in world.of(NodeRequested)}) == 1 + 2
    assert len(world.of(BudgetRefused)) == 1


def test_a_cap_that_allows_no_trainer_buys_nothing() -> None:
    for world in (priced(capped(5.0)), priced(capped(usd_per_h=20.0))):
        world.run()
        assert (world.state.phase, world.launches) == (RunPhase.PAUSED, [])


@pytest.mark.parametrize(("leaves", "usd_per_h"), [(Role.TRAINER, 44.0), (Role.ROLLOUT, 43.0)])
def test_a_machine_on_its_way_out_makes_room_for_the_next(leaves: Role, usd_per_h: float) -> None:
    """The cap an hour has room for one of each; the old machine is paid for until its cloud has it back."""
    world = priced(capped(usd_per_h=usd_per_h, max_replicas=1), max_steps=10**6, ends_in_s=300.0)
    while world.steps < 5.0:
        world.tick()
        world.advance(5.0)
    name = f"{leaves}-0-i1"
    ended = exit_codes.STOPPED if leaves is Role.TRAINER else None
    world.machines[name] = replace(world.machines[name], notice=True, exit_code=ended)
    while name in world.state.nodes:
        assert world.state.phase is RunPhase.TRAINING
        assert f"{leaves}-0-i2" not in world.state.nodes
        world.tick()
        world.advance(5.0)
    world.tick()
    assert f"{leaves}-0-i2" in world.state.nodes
    assert world.of(BudgetReached, BudgetRefused) == []


def test_pause_for_unbought_work_reports_it_and_resumes() -> None:
    """A trainer's launch hangs until the budget is reached by what it might have cost, and is then refused."""
    world = priced(patient(capped(30.0)), launch_s=10**6, max_steps=20, ends_in_s=300.0)
    world.until(lambda it: bool(it.of(BudgetReached)), dt_s=60.0)
    assert world.spent > 10.0
    world.machines.clear()
    world.refused.append(LaunchRefused("trainer-0-i1", Refusal.NO_CAPACITY, "nothing to be had"))
    for _ in range(5):
        world.tick()
    assert world.state.phase is RunPhase.PAUSED
    assert world.spent == bill(rentals(world.history, world.now_s)).cost_usd == 0.0
    assert "USD of this were reserved for requests that bought no machine; `grpo-orch" in world.state.reason
    world.launch_s = 0.0
    world.resume()
    world.run()
    assert (world.state.phase, len(world.of(BudgetReached))) == (RunPhase.FINISHED, 1)


def test_possibly_bought_machine_stays_paid() -> None:
    """Nobody says that it was refused, or its machine was there once."""
    for came in (False, True):
        launch_s = 0.0 if came else 10**6
        world = priced(patient(capped(30.0)), launch_s=launch_s, boot_s={Role.TRAINER: 10**6}, max_steps=20)
        while not world.of(BudgetReached):
            world.tick()
            world.advance(60.0)
        world.tick()
        if came:
            world.refused.append(LaunchRefused("trainer-0-i1", Refusal.NO_CAPACITY, "its work cannot be started"))
        world.machines.clear()
        for _ in range(5):
            world.tick()
        assert world.state.phase is RunPhase.PAUSED
        assert world.spent > 10.0
        assert "bought no machine" not in world.state.reason


def test_failed_launch_that_left_a_machine_is_paid_until_gone() -> None:
    world = priced(capped(100.0), max_steps=10**6, launch_s=10**6, ends_in_s=300.0)
    world.tick()
    world.advance(60.0)
    world.refused.append(LaunchRefused("trainer-0-i1", Refusal.UNKNOWN, "its set-up failed", machine_exists=True))
    world.tick()
    assert world.state.nodes["trainer-0-i1"].phase is NodePhase.TERMINATING
    while "trainer-0-i1" in world.machines:
        world.advance(60.0)
        world.tick()
    world.tick()
    assert "trainer-0-i1" not in world.state.nodes
    assert world.state.money.spent_usd == pytest.approx(40.0 * 360.0 / 3600)
    assert bill(rentals(world.history, world.now_s)).cost_usd == pytest.approx(world.spent)
    assert world.state.kinds["trainer on demand"].unserved_in_a_row == 1


ACTS = st.sampled_from(["lose", "notice", "refuse", "away", "daemon", "wait", "wait", "wait", "fast"])


def test_disks_are_kept_the_money_for_before_a_launch() -> None:
    """A trainer of 40 USD an hour needs 16.67 to be stopped and returned; with its disk 0.76 more."""
    for run, bought in ((capped(17.0), True), (with_disks(capped(17.0)), False), (with_disks(capped(17.5)), True)):
        world = priced(run)
        world.tick()
        assert bool(world.of(NodeRequested)) is bought


IN_GCP = Pool("gcp", "us-central1", "us-central1-a", "a3-highgpu-8g", "H100:8", Market.SPOT)


def in_gcp(seen: Snapshot) -> Snapshot:
    """The cloud tells where its machines are."""
    return replace(seen, machines={name: replace(one, pool=IN_GCP) for name, one in (seen.machines or {}).items()})


def test_disk_price_is_that_of_the_machines_known_place() -> None:
    disk_anywhere = {"any_of": [DISKS, {"infra": "gcp", "disk_tier": "low"}]}
    run = with_disks(capped(10**4))
    sections = replace(run.trainer, resources=disk_anywhere), replace(run.rollout, resources=disk_anywhere)
    run = replace(run, trainer=sections[0], rollout=sections[1])
    world = priced(run, max_steps=10**6, launch_s=600.0, sees=in_gcp)
    world.tick()
    (asked,) = world.of(NodeRequested)
    assert asked.disk_usd_per_h == pytest.approx(1332.0 / 730)
    for _ in range(400):
        world.advance(10.0)
        world.tick()
    there = 10.24 / 730
    assert [node.disk_usd_per_h for node in world.state.nodes.values()] == pytest.approx([there] * 3)
    hours = sum(one.hours for one in rentals(world.history, world.now_s))
    assert spent_over_time(world.history, world.now_s)[-1].disks_usd == pytest.approx(hours * there)
    assert bill(rentals(world.history, world.now_s)).cost_usd == pytest.approx(world.spent)


@settings(max_examples=50)
@given(
    st.floats(8.0, 80.0),
    st.lists(st.tuples(ACTS, st.integers(0, 9), st.floats(1.0, 240.0)), max_size=25),
    st.floats(0.0, 880.0),
    st.booleans(),
)
def test_the_cap_is_never_passed(
    usd: float, acts: list[tuple[str, int, float]], storing_s: float, disks: bool
) -> None:
    """Losses with and without notice, no capacity, a cloud that does not answer for minutes, new daemons."""
    run = capped(usd, max_replicas=3)
    world = priced(with_disks(run) if disks else run, max_steps=10**6, storing_s=storing_s)
    for act, which, passes_s in acts:
        world.away = False
        world.tick()
        names = sorted(world.machines)
        match act:
            case "lose" if names:
                world.lose(names[which % len(names)])
            case "notice" if names:
                name = names[which % len(names)]
                world.machines[name] = replace(world.machines[name], notice=True)
            case "refuse":
                world.refusing = not world.refusing
            case "away":
                world.away = True
            case "daemon":
                world.take_over()
        for _ in range(5):
            world.advance(passes_s / 5)
            world.tick()
            assert world.spent <= usd
    world.away = world.refusing = False
    for _ in range(5000):
        if world.tick():
            break
        world.advance(20.0)
        assert world.spent <= usd
    assert world.machines == {}
    assert world.state.phase is RunPhase.PAUSED
    reported = bill(rentals(world.history, world.now_s))
    over_time = spent_over_time(world.history, world.now_s)
    assert (over_time[-1].usd if over_time else 0.0) == pytest.approx(world.spent)
    assert not disks or not over_time or over_time[-1].disks_usd > 0
    assert reported.cost_usd == pytest.approx(world.spent)
    assert reported.cost_all_on_demand_usd == pytest.approx(on_demand_usd(world.state, world.now_s))


def test_the_diary_has_the_numbers_of_each_purchase_and_return() -> None:
    world = priced(capped(30.0), max_steps=10**6)
    world.run(10**5)
    asked = {event.node: event for event in world.of(NodeRequested)}
    assert asked["trainer-0-i1"].reason == "first; 0.00 of 30.00 USD spent"
    assert asked["rollout-1-i1"].reason.startswith("first; 2 of 2 rollout nodes; ")
    assert asked["rollout-1-i1"].max_usd_per_h == 4.0
    gone = [event.reason for event in world.of(NodeMoved) if event.phase is NodePhase.GONE]
    assert len(gone) == 3
    assert all(reason.startswith("terminated, after ") and reason.endswith(" USD") for reason in gone)


def test_budget_for_a_trainer_is_found_fast_among_many_nodes() -> None:
    """No number of returned nodes makes room here; it once took a tick the cube of their number."""
    nodes = 300
    world = priced(capped(None, 40.0 + 4.0 * nodes, nodes), max_steps=10**6, proved=True)
    world.wait(60.0, 5.0)
    assert len(world.up(Role.ROLLOUT)) == nodes
    world.lose("trainer-0-i1")
    world.most = {"trainer on demand": 10.0**6, "rollout on spot": 4.0}
    snapshot, began_s = world.snapshot(), process_time()
    assert any(isinstance(event, BudgetReached) for event in decide(world.state, snapshot, world.spec).events)
    assert process_time() - began_s < 1.5
