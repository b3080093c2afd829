"""Report to the user: shortages and a nearly spent budget.

Each topic has a state. It is journalled when the state differs from the last report of that topic.
"""

from __future__ import annotations

from collections.abc import Iterator

from grpo_orch.policies.fleet.budget import are_set, caps_of, spent_usd
from grpo_orch.policies.model.events import (
    BudgetNeared,
    CapacityShortage,
    Event,
    PitfallFound,
)
from grpo_orch.policies.model.phases import LIVE_RUN
from grpo_orch.policies.model.reports import PITFALL
from grpo_orch.policies.model.vocabulary import NodePhase, Role, RunPhase
from grpo_orch.policies.tick.draft import Tick

NEAR_SHARE = 0.8  # of `budget.usd`: once spent, the user is notified while there is time to raise it
MISSING_S = 3600.0  # without a machine of a role; shorter shortages are common
PRICES = "prices"  # a kind of PitfallFound event


def report(tick: Tick) -> None:
    """Journal each topic of a live run whose state has changed."""
    if tick.state.phase in LIVE_RUN:
        for topic in (_money, _capacity):
            for event, reason in topic(tick):
                tick.report(event, reason)


def _money(tick: Tick) -> Iterator[tuple[Event, str]]:
    """Report a nearly spent budget, and that the cloud does not list its offers."""
    caps, error = caps_of(tick.state, tick.spec), tick.snapshot.prices_trouble
    if caps.usd is not None:
        spent = spent_usd(tick.state, tick.snapshot.now_s) + tick.snapshot.controller.usd
        if spent >= NEAR_SHARE * caps.usd:
            yield BudgetNeared(spent, caps.usd), f"{spent:.2f} of {caps.usd:.2f} USD are spent"
    if error and f"{PITFALL} {PRICES}" not in tick.state.reports:
        step = 0 if tick.snapshot.trainer is None else tick.snapshot.trainer.step
        is_capped = tick.snapshot.prices is None and are_set(caps)
        effect = (
            "nothing is bought, because the run has a budget" if is_capped else "the cloud chooses where to buy"
        )
        text = f"the cloud does not list its offers: {error}; {effect}"
        yield PitfallFound(PRICES, step, text), text


def _capacity(tick: Tick) -> Iterator[tuple[Event, str]]:
    """Report that the run has waited for machines for an hour, as far as this controller has watched.

    Either the trainer has no machine, or no rollout node serves while the trainer works. A parked run has already
    reported it.
    """
    state = tick.state
    role, since_s = Role.TRAINER, state.shortages.trainer_since_s
    if since_s is None and state.shortages.rollout_since_s is not None and tick.spec.rollout.replicas.max:
        serving = [node.since_s for node in state.trainer_machines if node.phase is NodePhase.SERVING]
        if serving:
            role, since_s = Role.ROLLOUT, max(state.shortages.rollout_since_s, min(serving))
    if state.phase is RunPhase.PARKED or since_s is None or tick.silent_s(since_s) < MISSING_S:
        return
    missing = "no trainer machine" if role is Role.TRAINER else "no rollout node has served"
    reason = f"{missing} for {tick.silent_s(since_s) / 60:.0f} min"
    refused = [kind for name, kind in state.kinds.items() if name.startswith(role) and kind.last_refusal]
    if refused:
        reason += f"; last refusal: {max(refused, key=lambda kind: kind.failed_at_s).last_refusal}"
    yield CapacityShortage(role, since_s, reason), reason
