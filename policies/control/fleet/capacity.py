"""Tells once that there has been no machine of a role for long, which no move of a node says."""

from __future__ import annotations

from policies.control.tick import Tick
from policies.model.events import CapacityMissing
from policies.model.phases import LIVE_RUN
from policies.model.vocabulary import NodePhase, Role, RunPhase, role_of

MISSING_S = 3600.0  # shorter droughts are usual, and pass


def tell_missing(tick: Tick) -> None:
    """Journal that a run has waited for a machine for an hour, as far as this controller has watched: without one
    for the trainer, or without any for rollouts while the trainer works."""
    if tick.state.phase not in LIVE_RUN or tick.state.phase is RunPhase.PARKED:
        return  # a parked run has told it
    trainers = tick.state.trainer_machines
    if not trainers:
        _tell(tick, Role.TRAINER, tick.state.trainerless_since_s)
        return
    since_s = tick.state.rolloutless_since_s
    waits = min((node.since_s for node in trainers if node.phase is NodePhase.SERVING), default=None)
    if tick.spec.rollout.replicas.max and since_s is not None and waits is not None:
        _tell(tick, Role.ROLLOUT, max(since_s, waits))


def _tell(tick: Tick, role: Role, since_s: float | None) -> None:
    if since_s is None or role in tick.state.capacity_told or tick.silent_s(since_s) < MISSING_S:
        return
    minutes = f"no {role} machine for {tick.silent_s(since_s) / 60:.0f} min"
    refused = [slot for name, slot in tick.state.slots.items() if role_of(name) is role and slot.last_refusal]
    newest = max(refused, key=lambda slot: slot.refused_at_s, default=None)
    why = f"{minutes}; last refused: {newest.last_refusal}" if newest else minutes
    tick.emit(CapacityMissing(role, since_s, why), why)
