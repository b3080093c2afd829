"""The fold: a state stays as it was, and a clock that a new controller brings is set by the store's."""

from __future__ import annotations

import pytest

from grpo_orch.policies.ledger.rentals import rentals
from grpo_orch.policies.model.events import ControllerTookOver, Event, MachineBought, NodeMoved, NodeRequested
from grpo_orch.policies.model.fold import PREEMPTION_NOTICE, clock_lag_s, fold
from grpo_orch.policies.model.pools import Pool
from grpo_orch.policies.model.state import RunState
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Role
from tests.generators.views_world import requested

POOL = Pool("aws", "r", "z", "g6.xlarge", "L4:1", Market.SPOT)


def asked(place: int) -> NodeRequested:
    return NodeRequested(f"rollout-{place}-i1", Role.ROLLOUT, f"rollout-{place}", 1, Market.SPOT, "first")


def came(place: int) -> MachineBought:
    return MachineBought(f"rollout-{place}-i1", Market.SPOT, "r/z", 1.0, 2.0, POOL)


def mappings(state: RunState) -> list[dict[str, object]]:
    return [dict(one) for one in (state.nodes, state.slots, state.kinds, state.pools)]


def test_fold_leaves_the_state_before_it_unchanged() -> None:
    begun: list[Event] = [asked(0), asked(1), came(0)]
    more: list[Event] = [NodeMoved("rollout-0-i1", NodePhase.GONE, "lost"), came(1), asked(2)]
    before = fold([(1, 10.0, begun)])
    known = mappings(before)
    made = fold([(2, 20.0, more)], before)
    assert mappings(before) == known
    assert made == fold([(1, 10.0, begun), (2, 20.0, more)])


@pytest.mark.parametrize(
    ("phase", "why"), [(NodePhase.GONE, "preempted"), (NodePhase.DRAINING, PREEMPTION_NOTICE)]
)
def test_machines_taken_before_they_serve_are_no_service(phase: NodePhase, why: str) -> None:
    def moved(count: int, *phases: NodePhase) -> list[Event]:
        node = f"rollout-0-i{count}"
        asked = NodeRequested(node, Role.ROLLOUT, "rollout-0", count, Market.SPOT, "")
        return [asked, *(NodeMoved(node, to, why) for to in phases)]

    gone = [NodePhase.GONE] if phase is NodePhase.DRAINING else []
    history = [(1, 100.0, moved(1, NodePhase.BOOTING, NodePhase.SERVING, NodePhase.GONE))]
    history += [(at, at * 100.0, moved(at, NodePhase.BOOTING, phase, *gone)) for at in (2, 3, 4)]
    state = fold(history)
    kind = state.kinds["rollout on spot"]
    assert (kind.preempted_in_a_row, kind.fails, kind.never_serves) == (3, True, False)
    assert state.shortages.rollout_since_s == 100.0
    booting = fold([(5, 500.0, moved(5, NodePhase.BOOTING))], state)
    assert (booting.kinds["rollout on spot"].fails, booting.shortages.rollout_since_s) == (True, 100.0)
    serving = fold([(6, 600.0, [NodeMoved("rollout-0-i5", NodePhase.SERVING, "")])], booting)
    assert (serving.kinds["rollout on spot"].fails, serving.shortages.rollout_since_s) == (False, None)


def test_simultaneous_preemptions_of_a_zone_are_one() -> None:
    booting = [NodeMoved(f"rollout-{place}-i1", NodePhase.BOOTING, "") for place in range(3)]
    taken = [NodeMoved(f"rollout-{place}-i1", NodePhase.GONE, "preempted") for place in range(3)]
    state = fold([(1, 100.0, [asked(0), asked(1), asked(2), *booting]), (2, 200.0, taken)])
    assert state.kinds["rollout on spot"].preempted_in_a_row == 1


DAY_S = 86400.0


@pytest.mark.parametrize(
    ("time_s", "since_last_event_s", "back_s"),
    [
        (1600.0, 0.0, 0.0),  # a store that tells nothing
        (400.0, 0.0, 600.0),
        (1600.0, 600.0, 0.0),  # all clocks agree
        (1600.0, 300.0, 0.0),  # time does not go slower for a store
        (1600.0, 900.0, 300.0),
        (400.0, 900.0, 1500.0),
        (0.0, DAY_S, 1000.0 + DAY_S),  # however far behind the host is
        (0.0, DAY_S + 1.0, 1000.0),  # a store that is wild
        (1000.0 + 30 * DAY_S, 30 * DAY_S + 60.0, 60.0),  # a run that rested for a month
    ],
)
def test_time_advances_by_the_later_of_both_clocks(
    time_s: float, since_last_event_s: float, back_s: float
) -> None:
    assert clock_lag_s(1000.0, time_s, since_last_event_s) == back_s


def test_a_machine_is_as_old_for_the_bill_as_for_the_budget() -> None:
    asked = requested("rollout-0-i1")
    history: list[tuple[int, float, tuple[Event, ...]]] = [
        (1, 1000.0, (asked,)),
        (2, 500.0, (ControllerTookOver("b", 2, "resume", 900.0),)),
    ]
    [node] = fold(history).nodes.values()
    [rental] = rentals(history, 500.0)
    assert node.requested_at_s == rental.from_s == 500.0 - 900.0
