"""States of machines and tokens a second, from what was journalled and counted."""

from __future__ import annotations

from grpo_orch.orchestrator.views.reader import Reader
from grpo_orch.orchestrator.views.run_view import Rates
from grpo_orch.orchestrator.views.view_model import NodeState, phase_state, state_now
from grpo_orch.policies.model.vocabulary import NodePhase, Role
from grpo_orch.policies.serving.gateway_status import GatewayStatus, MemberStatus
from grpo_orch.policies.serving.wire import EngineStats
from tests.generators.views_world import T0, World, next_view

S = NodeState


def member(serving: bool = True, running: int = 0, tokens: int = 0, node: str = "rollout-0-i1") -> MemberStatus:
    return MemberStatus(node, "b", "h:1", "0-1", serving, False, running, 0.1, engine=EngineStats(tokens=tokens))


def state_of(world: World, slot: str, at_s: float) -> NodeState:
    nodes = {node.slot: node for node in next_view(Reader(world.store), T0 + at_s).nodes}
    return nodes[slot].state


def test_state_of_a_slot_is_that_of_its_newest_machine() -> None:
    world = World()
    world.starts()
    assert state_of(world, "rollout-1", 50) is S.SERVING
    world.moves(100, "rollout-1-i1", NodePhase.GONE, "preempted")
    assert state_of(world, "rollout-1", 100) is S.LOST
    world.asks_for(101, "rollout-1-i2")
    assert state_of(world, "rollout-1", 120) is S.REQUESTED
    world.moves(140, "rollout-1-i2", NodePhase.REFUSED)
    assert state_of(world, "rollout-1", 200) is S.REFUSED
    assert state_of(world, "rollout-0", 200) is S.SERVING


def test_terminated_machine_does_not_count_as_lost() -> None:
    assert phase_state(NodePhase.GONE, NodePhase.TERMINATING) is S.GONE
    for before in (NodePhase.REQUESTED, NodePhase.BOOTING, NodePhase.SERVING, NodePhase.DRAINING):
        assert phase_state(NodePhase.GONE, before) is S.LOST
    for phase in set(NodePhase) - {NodePhase.GONE}:
        assert str(phase_state(phase, None)) == str(phase)


def test_gateway_adds_the_current_rate_of_serving_nodes() -> None:
    leaving = MemberStatus("rollout-0-i1", "b", "h:1", "0-1", False, True, 0, 0.1)
    looks = [
        ([member(serving=False)], S.LOADING),
        ([member()], S.IDLE),
        ([member(running=1)], S.SERVING),
        ([member(), member(running=1)], S.SERVING),
        ([leaving], S.SERVING),
        ([], S.SERVING),
    ]
    for members, state in looks:
        assert state_now(S.SERVING, Role.ROLLOUT, members) is state
    assert state_now(S.SERVING, Role.TRAINER, [member()]) is S.SERVING
    assert state_now(S.DRAINING, Role.ROLLOUT, [member()]) is S.DRAINING


def test_machine_rate_is_tokens_counted_between_statuses() -> None:
    rates = Rates()
    rates.update(GatewayStatus("b", None, [member(tokens=1000)], up_s=10.0))
    assert rates.by_machine == {}
    rates.update(GatewayStatus("b", None, [member(tokens=1500)], up_s=15.0))
    assert rates.by_machine == {"rollout-0-i1": 100.0}
    rates.update(GatewayStatus("b", None, [member(tokens=1500)], up_s=15.0))  # the same status once more
    assert rates.by_machine == {"rollout-0-i1": 100.0}
    rates.update(GatewayStatus("b", None, [member(tokens=7)], up_s=20.0))  # its engine began anew
    assert rates.by_machine == {}
    rates.update(None)
    assert rates.by_machine == {}
