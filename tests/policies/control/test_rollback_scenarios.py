"""Whole runs in the simulated world, with the real retention, while controllers and machines die: each rollback
goes to a checkpoint, at most twice as far back as the best that was ever saved."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_orch.policies.control.rollback import newest_before, target_before_step
from grpo_orch.policies.model.events import NodeRequested, ProbationPassed, RollbackStarted
from grpo_orch.policies.model.fold import fold
from grpo_orch.policies.model.spec import KlPolicy, Replicas, RollbackBudget, RolloutSpec
from grpo_orch.policies.model.state import RunState
from grpo_orch.policies.model.vocabulary import Cause, PolicyVersion, Role, RunPhase
from tests.stand_ins.world import World, spec

MAX_STEPS = 60
TICKS = 1500
# By timeline: the step of the trip, and how long before it began.
TRIPS = st.lists(st.tuples(st.integers(1, MAX_STEPS), st.integers(0, 30)), max_size=4).map(
    lambda found: {timeline: (trip, max(1, trip - lag)) for timeline, (trip, lag) in enumerate(found)}
)
WHAT_DIES = st.dictionaries(
    st.integers(0, 400), st.sampled_from(["controller", Role.TRAINER, Role.ROLLOUT]), max_size=4
)


def run_with(save_steps: int, trips: dict[int, tuple[int, int]], guarded: bool) -> World:
    base = spec()
    kl = KlPolicy(budget=RollbackBudget(total=9, recent=9))
    made = replace(
        base, policies=replace(base.policies, kl=kl), checkpoints=replace(base.checkpoints, keep_last=1)
    )
    return World(spec=made, max_steps=MAX_STEPS, save_steps=save_steps, trips=trips, guarded=guarded)


def check(state: RunState, begun: RollbackStarted, ever: set[PolicyVersion]) -> None:
    """`state` is what the controller knew when it decided."""
    assert begun.cause is Cause.DIVERGED
    assert state.diverged is not None
    before_step = target_before_step(state.diverged.onset_step, state.rollbacks)
    ideal = newest_before(sorted(ever), state.forks, state.timeline, before_step)
    if begun.fork.start is None:
        assert not ever, "never step 0 though there was a checkpoint"
        return
    assert ideal is not None
    furthest = max(state.diverged.step, *(at.step for at in ever))
    assert furthest - PolicyVersion.parse(begun.fork.start).step <= 2 * (furthest - ideal.step)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(save_steps=st.integers(1, 12), trips=TRIPS, dies=WHAT_DIES, guarded=st.booleans())
def test_each_rollback_finds_its_target_after_any_death(
    save_steps: int, trips: dict[int, tuple[int, int]], dies: dict[int, str], guarded: bool
) -> None:
    world = run_with(save_steps, trips, guarded)
    ever: set[PolicyVersion] = set()
    for count in range(TICKS):
        dead = dies.get(count)
        if dead in (Role.TRAINER, Role.ROLLOUT):
            for name in world.up(Role(dead)):
                world.lose(name)
        state, known = world.state, len(world.history)
        over = world.tick(journal_only=dead == "controller")
        for number, time_s, events in world.history[known:]:
            for event in events:
                if isinstance(event, RollbackStarted):
                    check(state, event, ever)
                state = fold([(number, time_s, (event,))], state)
        if dead == "controller":
            world.take_over()
        if over:
            break
        world.advance()
        ever |= set(world.checkpoints)
    assert world.state.phase in (RunPhase.FINISHED, RunPhase.PAUSED)
    if world.state.phase is RunPhase.PAUSED:
        trip = world.state.diverged
        assert trip is not None
        before_step = target_before_step(trip.onset_step, world.state.rollbacks)
        assert newest_before(sorted(ever), world.state.forks, world.state.timeline, before_step) is None
        assert set(world.checkpoints) <= ever
        assert world.checkpoints, "and all that is there stays"


def test_a_run_without_rollout_nodes_rolls_back_and_finishes() -> None:
    world = run_with(5, {0: (23, 17)}, guarded=True)
    world.spec = replace(world.spec, rollout=RolloutSpec(replicas=Replicas(min=0, max=0)))
    world.run(TICKS)
    assert len(world.state.rollbacks) == 1
    assert world.state.phase is RunPhase.FINISHED
    told = [event for _, _, events in world.history for event in events]
    assert any(isinstance(event, ProbationPassed) for event in told), "and it ends, for a node that never comes"
    assert not any(isinstance(event, NodeRequested) and event.role is Role.ROLLOUT for event in told)
