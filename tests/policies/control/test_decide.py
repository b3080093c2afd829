"""The controller's decisions, as stories; random ones are in `test_controlled_scenarios`."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from grpo_orch.policies.control.decide import BUSY_S, BUSY_TICK_S, STEADY_TICK_S, decide
from grpo_orch.policies.model.breaker import back_off_s
from grpo_orch.policies.model.events import (
    Event,
    MachineBought,
    NodeMoved,
    NodeRequested,
    StoreCaughtUp,
    StoreSlowed,
)
from grpo_orch.policies.model.vocabulary import MachineState, Market, NodePhase, Refusal, Role, RunPhase
from grpo_orch.policies.tick.snapshot import (
    HEARTBEAT_FRESH_S,
    Command,
    Confirm,
    Decision,
    Gateway,
    Launch,
    LaunchRefused,
    Machine,
    Terminate,
)
from tests.stand_ins.world import World, until_training


def test_undisturbed_run_finishes_and_returns_every_machine() -> None:
    world = World()
    world.run()
    assert world.state.phase is RunPhase.FINISHED
    assert world.machines == {}
    assert sorted(world.launches) == [("rollout-0-i1", 1), ("rollout-1-i1", 1), ("trainer-0-i1", 1)]


def test_looks_are_close_together_only_after_a_change() -> None:
    """A launch takes minutes, and each look costs requests to the store; a loss is looked at every second."""

    def decided() -> Decision:
        return decide(world.state, world.snapshot(), world.spec)

    world = World(launch_s=600.0, boot_s={Role.TRAINER: 600.0})
    assert decided().requeue_after_s == BUSY_TICK_S
    looks = 0
    for _ in range(1100):
        world.tick()
        world.advance(1.0)
        changed_s = max((one.since_s for one in world.state.nodes.values()), default=world.now_s)
        if world.now_s - changed_s > BUSY_S and not (now := decided()).events:
            assert now.requeue_after_s == STEADY_TICK_S
            looks += 1
    assert looks > 1000
    world.lose("trainer-0-i1")
    assert decided().requeue_after_s == BUSY_TICK_S


def test_lost_rollout_node_is_replaced_under_a_new_name() -> None:
    world = until_training(World())
    world.lose("rollout-1-i1")
    decision = decide(world.state, world.snapshot(), world.spec)
    assert NodeMoved("rollout-1-i1", NodePhase.GONE, "preempted") in decision.events
    assert Launch("rollout-1-i2", "rollout-1", Market.SPOT, 1) in decision.actions
    assert Terminate("rollout-1-i1") in decision.actions  # its record is cleared at the cloud
    world.run()
    assert world.state.phase is RunPhase.FINISHED


def test_preemption_notice_drains_and_requests_replacement() -> None:
    world = until_training(World())
    world.machines["rollout-0-i1"] = replace(world.machines["rollout-0-i1"], notice=True)
    decision = decide(world.state, world.snapshot(), world.spec)
    moved = [e for e in decision.events if isinstance(e, NodeMoved)]
    assert [(e.node, e.phase) for e in moved] == [("rollout-0-i1", NodePhase.DRAINING)]
    assert Launch("rollout-0-i2", "rollout-0", Market.SPOT, 1) in decision.actions
    assert not any(isinstance(a, Terminate) for a in decision.actions)  # it may work until it is taken


def test_machine_price_is_journalled_once_when_first_seen() -> None:
    world = World(proved=True)
    world.tick()
    bought = Machine(
        "rollout-0-i1",
        MachineState.UP,
        market=Market.ON_DEMAND,
        price_usd_per_h=0.8,
        on_demand_usd_per_h=0.8,
        where="aws/us-east-1",
    )
    world.machines["rollout-0-i1"] = bought
    world.tick()
    world.tick()
    told = world.of(MachineBought)
    assert told == [MachineBought("rollout-0-i1", Market.ON_DEMAND, "aws/us-east-1", 0.8, 0.8)]
    node = world.state.nodes["rollout-0-i1"]
    assert (node.market, node.price_usd_per_h) == (Market.ON_DEMAND, 0.8)  # asked for on spot, given on demand


def test_starting_machine_may_still_be_refused() -> None:
    world = World(proved=True)
    world.tick()
    world.machines["rollout-0-i1"] = Machine("rollout-0-i1", MachineState.STARTING, attempt=0)
    world.tick()
    assert world.state.nodes["rollout-0-i1"].phase is NodePhase.REQUESTED
    world.refused.append(LaunchRefused("rollout-0-i1", Refusal.NO_CAPACITY, "no spot in us-east-1"))
    del world.machines["rollout-0-i1"]
    world.tick()
    assert "rollout-0-i1" not in world.state.nodes
    assert world.state.kinds["rollout on spot"].last_refusal is Refusal.NO_CAPACITY


def confirms(world: World) -> list[str]:
    return [
        action.node
        for action in decide(world.state, world.snapshot(), world.spec).actions
        if isinstance(action, Confirm)
    ]


def test_cloud_is_asked_only_about_silent_machines() -> None:
    world = until_training(World())
    assert confirms(world) == []
    world.booted_at_s["rollout-1-i1", 1] = world.now_s + 1000  # out of the membership, up at the cloud
    world.tick()
    assert confirms(world) == ["rollout-1-i1"]
    world.exit("rollout-1-i1", 1)  # its work has ended: the machine answers
    assert confirms(world) == []


def test_cloud_is_asked_about_a_trainer_without_heartbeat() -> None:
    world = until_training(World())
    assert world.beat is not None
    world.now_s = world.beat.beat_at_s + HEARTBEAT_FRESH_S - 0.1
    assert confirms(world) == []
    world.now_s += 0.2
    assert confirms(world) == ["trainer-0-i1"]


def test_no_capacity_backs_off_and_recovers() -> None:
    world = until_training(World())
    world.refusing = True
    for node in world.up(Role.ROLLOUT):
        world.lose(node)
    world.wait(50.0, 0.5)
    requests = world.of(NodeRequested)
    # Capacity is often away for an hour; a refusal is not answered at once with the next request.
    assert (world.state.phase, len(requests) < 20) == (RunPhase.TRAINING, True)
    world.refusing = False
    world.run()
    assert world.state.phase is RunPhase.FINISHED


def test_nothing_is_concluded_when_the_cloud_does_not_answer() -> None:
    world = until_training(World())
    silent = replace(world.snapshot(), machines=None)
    decision = decide(world.state, silent, world.spec)
    assert decision.events == ()
    assert decision.actions == ()


def test_absent_or_young_gateway_proves_nothing() -> None:
    world = until_training(World())
    away = replace(world.snapshot(), members=None)
    young = replace(world.snapshot(), members={}, gateway=Gateway(age_s=1.0))
    assert decide(world.state, away, world.spec).events == ()
    assert decide(world.state, young, world.spec).events == ()
    old = replace(world.snapshot(), members={}, gateway=Gateway(age_s=30.0))
    assert {e.node for e in decide(world.state, old, world.spec).events if isinstance(e, NodeMoved)} == {
        "rollout-0-i1",
        "rollout-1-i1",
    }


def test_a_machine_serves_while_one_of_its_engines_does() -> None:
    world = until_training(World())
    seen = world.snapshot()
    assert seen.members is not None
    alone = {**seen.members, "rollout-0-i1.1": seen.members["rollout-0-i1"]}
    del alone["rollout-0-i1"]  # its other engine
    old = replace(seen, members=alone, gateway=Gateway(age_s=30.0))
    assert not [e for e in decide(world.state, old, world.spec).events if isinstance(e, NodeMoved)]
    alone["rollout-0-i11"] = alone.pop("rollout-0-i1.1")  # another machine
    other = replace(old, members=alone)
    moved = [e for e in decide(world.state, other, world.spec).events if isinstance(e, NodeMoved)]
    assert [(e.node, e.phase) for e in moved] == [("rollout-0-i1", NodePhase.BOOTING)]


def test_orphans_are_taken_down_and_known_machines_are_not() -> None:
    world = until_training(World())
    world.machines["rollout-7-i3"] = Machine("rollout-7-i3", MachineState.UP)
    assert decide(world.state, world.snapshot(), world.spec).actions == (Terminate("rollout-7-i3"),)


def test_launch_that_no_listing_shows_is_taken_down_with_its_run() -> None:
    """Its answer was lost, and listings are old: the cloud is asked once before the node is believed gone."""
    world = World()
    world.tick(journal_only=True)
    assert list(world.state.nodes) == ["trainer-0-i1"]
    world.commands.append(Command("1", "down"))
    decision = decide(world.state, world.snapshot(), world.spec)
    assert decision.actions == (Terminate("trainer-0-i1"),)


@pytest.mark.parametrize(
    ("known", "says", "stored_step", "events"),
    [
        (False, False, 50, ()),
        (False, True, 50, (StoreSlowed(120, 50),)),
        (False, True, None, (StoreSlowed(120, 0),)),
        (True, True, 50, ()),
        (True, False, 100, (StoreCaughtUp(120, 100),)),
        (True, False, None, ()),  # a trainer that has only just started: it cannot know yet
    ],
)
def test_slow_store_is_journalled(
    known: bool, says: bool, stored_step: int | None, events: tuple[Event, ...]
) -> None:
    world = until_training(World())
    assert world.beat is not None
    world.beat = replace(world.beat, step=120, stored_step=stored_step, store_slow=says)
    if known:
        world.journal((StoreSlowed(100, 50),))
    assert decide(world.state, world.snapshot(), world.spec).events == events


def test_slow_store_is_reported_once_by_any_process() -> None:
    world = until_training(World(max_steps=100))
    for slow in (True, False, True, False):
        world.store_slow = slow
        world.exit("trainer-0-i1", 1)  # a new attempt, which knows nothing of the store at first
        for _ in range(40):
            world.tick()
            world.advance()
        world.take_over()
    told = [type(event) for event in world.of(StoreSlowed, StoreCaughtUp)]
    assert told == [StoreSlowed, StoreCaughtUp] * 2


def crash_points(disturb: int) -> list[World]:
    """A run that loses a node and its trainer, cut at every tick, before and after the actions of that tick."""
    cuts = []
    world = World()
    for count in range(400):
        if count == disturb and (up := world.up(Role.ROLLOUT)):
            world.lose(up[0])
        if count == disturb + 7 and (up := world.up(Role.TRAINER)):
            world.exit(up[0], 1)
        before_action = copy.deepcopy(world)
        before_action.tick(journal_only=True)
        cuts.append(before_action)
        finished = world.tick()
        cuts.append(copy.deepcopy(world))
        if finished:
            return cuts
        world.advance()
    raise AssertionError("did not converge")


@pytest.mark.parametrize("disturb", [1, 14, 22])
def test_crash_after_every_event_ends_same_without_relaunch(disturb: int) -> None:
    cuts = crash_points(disturb)
    assert len(cuts) > 40
    for world in cuts:
        world.take_over()
        world.run()
        assert world.state.phase is RunPhase.FINISHED
        assert world.machines == {}
        assert len(world.launches) == len(set(world.launches)), "a node was launched twice"


def test_back_off_doubles_to_the_limit_that_the_need_sets() -> None:
    assert [back_off_s(failures, needed=True) for failures in range(6)] == [0, 2, 4, 8, 15, 15]
    assert back_off_s(11, needed=False) == 120
