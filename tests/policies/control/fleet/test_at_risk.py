"""Machines that their cloud may soon take, as it says: told, remembered, and replaced where that pays."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from policies.control.snapshot import Action, Launch, Snapshot
from policies.fleet.how_many import StepShape
from policies.model.events import BudgetRefused, BuyingStopped, NodeMoved, NodeRequested, RiskTold
from policies.model.folding.pool_fold import NOTICED
from policies.model.pool_record import AT_RISK_S
from policies.model.pools import Pool, PoolOffer
from policies.model.spec import Budget
from policies.model.vocabulary import Market, NodePhase, Role, RunPhase, role_of
from tests.stand_ins.world import World, spec

BOOT_S = 300.0
SHAPE = StepShape(60.0, 600.0)  # at 4 and 1.2 USD/h 5.8 nodes are cheapest
DEAREST = {"trainer on demand": 4.0, "rollout on spot": 1.3}


def pool(zone: str, market: Market = Market.SPOT) -> Pool:
    return Pool("aws", "r", f"r{zone}", "g6.xlarge", "L4:1", market)


OFFERS = (
    PoolOffer(Role.TRAINER, pool("a", Market.ON_DEMAND), 4.0),
    *(PoolOffer(Role.ROLLOUT, pool(zone), 1.2 + place / 100) for place, zone in enumerate("abc")),
)


@dataclass
class Said(World):
    """Machines come where they are asked for; what its cloud has said of each is in `at_risk`, for good."""

    proved: bool = True
    max_steps: int = 10**6
    offers: tuple[PoolOffer, ...] = OFFERS
    shape: StepShape | None = SHAPE
    at_risk: set[str] = field(default_factory=set)
    activity: str = "training"
    boot_s: dict[Role, float] = field(default_factory=lambda: {Role.ROLLOUT: BOOT_S})

    def snapshot(self) -> Snapshot:
        seen = super().snapshot()
        machines = {
            name: replace(one, at_risk=name in self.at_risk) for name, one in (seen.machines or {}).items()
        }
        beat = None if seen.trainer is None else replace(seen.trainer, activity=self.activity)
        return replace(
            seen, machines=machines, pools=self.offers, prices=DEAREST, step_shape=self.shape, trainer=beat
        )

    def act(self, action: Action) -> None:
        super().act(action)
        if isinstance(action, Launch) and (machine := self.machines.get(action.node)) and not machine.pool:
            price = 4.0 if role_of(action.node) is Role.TRAINER else 1.2
            self.machines[action.node] = replace(
                machine, market=action.market, pool=action.pool, price_usd_per_h=price, on_demand_usd_per_h=4.0
            )

    def let_pass(self, seconds: float, dt_s: float = 5.0) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.tick()
            self.advance(dt_s)
        self.tick()

    @property
    def early(self) -> list[NodeRequested]:
        return [event for event in self.of(NodeRequested) if event.relieves]

    @property
    def serving(self) -> list[str]:
        return [node.id for node in self.state.live(Role.ROLLOUT) if node.phase is NodePhase.SERVING]

    def learn(self, lost: int) -> None:
        """So many machines that were at risk are lost two minutes later, and their successors serve."""
        for _ in range(lost):
            node = self.serving[0]
            self.at_risk.add(node)
            self.let_pass(120.0)
            self.lose(node)
            self.let_pass(BOOT_S + AT_RISK_S)


def serving(nodes: int = 1, **more: Any) -> Said:
    world = Said(spec=spec(nodes), **more)
    world.let_pass(3 * BOOT_S)
    assert len(world.serving) == nodes
    return world


def learnt(nodes: int = 1, **more: Any) -> Said:
    """One of which the newest machine at risk was lost in the pool where the next one is."""
    world = serving(nodes, offers=OFFERS[:2], **more)
    world.learn(2)
    world.offers = OFFERS
    world.let_pass(AT_RISK_S)
    assert world.early == []
    return world


def test_a_word_is_journalled_once_with_what_the_pool_has_shown_and_by_itself_buys_nothing() -> None:
    world = serving()
    (node,) = world.serving
    world.at_risk.add(node)
    world.let_pass(2 * AT_RISK_S)
    (told,) = world.of(RiskTold)
    assert told.node == node
    assert told.share == pytest.approx(0.095, abs=0.001)
    assert "of 0 told so in aws/r/ra g6.xlarge L4:1 spot 0 were taken within 30 min; 0.10" in told.reason
    assert "another now saves" in told.reason
    assert world.early == []
    world.take_over()
    world.let_pass(60.0)
    assert len(world.of(RiskTold)) == 1, "the next controller knows it"


def test_a_pool_whose_machines_at_risk_are_lost_has_another_bought_elsewhere_before_the_loss() -> None:
    world = learnt()
    (node,) = world.serving
    world.at_risk.add(node)
    world.let_pass(60.0)
    (early,) = world.early
    assert (early.relieves, early.slot) == (node, world.state.nodes[node].slot)
    assert early.pool != world.state.nodes[node].pool
    assert f"{node} is at risk; another now saves" in early.reason
    assert world.serving == [node], "it works until the other does"
    world.activity = "generating"
    world.let_pass(2 * BOOT_S)
    assert world.serving == [early.node]
    (moved,) = (one for one in world.of(NodeMoved) if (one.node, one.phase) == (node, NodePhase.TERMINATING))
    assert f"{early.node} serves in its place" in moved.reason


def test_a_loss_or_notice_before_the_other_serves_buys_no_third() -> None:
    for noticed in (False, True):
        world = learnt()
        (node,) = world.serving
        world.at_risk.add(node)
        world.let_pass(60.0)
        (early,) = world.early
        if noticed:
            world.machines[node] = replace(world.machines[node], notice=True)
        else:
            world.lose(node)
        before = len(world.of(NodeRequested))
        world.let_pass(2 * BOOT_S)
        assert early.node in world.serving
        assert len(world.of(NodeRequested)) == before


def test_words_that_nothing_follows_are_heeded_no_more() -> None:
    world = learnt()
    for _ in range(12):
        world.at_risk.update(world.serving)
        world.let_pass(2 * AT_RISK_S)
    some = len(world.early)
    assert 1 <= some <= 8
    for _ in range(5):
        world.at_risk.update(world.serving)
        world.let_pass(2 * AT_RISK_S)
    assert len(world.early) == some


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_cloud_that_says_it_of_every_machine_at_once_starts_no_chain(nodes: int) -> None:
    """Each machine is said to be at risk from its first moment on, for ever."""
    world = learnt(nodes)
    for _ in range(12 * 60):
        world.at_risk.update(world.machines)
        world.let_pass(60.0, dt_s=20.0)
        beyond = [one for one in world.state.live(Role.ROLLOUT) if one.phase is not NodePhase.DRAINING]
        assert len(beyond) <= 2 * nodes
    assert len({event.relieves for event in world.early}) == len(world.early), "each is relieved once"
    assert len(world.early) <= nodes * len(OFFERS[1:])
    assert len(world.serving) == nodes


def test_where_each_pool_has_one_at_risk_or_rests_no_other_is_bought() -> None:
    world = learnt()
    world.offers = OFFERS[:2]
    (node,) = world.serving
    world.at_risk.add(node)
    world.let_pass(300.0)
    assert world.early == []
    assert "no other pool is free of such words" in world.of(RiskTold)[-1].reason


def test_there_is_no_money_for_it_and_that_neither_stops_the_run_nor_is_told_as_a_refusal() -> None:
    world = learnt()
    world.spec = replace(world.spec, budget=Budget(usd_per_h=6.0))  # the trainer and one node take 5.2
    (node,) = world.serving
    world.at_risk.add(node)
    world.let_pass(300.0)
    assert world.early == []
    assert world.of(BudgetRefused) == []
    assert world.state.phase is RunPhase.TRAINING
    assert "6.41 USD an hour are more than `budget.usd_per_h`" in world.of(RiskTold)[-1].reason


def test_one_that_comes_early_takes_no_room_from_a_trainer_that_is_lost_meanwhile() -> None:
    """The trainer's successor costs more: with one node it fits under the cap for the hour, with both not."""
    world = learnt()
    world.spec = replace(world.spec, budget=Budget(usd_per_h=6.5))
    (node,) = world.serving
    world.at_risk.add(node)
    world.let_pass(60.0)
    assert len(world.early) == 1
    world.offers = (replace(OFFERS[0], usd_per_h=4.2), *OFFERS[1:])
    world.lose("trainer-0-i1")
    world.let_pass(120.0)
    assert [one.id for one in world.state.trainer_machines] == ["trainer-0-i2"]
    assert world.state.phase is RunPhase.TRAINING
    assert world.serving == [node]


