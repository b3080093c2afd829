"""Each machine's life, from the journal alone: its phases and when, where, at what price, and how it ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from policies.model.events import Event, MachineBought, NodeMoved, NodeRequested
from policies.model.vocabulary import Market, NodePhase, Role

History = Iterable[tuple[int, float, Iterable[Event]]]  # (entry number, time_s, events), as `fold.fold` takes it


class End(StrEnum):
    """How a life ended."""

    LOST = "lost"  # nobody had asked for it
    RETURNED = "returned"
    REFUSED = "refused"  # its cloud never gave it


@dataclass(frozen=True, slots=True)
class Span:
    """A phase, in seconds since the epoch."""

    phase: NodePhase
    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class Life:
    """One machine, from its request until it was gone or, with `end` None, until now."""

    node: str
    role: Role
    slot: str
    market: Market
    pool: str  # where it was asked for or landed; empty: its cloud does not say
    price_usd_per_h: float  # 0: not known
    spans: tuple[Span, ...]
    end: End | None
    reason: str  # of its last move

    @property
    def from_s(self) -> float:
        return self.spans[0].from_s

    @property
    def until_s(self) -> float:
        return self.spans[-1].until_s


@dataclass(slots=True)
class _Draft:
    """A life that goes on, as far as it is read."""

    request: NodeRequested
    market: Market
    pool: str
    phase: NodePhase
    since_s: float
    reason: str
    price_usd_per_h: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def enter(self, phase: NodePhase, at_s: float, reason: str) -> None:
        """A controller's clock may be behind the one before it: no span ends before it begins."""
        at_s = max(at_s, self.since_s)
        self.spans.append(Span(self.phase, self.since_s, at_s))
        self.phase, self.since_s, self.reason = phase, at_s, reason

    def life(self, end: End | None) -> Life:
        request = self.request
        return Life(
            request.node,
            request.role,
            request.slot,
            self.market,
            self.pool,
            self.price_usd_per_h,
            tuple(self.spans),
            end,
            self.reason,
        )


def lives(history: History, now_s: float) -> list[Life]:
    """Return every machine that was asked for, in that order; those still there live until `now_s`."""
    going: dict[str, _Draft] = {}
    found: list[Life] = []
    for _, time_s, events in history:
        for event in events:
            match event:
                case NodeRequested():
                    pool = str(event.pool or "")
                    going[event.node] = _Draft(
                        event, event.market, pool, NodePhase.REQUESTED, time_s, event.reason
                    )
                case MachineBought() if event.node in going:
                    draft = going[event.node]
                    draft.market, draft.price_usd_per_h = event.market, event.price_usd_per_h
                    draft.pool = str(event.pool or event.where or draft.pool)
                case NodeMoved() if event.node in going:
                    draft = going[event.node]
                    end = _end(draft.phase, event.phase)
                    draft.enter(event.phase, time_s, event.reason)
                    if end is not None:
                        found.append(going.pop(event.node).life(end))
                case _:
                    pass  # nothing else begins, moves or ends a machine
    for draft in going.values():
        draft.enter(draft.phase, now_s, draft.reason)
        found.append(draft.life(None))
    return sorted(found, key=lambda life: (life.from_s, life.node))


def _end(before: NodePhase, phase: NodePhase) -> End | None:
    if phase is NodePhase.REFUSED:
        return End.REFUSED
    if phase is not NodePhase.GONE:
        return None
    return End.RETURNED if before is NodePhase.TERMINATING else End.LOST
