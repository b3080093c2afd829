"""A trainer that generates while no rollout node is to be had: what is told of it, and whether that pays.

It begins by itself (`tasks.completions.drought`), since it is paid for while it waits. What is decided here is
whether the run goes on so, in place of parking.
"""

from __future__ import annotations

from policies.control.fleet.deadline import is_behind
from policies.control.fleet.size import GENERATING, hourly_prices
from policies.control.fleet.stand_ins import on_demand_usd_per_h
from policies.control.objective import steps_of_generation
from policies.control.snapshot import OWN_GENERATION
from policies.control.tick import Tick
from policies.fleet.how_many import HourlyPrices
from policies.fleet.parking import own_step_limit_s
from policies.model.events import NodesGenerate, TrainerGenerates
from policies.model.spec import processes_of
from policies.model.vocabulary import NodePhase, Role, RunPhase

TRIED_ROWS = 2  # logged steps until one is measured: it ends where the next generation is logged


def tell_own_generation(tick: Tick) -> None:
    """Journal that the trainer has begun to generate, and that it has ended."""
    beat, since_s = tick.snapshot.trainer, tick.state.own_generation_since_s
    if beat is None or tick.state.phase is not RunPhase.TRAINING or beat.timeline != tick.state.timeline:
        return
    if since_s is None and beat.activity == OWN_GENERATION:
        without_s = tick.state.rolloutless_since_s
        waited_s = None if without_s is None else tick.waited_s(without_s)
        tick.emit(TrainerGenerates(beat.step, waited_s), "no rollout node is there: the trainer generates")
    elif since_s is not None and _nodes_generate(tick, beat.activity):
        lasted_s = tick.waited_s(since_s)
        tick.emit(NodesGenerate(beat.step, lasted_s), f"completions are the nodes' again, at step {beat.step}")


def _nodes_generate(tick: Tick, activity: str) -> bool:
    """Whether nodes make what the trainer asks for. One that waits has none, and will generate again."""
    if activity == GENERATING:
        return True
    there = any(node.phase is NodePhase.SERVING for node in tick.state.live(Role.ROLLOUT))
    return there and activity != OWN_GENERATION


def own_generation_pays(tick: Tick, idle_limit_s: float) -> bool:
    """Whether what the trainer makes itself is worth its price: a step costs no more than with nodes on demand, or
    may yet turn out to. A run behind its deadline takes what it can get."""
    since_s = tick.state.own_generation_since_s
    if since_s is None:
        return False
    most_s, own = _step_limit_s(tick, idle_limit_s), tick.snapshot.own_step
    # The completions of several steps are made at once, before the first of them.
    at_once = max(1.0, steps_of_generation(tick.spec.grpo, processes_of(tick.spec)))
    if tick.silent_s(max(since_s, tick.snapshot.stepped_at_s)) >= idle_limit_s + at_once * most_s:
        return False
    if own is None:
        rows_s = TRIED_ROWS * max(at_once, int(tick.spec.grpo.get("logging_steps", 1))) * most_s
        return tick.silent_s(since_s) < idle_limit_s + rows_s
    return own.seconds(1) <= most_s or is_behind(tick)


def _step_limit_s(tick: Tick, idle_limit_s: float) -> float:
    """Seconds that a step of the trainer alone may take; before any was measured, as many as its wait."""
    beside = hourly_prices(tick.state).beside_usd_per_h
    node = on_demand_usd_per_h(tick) or beside
    # Where none was made with nodes: one of them generates as fast as the trainer, or faster.
    shape = tick.snapshot.step_shape or tick.snapshot.own_step
    replicas = tick.spec.rollout.replicas
    if shape is None:
        return idle_limit_s
    return own_step_limit_s(shape, HourlyPrices(beside, node), max(1, replicas.min), replicas.max)