def test_another_that_is_refused_is_not_asked_for_again_and_the_fleet_lacks_nothing_for_it() -> None:
    world = learnt()
    (node,) = world.serving
    world.at_risk.add(node)
    world.refusing_rollouts = True
    world.let_pass(600.0)
    assert len(world.early) == 1
    assert world.of(BuyingStopped) == []
    assert world.state.spot_short_since_s is None or world.state.spot_short_since_s < world.now_s - AT_RISK_S
    assert world.state.slots[world.state.nodes[node].slot].refusals_in_a_row == 0
    world.refusing_rollouts = False
    world.let_pass(600.0)
    assert world.serving == [node]


def test_a_machine_that_boots_is_replaced_once_it_serves_if_at_all() -> None:
    world = learnt()
    world.offers = OFFERS[:2]
    world.lose(world.serving[0])
    world.let_pass(60.0)
    world.offers = OFFERS
    (booting,) = (node.id for node in world.state.live(Role.ROLLOUT))
    world.at_risk.add(booting)
    world.let_pass(60.0)
    assert world.of(RiskTold)[-1].node == booting
    assert world.early == []
    world.let_pass(BOOT_S)
    assert [event.relieves for event in world.early] == [booting]


def test_with_a_notice_in_the_same_look_it_says_nothing_more() -> None:
    world = serving()
    (node,) = world.serving
    world.at_risk.add(node)
    world.machines[node] = replace(world.machines[node], notice=True)
    world.let_pass(60.0)
    assert world.of(RiskTold) == []
    assert [one.reason for one in world.of(NodeMoved) if one.phase is NodePhase.DRAINING] == [NOTICED]


