"""The plan in words and numbers, for people: what `grpo-orch explain` prints.

JSON has no infinity: what never comes is None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from policies.control.snapshot import Snapshot
from policies.fleet.market import Offer, market_of, may_fall_back, offers
from policies.fleet.objective import Candidate, Comparison
from policies.fleet.plan import plan
from policies.fleet.reconcile import reconcile
from policies.model.phases import LIVE_RUN
from policies.model.spec import RunSpec, generates_itself
from policies.model.state import RunState
from policies.model.vocabulary import Market, NodePhase, Role, kind_of


@dataclass(frozen=True, slots=True)
class OfferLine:
    """One role on one market."""

    kind: str  # rollout on spot
    status: str
    usd_per_h: float | None
    place: str
    again_at_s: float | None
    start_s: float
    lifetime_h: float
    why: str


@dataclass(frozen=True, slots=True)
class CandidateLine:
    """A candidate, and what it loses over the horizon of its question."""

    name: str
    loss_usd: float
    step_usd: float | None
    step_s: float | None
    usd_per_h: float
    change_usd: float
    in_time: bool


@dataclass(frozen=True, slots=True)
class Question:
    """Candidates for one question, the chosen one first. `difference_usd`: what the next one loses more."""

    name: str
    horizon_s: float
    worth_usd: float  # of a step
    difference_usd: float
    candidates: tuple[CandidateLine, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Market, candidates, choice and pending changes at one moment."""

    at_s: float
    plan: str  # in a sentence; empty while nothing is compared
    offers: tuple[OfferLine, ...]
    questions: tuple[Question, ...]
    pending: tuple[str, ...]  # nodes that come or go, requests of this moment, and why nothing is bought


def explain(state: RunState, snapshot: Snapshot, spec: RunSpec) -> Explanation:
    """Return the plan of this moment; without offers and questions where the run is over."""
    if state.phase not in LIVE_RUN:
        return Explanation(snapshot.now_s, f"the run is {state.phase}: {state.reason}", (), (), ())
    market = offers(state, snapshot, spec)
    wanted = plan(market, state, snapshot, spec)
    changes = reconcile(wanted, offers(state, snapshot, spec), state, snapshot, spec)
    nodes = [node for node in state.nodes.values() if node.phase is not NodePhase.SERVING]
    waiting = [f"{node.id} is {node.phase}: {node.reason}" for node in nodes]
    pending = (*waiting, *(reason for _, reason in changes.events), *changes.notes)
    lines = tuple(_offer_line(market.offer(*kind)) for kind in _kinds(spec))
    return Explanation(snapshot.now_s, wanted.words, lines, tuple(map(_question, wanted.comparisons)), pending)


def _kinds(spec: RunSpec) -> list[tuple[Role, Market]]:
    found = [(Role.TRAINER, market_of(Role.TRAINER, spec))]
    if not generates_itself(spec):
        found.append((Role.ROLLOUT, market_of(Role.ROLLOUT, spec)))
        found += [(Role.ROLLOUT, Market.ON_DEMAND)] if may_fall_back(spec) else []
    return found


def _offer_line(offer: Offer) -> OfferLine:
    kind, lifetime_h = kind_of(offer.role, offer.market), offer.lifetime_s / 3600
    status, until_s = str(offer.status), offer.until_s
    return OfferLine(kind, status, offer.usd_per_h, offer.place, until_s, offer.start_s, lifetime_h, offer.why)


def _question(compared: Comparison) -> Question:
    extra = () if compared.reference is None else (compared.reference,)
    lines = tuple(_candidate_line(one, compared) for one in (*compared.candidates, *extra))
    return Question(compared.question, compared.horizon_s, compared.worth_usd, compared.difference_usd, lines)


def _candidate_line(candidate: Candidate, compared: Comparison) -> CandidateLine:
    makes_steps = math.isfinite(candidate.step_s)
    return CandidateLine(
        name=candidate.name,
        loss_usd=candidate.loss_usd(compared.worth_usd, compared.horizon_s),
        step_usd=candidate.step_usd if makes_steps else None,
        step_s=_finite(candidate.step_s),
        usd_per_h=candidate.usd_per_h,
        change_usd=candidate.change_usd,
        in_time=candidate.in_time,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
