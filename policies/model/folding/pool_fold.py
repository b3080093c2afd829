"""How journalled events change what is known of the pools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from policies.model.events import MachineBought, NodeMoved
from policies.model.folding.drafts import with_item
from policies.model.pool_record import PoolRecord, came, refused, stayed
from policies.model.pools import Pool
from policies.model.state import Node, RunState
from policies.model.vocabulary import NodePhase, Refusal

NOTICED = "the cloud will take it back"  # why a node drains: its machine is as good as lost


def note_bought(state: RunState, event: MachineBought, asked: Pool | None, time_s: float) -> RunState:
    """The machine came: where it landed, and if that is elsewhere, not where it was asked for."""
    landed = landed_in(asked, event.pool)
    if landed is None or event.pool is None:
        return state
    if asked is not None and asked != landed:
        state = _with(state, asked, lambda record: refused(record, time_s, time_s))
    if landed != landed.anywhere and str(landed.anywhere) in state.pools:  # its quota has room again
        state = _with(state, landed.anywhere, lambda record: came(record, time_s))
    return _with(state, landed, lambda record: came(record, time_s))


def landed_in(asked: Pool | None, landed: Pool | None) -> Pool | None:
    """The pool that a machine is in: the one asked for where that leaves the zone to the cloud."""
    if asked is None or landed is None:
        return landed or asked
    return asked if asked == replace(landed, zone=asked.zone and landed.zone) else landed


def note_moved(state: RunState, node: Node, move: NodeMoved, time_s: float) -> RunState:
    """`node` as it was before the move. Credentials that are refused say nothing of a pool."""
    if node.pool is None:
        return state
    if move.phase is NodePhase.REFUSED:
        if move.refusal is Refusal.CREDENTIALS:
            return state
        pool = node.pool.anywhere if move.refusal is Refusal.QUOTA else node.pool  # a quota is the region's
        return _with(state, pool, lambda record: refused(record, node.requested_at_s, time_s))
    noticed = node.phase is NodePhase.DRAINING and node.reason == NOTICED
    if node.came_at_s is None or node.phase is NodePhase.TERMINATING or noticed:
        return state  # told already
    since_s, taken = node.came_at_s, move.phase is NodePhase.GONE or move.reason == NOTICED
    if not taken and move.phase is not NodePhase.TERMINATING:
        return state
    recommended = node.rebalance_recommended
    return _with(
        state,
        node.pool,
        lambda record: stayed(record, since_s, time_s, taken=taken, rebalance_recommended=recommended),
    )


def _with(state: RunState, pool: Pool, change: Callable[[PoolRecord], PoolRecord]) -> RunState:
    changed = change(state.pools.get(str(pool), PoolRecord(pool)))
    return replace(state, pools=with_item(state.pools, str(pool), changed))
