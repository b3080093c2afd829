"""Track what a run has cost, and check whether one more machine fits under its caps.

A machine counts from its request until it is known to be gone, at its price or, until that is known, at the
maximum for its kind. A machine is requested only if the money spent so far and the cost of everything that runs,
until it could be stopped and returned, fit under the cap together. So the cap holds while a daemon is alive and
the cloud terminates machines on request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from grpo_orch.policies.costs import disks
from grpo_orch.policies.model.spec import Budget, RunSpec
from grpo_orch.policies.model.state import Node, RunState
from grpo_orch.policies.model.vocabulary import Role
from grpo_orch.policies.tick.snapshot import Snapshot

BUDGET = "budget"  # a command: sets `budget.usd`
# A stopping trainer must make progress within this time, again and again: weights and optimizer of 32 billion
# parameters are up to 525 GB, and a store may take 1 GB/s, or 100 MB/s.
STOP_WAIT_S = 900.0
TEARDOWN_S = 600.0  # from the request to terminate a machine until it is known to be gone; SkyPilot gets 300 s
PRICES_UNKNOWN = "prices are not known yet, and the run has a budget"


def caps_of(state: RunState, spec: RunSpec) -> Budget:
    """Return the caps in force: run.yaml's, with `budget.usd` as a user has set it since."""
    usd = state.money.cap_usd
    return spec.budget if usd is None else replace(spec.budget, usd=usd)


def are_set(caps: Budget) -> bool:
    return caps.usd is not None or caps.usd_per_h is not None


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


def stop_usd(role: Role, usd_per_h: float) -> float:
    """Return the cost of a machine from the decision to stop until it is known to be gone."""
    stop_s = STOP_WAIT_S if role is Role.TRAINER else 0.0
    return usd_per_h * (stop_s + TEARDOWN_S) / 3600


class Spending:
    """The money spent, and the cost of the machines that run. Add each purchase before checking the next.

    Attributes:
        spent_usd: so far.
        usd_per_h: of all running machines.
        reserve_usd: to stop and return all of them.
    """

    def __init__(
        self,
        state: RunState,
        snapshot: Snapshot,
        spec: RunSpec,
        nodes: Iterable[Node] | None = None,
        caps: Budget | None = None,
    ) -> None:
        """Count `nodes`, or all of the state's. `caps`: None: those in force."""
        self.caps = caps_of(state, spec) if caps is None else caps
        self._are_prices_known = snapshot.prices is not None
        self.spent_usd = spent_usd(state, snapshot.now_s) + snapshot.controller.usd
        self.usd_per_h = self.reserve_usd = 0.0
        self.add(Role.TRAINER, snapshot.controller.usd_per_h)  # the controller runs until the trainer has stopped
        for node in state.nodes.values() if nodes is None else nodes:
            self.add(node.role, node.usd_per_h)

    def add(self, role: Role, usd_per_h: float, reserve_usd: float | None = None) -> None:
        """Count one more machine. `reserve_usd`: to stop it; None: at the same price."""
        self.usd_per_h += usd_per_h
        self.reserve_usd += stop_usd(role, usd_per_h) if reserve_usd is None else reserve_usd

    def exceeded(self) -> str:
        """Return why the running machines must stop: the rest of `budget.usd` only pays for stopping them."""
        return self._over_total(0.0)

    def excess_with(self, role: Role, usd_per_h: float) -> str:
        """Return which cap is exceeded with one more machine at that price; empty: none."""
        cap, rate = self.caps.usd_per_h, self.usd_per_h + usd_per_h
        if (excess := self._over_total(stop_usd(role, usd_per_h))) or cap is None or rate <= cap:
            return excess
        return f"{rate:.2f} USD an hour exceed `budget.usd_per_h`, {cap:.2f}"

    def refusal(self, role: Role, kind: str, max_usd_per_h: float | None) -> str:
        """Return why one more machine with this maximum price is not bought; empty: it is."""
        if not are_set(self.caps):
            return ""
        if not self._are_prices_known:
            return PRICES_UNKNOWN
        if max_usd_per_h is None:
            return f"the price of {kind} is unknown, and the run has a budget"
        return self.excess_with(role, max_usd_per_h)

    @property
    def summary(self) -> str:
        """`12.30 of 500.00 USD spent`; empty without a cap."""
        return "" if self.caps.usd is None else f"{self.spent_usd:.2f} of {self.caps.usd:.2f} USD spent"

    def _over_total(self, more_usd: float) -> str:
        cap, reserve_usd = self.caps.usd, self.reserve_usd + more_usd
        if cap is None or self.spent_usd + reserve_usd <= cap:
            return ""
        cost = f"{self.spent_usd:.2f} USD spent and {reserve_usd:.2f} to stop and return all machines"
        return f"{cost} exceed `budget.usd`, {cap:.2f}"
