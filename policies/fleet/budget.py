"""What a run has cost, and whether a machine more still fits under its caps.

A machine counts from its request until it is known to be gone, at its price or, until that is known, at the most
that one of its kind may cost. Something may be started only if what is spent, what everything that runs will cost
until it could be stopped, and what giving it back costs fit under the cap together: so the cap is not passed while
somebody steers and the cloud takes machines back when asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from policies.fleet import disks
from policies.model.spec import RunSpec
from policies.model.state import RunState

TEARDOWN_S = 600.0  # from the order to give a machine back until it is known to be gone; SkyPilot is given 300 s


@dataclass(frozen=True, slots=True)
class Running:
    """Something that costs by the hour, and how long it has to go on after the decision to stop."""

    usd_per_h: float
    stop_s: float
    once_usd: float = 0.0  # what it will have cost besides by then

    @property
    def reserve_usd(self) -> float:
        """What it costs from now until it is known to be gone."""
        return self.usd_per_h * (self.stop_s + TEARDOWN_S) / 3600 + self.once_usd


def together(running: Iterable[Running]) -> list[Running]:
    """Return the same cost an hour and the same reserve in as few as there are times to stop."""
    found: dict[float, Running] = {}
    for one in running:
        before = found.get(one.stop_s, Running(0.0, one.stop_s))
        both_usd = before.once_usd + one.once_usd
        found[one.stop_s] = Running(before.usd_per_h + one.usd_per_h, one.stop_s, both_usd)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Caps:
    """What a run may cost, in all and an hour. None: no limit."""

    usd: float | None
    usd_per_h: float | None


def spent_usd(state: RunState, now_s: float) -> float:
    """Return what the run's machines have cost until now."""
    return state.spent_usd + sum(node.cost_usd(now_s) for node in state.nodes.values())


def on_demand_usd(state: RunState, now_s: float) -> float:
    """Return what the same machines would have cost on demand."""
    return state.spent_on_demand_usd + sum(node.on_demand_cost_usd(now_s) for node in state.nodes.values())


def not_counted(spec: RunSpec) -> str:
    """Name the costs of such a run that are not counted."""
    unpriced = [f"disks at {cloud or 'an unnamed cloud'} (no price is known)" for cloud in disks.unknown(spec)]
    return ", ".join([*unpriced, "the store, traffic between zones"])


def excess(caps: Caps, spent: float, running: Iterable[Running]) -> str:
    """Say which cap what runs does not fit under, with the numbers; empty: it fits."""
    running = list(running)
    rate, reserve = sum(one.usd_per_h for one in running), sum(one.reserve_usd for one in running)
    if caps.usd is not None and spent + reserve > caps.usd:
        told = f"{spent:.2f} USD spent and {reserve:.2f} until all is stopped and returned"
        return f"{told} are more than `budget.usd`, {caps.usd:.2f}"
    if caps.usd_per_h is not None and rate > caps.usd_per_h:
        return f"{rate:.2f} USD an hour are more than `budget.usd_per_h`, {caps.usd_per_h:.2f}"
    return ""
