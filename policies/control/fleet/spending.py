"""The budget: nothing is bought that does not fit under it; a run that reaches it stores what it has and stops."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from policies.control.stopping import STOP_WAIT_S
from policies.control.tick import Tick
from policies.fleet.budget import Caps, Running, excess, spent_usd, together
from policies.model.events import BudgetNeared, BudgetReached, BudgetRefused
from policies.model.phases import FILLING_NODE, LIVE_RUN
from policies.model.spec import RunSpec
from policies.model.state import Node, RunState
from policies.model.vocabulary import NodePhase, Role, RunPhase

NEAR_SHARE = 0.8  # of `budget.usd`: once it is spent the user is told, while there is time to raise it
BUDGET = "budget"  # a command: `budget.usd` is another one from now on


def caps_of(state: RunState, spec: RunSpec) -> Caps:
    """Return the caps in force: run.yaml's, or what a user has raised the first one to since."""
    usd = spec.budget.usd if state.budget_usd is None else state.budget_usd
    return Caps(usd, spec.budget.usd_per_h)


def stop_at_cap(tick: Tick) -> None:
    """Stop a run for which no more money is left than stopping takes; say once that most of it is spent."""
    if tick.state.phase not in LIVE_RUN:
        return
    caps = caps_of(tick.state, tick.spec)
    if caps.usd is None:
        return
    if why := excess(Caps(caps.usd, None), _spent(tick), _running(tick, tick.state.nodes.values())):
        reach_cap(tick, why)
    elif not tick.state.budget_neared and (spent := _spent(tick)) >= NEAR_SHARE * caps.usd:
        tick.emit(BudgetNeared(spent, caps.usd), f"{spent:.2f} of {caps.usd:.2f} USD are spent")


def may_go_on(tick: Tick) -> bool:
    """Whether all that runs may do so a moment longer, and stopping it then still fits under `budget.usd`."""
    caps = Caps(caps_of(tick.state, tick.spec).usd, None)
    return not excess(caps, _spent(tick), _running(tick, tick.state.nodes.values()))


def reach_cap(tick: Tick, why: str) -> None:
    """Have the run store what it has and return all machines."""
    tick.emit(BudgetReached(_spent(tick), why, tick.spec.budget.at), f"budget: {why}")
    tick.move_run(RunPhase.STOPPING, f"the budget is reached: {why}")


class Purse:
    """What is spent and what runs, as purchases of one tick find it: each that is made is added."""

    def __init__(self, tick: Tick, nodes: Iterable[Node] | None = None, caps: Caps | None = None) -> None:
        """`nodes`: those that run; None: all that there are. `caps`: None: those in force."""
        self._caps = caps_of(tick.state, tick.spec) if caps is None else caps
        self._prices_known = tick.snapshot.prices is not None
        self._spent = _spent(tick)
        self._running = _running(tick, tick.state.nodes.values() if nodes is None else nodes)

    def refusal(self, role: Role, kind: str, most_usd_per_h: float | None) -> str:
        """Say why a machine more, which may cost so much, is not bought; empty: it is."""
        if self._caps == Caps(None, None):
            return ""
        if not self._prices_known:
            return PRICES_UNKNOWN
        if most_usd_per_h is None:
            return f"no price is known of machines of the kind {kind}, and there is a budget"
        return excess(self._caps, self._spent, [*self._running, Running(most_usd_per_h, _stop_s(role))])

    def fits(self, role: Role, usd_per_h: float) -> bool:
        """Whether a machine more at that price is bought."""
        return not self.refusal(role, "", usd_per_h)

    def add(self, role: Role, most_usd_per_h: float) -> None:
        self._running = together([*self._running, Running(most_usd_per_h, _stop_s(role))])

    def keep_back(self, role: Role, likely_usd_per_h: float, most_usd_per_h: float) -> None:
        """Count one that will be asked for later: an hour at what it is likely to cost, in all at the most."""
        likely, most = (Running(usd, _stop_s(role)) for usd in (likely_usd_per_h, most_usd_per_h))
        once_usd = most.reserve_usd - likely.reserve_usd
        self._running = together([*self._running, replace(likely, once_usd=once_usd)])

    def words(self) -> str:
        """`12.30 of 500.00 USD spent`; empty without a cap."""
        cap = self._caps.usd
        return "" if cap is None else f"{self._spent:.2f} of {cap:.2f} USD spent"


PRICES_UNKNOWN = "prices are not known yet, and there is a budget"


def refuse(
    tick: Tick, role: Role, kind: str, most_usd_per_h: float | None, why: str, *, stand_in: bool = False
) -> None:
    """A machine is not bought for lack of money: without it the run stops, or goes on with what it has. While
    machines are on their way out it waits: what they cost may be what the new one will. For want of a price, or of
    money for a `stand_in`, with or without which the run goes on, none stops. Nor over what a trainer may cost an
    hour beside rollout nodes: these go back first, and come again beside what it does cost."""
    essential = role is Role.TRAINER or not tick.state.live(Role.ROLLOUT)
    stay = [node for node in tick.state.nodes.values() if node.phase in FILLING_NODE]
    leave, what = len(tick.state.nodes) - len(stay), kind if stand_in else f"{role}"
    if why == PRICES_UNKNOWN:
        tick.reasons.append(why)
    elif most_usd_per_h is not None and leave and not excess_with(tick, role, most_usd_per_h, stay):
        tick.reasons.append(f"{role} waits for {leave} machines to be gone: {why}")
    elif role is Role.TRAINER and most_usd_per_h is not None and (idle := _in_its_way(tick, most_usd_per_h, stay)):
        for node in idle:
            tick.move(node, NodePhase.TERMINATING, f"the trainer's machine comes first: {why}")
    elif essential and most_usd_per_h is not None and not stand_in:
        reach_cap(tick, why)
    elif what not in tick.state.budget_refused:
        tick.emit(BudgetRefused(what, why), f"no more {what} machines: {why}")


def _in_its_way(tick: Tick, trainer_usd_per_h: float, nodes: list[Node]) -> list[Node]:
    """Return the rollout nodes, the dearest first, without which there is room for a trainer's machine under the
    cap an hour; none where that is not all it takes."""
    one = Running(trainer_usd_per_h, _stop_s(Role.TRAINER))
    if excess(Caps(caps_of(tick.state, tick.spec).usd, None), _spent(tick), [*_running(tick, nodes), one]):
        return []
    rollouts = sorted((one for one in nodes if one.role is Role.ROLLOUT), key=lambda one: -one.usd_per_h)
    for count in range(1, len(rollouts) + 1):
        idle = rollouts[:count]
        stay = [node for node in nodes if node not in idle]
        if not excess_with(tick, Role.TRAINER, trainer_usd_per_h, stay):
            return idle
    return []


def _spent(tick: Tick) -> float:
    return spent_usd(tick.state, tick.snapshot.now_s) + tick.snapshot.controller_usd


def excess_with(tick: Tick, role: Role, most_usd_per_h: float, nodes: Iterable[Node]) -> str:
    """Say which cap these nodes and one more at that price do not fit under; empty: they do."""
    running = [*_running(tick, nodes), Running(most_usd_per_h, _stop_s(role))]
    return excess(caps_of(tick.state, tick.spec), _spent(tick), running)


def _running(tick: Tick, nodes: Iterable[Node]) -> list[Running]:
    running = [Running(node.usd_per_h, _stop_s(node.role)) for node in nodes]
    return together([*running, Running(tick.snapshot.controller_usd_per_h, STOP_WAIT_S)])


def _stop_s(role: Role) -> float:
    return STOP_WAIT_S if role is Role.TRAINER else 0.0
