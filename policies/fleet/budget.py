"""Track what a run has cost, and check whether one more machine fits under its caps.

A machine counts from its request until it is known to be gone, at its price or, until that is known, at the
maximum for its kind. A machine is requested only if the money spent so far and the cost of everything that runs,
until it could be stopped and returned, fit under the cap together. So the cap holds while a daemon is alive and
the cloud terminates machines on request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from grpo_orch.policies.costs import disks
from grpo_orch.policies.model.spec import RunSpec
from grpo_orch.policies.model.state import Node, RunState
from grpo_orch.policies.model.vocabulary import Role
from grpo_orch.policies.tick.snapshot import Snapshot

BUDGET = "budget"  # a command: sets `budget.usd`
# A stopping trainer must make progress within this time, again and again: weights and optimizer of 32 billion
# parameters are up to 525 GB, and a store may take 1 GB/s, or 100 MB/s.
STOP_WAIT_S = 900.0
TEARDOWN_S = 600.0  # from the request to terminate a machine until it is known to be gone; SkyPilot gets 300 s
PRICES_UNKNOWN = "prices are not known yet, and the run has a budget"


@dataclass(frozen=True, slots=True)
class Running:
    """An hourly cost, and how long it continues after the decision to stop."""

    usd_per_h: float
    stop_s: float
    once_usd: float = 0.0  # additional cost by then

    @property
    def reserve_usd(self) -> float:
        """Cost from now until it is known to be gone."""
        return self.usd_per_h * (self.stop_s + TEARDOWN_S) / 3600 + self.once_usd


@dataclass(frozen=True, slots=True)
class Caps:
    """Limits of a run's cost, in total and an hour. None: no limit."""

    usd: float | None
    usd_per_h: float | None

    @property
    def are_set(self) -> bool:
        return self.usd is not None or self.usd_per_h is not None


def caps_of(state: RunState, spec: RunSpec) -> Caps:
    """Return the caps in force: run.yaml's, with `budget.usd` as a user has set it since."""
    usd = spec.budget.usd if state.money.cap_usd is None else state.money.cap_usd
    return Caps(usd, spec.budget.usd_per_h)


def spent_usd(state: RunState, now_s: float) -> float:
    """Return the cost of the run's machines until now."""
    return state.money.spent_usd + sum(node.cost_usd(now_s) for node in state.nodes.values())


def on_demand_usd(state: RunState, now_s: float) -> float:
    """Return the cost that the same machines would have had on demand."""
    return state.money.spent_on_demand_usd + sum(node.on_demand_cost_usd(now_s) for node in state.nodes.values())


def not_counted(spec: RunSpec) -> str:
    """Name the costs of a run that are not counted."""
    unpriced = [f"disks at {cloud or 'an unnamed cloud'} (price unknown)" for cloud in disks.unknown(spec)]
    return ", ".join([*unpriced, "the store, traffic between zones"])


def excess(caps: Caps, spent: float, running: Iterable[Running]) -> str:
    """Return which cap the running machines exceed, with the numbers; empty: none."""
    running = list(running)
    rate, reserve = sum(item.usd_per_h for item in running), sum(item.reserve_usd for item in running)
    if caps.usd is not None and spent + reserve > caps.usd:
        cost = f"{spent:.2f} USD spent and {reserve:.2f} to stop and return all machines"
        return f"{cost} exceed `budget.usd`, {caps.usd:.2f}"
    if caps.usd_per_h is not None and rate > caps.usd_per_h:
        return f"{rate:.2f} USD an hour exceed `budget.usd_per_h`, {caps.usd_per_h:.2f}"
    return ""


def merged(running: Iterable[Running]) -> list[Running]:
    """Merge items with the same time to stop; the hourly cost and the reserve stay the same."""
    found: dict[float, Running] = {}
    for item in running:
        before = found.get(item.stop_s, Running(0.0, item.stop_s))
        once_usd = before.once_usd + item.once_usd
        found[item.stop_s] = Running(before.usd_per_h + item.usd_per_h, item.stop_s, once_usd)
    return list(found.values())


class Spending:
    """The money spent and the machines running. Each purchase of a tick is added before the next is checked."""

    def __init__(
        self,
        state: RunState,
        snapshot: Snapshot,
        spec: RunSpec,
        nodes: Iterable[Node] | None = None,
        caps: Caps | None = None,
    ) -> None:
        """Count `nodes`, or all of the state's. `caps`: None: those in force."""
        nodes = state.nodes.values() if nodes is None else nodes
        controller = Running(snapshot.controller.usd_per_h, STOP_WAIT_S)
        self.caps = caps_of(state, spec) if caps is None else caps
        self.spent_usd = spent_usd(state, snapshot.now_s) + snapshot.controller.usd
        self.running = merged([*(Running(node.usd_per_h, _stop_s(node.role)) for node in nodes), controller])
        self._prices_known = snapshot.prices is not None

    def exceeded(self) -> str:
        """Return why the running machines must stop: the rest of `budget.usd` only pays for stopping them."""
        return excess(Caps(self.caps.usd, None), self.spent_usd, self.running)

    def refusal(self, role: Role, kind: str, max_usd_per_h: float | None) -> str:
        """Return why one more machine with this maximum price is not bought; empty: it is."""
        if not self.caps.are_set:
            return ""
        if not self._prices_known:
            return PRICES_UNKNOWN
        if max_usd_per_h is None:
            return f"the price of {kind} is unknown, and the run has a budget"
        return self.excess_with(role, max_usd_per_h)

    def excess_with(self, role: Role, usd_per_h: float) -> str:
        """Return which cap is exceeded with one more machine at that price; empty: none."""
        return excess(self.caps, self.spent_usd, [*self.running, Running(usd_per_h, _stop_s(role))])

    def fits(self, role: Role, usd_per_h: float) -> bool:
        """Whether one more machine at that price is bought."""
        return not self.refusal(role, "", usd_per_h)

    def add(self, role: Role, max_usd_per_h: float) -> None:
        self.running = merged([*self.running, Running(max_usd_per_h, _stop_s(role))])

    def reserve(self, role: Role, likely_usd_per_h: float, max_usd_per_h: float) -> None:
        """Count a machine that will be requested later: hourly at its likely price, in total at its maximum."""
        likely, maximum = (Running(usd, _stop_s(role)) for usd in (likely_usd_per_h, max_usd_per_h))
        once_usd = maximum.reserve_usd - likely.reserve_usd
        self.running = merged([*self.running, replace(likely, once_usd=once_usd)])

    @property
    def summary(self) -> str:
        """`12.30 of 500.00 USD spent`; empty without a cap."""
        return "" if self.caps.usd is None else f"{self.spent_usd:.2f} of {self.caps.usd:.2f} USD spent"


def _stop_s(role: Role) -> float:
    return STOP_WAIT_S if role is Role.TRAINER else 0.0
