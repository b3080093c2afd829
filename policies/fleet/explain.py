"""Build the explanation of the plan, which the daemon stores and `grpo-orch explain` prints."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_orch.policies.fleet.market import Offer, market_of, may_fall_back, offers
from grpo_orch.policies.fleet.objective import Comparison
from grpo_orch.policies.fleet.plan import plan
from grpo_orch.policies.fleet.reconcile import reconcile
from grpo_orch.policies.model.phases import LIVE_RUN
from grpo_orch.policies.model.spec import RunSpec, generates_itself
from grpo_orch.policies.model.state import RunState
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Role
from grpo_orch.policies.tick.draft import Tick
from grpo_orch.policies.tick.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Explanation:
    """The market, the candidates, the choice and the pending changes at one moment."""

    at_s: float
    plan: str  # one sentence; empty while nothing is compared
    offers: tuple[Offer, ...]
    comparisons: tuple[Comparison, ...]
    pending: tuple[str, ...]  # nodes that start or leave, new requests, and why nothing is bought


def explain(state: RunState, snapshot: Snapshot, spec: RunSpec) -> Explanation:
    """Return the current plan; without offers and comparisons once the run is over."""
    if state.phase not in LIVE_RUN:
        return Explanation(snapshot.now_s, f"the run is {state.phase}: {state.reason}", (), (), ())
    market, tick = offers(state, snapshot, spec), Tick(state, snapshot, spec)
    wanted = plan(market, state, snapshot, spec)
    kinds = [(Role.TRAINER, market_of(Role.TRAINER, spec))]
    if not generates_itself(spec):
        kinds.append((Role.ROLLOUT, market_of(Role.ROLLOUT, spec)))
        kinds += [(Role.ROLLOUT, Market.ON_DEMAND)] if may_fall_back(spec) else []
    lines = tuple(market.offer(*kind) for kind in kinds)
    reconcile(wanted, market, tick)
    nodes = [node for node in state.nodes.values() if node.phase is not NodePhase.SERVING]
    pending = (*(f"{node.id} is {node.phase}: {node.reason}" for node in nodes), *tick.reasons)
    return Explanation(snapshot.now_s, wanted.sentence, lines, wanted.comparisons, pending)
