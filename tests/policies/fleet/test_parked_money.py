"""Under a cap an hour a parked run goes on with what it went on with before: what its machines really cost."""

from __future__ import annotations

import pytest

from grpo_orch.policies.model.events import BudgetReached
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.vocabulary import Role, RunPhase
from tests.stand_ins.world import ON_DEMAND, World, capped, two_markets

CAP = 9.0  # USD an hour: the trainer at its price, 4, and a node on demand at the most that it may cost, 5


def parked(most: dict[str, float], run: RunSpec | None = None) -> World:
    world = dried_up(most, run or capped(usd_per_h=CAP, max_replicas=1))
    assert world.moves[-1] is RunPhase.PARKED
    assert world.of(BudgetReached) == []
    return world


def dried_up(most: dict[str, float], run: RunSpec) -> World:
    """A run that has trained with a node on demand, and can have none any more."""
    world = two_markets(run, most=most)
    world.let_pass(1.0)
    assert world.steps > 1000
    world.dry_up()
    world.let_pass(2.0)
    return world


@pytest.mark.parametrize("spot", [2.0, 6.0, 10.0])
@pytest.mark.parametrize("trainer", [5.0, 6.0, 9.0])
def test_a_parked_run_goes_on_with_prices_that_fit_though_what_is_listed_does_not(
    spot: float, trainer: float
) -> None:
    world = parked({"trainer on demand": trainer, "rollout on spot": spot, ON_DEMAND: 5.0})
    steps, world.refusing_rollouts = world.steps, False
    world.let_pass(1.0)
    assert RunPhase.PAUSED not in world.moves
    assert world.state.phase is RunPhase.TRAINING
    assert world.steps - steps > 1000
    assert len([one for one in world.launches if one[0].startswith(Role.TRAINER)]) == 2


def test_a_trainer_that_is_lost_comes_before_nodes_that_leave_no_room_for_what_it_may_cost() -> None:
    world = two_markets(
        capped(usd_per_h=CAP, max_replicas=1),
        most={"trainer on demand": 9.0, "rollout on spot": 2.0, ON_DEMAND: 5.0},
    )
    world.let_pass(1.0)
    for node in world.up(Role.TRAINER):
        world.lose(node)
    steps = world.steps
    world.let_pass(1.0)
    assert world.state.phase is RunPhase.TRAINING
    assert world.steps - steps > 1000
    assert len(world.stood_in) == 2


def test_a_trainer_that_costs_what_is_listed_ends_in_a_pause_and_is_bought_once() -> None:
    world = parked({"trainer on demand": 5.0, "rollout on spot": 10.0, ON_DEMAND: 5.0})
    world.most = {"trainer on demand": 9.5, "rollout on spot": 10.0, ON_DEMAND: 5.0}
    world.refusing_rollouts = False
    world.let_pass(1.0)
    assert world.state.phase is RunPhase.PAUSED
    assert len([one for one in world.launches if one[0].startswith(Role.TRAINER)]) == 1


def test_what_no_return_of_a_node_makes_room_for_under_the_whole_cap_ends_the_run() -> None:
    run = capped(usd=4.5, usd_per_h=CAP, max_replicas=1)
    world = two_markets(run, most={"trainer on demand": 5.0, "rollout on spot": 2.0, ON_DEMAND: 5.0})
    world.let_pass(2.0)
    assert world.state.phase is RunPhase.PAUSED
    assert len(world.of(BudgetReached)) == 1


@pytest.mark.parametrize("left_usd", [2.1, 2.5, 3.9])
def test_a_parked_run_without_the_money_to_go_on_ends_and_buys_nothing_in_vain(left_usd: float) -> None:
    most = {"trainer on demand": 9.0, "rollout on spot": 2.0, ON_DEMAND: 5.0}
    rich = dried_up(most, capped(usd=100.0, usd_per_h=CAP, max_replicas=1))
    spent = rich.spent
    # With the trainer at what it cost there would be enough for a node, and with what it may cost there is not.
    world = dried_up(most, capped(usd=spent + left_usd, usd_per_h=CAP, max_replicas=1))
    assert RunPhase.PARKED in world.moves
    bought, world.refusing_rollouts = len(world.launches), False
    world.let_pass(1.0)
    assert world.state.phase is RunPhase.PAUSED
    assert world.launches[bought:] == []
