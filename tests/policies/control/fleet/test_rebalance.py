"""Rebalance recommendations: journalled once, counted for the pool, and considered when a node must go."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from policies.control.snapshot import Action, Launch, Snapshot
from policies.fleet.how_many import StepShape
from policies.model.events import NodeMoved, NodeRequested, RebalanceRecommended
from policies.model.fold import NOTICED
from policies.model.pools import Pool, PoolOffer
from policies.model.vocabulary import Market, NodePhase, Role, role_of
from tests.stand_ins.world import World, spec

BOOT_S = 300.0
TRAINERS = Pool("aws", "r", "ra", "g6.xlarge", "L4:1", Market.ON_DEMAND)
NODES = Pool("aws", "r", "ra", "g6.xlarge", "L4:1", Market.SPOT)
OFFERS = PoolOffer(Role.TRAINER, TRAINERS, 4.0), PoolOffer(Role.ROLLOUT, NODES, 1.2)
FOR_SIX_NODES, FOR_TWO_NODES = StepShape(60.0, 600.0), StepShape(60.0, 30.0)


@dataclass
class Recommended(World):
    """Each machine comes where it is requested. `recommended` names those with a rebalance recommendation."""

    proved: bool = True
    max_steps: int = 10**6
    shape: StepShape = FOR_SIX_NODES
    recommended: set[str] = field(default_factory=set)

    def snapshot(self) -> Snapshot:
        seen = super().snapshot()
        machines = {
            name: replace(machine, rebalance_recommended=name in self.recommended)
            for name, machine in (seen.machines or {}).items()
        }
        trainer = None if seen.trainer is None else replace(seen.trainer, activity="training")
        return replace(seen, machines=machines, pools=OFFERS, step_shape=self.shape, trainer=trainer)

    def act(self, action: Action) -> None:
        super().act(action)
        if isinstance(action, Launch) and (machine := self.machines.get(action.node)) and not machine.pool:
            price = 4.0 if role_of(action.node) is Role.TRAINER else 1.2
            self.machines[action.node] = replace(
                machine, market=action.market, pool=action.pool, price_usd_per_h=price, on_demand_usd_per_h=4.0
            )

    def let_pass(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.tick()
            self.advance(5.0)
        self.tick()

    @property
    def serving(self) -> list[str]:
        return [node.id for node in self.state.live(Role.ROLLOUT) if node.phase is NodePhase.SERVING]


def serving(nodes: int) -> Recommended:
    world = Recommended(spec=spec(nodes), boot_s={Role.ROLLOUT: BOOT_S})
    world.let_pass(3 * BOOT_S)
    assert len(world.serving) == nodes
    return world


def test_recommendation_is_journalled_once_and_buys_nothing() -> None:
    world = serving(1)
    (node,) = world.serving
    requested = len(world.of(NodeRequested))
    world.recommended.add(node)
    world.let_pass(60.0)
    world.take_over()
    world.let_pass(60.0)
    (event,) = world.of(RebalanceRecommended)
    assert event.node == node
    assert "of 0 machines with one in aws/r/ra g6.xlarge L4:1 spot, the cloud took 0" in event.reason
    assert len(world.of(NodeRequested)) == requested
    assert world.serving == [node]


def test_pool_record_counts_recommendations_and_later_losses() -> None:
    world = serving(1)
    for _ in range(2):
        world.recommended.update(world.serving)
        world.let_pass(60.0)
        world.lose(world.serving[0])
        world.let_pass(2 * BOOT_S)
    record = world.state.pools[str(NODES)]
    assert (record.rebalances, record.rebalances_taken) == (2, 2)
    assert "of 1 machines" in world.of(RebalanceRecommended)[-1].reason
    assert "the cloud took 1" in world.of(RebalanceRecommended)[-1].reason


def test_recommendation_with_a_notice_is_not_journalled() -> None:
    world = serving(1)
    (node,) = world.serving
    world.recommended.add(node)
    world.machines[node] = replace(world.machines[node], notice=True)
    world.let_pass(60.0)
    assert world.of(RebalanceRecommended) == []
    assert [move.reason for move in world.of(NodeMoved) if move.phase is NodePhase.DRAINING] == [NOTICED]


def test_surplus_node_with_a_recommendation_is_returned_first() -> None:
    world = serving(3)
    recommended = world.serving[1]
    world.recommended.add(recommended)
    world.shape = FOR_TWO_NODES
    world.let_pass(900.0)
    returned = [move.node for move in world.of(NodeMoved) if move.phase is NodePhase.TERMINATING]
    assert returned == [recommended]
    assert len(world.serving) == 2
    record = world.state.pools[str(NODES)]
    assert (record.rebalances, record.rebalances_taken) == (1, 0)
