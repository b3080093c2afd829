"""Room for spot machines under `budget.usd_per_h`, which nodes on demand may have taken while spot was away.

What does not fit is not asked for, so nobody would learn that spot gives again, and the dearer nodes would stay
for ever. Now and then one of them goes back, and spot is asked before another is bought in its place.
"""

from __future__ import annotations

from policies.control.fleet.deadline import course_now
from policies.control.fleet.size import may_go
from policies.control.fleet.spending import caps_of, excess_with
from policies.control.fleet.stand_ins import stand_ins_of
from policies.control.fleet.where import Crowds, terms_of
from policies.control.tick import Tick
from policies.model.buying import BACK_OFF_MAX_EXTRA_S, PROBE_MAX_S, MachineKind
from policies.model.state import Node
from policies.model.vocabulary import Market, NodePhase, Role, RunPhase, kind_of

ASKED_S = 2 * BACK_OFF_MAX_EXTRA_S  # where spot may be asked at all, it is asked at least so often
STAYS_S = PROBE_MAX_S  # of which asking spot in vain, and the start of another in its place, is a few percent


def make_room(tick: Tick) -> None:
    """Return a node on demand, if a spot machine would fit under the cap an hour in its place: not while machines
    come or go, nor before each has served for STAYS_S, nor where the deadline hangs on the only one."""
    there = stand_ins_of(tick.state)
    if not there or not _may_make_room(tick, there) or not may_go(tick):
        return
    nodes = list(tick.state.nodes.values())
    others = [one for one in nodes if one.id != there[0].id]
    if not _has_room(tick, nodes) and _has_room(tick, others):
        why = "spot is asked again, for which `budget.usd_per_h` had no room"
        tick.move(there[0], NodePhase.TERMINATING, why)


def _may_make_room(tick: Tick, there: list[Node]) -> bool:
    if caps_of(tick.state, tick.spec).usd_per_h is None or tick.state.phase is not RunPhase.TRAINING:
        return False
    if tick.snapshot.pools is None or tick.snapshot.prices is None or _spot(tick).comes_and_fails:
        return False
    rollouts = [one for one in tick.state.nodes.values() if one.role is Role.ROLLOUT]
    if len(rollouts) == 1 and (course := course_now(tick)) is not None and not course.is_safe:
        return False
    settled = all(one.phase is NodePhase.SERVING for one in rollouts)
    return settled and all(tick.waited_s(one.since_s) >= STAYS_S for one in there)


def _has_room(tick: Tick, nodes: list[Node]) -> bool:
    """Whether there would be money for a spot machine beside these."""

    def fits(usd_per_h: float) -> bool:
        return not excess_with(tick, Role.ROLLOUT, usd_per_h, nodes)

    usd_per_h = terms_of(tick, Crowds(tick), Role.ROLLOUT, Market.SPOT, fits).usd_per_h
    return usd_per_h is not None and fits(usd_per_h)


def is_spot_asked(tick: Tick) -> bool:
    """Whether spot is being asked, or has refused lately: only then may a node on demand take its room."""
    kind = kind_of(Role.ROLLOUT, Market.SPOT)
    asked = any(one.kind == kind and one.phase is NodePhase.REQUESTED for one in tick.state.nodes.values())
    spot = _spot(tick)
    return asked or (spot.refused_in_a_row > 0 and tick.waited_s(spot.failed_at_s) < ASKED_S)


def _spot(tick: Tick) -> MachineKind:
    return tick.state.kinds.get(kind_of(Role.ROLLOUT, Market.SPOT), MachineKind())