def test_the_trainer_is_told_of_and_not_replaced() -> None:
    world = learnt()
    world.at_risk.add("trainer-0-i1")
    world.let_pass(300.0)
    assert "only rollout nodes on spot" in world.of(RiskTold)[-1].reason
    assert world.early == []


def test_of_a_zone_that_is_at_risk_as_a_whole_as_many_are_replaced_as_pay() -> None:
    """Where all of four go at once a step stands still, and where one of four goes it takes a little longer."""
    one, all_ = (learnt(4, shape=StepShape(60.0, 240.0)) for _ in range(2))
    (place,) = {node.pool for node in all_.state.live(Role.ROLLOUT)}
    assert place == pool("a")
    one.at_risk.add(one.serving[0])
    all_.at_risk.update(all_.serving)
    for world in (one, all_):
        world.let_pass(60.0)
    assert len(one.early) < len(all_.early) < 4


def test_of_too_many_those_at_risk_go_first() -> None:
    world = serving(3)
    doubtful = world.serving[1]
    world.at_risk.add(doubtful)
    world.shape = StepShape(60.0, 30.0)
    world.let_pass(900.0)
    gone = [one.node for one in world.of(NodeMoved) if one.phase is NodePhase.TERMINATING]
    assert gone == [doubtful]
    assert len(world.serving) == 2
