"""Compute the cost of a run's machines from the journal: when each was rented, and at what price."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise

from grpo_orch.policies.ledger.accounting import History
from grpo_orch.policies.model.events import ControllerTookOver, MachineBought, NodeMoved, NodeRequested
from grpo_orch.policies.model.fold import clock_lag_s
from grpo_orch.policies.model.vocabulary import Market, NodePhase, Refusal, Role


@dataclass(frozen=True, slots=True)
class Rental:
    """A machine from its request until it was gone, seconds since the epoch.

    Until the price is known, the maximum price is used.
    """

    node: str
    role: Role
    market: Market
    from_s: float
    until_s: float
    price_usd_per_h: float = 0.0
    on_demand_usd_per_h: float = 0.0
    disk_usd_per_h: float = 0.0  # on top of either

    @property
    def hours(self) -> float:
        return max(0.0, self.until_s - self.from_s) / 3600


@dataclass(frozen=True, slots=True)
class ControllerRental:
    """A controller machine of a `--remote` run; seconds since the epoch."""

    from_s: float
    until_s: float
    usd_per_h: float

    @property
    def usd(self) -> float:
        return self.usd_per_h * max(0.0, self.until_s - self.from_s) / 3600


@dataclass(frozen=True, slots=True)
class Bill:
    """The actual cost, and the cost of the same hours at on-demand prices, USD."""

    cost_usd: float
    cost_all_on_demand_usd: float


@dataclass(frozen=True, slots=True)
class SpentAt:
    """Cumulative USD spent by `time_s`, by category.

    Attributes:
        time_s: seconds since the epoch.
        trainer_usd: the trainer's machines, whatever their market.
        spot_usd, on_demand_usd: rollout nodes.
        controller_usd: the machine of a `--remote` run's daemon.
        disks_usd: disks of all machines except the controller's.
    """

    time_s: float
    trainer_usd: float = 0.0
    spot_usd: float = 0.0
    on_demand_usd: float = 0.0
    controller_usd: float = 0.0
    disks_usd: float = 0.0

    @property
    def usd(self) -> float:
        """The total."""
        machines = self.trainer_usd + self.spot_usd + self.on_demand_usd + self.controller_usd
        return machines + self.disks_usd


def rentals(history: History, now_s: float) -> list[Rental]:
    """Return every machine that existed or may have existed, from its request until gone, or until `now_s`.

    If a controller's clock is behind that of the controller before it, running machines keep their known age.
    """
    running: dict[str, Rental] = {}
    ended: list[Rental] = []
    last_s = 0.0
    for _, time_s, events in history:
        for event in events:
            before_s, last_s = last_s, time_s
            match event:
                case ControllerTookOver():
                    back_s = clock_lag_s(before_s, time_s, event.since_last_event_s)
                    running = {
                        node: replace(rental, from_s=rental.from_s - back_s) for node, rental in running.items()
                    }
                case NodeRequested():
                    running[event.node] = _rental(event, time_s, now_s)
                case NodeMoved(phase=NodePhase.REFUSED) | NodeMoved(phase=NodePhase.GONE, refusal=Refusal()):
                    running.pop(event.node, None)
                case MachineBought() if event.node in running:
                    rental, disk = running[event.node], event.disk_usd_per_h
                    running[event.node] = replace(
                        rental,
                        market=event.market,
                        price_usd_per_h=event.price_usd_per_h,
                        on_demand_usd_per_h=event.on_demand_usd_per_h,
                        disk_usd_per_h=rental.disk_usd_per_h if disk is None else disk,
                    )
                case NodeMoved(phase=NodePhase.GONE) if event.node in running:
                    ended.append(replace(running.pop(event.node), until_s=time_s))
                case _:
                    pass  # other events do not start or end a machine
    return sorted([*ended, *running.values()], key=lambda rental: (rental.from_s, rental.node))


def bill(rented: Iterable[Rental], other_usd: float = 0.0) -> Bill:
    """Sum the rentals at actual and at on-demand prices, if known. `other_usd` is added to both."""
    cost = on_demand = other_usd
    for rental in rented:
        on_list = rental.on_demand_usd_per_h or rental.price_usd_per_h
        cost += rental.hours * (rental.price_usd_per_h + rental.disk_usd_per_h)
        on_demand += rental.hours * (on_list + rental.disk_usd_per_h)
    return Bill(cost, on_demand)


def spent_over_time(history: History, now_s: float, controller: Iterable[ControllerRental] = ()) -> list[SpentAt]:
    """Return the cumulative cost at each moment at which a rate changed, and at `now_s`, in order.

    It is linear between two moments. The final known price of a machine is used from its request on. Empty if no
    machine was ever requested.

    Args:
        history: the run's journal.
        now_s: seconds since the epoch; running machines are counted until then.
        controller: controller machines of a `--remote` run, which are not in the journal.
    """
    changes = sorted([*_changes(rentals(history, now_s)), *_controller_changes(controller, now_s)])
    times_s = sorted({time_s for time_s, _, _ in changes})
    if not times_s:
        return []
    rates, totals = dict.fromkeys(_CATEGORIES, 0.0), dict.fromkeys(_CATEGORIES, 0.0)
    found, place = [], 0
    for time_s, next_s in pairwise([*times_s, times_s[-1]]):
        while place < len(changes) and changes[place][0] <= time_s:
            rates[changes[place][1]] += changes[place][2]
            place += 1
        found.append(SpentAt(time_s, **totals))
        for name, rate in rates.items():
            # Clamped at 0: adding and subtracting rates leaves rounding errors.
            totals[name] += max(0.0, rate) * (next_s - time_s) / 3600
    return found


_CATEGORIES = ("trainer_usd", "spot_usd", "on_demand_usd", "controller_usd", "disks_usd")


def _rental(request: NodeRequested, time_s: float, until_s: float) -> Rental:
    most, disk = request.max_usd_per_h, request.disk_usd_per_h
    return Rental(request.node, request.role, request.market, time_s, until_s, most, most, disk)


def _changes(rented: Sequence[Rental]) -> Iterator[tuple[float, str, float]]:
    """Yield the time, the category and the amount, USD an hour, of each change of a rate."""
    for rental in rented:
        market = "spot_usd" if rental.market is Market.SPOT else "on_demand_usd"
        name = "trainer_usd" if rental.role is Role.TRAINER else market
        yield from _rate(rental.from_s, rental.until_s, name, rental.price_usd_per_h)
        yield from _rate(rental.from_s, rental.until_s, "disks_usd", rental.disk_usd_per_h)


def _controller_changes(rented: Iterable[ControllerRental], now_s: float) -> Iterator[tuple[float, str, float]]:
    for rental in rented:
        yield from _rate(rental.from_s, min(rental.until_s, now_s), "controller_usd", rental.usd_per_h)


def _rate(from_s: float, until_s: float, name: str, usd_per_h: float) -> Iterator[tuple[float, str, float]]:
    if until_s >= from_s:
        yield from_s, name, usd_per_h
        yield until_s, name, -usd_per_h


# The life of each machine, from the journal: its phases, pool, price and end.


class End(StrEnum):
    """How a machine ended."""

    LOST = "lost"  # not terminated by the controller
    RETURNED = "returned"
    REFUSED = "refused"  # the cloud never provided it


@dataclass(frozen=True, slots=True)
class Span:
    """A phase, in seconds since the epoch."""

    phase: NodePhase
    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class Life:
    """A machine from its request until it was gone or, if `end` is None, until now."""

    node: str
    role: Role
    slot: str
    market: Market
    pool: str  # requested or actual; empty: unknown
    price_usd_per_h: float  # 0: unknown
    spans: tuple[Span, ...]
    end: End | None
    reason: str  # of its last phase change

    @property
    def from_s(self) -> float:
        return self.spans[0].from_s

    @property
    def until_s(self) -> float:
        return self.spans[-1].until_s


@dataclass(slots=True)
class _Draft:
    """A life that is being read from the journal."""

    request: NodeRequested
    market: Market
    pool: str
    phase: NodePhase
    since_s: float
    reason: str
    price_usd_per_h: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def enter(self, phase: NodePhase, at_s: float, reason: str) -> None:
        """Enter a phase. No span ends before it begins, although controllers' clocks differ."""
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
    """Return every requested machine, in the order of requests; live machines last until `now_s`."""
    drafts: dict[str, _Draft] = {}
    found: list[Life] = []
    for _, time_s, events in history:
        for event in events:
            match event:
                case NodeRequested():
                    pool = str(event.pool or "")
                    drafts[event.node] = _Draft(
                        event, event.market, pool, NodePhase.REQUESTED, time_s, event.reason
                    )
                case MachineBought() if event.node in drafts:
                    draft = drafts[event.node]
                    draft.market, draft.price_usd_per_h = event.market, event.price_usd_per_h
                    draft.pool = str(event.pool or event.where or draft.pool)
                case NodeMoved() if event.node in drafts:
                    draft = drafts[event.node]
                    end = _end(draft.phase, event.phase)
                    draft.enter(event.phase, time_s, event.reason)
                    if end is not None:
                        found.append(drafts.pop(event.node).life(end))
                case _:
                    pass  # other events do not affect machines
    for draft in drafts.values():
        draft.enter(draft.phase, now_s, draft.reason)
        found.append(draft.life(None))
    return sorted(found, key=lambda life: (life.from_s, life.node))


def _end(before: NodePhase, phase: NodePhase) -> End | None:
    if phase is NodePhase.REFUSED:
        return End.REFUSED
    if phase is not NodePhase.GONE:
        return None
    return End.RETURNED if before is NodePhase.TERMINATING else End.LOST
