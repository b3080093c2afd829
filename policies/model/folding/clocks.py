"""A controller takes over on a host whose clock may be another's: no time of a state lies after its own."""

from __future__ import annotations

from dataclasses import replace

from policies.model.folding.drafts import in_place_of
from policies.model.state import RunState

MOST_UNSEEN_S = 86400.0  # the store says that more went by than hosts' clocks showed: then its own is wrong


def behind_s(told_s: float, time_s: float, since_told_s: float) -> float:
    """By how much the clock of a controller that takes over at `time_s` is behind the one before it, which told of
    its last event at `told_s`, seconds: as far as it shows. Time does not go back; and it went on for at least
    `since_told_s`, if the store's clock tells: what cost money then was paid for."""
    unseen_s = since_told_s - max(0.0, time_s - told_s)
    return max(0.0, told_s - time_s) + (unseen_s if 0.0 < unseen_s <= MOST_UNSEEN_S else 0.0)


def with_times_up_to(state: RunState, time_s: float, back_s: float) -> RunState:
    """Return the state with no time after `time_s`, at which a controller takes over on a clock that is `back_s`
    behind: what was journalled before happened before, whatever the clock said then. A machine stays as old as it
    is known to be: it is paid for."""
    nodes = {
        name: replace(
            node,
            since_s=min(node.since_s, time_s),
            requested_at_s=min(node.requested_at_s - back_s, time_s),
            attempt_ended_at_s=_not_after(node.attempt_ended_at_s, time_s),
        )
        for name, node in state.nodes.items()
    }
    slots = {name: replace(one, refused_at_s=min(one.refused_at_s, time_s)) for name, one in state.slots.items()}
    kinds = {
        name: replace(one, failed_at_s=min(one.failed_at_s, time_s), stopped_at_s=one.stopped_at_s - back_s)
        for name, one in state.kinds.items()
    }
    pools = {
        name: replace(one, refused_at_s=min(one.refused_at_s, time_s), taken_at_s=min(one.taken_at_s, time_s))
        for name, one in state.pools.items()
    }
    return replace(
        state,
        nodes=in_place_of(state.nodes, nodes),
        slots=in_place_of(state.slots, slots),
        kinds=in_place_of(state.kinds, kinds),
        pools=in_place_of(state.pools, pools),
        fleet_sized_at_s=min(state.fleet_sized_at_s, time_s),
        trainerless_since_s=_not_after(state.trainerless_since_s, time_s),
        rolloutless_since_s=_not_after(state.rolloutless_since_s, time_s),
        spot_short_since_s=_not_after(state.spot_short_since_s, time_s),
        parked_at_s=_not_after(state.parked_at_s, time_s),
        proved_at_s=_not_after(state.proved_at_s, time_s),
        diverged_at_s=min(state.diverged_at_s, time_s),
        rollbacks=tuple(replace(one, since_s=min(one.since_s, time_s)) for one in state.rollbacks),
    )


def _not_after(since_s: float | None, time_s: float) -> float | None:
    return None if since_s is None else min(since_s, time_s)
