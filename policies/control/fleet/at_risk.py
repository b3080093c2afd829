"""Machines that their cloud may soon take, as it says itself: AWS's rebalance recommendation.

Each such word is journalled once, with what its pool's history makes of it. Where `policies.fleet.risk` finds that
it pays, another node is asked for, beyond the wanted count, and the one at risk goes back once that serves. One in
a pool where no machine is at risk or was lately, for there the next would be told the same; for each node once, so
that whatever a cloud says, no more is bought than it has given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from policies.control.fleet.deadline import boot_s
from policies.control.fleet.size import hourly_prices, is_at_risk, may_go
from policies.control.fleet.spending import Purse
from policies.control.fleet.store_bill import join_usd
from policies.control.fleet.where import Crowds, Terms, terms_elsewhere
from policies.control.tick import Tick
from policies.fleet.risk import Risk, risk_of, saved_s, short_usd_per_h
from policies.model.buying import MachineKind
from policies.model.events import RiskTold
from policies.model.phases import FILLING_NODE
from policies.model.pool_record import AT_RISK_S, under_risk
from policies.model.pools import Pool
from policies.model.state import Node
from policies.model.vocabulary import Market, NodePhase, Role, RunPhase, kind_of


@dataclass(frozen=True, slots=True)
class Relief:
    """Another node in place of one at risk: where, and what that would save and cost."""

    terms: Terms
    saves_usd: float
    costs_usd: float

    @property
    def pays(self) -> bool:
        return self.saves_usd > self.costs_usd

    @property
    def words(self) -> str:
        return f"another now saves {self.saves_usd:.3f} USD and costs {self.costs_usd:.3f}"


def tell_risks(tick: Tick) -> None:
    """Journal of each machine once that its cloud may soon take it, and what is made of that. Beside a notice it
    says nothing more."""
    for machine in (tick.snapshot.machines or {}).values():
        node = tick.node(machine.node) if machine.at_risk else None
        if node is None or node.at_risk_since_s is not None:
            continue
        if node.phase in (NodePhase.BOOTING, NodePhase.SERVING):
            risk = _risk(tick, node.pool)
            told = replace(node, at_risk_since_s=tick.snapshot.now_s)
            weighed = relief_of(tick, Purse(tick), Crowds(tick), told)
            then = weighed if isinstance(weighed, str) else weighed.words
            reason = f"{_words(node.pool, risk)}; {then}"
            tick.emit(RiskTold(node.id, risk.share(AT_RISK_S), reason), f"{node.id} is at risk: {reason}")


def return_relieved(tick: Tick) -> None:
    """Return the nodes at risk in whose place another serves; and, while the trainer has no machine, the others
    that are on their way: they have room and money that it may need."""
    trainer = bool(tick.state.trainer_machines)
    for one in sorted(tick.state.beyond):
        node, other = tick.state.nodes[tick.state.nodes[one].relieves], tick.state.nodes[one]
        if other.phase is not NodePhase.SERVING:
            if not trainer:
                tick.move(other, NodePhase.TERMINATING, "the trainer has no machine, and comes first")
        elif node.phase is not NodePhase.SERVING or not trainer or may_go(tick):
            why = f"it was said to be at risk, and {other.id} serves in its place"
            tick.move(node, NodePhase.TERMINATING, why)


def unrelieved(tick: Tick) -> list[Node]:
    """The nodes at risk, none of which has another coming in its place, while the fleet is whole and works."""
    kind = tick.state.kinds.get(kind_of(Role.ROLLOUT, Market.SPOT), MachineKind())
    trains = any(one.phase is NodePhase.SERVING for one in tick.state.trainer_machines)
    if tick.state.phase is not RunPhase.TRAINING or not trains or kind.stopped:
        return []
    found = [one for one in tick.state.nodes.values() if is_at_risk(tick, one) and not one.relieved]
    found = [one for one in found if one.role is Role.ROLLOUT and one.phase is NodePhase.SERVING]
    return sorted((one for one in found if one.market is Market.SPOT), key=lambda node: node.id)


def relief_of(tick: Tick, purse: Purse, crowds: Crowds, node: Node) -> Relief | str:
    """Weigh another node in place of one at risk; or say why there is none.

    What is at risk in a pool is taken to go together: the first that is relieved saves most.
    """
    prices, since_s = hourly_prices(tick.state), node.at_risk_since_s
    if node.role is not Role.ROLLOUT or node.market is not Market.SPOT or since_s is None:
        return "only rollout nodes on spot are replaced before a notice"
    if not prices.known:
        return "what it costs to be without it is not known"
    terms = terms_elsewhere(tick, crowds, Role.ROLLOUT, Market.SPOT, _risky(tick) | {node.pool})
    if terms is None or terms.where is None or terms.usd_per_h is None:
        return "no other pool is free of such words and does not rest"
    if why := purse.refusal(Role.ROLLOUT, node.kind, terms.usd_per_h):
        return f"no money for another: {why}"
    live = [one for one in tick.state.live(Role.ROLLOUT) if one.phase in FILLING_NODE]
    with_it = [one for one in live if one.pool == node.pool and not one.relieved and is_at_risk(tick, one)]
    together = 1 + sum(one.id != node.id for one in with_it)
    nodes, shape = len(live) - len(tick.state.beyond), tick.snapshot.step_shape
    short, less = (short_usd_per_h(shape, prices, nodes, count) for count in (together, together - 1))
    start_s, within_s = boot_s(tick.state), AT_RISK_S - tick.waited_s(since_s)
    risk, others = _risk(tick, node.pool), terms.where.weather.losses_an_hour
    spared_s = saved_s(risk.losses_an_hour, start_s, within_s) - saved_s(others, start_s, within_s)
    start_usd = terms.usd_per_h * start_s / 3600 + join_usd(tick, Role.ROLLOUT)
    return Relief(terms, (short - less) * spared_s / 3600, (1 - risk.share(within_s)) * start_usd)


def _risk(tick: Tick, pool: Pool | None) -> Risk:
    now_s, half_life_h = tick.snapshot.now_s, tick.spec.policies.fleet.loss_half_life_h
    there = [
        under_risk(node.at_risk_since_s, now_s, taken=False)
        for node in tick.state.nodes.values()
        if node.at_risk_since_s is not None and node.pool == pool and node.phase in FILLING_NODE
    ]
    return risk_of(tick.state.pools.get(str(pool)), there, now_s, half_life_h)


def _risky(tick: Tick) -> set[Pool | None]:
    """Pools in which a machine is at risk, or was lately."""
    lately = {
        record.pool
        for record in tick.state.pools.values()
        if any(tick.waited_s(one.until_s) < AT_RISK_S for one in record.at_risk)
    }
    return lately | {one.pool for one in tick.state.nodes.values() if is_at_risk(tick, one)}


def _words(pool: Pool | None, risk: Risk) -> str:
    """`of 4 told so in aws/r/z g6.xlarge L4:1 spot 1 was taken within 30 min; 0.21 are expected to be`."""
    within = f"within {AT_RISK_S / 60:.0f} min"
    seen = f"of {risk.told} told so in {pool or 'its pool'} {risk.taken} were taken {within}"
    return f"{seen}; {risk.share(AT_RISK_S):.2f} are expected to be"
