"""The money: what a run has cost, and whether one more machine fits under its caps.

A machine counts from its request until it is known to be gone, at its price or, until that is known, at the most
that one of its kind may cost. A machine is requested only if what is spent, what everything that runs will cost
until it could be stopped, and what giving it back costs fit under the cap together: so the cap is not passed while
a daemon is alive and the cloud takes machines back when asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from policies.costs import disks
from policies.model.spec import RunSpec
from policies.model.state import Node, RunState
from policies.model.vocabulary import Role
from policies.tick.snapshot import Snapshot

BUDGET = "budget"  # a command: sets `budget.usd`
# From the word to stop until something must have got on, and again after it did: weights and optimizer of 32
# billion parameters are up to 525 GB, of which a store may take 1 GB/s, or 100 MB/s.
STOP_WAIT_S = 900.0
TEARDOWN_S = 600.0  # from the order to give a machine back until it is known to be gone; SkyPilot is given 300 s
PRICES_UNKNOWN = "prices are not known yet, and there is a budget"


@dataclass(frozen=True, slots=True)
class Running:
    """Something that costs by the hour, and how long it continues after the decision to stop."""

    usd_per_h: float
    stop_s: float
    once_usd: float = 0.0  # what it will have cost besides by then

    @property
    def reserve_usd(self) -> float:
        """What it costs from now until it is known to be gone."""
        return self.usd_per_h * (self.stop_s + TEARDOWN_S) / 3600 + self.once_usd


@dataclass(frozen=True, slots=True)
class Caps:
    """What a run may cost, in all and an hour. None: no limit."""

    usd: float | None
    usd_per_h: float | None

    @property
    def are_set(self) -> bool:
        return self.usd is not None or self.usd_per_h is not None


def caps_of(state: RunState, spec: RunSpec) -> Caps:
    """Return the caps in force: run.yaml's, or what a user has raised the first one to since."""
    usd = spec.budget.usd if state.money.cap_usd is None else state.money.cap_usd
    return Caps(usd, spec.budget.usd_per_h)


def spent_usd(state: RunState, now_s: float) -> float:
    """Return what the run's machines have cost until now."""
    return state.money.spent_usd + sum(node.cost_usd(now_s) for node in state.nodes.values())


def on_demand_usd(state: RunState, now_s: float) -> float:
    """Return what the same machines would have cost on demand."""
    return state.money.spent_on_demand_usd + sum(node.on_demand_cost_usd(now_s) for node in state.nodes.values())


def not_counted(spec: RunSpec) -> str:
    """Name the costs of such a run that are not counted."""
    unpriced = [f"disks at {cloud or 'an unnamed cloud'} (no price is known)" for cloud in disks.unknown(spec)]
    return ", ".join([*unpriced, "the store, traffic between zones"])


def excess(caps: Caps, spent: float, running: Iterable[Running]) -> str:
    """Return which cap the running machines exceed, with the numbers; empty: none."""
    running = list(running)
    rate, reserve = sum(item.usd_per_h for item in running), sum(item.reserve_usd for item in running)
    if caps.usd is not None and spent + reserve > caps.usd:
        cost = f"{spent:.2f} USD spent and {reserve:.2f} until all is stopped and returned"
        return f"{cost} are more than `budget.usd`, {caps.usd:.2f}"
    if caps.usd_per_h is not None and rate > caps.usd_per_h:
        return f"{rate:.2f} USD an hour are more than `budget.usd_per_h`, {caps.usd_per_h:.2f}"
    return ""


def together(running: Iterable[Running]) -> list[Running]:
    """Return the same cost an hour and the same reserve, one item for each time to stop."""
    found: dict[float, Running] = {}
    for item in running:
        before = found.get(item.stop_s, Running(0.0, item.stop_s))
        once_usd = before.once_usd + item.once_usd
        found[item.stop_s] = Running(before.usd_per_h + item.usd_per_h, item.stop_s, once_usd)
    return list(found.values())


class Spending:
    """What is spent and what runs. Each purchase of a tick is added, so that the next one is judged with it."""

    def __init__(
        self,
        state: RunState,
        snapshot: Snapshot,
        spec: RunSpec,
        nodes: Iterable[Node] | None = None,
        caps: Caps | None = None,
    ) -> None:
        """`nodes`: the running ones; None: all nodes of the state. `caps`: None: those in force."""
        nodes = state.nodes.values() if nodes is None else nodes
        controller = Running(snapshot.controller.usd_per_h, STOP_WAIT_S)
        self.caps = caps_of(state, spec) if caps is None else caps
        self.spent_usd = spent_usd(state, snapshot.now_s) + snapshot.controller.usd
        self.running = together([*(Running(node.usd_per_h, _stop_s(node.role)) for node in nodes), controller])
        self._prices_known = snapshot.prices is not None

    def exceeded(self) -> str:
        """Return why the running machines must stop: `budget.usd` has no more left than stopping them takes."""
        return excess(Caps(self.caps.usd, None), self.spent_usd, self.running)

    def refusal(self, role: Role, kind: str, most_usd_per_h: float | None) -> str:
        """Return why one more machine, which may cost that much, is not bought; empty: it is."""
        if not self.caps.are_set:
            return ""
        if not self._prices_known:
            return PRICES_UNKNOWN
        if most_usd_per_h is None:
            return f"no price is known of machines of the kind {kind}, and there is a budget"
        return self.excess_with(role, most_usd_per_h)

    def excess_with(self, role: Role, usd_per_h: float) -> str:
        """Return which cap is exceeded with one more machine at that price; empty: none."""
        return excess(self.caps, self.spent_usd, [*self.running, Running(usd_per_h, _stop_s(role))])

    def fits(self, role: Role, usd_per_h: float) -> bool:
        """Whether one more machine at that price is bought."""
        return not self.refusal(role, "", usd_per_h)

    def add(self, role: Role, most_usd_per_h: float) -> None:
        self.running = together([*self.running, Running(most_usd_per_h, _stop_s(role))])

    def reserve(self, role: Role, likely_usd_per_h: float, most_usd_per_h: float) -> None:
        """Count a machine that will be requested later: by the hour at its likely price, in all at the highest."""
        likely, most = (Running(usd, _stop_s(role)) for usd in (likely_usd_per_h, most_usd_per_h))
        once_usd = most.reserve_usd - likely.reserve_usd
        self.running = together([*self.running, replace(likely, once_usd=once_usd)])

    @property
    def words(self) -> str:
        """`12.30 of 500.00 USD spent`; empty without a cap."""
        return "" if self.caps.usd is None else f"{self.spent_usd:.2f} of {self.caps.usd:.2f} USD spent"


def _stop_s(role: Role) -> float:
    return STOP_WAIT_S if role is Role.TRAINER else 0.0
