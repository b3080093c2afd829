"""SpotHedge, the policy of SkyServe (Mao et al., EuroSys 2025, arXiv 2411.01438), written from the paper.

Zones are active or preempting: one that refused a launch or took a machine is preempting until it gives one again,
and all become active when fewer than two are. A machine is bought in the cheapest active zone of those that the
fleet is not in, else in the cheapest active one. N machines are wanted; N + EXTRA are asked for on spot, and
min(N, N + EXTRA - those that serve) on demand. N is ours, by the cost of a step; theirs follows a request rate.
Here zones of the trainer's region alone count, as for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from grpo_orch.policies.control.decide import decide
from grpo_orch.policies.fleet.market import may_fall_back, offers
from grpo_orch.policies.fleet.objective import rollouts_wanted
from grpo_orch.policies.fleet.plan import plan
from grpo_orch.policies.model.events import Event, FleetSized, NodeMoved, NodeRequested
from grpo_orch.policies.model.phases import FILLING_NODE, LIVE_RUN
from grpo_orch.policies.model.pools import Pool, PoolOffer
from grpo_orch.policies.model.spec import Replicas, RunSpec
from grpo_orch.policies.model.state import Node, RunState
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Role, node_id_of, slot_of
from grpo_orch.policies.tick.snapshot import Action, Decision, Launch, Snapshot

EXTRA = 1
ACTIVE_LEAST = 2


def spot_hedge(state: RunState, snapshot: Snapshot, spec: RunSpec) -> Decision:
    """Decide as SpotHedge would of rollout nodes, and as ours does of all else."""
    sized = _sized(state, snapshot, spec)
    wanted = sized[0].nodes if sized else rollouts_wanted(state, spec)
    there = [one for one in state.live(Role.ROLLOUT) if one.phase in FILLING_NODE]
    stand_ins = [one for one in there if one.is_fallback]
    spot = [one for one in there if not one.is_fallback]
    # Ours goes on from what it is told: so many on spot, whatever stands in, and no zone rests.
    many = wanted + EXTRA + len(stand_ins)
    resources = {**spec.rollout.resources, "use_spot": True}
    told = replace(spec, rollout=replace(spec.rollout, replicas=Replicas(min=many, max=many), resources=resources))
    found = decide(replace(state, pools={}, size=replace(state.size, nodes=many)), snapshot, told)
    events, actions = _placed(found, state, snapshot, [one.pool for one in spot if one.pool is not None])
    serving = sum(one.phase is NodePhase.SERVING for one in spot)
    if may_fall_back(spec) and state.phase in LIVE_RUN and state.is_proved and state.trainer_machines:
        fallback = min(wanted, wanted + EXTRA - serving)
        events += _fallback(state, snapshot, stand_ins, fallback, events)
    return replace(found, events=(*sized, *events), actions=actions)


def _sized(state: RunState, snapshot: Snapshot, spec: RunSpec) -> tuple[FleetSized, ...]:
    if state.phase not in LIVE_RUN:
        return ()
    ours = plan(offers(state, snapshot, spec), state, snapshot, spec)
    before = rollouts_wanted(state, spec)
    return (FleetSized(ours.spot, before, ours.size_reason),) if ours.size_reason else ()


def next_pool(offers: Sequence[PoolOffer], active_places: set[str], there: Sequence[Pool]) -> Pool:
    """Return where the next machine on spot is bought: the paper's choice of a zone."""
    used = {one.zone_path for one in there}
    open_ones = [one for one in offers if one.pool.zone_path in active_places]
    unused = [one for one in open_ones if one.pool.zone_path not in used]
    return min(unused or open_ones, key=lambda one: (one.usd_per_h, one.pool)).pool


def active(state: RunState, offers: Sequence[PoolOffer]) -> set[str]:
    """Return the zones that are active now, from what each has done in the order of time."""
    zones = {one.pool.zone_path for one in offers}
    seen: list[tuple[float, str, bool]] = []
    for record in state.pools.values():
        if record.pool.zone_path in zones and record.pool.market is Market.SPOT:
            seen += [(one.at_s, record.pool.zone_path, one.succeeded) for one in record.launches]
            seen += [(one.until_s, record.pool.zone_path, False) for one in record.stays if one.preempted]
    found = set(zones)
    for _, zone, gave in sorted(seen):
        if gave:
            found.add(zone)
        else:
            found.discard(zone)
        if len(found) < min(ACTIVE_LEAST, len(zones)):
            found = set(zones)
    return found


def _placed(
    found: Decision, state: RunState, snapshot: Snapshot, there: list[Pool]
) -> tuple[list[Event], tuple[Action, ...]]:
    """The decision, with each purchase on spot in the zone that SpotHedge takes."""
    offers = [one for one in _here(state, snapshot) if one.pool.market is Market.SPOT]
    places: dict[str, Pool] = {}
    events: list[Event] = []
    for event in found.events:
        if offers and isinstance(event, NodeRequested) and event.role is Role.ROLLOUT:
            places[event.node] = pool = next_pool(offers, active(state, offers), there)
            there.append(pool)
            events.append(replace(event, pool=pool))
        else:
            events.append(event)
    actions = tuple(
        replace(one, pool=places[one.node]) if isinstance(one, Launch) and one.node in places else one
        for one in found.actions
    )
    return events, actions


def _fallback(
    state: RunState, snapshot: Snapshot, there: Sequence[Node], wanted: int, decided: Sequence[Event]
) -> list[Event]:
    """Buy and return machines on demand until as many are there."""
    if len(there) >= wanted:
        moved = {one.node for one in decided if isinstance(one, NodeMoved)}
        surplus = [one for one in there if one.id not in moved][: len(there) - wanted]
        return [NodeMoved(one.id, NodePhase.TERMINATING, "spot machines serve") for one in surplus]
    offers = [one for one in _here(state, snapshot) if one.pool.market is Market.ON_DEMAND]
    pool = min(offers, key=lambda one: (one.usd_per_h, one.pool)).pool if offers else None
    taken = {one.slot for one in there} | {one.slot for one in decided if isinstance(one, NodeRequested)}
    names = [slot_of(Role.ROLLOUT, place) for place in range(wanted + len(taken))]
    free = [name for name in names if name not in taken]
    return [_on_demand(state, name, pool) for name in free[: wanted - len(there)]]


def _on_demand(state: RunState, name: str, pool: Pool | None) -> NodeRequested:
    incarnation = state.slots.get(name, 0) + 1
    node, reason = node_id_of(name, incarnation), "falls back to on demand"
    return NodeRequested(node, Role.ROLLOUT, name, incarnation, Market.ON_DEMAND, reason, 0.0, pool, True)


def _here(state: RunState, snapshot: Snapshot) -> list[PoolOffer]:
    """Where rollout nodes may be bought, in the region of the machines that are there."""
    regions = {node.pool.region for role in Role for node in state.live(role) if node.pool is not None}
    offers = [one for one in snapshot.pools or () if one.role is Role.ROLLOUT]
    return [one for one in offers if not regions or one.pool.region in regions]
