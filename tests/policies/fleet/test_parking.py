"""A run for which no rollout node can be had returns its trainer's machine, and goes on once one can."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_orch.policies.control.node_phases import MACHINE_LOST_S
from grpo_orch.policies.fleet.plan import IDLE_MIN_S
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.breaker import BACK_OFF_MAX_EXTRA_S
from grpo_orch.policies.model.events import BudgetRefused, CapacityShortage, JobRestarted, NodeRequested, RunMoved
from grpo_orch.policies.model.spec import Replicas, RunSpec
from grpo_orch.policies.model.vocabulary import Market, PolicyVersion, Role, RunPhase
from grpo_orch.policies.tick.snapshot import Action, Launch, Snapshot
from tests.stand_ins.world import HOUR_S, PARKS_IN_S, capped, drought, fallback_nodes, parked, spec, two_markets


def test_day_without_nodes_costs_no_trainer_and_no_step() -> None:
    world = drought()
    lost_at_s, steps = world.now_s, int(world.steps)
    world.until(RunPhase.PARKED)
    assert IDLE_MIN_S <= world.now_s - lost_at_s <= PARKS_IN_S
    world.wait(30.0)
    assert world.machines == {}
    assert world.checkpoints == [PolicyVersion(0, steps)]
    asked = len(world.of(NodeRequested))
    world.wait(24 * HOUR_S, 20.0)
    new = world.of(NodeRequested)[asked:]
    assert {event.role for event in new} == {Role.ROLLOUT}
    assert {event.slot for event in new} == {"rollout-0"}
    assert len(new) <= 24 * HOUR_S / BACK_OFF_MAX_EXTRA_S + 10
    assert (world.machines, world.of(CapacityShortage)) == ({}, [])
    world.refusing_rollouts = False
    back_at_s = world.now_s
    world.until(RunPhase.TRAINING)
    world.wait(60.0)
    assert world.now_s - back_at_s < BACK_OFF_MAX_EXTRA_S + 120.0
    assert len(world.up(Role.ROLLOUT)) == 2
    assert world.steps > steps
    assert (world.state.failures.count, world.of(JobRestarted)) == (0, [])
    (told,) = [event for event in world.of(RunMoved) if event.parked_s is not None]
    assert (told.parked_s or 0.0) > 24 * HOUR_S
    assert "rollout-0" in told.reason


def at_work(looked: Snapshot) -> Snapshot:
    return replace(looked, trainer=looked.trainer and replace(looked.trainer, activity="training"))


def test_a_wait_of_minutes_and_a_trainer_at_work_park_nothing() -> None:
    world = drought()
    world.wait(IDLE_MIN_S - 30.0)
    world.refusing_rollouts = False
    world.wait(HOUR_S)
    assert RunPhase.PARKED not in world.moves
    world.dry_up()
    looked = world.snapshot
    world.snapshot = lambda: at_work(looked())  # type: ignore[method-assign]
    world.wait(HOUR_S)
    assert RunPhase.PARKED not in world.moves


@pytest.mark.parametrize("run", [replace(spec(2), grpo={"save_strategy": "no"}), spec(0)])
def test_trainer_without_checkpoints_or_generating_stays(run: RunSpec) -> None:
    run = replace(run, rollout=replace(run.rollout, replicas=Replicas(min=0, max=run.rollout.replicas.max)))
    world = drought(run)
    world.wait(2 * HOUR_S)
    assert RunPhase.PARKED not in world.moves


def test_a_slow_launch_is_no_drought() -> None:
    world = drought()
    world.refusing_rollouts, world.launch_s = False, 800.0
    world.wait(780.0)
    assert world.is_at(RunPhase.TRAINING)
    world.wait(120.0)
    assert len(world.up(Role.ROLLOUT)) == 2


def test_the_trainers_machine_stays_until_all_is_stored() -> None:
    world = drought(storing_s=1800.0)
    world.until(RunPhase.PARKED)
    world.wait(1700.0)
    assert world.up(Role.TRAINER)
    world.wait(200.0)
    assert world.machines == {}
    assert [at.step for at in world.checkpoints] == [int(world.steps)]


def test_trainer_preempted_while_storing_is_awaited() -> None:
    world = drought(storing_s=60.0)
    world.until(RunPhase.PARKED)
    world.cut_off = True  # its gateway will be heard again before it is
    world.wait(MACHINE_LOST_S - 300.0)
    assert world.up(Role.TRAINER)
    world.cut_off = False
    world.wait(120.0)
    assert (world.state.phase, world.machines, len(world.checkpoints)) == (RunPhase.PARKED, {}, 1)


def test_trainer_failing_while_storing_restarts_on_its_machine() -> None:
    world = drought(storing_s=600.0)
    world.until(RunPhase.PARKED)
    world.wait(60.0)
    [node] = world.up(Role.TRAINER)
    world.exit(node, exit_codes.FAILED)
    world.stops_at_s = None
    world.wait(60.0)
    assert world.is_at(RunPhase.TRAINING)
    assert world.up(Role.TRAINER) == [node]
    assert world.launches[-1] == (node, 2)
    assert world.state.failures.count == 0
    world.until(RunPhase.PARKED)


def test_node_joining_during_draining_is_kept_and_used() -> None:
    world = drought(storing_s=120.0)
    world.launch_s = 60.0
    world.until(RunPhase.PARKED)
    requested = [node.id for node in world.state.live(Role.ROLLOUT)]
    world.refusing_rollouts = False
    if not requested:  # its next launch falls into the drain
        world.act(Launch("rollout-0-i99", "rollout-0", Market.SPOT, 1))
    world.wait(90.0)
    assert world.is_at(RunPhase.PARKED)
    world.until(RunPhase.TRAINING)
    world.wait(120.0)
    assert len(world.up(Role.ROLLOUT)) == 2


def test_probe_is_kept_while_trainer_boots_if_available() -> None:
    world = parked()
    world.boot_s[Role.TRAINER] = 800.0
    world.refusing_rollouts = False
    world.until(RunPhase.STARTING)
    [probe] = world.up(Role.ROLLOUT)
    world.until(RunPhase.TRAINING)
    assert probe in world.up(Role.ROLLOUT)
    world.dry_up()
    world.until(RunPhase.PARKED, 2 * HOUR_S)
    world.wait(60.0)
    act = world.act
    world.act = lambda action: None if isinstance(action, Launch) and "trainer" in action.node else act(action)  # type: ignore[method-assign]
    world.refusing_rollouts = False
    world.until(RunPhase.STARTING)
    world.wait(2 * IDLE_MIN_S)
    assert world.up(Role.ROLLOUT)  # a boot's time: the trainer's clock began anew with the unparking
    world.wait(HOUR_S)
    assert world.machines == {}


def test_knowledge_of_failing_machines_outlives_parking() -> None:
    world = drought()
    world.refusing_rollouts, world.boot_s[Role.ROLLOUT] = False, 10**9
    world.wait(12 * HOUR_S, 20.0)
    assert RunPhase.PARKED in world.moves
    assert world.state.kinds["rollout on spot"].stopped
    bought = [node for node, _ in world.launches if node.startswith(Role.ROLLOUT)]
    assert len(bought) <= 2 + 4 + 6  # before; three in a row, side by side; then ever more rarely
    trainers = [node for node, _ in world.launches if node.startswith(Role.TRAINER)]
    assert len(trainers) <= 1 + 6


def test_both_markets_are_tried_in_turn() -> None:
    world = two_markets(spec(2))
    refuse_all = {"on": True}
    act = world.act

    def nothing(action: Action) -> None:
        world.no_spot = refuse_all["on"] or world.no_spot
        world.refusing_rollouts = refuse_all["on"]
        act(action)

    world.act = nothing  # type: ignore[method-assign]
    world.let_pass(0.5, 5.0)
    assert world.is_at(RunPhase.PARKED)
    before = len(world.of(NodeRequested))
    world.let_pass(2.0, 5.0)
    markets = [event.market for event in world.of(NodeRequested)[before:]]
    assert 20 < len(markets) < 2 * 2 * HOUR_S / BACK_OFF_MAX_EXTRA_S + 5
    assert abs(markets.count(Market.SPOT) - markets.count(Market.ON_DEMAND)) <= 2
    refuse_all["on"] = False
    world.refusing_rollouts = False
    world.let_pass(0.2, 5.0)
    assert world.is_at(RunPhase.TRAINING)
    assert fallback_nodes(world.state)


def test_on_demand_is_tried_where_spot_never_served() -> None:
    """No other machine on spot can show that what was wrong with the first is mended."""
    world = two_markets(spec(2), no_spot=False, boot_s={Role.ROLLOUT: 10.0**9})
    while world.state.phase is not RunPhase.PARKED:
        world.let_pass(0.1, 5.0)
    assert world.state.kinds["rollout on spot"].never_serves
    assert not world.stood_in
    world.no_spot, world.boot_s = True, {}
    world.let_pass(8.0, 5.0)
    assert world.is_at(RunPhase.TRAINING)
    assert fallback_nodes(world.state)


def test_past_lack_of_money_parks_no_run_that_has_it_now() -> None:
    world = two_markets(capped(usd_per_h=9.0, max_replicas=1), boot_s={Role.ROLLOUT: 900.0}, no_spot=False)
    world.let_pass(0.5)
    told = BudgetRefused("rollout on demand", "another machine had taken the room")
    world.journal((told,))
    world.no_spot = True
    for node in world.up(Role.ROLLOUT):
        world.lose(node)
    world.let_pass(0.5)  # on demand is bought once the wait has cost what its start does
    assert RunPhase.PARKED not in [event.phase for event in world.of(RunMoved)]
    assert len(fallback_nodes(world.state)) == 1
