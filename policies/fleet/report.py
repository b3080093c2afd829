"""Report to the user: shortages, missed deadlines, a nearly spent budget, and who generates.

Each topic has a state. It is journalled when the state differs from the last report of that topic.
"""

from __future__ import annotations

from grpo_orch.policies.fleet.budget import Spending, caps_of
from grpo_orch.policies.fleet.deadline import deadline_progress
from grpo_orch.policies.model.events import (
    BudgetNeared,
    CapacityShortage,
    DeadlineMissed,
    NodesGenerate,
    PitfallFound,
    TrainerGenerates,
)
from grpo_orch.policies.model.phases import LIVE_RUN
from grpo_orch.policies.model.reports import PITFALL
from grpo_orch.policies.model.vocabulary import NodePhase, Role, RunPhase, role_of
from grpo_orch.policies.tick.draft import Tick
from grpo_orch.policies.tick.snapshot import GENERATING, OWN_GENERATION

NEAR_SHARE = 0.8  # of `budget.usd`: once spent, the user is notified while there is time to raise it
MISSING_S = 3600.0  # without a machine of a role; shorter shortages are common
PRICES = "prices"  # a kind of PitfallFound event


def report(tick: Tick) -> None:
    """Journal each topic whose state has changed."""
    if tick.state.phase not in LIVE_RUN:
        return
    _budget(tick)
    _prices(tick)
    _generation(tick)
    _capacity(tick)
    _deadline(tick)


def _budget(tick: Tick) -> None:
    usd = caps_of(tick.state, tick.spec).usd
    if usd is None:
        return
    spent = Spending(tick.state, tick.snapshot, tick.spec).spent_usd
    if spent >= NEAR_SHARE * usd:
        tick.report(BudgetNeared(spent, usd), f"{spent:.2f} of {usd:.2f} USD are spent")


def _prices(tick: Tick) -> None:
    """Report that the cloud does not list its offers. Without a budget, machines are bought nevertheless."""
    error = tick.snapshot.prices_trouble
    if not error or f"{PITFALL} {PRICES}" in tick.state.reports:
        return
    step = 0 if tick.snapshot.trainer is None else tick.snapshot.trainer.step
    is_capped = tick.snapshot.prices is None and caps_of(tick.state, tick.spec).are_set
    effect = "nothing is bought, because the run has a budget" if is_capped else "the cloud chooses where to buy"
    text = f"the cloud does not list its offers: {error}; {effect}"
    tick.report(PitfallFound(PRICES, step, text), text)


def _generation(tick: Tick) -> None:
    """Report who makes the completions: rollout nodes, or the trainer while none is available."""
    beat, since_s = tick.snapshot.trainer, tick.state.own_generation_since_s
    if beat is None or tick.state.phase is not RunPhase.TRAINING or beat.timeline != tick.state.timeline:
        return
    if beat.activity == OWN_GENERATION:
        without_s = tick.state.shortages.rollout_since_s
        waited_s = None if without_s is None else tick.waited_s(without_s)
        tick.report(TrainerGenerates(beat.step, waited_s), "no rollout node is available: the trainer generates")
    elif since_s is not None and _nodes_generate(tick, beat.activity):
        lasted_s = tick.waited_s(since_s)
        tick.report(NodesGenerate(beat.step, lasted_s), f"rollout nodes generate again, at step {beat.step}")


def _nodes_generate(tick: Tick, activity: str) -> bool:
    """Whether nodes make the trainer's completions. A waiting trainer has no nodes and will generate again."""
    if activity == GENERATING:
        return True
    is_serving = any(node.phase is NodePhase.SERVING for node in tick.state.live(Role.ROLLOUT))
    return is_serving and activity != OWN_GENERATION


def _capacity(tick: Tick) -> None:
    """Report that the run has waited for machines for an hour, as far as this controller has watched.

    Either the trainer has no machine, or no rollout node serves while the trainer works. A parked run has already
    reported it.
    """
    state = tick.state
    if state.phase is RunPhase.PARKED:
        return
    trainer_since_s, since_s = state.shortages.trainer_since_s, state.shortages.rollout_since_s
    if trainer_since_s is not None:
        _missing(tick, Role.TRAINER, trainer_since_s)
    elif since_s is not None and tick.spec.rollout.replicas.max:
        serving = [node.since_s for node in state.trainer_machines if node.phase is NodePhase.SERVING]
        if serving:
            _missing(tick, Role.ROLLOUT, max(since_s, min(serving)))


def _missing(tick: Tick, role: Role, since_s: float) -> None:
    if tick.silent_s(since_s) < MISSING_S:
        return
    missing = "no trainer machine" if role is Role.TRAINER else "no rollout node has served"
    minutes = f"{missing} for {tick.silent_s(since_s) / 60:.0f} min"
    refused = [slot for name, slot in tick.state.slots.items() if role_of(name) is role and slot.last_refusal]
    newest = max(refused, key=lambda slot: slot.refused_at_s, default=None)
    reason = f"{minutes}; last refusal: {newest.last_refusal}" if newest else minutes
    tick.report(CapacityShortage(role, since_s, reason), reason)


def _deadline(tick: Tick) -> None:
    """Report a deadline that has passed or is out of reach. The run continues at the most economical pace."""
    course = deadline_progress(tick.state, tick.spec, tick.snapshot.trainer, tick.snapshot.now_s)
    if course is None:
        return
    shape, max_nodes = tick.snapshot.measured.step, tick.spec.rollout.replicas.max
    if shape is None or max_nodes == 0:
        if course.now_s > course.deadline_s:
            event = DeadlineMissed(course.deadline_s, None, course.step, course.steps, max_nodes, None)
            tick.report(event, f"the deadline has passed at step {course.step} of {course.steps}")
    elif course.is_late(shape, max_nodes):
        end_s, step_s = course.end_s(shape, max_nodes), shape.seconds(max_nodes)
        event = DeadlineMissed(course.deadline_s, end_s, course.step, course.steps, max_nodes, step_s)
        late_s = end_s - course.deadline_s
        tick.report(event, f"the deadline is out of reach: {late_s:.0f} s late even with {max_nodes} nodes")
