"""Rebalance recommendations: journalled once, counted for the pool, and considered when a node must go."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from grpo_orch.policies.costs.steps import StepShape
from grpo_orch.policies.model.events import NodeMoved, NodeRequested, RebalanceRecommended
from grpo_orch.policies.model.fold import PREEMPTION_NOTICE
from grpo_orch.policies.model.pools import Pool, PoolOffer
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Role
from grpo_orch.policies.tick.snapshot import Snapshot
from tests.stand_ins.world import World, on_two_markets, spec

BOOT_S = 300.0
TRAINERS = Pool("aws", "r", "ra", "g6.xlarge", "L4:1", Market.ON_DEMAND)
NODES = Pool("aws", "r", "ra", "g6.xlarge", "L4:1", Market.SPOT)
OFFERS = PoolOffer(Role.TRAINER, TRAINERS, 4.0), PoolOffer(Role.ROLLOUT, NODES, 1.0)
FOR_SIX_NODES, FOR_TWO_NODES = StepShape(60.0, 600.0), StepShape(60.0, 30.0)


@dataclass
class Recommended(World):
    """`recommended` names the machines with a rebalance recommendation."""

    recommended: set[str] = field(default_factory=set)

    def snapshot(self) -> Snapshot:
        seen = super().snapshot()
        machines = {
            name: replace(machine, rebalance_recommended=name in self.recommended)
            for name, machine in (seen.machines or {}).items()
        }
        return replace(
            seen, machines=machines, trainer=seen.trainer and replace(seen.trainer, activity="training")
        )

    @property
    def serving(self) -> list[str]:
        return [node.id for node in self.state.live(Role.ROLLOUT) if node.phase is NodePhase.SERVING]


def serving(nodes: int) -> Recommended:
    offered = {"offers": OFFERS, "most": None, "no_spot": False, "shape": FOR_SIX_NODES, "pace_s": 5.0}
    world = Recommended(spec(nodes), **on_two_markets(**offered, boot_s={Role.ROLLOUT: BOOT_S}))
    world.wait(3 * BOOT_S)
    assert len(world.serving) == nodes
    return world


def test_recommendation_is_journalled_once_and_buys_nothing() -> None:
    world = serving(1)
    (node,) = world.serving
    requested = len(world.of(NodeRequested))
    world.recommended.add(node)
    world.wait(60.0)
    world.take_over()
    world.wait(60.0)
    (event,) = world.of(RebalanceRecommended)
    assert event.node == node
    assert "the cloud preempted 0 of 0 earlier machines with one in aws/r/ra g6.xlarge L4:1 spot" in event.reason
    assert len(world.of(NodeRequested)) == requested
    assert world.serving == [node]


def test_pool_record_counts_recommendations_and_later_losses() -> None:
    world = serving(1)
    for _ in range(2):
        world.recommended.update(world.serving)
        world.wait(60.0)
        world.lose(world.serving[0])
        world.wait(2 * BOOT_S)
    record = world.state.pools[str(NODES)]
    assert (record.rebalances, record.rebalances_preempted) == (2, 2)
    assert "the cloud preempted 1 of 1 earlier machines" in world.of(RebalanceRecommended)[-1].reason


def test_recommendation_with_a_notice_is_not_journalled() -> None:
    world = serving(1)
    (node,) = world.serving
    world.recommended.add(node)
    world.notice(node)
    world.wait(60.0)
    assert world.of(RebalanceRecommended) == []
    assert [move.reason for move in world.of(NodeMoved) if move.phase is NodePhase.DRAINING] == [PREEMPTION_NOTICE]


def test_surplus_node_with_a_recommendation_is_returned_first() -> None:
    world = serving(3)
    recommended = world.serving[1]
    world.recommended.add(recommended)
    world.shape = FOR_TWO_NODES
    world.wait(900.0)
    returned = [move.node for move in world.of(NodeMoved) if move.phase is NodePhase.TERMINATING]
    assert returned == [recommended]
    assert len(world.serving) == 2
    record = world.state.pools[str(NODES)]
    assert (record.rebalances, record.rebalances_preempted) == (1, 0)
