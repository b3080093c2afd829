"""How long each wait lasts, in seconds as they are written here: one second earlier nothing is done."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from grpo_orch.policies.control.decide import decide
from grpo_orch.policies.model.breaker import MachineKind
from grpo_orch.policies.model.events import CapacityShortage, JobRestarted, NodeMoved, ProbationPassed
from grpo_orch.policies.model.state import Node, Rollback, RunState, Shortages, TrainerFailures
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.model.vocabulary import (
    Cause,
    MachineState,
    Market,
    NodePhase,
    RollbackStage,
    RunPhase,
    kind_of,
    role_of,
    slot_and_incarnation,
)
from grpo_orch.policies.serving.gateway_status import MemberStatus
from grpo_orch.policies.tick.snapshot import Decision, Gateway, Machine, Snapshot, Stored, Trainer
from tests.stand_ins.world import spec

NOW_S = 100_000.0
LONG_S = 50_000.0
TRAINER, ROLLOUT = "trainer-0-i1", "rollout-0-i1"
KIND = "rollout on spot"
STEP, LAST_STEP = 5, 100


def node(name: str, phase: NodePhase = NodePhase.SERVING, for_s: float = LONG_S, **known: object) -> Node:
    """One that has been in its phase for so long."""
    role, (slot, incarnation) = role_of(name), slot_and_incarnation(name)
    market = Market.SPOT if name.startswith("rollout") else Market.ON_DEMAND
    since_s = NOW_S - for_s
    there = Node(name, role, slot, incarnation, market, phase, since_s, since_s, kind=kind_of(role, market))
    return replace(there, served=True, **known)  # type: ignore[arg-type]  # fields of Node


def decided(
    *nodes: Node,
    beat_s: float = 1.0,
    members: tuple[str, ...] | None = (ROLLOUT,),
    exit_code: int | None = None,
    step: int = STEP,
    gateway: dict[str, float] | None = None,
    steady_s: float = math.inf,
    **state: object,
) -> Decision:
    """What is decided where the trainer's last heartbeat is so old, and all that is not said is as it should be.

    `exit_code`: of nodes whose attempt has ended; `gateway`: fields of it; `state`: of the run's state.
    """
    known = replace(
        RunState("sim", RunPhase.TRAINING, is_proved=True, nodes={one.id: one for one in nodes}),
        **state,  # type: ignore[arg-type]  # fields of RunState
    )
    ended = {one.id: exit_code for one in nodes if one.attempt_ended_at_s is not None}
    machines = {one.id: Machine(one.id, MachineState.UP, one.attempt, ended.get(one.id)) for one in nodes}
    there = [MemberStatus(name, "b", "10.0.0.2:1", "0-5", True, False, 4, 0.1) for name in members or ()]
    snapshot = Snapshot(
        now_s=NOW_S,
        machines=machines,
        members=None if members is None else {one.node: one for one in there},
        gateway=replace(Gateway(age_s=LONG_S), **gateway or {}),  # type: ignore[arg-type]  # its fields
        steady_s=steady_s,
        trainer=Trainer(TRAINER, 1, known.timeline, step, LAST_STEP, "training", NOW_S - beat_s),
        store=Stored(timeline=known.timeline),
    )
    return decide(known, snapshot, spec(1))


def goes(decision: Decision, name: str, phase: NodePhase = NodePhase.TERMINATING) -> bool:
    return any(isinstance(one, NodeMoved) and (one.node, one.phase) == (name, phase) for one in decision.events)


def restarts(decision: Decision) -> bool:
    return any(isinstance(one, JobRestarted) for one in decision.events)


def tells(decision: Decision, kind: type) -> bool:
    return any(isinstance(one, kind) for one in decision.events)


def rolling_back(stage: RollbackStage, for_s: float) -> dict[str, object]:
    return {"rollbacks": (Rollback(Fork(1, None), Cause.USER, STEP, stage, NOW_S - for_s),)}


def trainerless(for_s: float, boot_s: float) -> Decision:
    kinds = {KIND: MachineKind(served=1, boot_s=boot_s)}
    return decided(node(ROLLOUT), members=None, kinds=kinds, shortages=Shortages(trainer_since_s=NOW_S - for_s))


def broken(name: str, for_s: float, attempt: int = 1, **state: object) -> Decision:
    """Its work ended so long ago."""
    ended = node(name, NodePhase.BOOTING, for_s, attempt=attempt, attempt_ended_at_s=NOW_S - for_s)
    nodes = (ended,) if name == TRAINER else (node(TRAINER), ended)
    return decided(*nodes, exit_code=1, members=(), **state)  # type: ignore[arg-type]


DRAINING, BOOTING = NodePhase.DRAINING, NodePhase.BOOTING
ALL = node(TRAINER), node(ROLLOUT)
LIMITS: dict[str, tuple[float, Callable[[float], bool]]] = {
    "a notice of a rollout node's": (
        180.0,
        lambda s: goes(decided(node(TRAINER), node(ROLLOUT, DRAINING, s)), ROLLOUT),
    ),
    "a notice of a silent trainer's": (
        180.0,
        lambda s: goes(decided(node(TRAINER, DRAINING, s), beat_s=60.0), TRAINER),
    ),
    "a beat of a trainer's that drains": (
        10.0,
        lambda s: goes(decided(node(TRAINER, DRAINING), beat_s=s), TRAINER),
    ),
    "a beat that shows that a trainer works": (
        10.0,
        lambda s: not goes(decided(node(TRAINER, BOOTING, 20.0), beat_s=s), TRAINER, NodePhase.SERVING),
    ),
    "a silence beside the gateway": (120.0, lambda s: goes(decided(*ALL, beat_s=s), TRAINER)),
    "a silence since the gateway is heard": (
        120.0,
        lambda s: goes(decided(*ALL, beat_s=LONG_S, gateway={"contact_s": s}), TRAINER),
    ),
    "a silence over unbroken looks": (
        120.0,
        lambda s: goes(decided(*ALL, beat_s=LONG_S, steady_s=s), TRAINER),
    ),
    "a silence of the whole machine": (3600.0, lambda s: goes(decided(*ALL, beat_s=s, members=None), TRAINER)),
    "a silence of its gateway": (
        3600.0,
        lambda s: goes(decided(*ALL, beat_s=LONG_S, members=None, gateway={"silent_s": s}), TRAINER),
    ),
    "a gateway too young to know all": (
        5.0,
        lambda s: goes(decided(*ALL, members=(), gateway={"age_s": s}), ROLLOUT, BOOTING),
    ),
    "a boot": (
        900.0,
        lambda s: goes(decided(node(TRAINER), node(ROLLOUT, BOOTING, s), members=()), ROLLOUT),
    ),
    "a boot that a gateway has watched": (
        900.0,
        lambda s: goes(
            decided(node(TRAINER), node(ROLLOUT, BOOTING, 3000.0), members=(), gateway={"age_s": s}), ROLLOUT
        ),
    ),
    "a boot though looks fail": (
        3600.0,
        lambda s: goes(
            decided(node(TRAINER), node(ROLLOUT, BOOTING, s), members=(), gateway={"age_s": 500.0}), ROLLOUT
        ),
    ),
    "an endless boot that a gateway has watched": (
        120.0,
        lambda s: goes(decided(node(TRAINER), node(ROLLOUT, BOOTING), members=(), gateway={"age_s": s}), ROLLOUT),
    ),
    "before the first restart of a rollout node's work": (1.0, lambda s: restarts(broken(ROLLOUT, s))),
    "before its fourth": (8.0, lambda s: restarts(broken(ROLLOUT, s, attempt=4))),
    "before a trainer's third": (4.0, lambda s: restarts(broken(TRAINER, s, failures=TrainerFailures(3)))),
    "an old trainer that does not stop": (
        120.0,
        lambda s: goes(decided(*ALL, **rolling_back(RollbackStage.FORKED, s)), TRAINER),  # type: ignore[arg-type]
    ),
    "a trainer that stores what it has": (
        900.0,
        lambda s: goes(decided(node(TRAINER, DRAINING, s), phase=RunPhase.STOPPING), TRAINER),
    ),
    "a silent trainer that may store what it has": (
        120.0,
        lambda s: goes(
            decided(node(TRAINER), beat_s=s, phase=RunPhase.STOPPING, gateway={"contact_s": 0.0}), TRAINER
        ),
    ),
    "a parked trainer that does not end": (
        3600.0,
        lambda s: goes(decided(node(TRAINER, DRAINING, s), phase=RunPhase.PARKED), TRAINER),
    ),
    "rollout nodes without a trainer": (300.0, lambda s: goes(trainerless(s, boot_s=100.0), ROLLOUT)),
    "those that take longer to start": (600.0, lambda s: goes(trainerless(s, boot_s=600.0), ROLLOUT)),
    "and much longer": (900.0, lambda s: goes(trainerless(s, boot_s=5000.0), ROLLOUT)),
    "no trainer's machine": (
        3600.0,
        lambda s: tells(decided(shortages=Shortages(trainer_since_s=NOW_S - s), members=None), CapacityShortage),
    ),
    "no rollout node for a trainer": (
        3600.0,
        lambda s: tells(
            decided(node(TRAINER, for_s=s), shortages=Shortages(rollout_since_s=0.0), members=()), CapacityShortage
        ),
    ),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_limit_lasts_as_long_as_set(limit: str) -> None:
    limit_s, over = LIMITS[limit]
    late_s = min(1.0, limit_s / 10)
    assert not over(limit_s - late_s)
    assert over(limit_s + late_s)


def test_draining_trainer_outlives_its_notice_while_it_beats() -> None:
    assert not goes(decided(node(TRAINER, DRAINING), beat_s=1.0), TRAINER)


def test_trainer_with_heartbeat_is_kept_in_any_phase() -> None:
    assert decided(*ALL, beat_s=9.0).events == ()
    assert decided(*ALL, beat_s=math.inf, steady_s=0.0).events == ()
    assert decided(*ALL, beat_s=math.inf, members=None, steady_s=60.0).events == ()


@pytest.mark.parametrize(("attempt", "again"), [(4, True), (5, False)])
def test_rollout_nodes_work_is_started_five_times(attempt: int, again: bool) -> None:
    decision = broken(ROLLOUT, 100.0, attempt)
    assert restarts(decision) is again
    assert goes(decision, ROLLOUT) is not again


@pytest.mark.parametrize(("step", "passes"), [(STEP, False), (2 * STEP, False), (2 * STEP + 1, True)])
def test_a_probation_is_passed_beyond_its_last_step(step: int, passes: bool) -> None:
    """As far beyond step 5, where the timeline before had come to, as that was from the start."""
    decision = decided(*ALL, step=step, **rolling_back(RollbackStage.PROBATION, 0.0))  # type: ignore[arg-type]
    assert tells(decision, ProbationPassed) is passes
