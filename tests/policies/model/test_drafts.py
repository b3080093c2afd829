"""A state stays as it was, however many events are folded onto it."""

from __future__ import annotations

from policies.model.events import Event, MachineBought, NodeMoved, NodeRequested
from policies.model.fold import apply, draft, final, fold
from policies.model.pools import Pool
from policies.model.state import RunState
from policies.model.vocabulary import Market, NodePhase, Role

POOL = Pool("aws", "r", "z", "g6.xlarge", "L4:1", Market.SPOT)


def asked(place: int) -> NodeRequested:
    return NodeRequested(f"rollout-{place}-i1", Role.ROLLOUT, f"rollout-{place}", 1, Market.SPOT, "first")


def came(place: int) -> MachineBought:
    return MachineBought(f"rollout-{place}-i1", Market.SPOT, "r/z", 1.0, 2.0, POOL)


def mappings(state: RunState) -> list[dict[str, object]]:
    return [dict(one) for one in (state.nodes, state.slots, state.kinds, state.pools)]


def test_a_draft_leaves_the_state_that_it_was_made_of_and_ends_as_the_fold_would() -> None:
    begun: list[Event] = [asked(0), asked(1), came(0)]
    more: list[Event] = [NodeMoved("rollout-0-i1", NodePhase.GONE, "lost"), came(1), asked(2)]
    before = fold([(1, 10.0, begun)])
    known = mappings(before)
    state, one_by_one = draft(before), before
    for event in more:
        state, one_by_one = apply(state, event, 20.0, 2), apply(one_by_one, event, 20.0, 2)
    made = final(state)
    assert mappings(before) == known
    assert made == one_by_one == fold([(1, 10.0, begun), (2, 20.0, more)])
    assert not any(hasattr(one, "__setitem__") for one in (made.nodes, made.slots, made.kinds, made.pools))
