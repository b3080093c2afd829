"""The budget: nothing is bought that does not fit under it; a run that reaches it stores what it has and stops."""

from __future__ import annotations

from collections.abc import Iterable

from policies.control.stopping import STOP_WAIT_S
from policies.control.tick import Tick
from policies.fleet.budget import Caps, Running, excess, spent_usd
from policies.model.events import BudgetReached, BudgetRefused
from policies.model.phases import FILLING_NODE, LIVE_RUN
from policies.model.spec import RunSpec
from policies.model.state import Node, RunState
from policies.model.vocabulary import Role, RunPhase

BUDGET = "budget"  # a command: `budget.usd` is another one from now on


def caps_of(state: RunState, spec: RunSpec) -> Caps:
    """Return the caps in force: run.yaml's, or what a user has raised the first one to since."""
    usd = spec.budget.usd if state.budget_usd is None else state.budget_usd
    return Caps(usd, spec.budget.usd_per_h)


def stop_at_cap(tick: Tick) -> None:
    """Stop a run for which no more money is left than stopping takes."""
    if tick.state.phase not in LIVE_RUN:
        return
    caps = caps_of(tick.state, tick.spec)
    if caps.usd is None:
        return
    if why := excess(Caps(caps.usd, None), _spent(tick), _running(tick, tick.state.nodes.values())):
        reach_cap(tick, why)


def reach_cap(tick: Tick, why: str) -> None:
    """Have the run store what it has and return all machines."""
    tick.emit(BudgetReached(_spent(tick), why, tick.spec.budget.at), f"budget: {why}")
    tick.move_run(RunPhase.STOPPING, f"the budget is reached: {why}")


def refusal(tick: Tick, role: Role, kind: str) -> str:
    """Say why a machine more of that kind is not bought; empty: it is."""
    caps = caps_of(tick.state, tick.spec)
    if caps.usd is None and caps.usd_per_h is None:
        return ""
    if tick.snapshot.prices is None:
        return PRICES_UNKNOWN
    return _excess_with(tick, role, kind, tick.state.nodes.values())


PRICES_UNKNOWN = "prices are not known yet, and there is a budget"


def refuse(tick: Tick, role: Role, kind: str, why: str) -> None:
    """A machine is not bought for lack of money: without it the run stops, or goes on with what it has. While
    machines are on their way out it waits: what they cost may be what the new one will."""
    essential = role is Role.TRAINER or not tick.state.live(Role.ROLLOUT)
    stay = [node for node in tick.state.nodes.values() if node.phase in FILLING_NODE]
    leave = len(tick.state.nodes) - len(stay)
    if why == PRICES_UNKNOWN:
        tick.reasons.append(why)
    elif leave and not _excess_with(tick, role, kind, stay):
        tick.reasons.append(f"{role} waits for {leave} machines to be gone: {why}")
    elif essential:
        reach_cap(tick, why)
    elif not tick.state.budget_refused:
        tick.emit(BudgetRefused(f"{role}", why), f"no more {role} machines: {why}")


def budget_words(tick: Tick) -> str:
    """`12.30 of 500.00 USD spent`; empty without a cap."""
    cap = caps_of(tick.state, tick.spec).usd
    return "" if cap is None else f"{_spent(tick):.2f} of {cap:.2f} USD spent"


def _spent(tick: Tick) -> float:
    return spent_usd(tick.state, tick.snapshot.now_s) + tick.snapshot.controller_usd


def _excess_with(tick: Tick, role: Role, kind: str, nodes: Iterable[Node]) -> str:
    """Say which cap these nodes and one more of that kind do not fit under; empty: they do."""
    one = Running((tick.snapshot.prices or {}).get(kind, 0.0), _stop_s(role))
    return excess(caps_of(tick.state, tick.spec), _spent(tick), [*_running(tick, nodes), one])


def _running(tick: Tick, nodes: Iterable[Node]) -> list[Running]:
    running = [Running(node.usd_per_h, _stop_s(node.role)) for node in nodes]
    return [*running, Running(tick.snapshot.controller_usd_per_h, STOP_WAIT_S)]


def _stop_s(role: Role) -> float:
    return STOP_WAIT_S if role is Role.TRAINER else 0.0
