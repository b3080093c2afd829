"""The size of the fleet as the controller steers it: slowly after the optimum, and those too many go back."""

from __future__ import annotations

from dataclasses import replace

from grpo_orch.policies.control.decide import decide
from grpo_orch.policies.costs.steps import StepShape
from grpo_orch.policies.fleet.explain import explain
from grpo_orch.policies.fleet.objective import rollouts_wanted
from grpo_orch.policies.fleet.plan import SIZE_SETTLE_S
from grpo_orch.policies.fleet.reconcile import RETURN_WAIT_MAX_S
from grpo_orch.policies.model.events import FleetSized, MachineBought, NodeMoved
from grpo_orch.policies.model.pools import Pool, PoolOffer
from grpo_orch.policies.model.spec import Replicas
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Role
from grpo_orch.policies.tick.snapshot import Launch, Machine, Snapshot, Terminate
from tests.stand_ins.world import World, on_two_markets, spec, until_training

FLAT = StepShape(60.0, 30.0)  # at 3.96 and 2.38 USD/h 0.9 nodes are cheapest
STEEP = StepShape(60.0, 1200.0)  # 5.8


def priced(world: World) -> World:
    world = until_training(world)
    prices = {Role.TRAINER: 3.96, Role.ROLLOUT: 2.38}
    bought = [
        MachineBought(node.id, Market.SPOT, "", prices[node.role], 8.0) for node in world.state.nodes.values()
    ]
    world.journal(tuple(bought))
    return world


def looked(world: World, shape: StepShape | None, activity: str = "training") -> Snapshot:
    assert world.beat is not None
    beat = replace(world.beat, activity=activity, beat_at_s=world.now_s)
    return replace(world.snapshot(), step_shape=shape, trainer=beat)


def tick(world: World, shape: StepShape, activity: str = "training") -> list[object]:
    decision = decide(world.state, looked(world, shape, activity), world.spec)
    world.journal(decision.events)
    for action in decision.actions:
        world.act(action)
    return list(decision.events)


def test_unprofitable_node_is_returned_between_generations() -> None:
    world = priced(World(spec(2), max_steps=10**6))
    events = tick(world, FLAT, "generating")
    sized = [event for event in events if isinstance(event, FleetSized)]
    assert [(event.nodes, event.before) for event in sized] == [(1, 2)]
    assert "3.96" in sized[0].reason
    assert not any(isinstance(event, NodeMoved) for event in events)
    (moved,) = (event for event in tick(world, FLAT) if isinstance(event, NodeMoved))
    assert moved.phase is NodePhase.TERMINATING
    assert "cheapest" in moved.reason
    for _ in range(20):
        tick(world, FLAT)
        world.advance()
    assert len(world.up(Role.ROLLOUT)) == len(world.state.live(Role.ROLLOUT)) == 1


def test_always_generating_trainer_does_not_keep_it_forever() -> None:
    world = priced(World(spec(2), max_steps=10**6))
    tick(world, FLAT, "generating")
    world.now_s += RETURN_WAIT_MAX_S + 1
    decision = decide(world.state, looked(world, FLAT, "generating"), world.spec)
    assert sum(isinstance(action, Terminate) for action in decision.actions) == 1


def test_fleet_grows_with_generation_after_a_delay() -> None:
    world = priced(World(spec(3), max_steps=10**6))
    tick(world, FLAT)
    assert rollouts_wanted(world.state, world.spec) == 1
    assert not any(isinstance(event, FleetSized) for event in tick(world, STEEP))
    world.now_s += SIZE_SETTLE_S + 1
    tick(world, STEEP)
    assert rollouts_wanted(world.state, world.spec) == 3
    for _ in range(20):
        tick(world, STEEP)
        world.advance()
    assert len(world.up(Role.ROLLOUT)) == 3


def test_fleet_is_maximal_without_prices_or_measured_steps() -> None:
    world = until_training(World(spec(2), max_steps=10**6))
    assert not any(isinstance(event, FleetSized) for event in tick(world, FLAT))
    world = priced(World(spec(2), max_steps=10**6))
    assert decide(world.state, looked(world, None), world.spec).events == ()
    assert rollouts_wanted(world.state, world.spec) == 2


def test_lost_node_is_replaced_up_to_that_size_only() -> None:
    world = priced(World(spec(4), max_steps=10**6))
    tick(world, FLAT)
    for _ in range(20):
        tick(world, FLAT)
        world.advance()
    (left,) = world.up(Role.ROLLOUT)
    world.lose(left)
    for _ in range(40):
        tick(world, FLAT)
        world.advance()
    assert len(world.up(Role.ROLLOUT)) == 1


LISTED = {"cheap": 1.0, "dear": 4.0}  # USD an hour


class OneCheap(World):
    """The cheap zone has one machine for rollouts, the dear one many."""

    def refuses(self, launch: Launch) -> bool:
        there = [pool for name, pool in self.pools.items() if name in self.machines and name != launch.node]
        is_full = any(pool is not None and (pool.zone, pool.market) == ("cheap", Market.SPOT) for pool in there)
        return launch.pool is not None and launch.pool.zone == "cheap" and is_full

    def report(self, machine: Machine) -> Machine:
        seen = super().report(machine)
        is_spot = seen.pool is not None and seen.pool.market is Market.SPOT
        return replace(seen, price_usd_per_h=LISTED[seen.pool.zone]) if seen.pool and is_spot else seen


def test_fleet_does_not_grow_for_an_unavailable_price() -> None:
    """One node is cheap, the next costs four times as much: it is not bought at the average, and again and again
    once that one is back."""
    base = spec(4)
    rollout = replace(base.rollout, resources={"use_spot": True}, replicas=Replicas(min=1, max=4))
    places = [Pool("aws", "r", zone, "g", "L4:1", Market.SPOT) for zone in LISTED]
    offers = [PoolOffer(Role.ROLLOUT, pool, LISTED[pool.zone]) for pool in places]
    offers.append(PoolOffer(Role.TRAINER, replace(places[1], market=Market.ON_DEMAND), 4.0))
    steps = StepShape(50.0, 50.0)
    usual = on_two_markets(no_spot=False, shape=steps, offers=tuple(offers))
    world = OneCheap(replace(base, rollout=rollout), **usual)
    world.let_pass(3.0)
    bought = [event.node for event in world.of(MachineBought) if event.node.startswith(Role.ROLLOUT)]
    assert len(bought) <= 2
    assert len(world.up(Role.ROLLOUT)) == 1


def test_smaller_fleet_is_priced_without_its_dearest_node() -> None:
    world = until_training(World(spec(2), max_steps=10**6))
    usd = {"trainer-0-i1": 4.0, "rollout-0-i1": 1.0, "rollout-1-i1": 4.0}
    bought = [MachineBought(node, Market.SPOT, "", usd[node], 0.0) for node in world.state.nodes]
    world.journal(tuple(bought))
    explained = explain(world.state, looked(world, StepShape(50.0, 50.0)), world.spec)
    assert explained.plan.startswith("1 on spot: 0.139 USD a step")  # 5 USD an hour for 100 s
