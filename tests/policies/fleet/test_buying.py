"""What is bought, and when no more is: the trainer first, and what never works not for ever.

An hour without a machine is told once.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_orch.policies.control.decide import decide
from grpo_orch.policies.fleet.plan import IDLE_MIN_S
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.breaker import (
    BACK_OFF_MAX_EXTRA_S,
    PROBE_FIRST_S,
    PROBE_MAX_S,
    REFUSALS,
    WORKS_S,
    MachineKind,
    probe_wait_s,
)
from grpo_orch.policies.model.events import (
    BudgetNeared,
    BuyingResumed,
    BuyingStopped,
    CapacityShortage,
    NodeRequested,
    RunMoved,
    SpecProved,
)
from grpo_orch.policies.model.phases import LIVE_RUN
from grpo_orch.policies.model.vocabulary import NodePhase, Role, RunPhase
from grpo_orch.policies.tick.snapshot import Trainer
from tests.stand_ins.world import HOUR_S, World, capped, priced, spec, until_training

KIND = "rollout on spot"


def test_rollout_nodes_are_requested_once_trainer_machine_is_up() -> None:
    world = World()
    world.refusing = True
    world.let_pass(1.0)
    assert {event.role for event in world.of(NodeRequested)} == {Role.TRAINER}
    world.refusing = False
    world.run()
    assert world.state.phase is RunPhase.FINISHED


@pytest.mark.parametrize("code", [exit_codes.BAD_SPEC, exit_codes.UNFIT_MACHINE])
def test_run_yaml_the_first_trainer_rejects_costs_one_machine(code: int) -> None:
    world = World(spec=spec(10), fails={Role.TRAINER: code})
    world.run()
    assert world.state.phase is RunPhase.FAILED
    assert world.launches == [("trainer-0-i1", 1)]


@pytest.mark.parametrize(
    ("activity", "asked"), [("starting", 0), ("restoring", 0), ("training", 2), ("waiting", 2), ("generating", 2)]
)
def test_rollout_nodes_are_requested_once_trainer_can_train(activity: str, asked: int) -> None:
    world = World(boot_s={Role.TRAINER: 1e9})
    for _ in range(3):
        world.tick()
    beat = Trainer("trainer-0-i1", 1, 0, 0, 0, activity, world.now_s)
    events = decide(world.state, replace(world.snapshot(), trainer=beat), world.spec).events
    assert sum(isinstance(event, NodeRequested) for event in events) == asked
    assert (SpecProved() in events) is bool(asked)


@pytest.mark.parametrize(("activity", "step"), [("training", 0), ("starting", 4), (None, 0)])
def test_trainer_that_has_trained_is_not_proved_again(activity: str | None, step: int) -> None:
    """It is in the journal; or no controller was alive while it trained: the store has its last heartbeat."""
    world = World(boot_s={Role.TRAINER: 1e9}, proved=activity is None)
    if activity is not None:
        world.beat = Trainer("trainer-0-i0", 1, 0, step, 10, activity, world.now_s - 600.0)
    for _ in range(3):
        world.tick()
    assert len(world.up(Role.ROLLOUT)) == 2, "both kinds of machine start side by side"


def test_work_slower_than_its_deadline_stops_being_bought() -> None:
    """24 h, two slots. Each machine is given up after 900 s, 1000 s before it would have served."""
    world = World(boot_s={Role.ROLLOUT: 1900.0}, max_steps=10**6)
    bought = world.let_pass(24.0)
    assert len(bought.machines) <= 15
    state = world.state
    assert state.phase in LIVE_RUN
    assert "policies.boot_timeout_s" in state.kinds[KIND].stopped
    assert len(world.of(BuyingStopped)) == 1
    world.boot_s = {Role.ROLLOUT: 5.0}  # it is mended: the next try shows it
    world.let_pass(PROBE_MAX_S / HOUR_S + 0.1)
    assert not world.state.kinds[KIND].stopped
    assert len(world.of(BuyingResumed)) == 1
    assert len(world.up(Role.ROLLOUT)) == 2


def test_launch_slower_than_its_deadline_stops_being_made() -> None:
    world = World(launch_s=1200.0, max_steps=10**6)
    world.let_pass(24.0)
    assert len(world.of(NodeRequested)) <= 15
    assert "policies.boot_timeout_s" in world.state.kinds["trainer on demand"].stopped


def test_slow_machine_within_the_deadline_serves() -> None:
    world = World(launch_s=600.0, boot_s={Role.ROLLOUT: 800.0, Role.TRAINER: 800.0})
    world.run(10**5)
    assert world.state.phase is RunPhase.FINISHED
    assert len(world.launches) == 3


def test_work_that_fails_on_every_machine_is_not_bought_for_ever() -> None:
    world = World(fails={Role.ROLLOUT: 1}, max_steps=10**6)
    assert len(world.let_pass(24.0).machines) <= 15
    assert "its work failed 5 times" in world.state.kinds[KIND].stopped


def test_steady_service_proves_that_a_kind_works_again() -> None:
    world = World(max_steps=10**9, save_steps=10**8)
    until_training(world)
    broken = MachineKind(stopped="3 in a row", broke_in_a_row=REFUSALS, failed_at_s=world.now_s, served=9)
    unserved = replace(broken, unserved_in_a_row=REFUSALS)
    for kind, after_s, resumed in ((broken, 0.0, False), (broken, 1.0, True), (unserved, 1.0, False)):
        state = replace(world.state, kinds={**world.state.kinds, KIND: kind})
        later = replace(world.snapshot(), now_s=world.now_s + WORKS_S + after_s, steady_s=1.0)
        events = decide(state, later, world.spec).events
        assert events == ((BuyingResumed(KIND),) if resumed else ()), "others never serve at all"


@pytest.mark.parametrize(
    ("code", "boot_s", "serves_s", "first"),
    [(1, 5.0, 60.0, 8), (exit_codes.BAD_SPEC, 5.0, 60.0, 8), (1, 800.0, 500.0, 16)],
    ids=["soon", "refused", "later than an hour, for their starts are long"],
)
def test_machines_that_break_soon_stop_being_bought(code: int, boot_s: float, serves_s: float, first: int) -> None:
    """As when the first real requests end the engine: each joins the members, and none does any work."""
    world = World(spec=spec(8), max_steps=10**9, save_steps=10**8)
    until_training(world)
    world.boot_s = {Role.ROLLOUT: boot_s}
    broken, end_s = True, world.now_s + 24 * HOUR_S
    while world.now_s < end_s:
        world.tick()
        for node in world.state.live(Role.ROLLOUT):
            if broken and node.phase is NodePhase.SERVING and world.now_s - node.since_s > serves_s:
                world.exit(node.id, code)
        world.advance(10.0)
    machines = {name for name, _ in world.launches if name.startswith(Role.ROLLOUT)}
    assert len(machines) < first + 12  # the first ones, until it is known how long a start takes, and tries
    assert world.state.kinds[KIND].stopped
    broken = False
    world.let_pass(5.0)
    assert not world.state.kinds[KIND].stopped
    assert len(world.up(Role.ROLLOUT)) == 8


def test_node_that_refuses_run_yaml_fails_the_run_by_name() -> None:
    world = World(fails={Role.ROLLOUT: exit_codes.BAD_SPEC})
    world.run()
    assert world.state.phase is RunPhase.FAILED
    assert "rollout-0-i1 cannot work with this run.yaml; see `grpo-orch logs rollout-0-i1`" in world.state.reason
    assert len(world.launches) <= 3
    assert world.machines == {}


def test_first_unfit_rollout_machine_is_replaced() -> None:
    world = World(spec(1), proved=True, max_steps=10**6)
    world.until(lambda it: bool(it.state.live(Role.ROLLOUT)))
    world.tick()
    world.exit("rollout-0-i1", exit_codes.UNFIT_MACHINE)
    world.let_pass(0.1)
    assert world.state.phase is RunPhase.TRAINING
    assert world.up(Role.ROLLOUT) == ["rollout-0-i2"]
    assert [attempt for node, attempt in world.launches if node == "rollout-0-i1"] == [1]  # not once more on it


def test_large_fleet_is_requested_once_one_machine_has_served() -> None:
    world = World(spec(8), proved=True, max_steps=10**6)
    world.until(lambda it: bool(it.up(Role.ROLLOUT)), dt_s=0.25)
    assert len(world.launches) == 1 + 3
    world.advance(20.0)
    world.wait(1.0, 0.25)
    assert len(world.launches) == 1 + 8


@pytest.mark.parametrize("replicas", [1, 8])
def test_third_unfit_rollout_machine_ends_the_run(replicas: int) -> None:
    world = World(spec(replicas), proved=True, fails={Role.ROLLOUT: exit_codes.UNFIT_MACHINE})
    world.run()
    assert world.state.phase is RunPhase.FAILED
    assert "3 machines in a row cannot work with this run.yaml; see `grpo-orch logs rollout-" in world.state.reason
    assert len(world.launches) == 1 + 3


def test_refusal_by_one_machine_while_others_serve_ends_nothing() -> None:
    world = until_training(World(max_steps=10**6))
    world.lose("rollout-1-i1")
    world.tick()
    world.advance()
    world.exit("rollout-1-i2", exit_codes.BAD_SPEC)
    world.let_pass(0.1)
    assert world.state.phase is RunPhase.TRAINING
    assert world.up(Role.ROLLOUT) == ["rollout-0-i1", "rollout-1-i3"]


def test_refusal_right_after_a_resume_ends_no_working_run() -> None:
    world = until_training(World(max_steps=10**6))
    world.journal((RunMoved(RunPhase.STOPPING, "asked to stop"), RunMoved(RunPhase.STARTING, "resumed")))
    world.exit("rollout-0-i1", exit_codes.BAD_SPEC)
    world.let_pass(0.1)
    assert world.state.phase is not RunPhase.FAILED


def test_rollout_machines_leave_and_return_with_the_trainer() -> None:
    world = until_training(World(spec(8), max_steps=10**6))
    world.lose("trainer-0-i1")
    world.refusing = True
    bought = world.let_pass(11.0)
    assert bought.hours < 8 * (IDLE_MIN_S + 60) / HOUR_S
    assert world.machines == {}
    world.refusing = False
    world.let_pass(0.1)
    assert len(world.up(Role.ROLLOUT)) == 8


def test_returning_capacity_is_found_soon_by_all() -> None:
    world = until_training(World(spec(4), max_steps=10**6))
    world.refusing_rollouts = True
    for node in world.up(Role.ROLLOUT):
        world.lose(node)
    world.let_pass(2.0, dt_s=1.0)
    assert "nothing to be had" in world.state.kinds[KIND].stopped
    assert len(world.of(NodeRequested)) < 2 * HOUR_S / 15 + 30  # one at a time
    world.refusing_rollouts = False
    world.let_pass((BACK_OFF_MAX_EXTRA_S + 60.0) / HOUR_S, dt_s=1.0)  # the run had parked
    assert len(world.up(Role.ROLLOUT)) == 4


def test_resume_after_a_repair_does_not_wait() -> None:
    world = World(boot_s={Role.ROLLOUT: 1900.0}, max_steps=10**6)
    world.let_pass(2.0)
    assert world.state.kinds[KIND].stopped
    world.fails[Role.TRAINER] = exit_codes.BAD_SPEC
    for node in world.up(Role.TRAINER):
        world.exit(node, exit_codes.BAD_SPEC)
    world.run()
    world.fails.clear()
    world.boot_s.clear()
    world.resume()
    world.let_pass(0.05)
    assert len(world.up(Role.ROLLOUT)) == 2


@pytest.mark.parametrize(
    ("kind", "needed", "waits"),
    [
        (MachineKind(unserved_in_a_row=REFUSALS), True, [PROBE_FIRST_S, 2 * PROBE_FIRST_S, 4 * PROBE_FIRST_S]),
        (MachineKind(refused_in_a_row=REFUSALS), True, [2, 4, 8]),
        (MachineKind(refused_in_a_row=9, unserved_in_a_row=2), False, [2, 4, 8]),
    ],
)
def test_tries_come_at_growing_intervals(kind: MachineKind, needed: bool, waits: list[float]) -> None:
    assert [probe_wait_s(replace(kind, probes=n), needed) for n in range(3)] == waits
    most = PROBE_MAX_S if kind.never_serves else 15 if needed else 120
    assert probe_wait_s(replace(kind, probes=50), needed) == most


def lacks(world: World) -> list[tuple[str, float]]:
    found = [(event, at) for _, at, events in world.history for event in events]
    return [(event.role, at - event.since_s) for event, at in found if isinstance(event, CapacityShortage)]


@pytest.mark.parametrize("role", Role)
def test_hour_without_a_machine_is_reported_once(role: Role) -> None:
    stays = replace(spec(), grpo={"save_strategy": "no"})  # others park, which says it
    world = World(stays, max_steps=10**6, refusing=role is Role.TRAINER, refusing_rollouts=role is Role.ROLLOUT)
    world.wait(3500.0, 60.0)
    assert lacks(world) == []
    world.wait(4 * 3600.0, 60.0)
    ((who, after_s),) = lacks(world)
    assert who == role
    assert 3600.0 <= after_s < 3700.0
    world.refusing = world.refusing_rollouts = False
    world.wait(3600.0, 60.0)
    assert not any(topic.startswith("capacity") for topic in world.state.reports)
    world.refusing_rollouts = True
    for node in world.up(Role.ROLLOUT):
        world.lose(node)
    world.wait(3 * 3600.0, 60.0)
    assert [who for who, _ in lacks(world)] == [role, Role.ROLLOUT]


def test_hours_without_a_controller_are_no_shortage() -> None:
    world = World(max_steps=10**6, refusing=True)
    world.wait(1800.0, 60.0)
    world.now_s += 10**5
    looked = world.snapshot
    world.take_over()
    steered_from_s = world.now_s
    world.snapshot = lambda: replace(looked(), steady_s=world.now_s - steered_from_s)  # type: ignore[method-assign]
    world.wait(3000.0, 60.0)
    assert lacks(world) == []
    world.wait(1200.0, 60.0)
    assert len(lacks(world)) == 1


def test_four_fifths_of_the_budget_are_reported_once() -> None:
    world = priced(capped(100.0), max_steps=10**6)
    world.run(10**5)
    neared = world.of(BudgetNeared)
    assert [event.usd for event in neared] == [100.0]
    assert 80.0 <= neared[0].spent_usd < 81.0
