"""When a rollback begins, where it goes and with what changed: after a trip, by hand, or out of memory."""

from __future__ import annotations

from dataclasses import replace

from grpo_orch.policies.control.decide import decide
from grpo_orch.policies.control.rollback import DIVERGENCE_WAIT_S, DRAIN_WAIT_S, TARGET_HINT
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import (
    CommandTaken,
    Diverged,
    FleetMoved,
    PitfallFound,
    RollbackStarted,
    RunMoved,
)
from grpo_orch.policies.model.spec import OnRollback, RollbackBudget
from grpo_orch.policies.model.timelines import Skipped
from grpo_orch.policies.model.vocabulary import Cause, NodePhase, PolicyVersion, Role, RunPhase
from grpo_orch.policies.tick.snapshot import HEARTBEAT_FRESH_S, Command, Stored
from tests.stand_ins.world import World, spec, with_kl, world_of


def test_second_trip_in_probation_goes_further_back_with_changes() -> None:
    world = world_of({0: (13, 9), 1: (11, 9)})
    world.until(lambda w: len(w.begun) == 2)
    first, second = world.begun
    assert (first.fork.start, second.fork.start) == ("0-8", "0-6")
    assert second.fork.changes == {"beta": 0.16, "learning_rate": 2.5e-4}
    assert second.fork.skipped == (Skipped(0, 9, 13), Skipped(1, 9, 11))
    world.run()
    assert world.state.phase is RunPhase.FINISHED
    assert world.state.timeline == 2


def test_second_trip_after_probation_uses_own_checkpoint() -> None:
    world = world_of({0: (13, 9), 1: (30, 27)}, budget=RollbackBudget(recent_steps=5))
    world.run()
    first, second = world.begun
    assert (first.fork.start, second.fork.start) == ("0-8", "1-26")
    assert first.fork.skipped == (Skipped(0, 9, 13),)
    assert second.fork.skipped == (Skipped(1, 27, 30),), "what has passed its probation sees all prompts again"


def test_run_without_checkpoint_before_onset_pauses() -> None:
    world = world_of({0: (5, 2)})
    world.save_steps = 3
    world.run()
    assert not world.begun
    assert (world.state.phase, world.state.reason) == (
        RunPhase.PAUSED,
        f"diverged since step 2; no checkpoint is from before step 2; the store has 0-3; {TARGET_HINT}",
    )
    assert world.checkpoints == [PolicyVersion(0, 3)]
    world.commands = [Command("c1", "rollback")]
    world.take_over()
    world.run()
    assert not world.begun, "nor does a person begin from step 0 without saying so"
    told = [one.kind for one in world.of(PitfallFound) if isinstance(one, PitfallFound)]
    assert (world.state.phase, told) == (RunPhase.PAUSED, ["no_target"])
    world.commands = [Command("c1", "rollback"), Command("c2", "rollback", "start")]
    world.take_over()
    world.run()
    assert world.begun[0].fork.start is None
    assert world.state.phase is RunPhase.FINISHED


def test_unlisted_checkpoint_still_counts_as_stored_once() -> None:
    world = world_of({0: (5, 2)})
    world.until(lambda w: w.state.diverged is not None)
    snapshot = replace(world.snapshot(), store=Stored(checkpoints=(), ever_stored=True))
    state = replace(world.state, rollbacks=(), phase=RunPhase.TRAINING)
    events = decide(state, snapshot, world.spec).events
    assert not [event for event in events if isinstance(event, RollbackStarted)]
    assert [event.phase for event in events if isinstance(event, RunMoved)] == [RunPhase.PAUSED]


def test_trip_before_the_first_checkpoint_starts_over() -> None:
    world = world_of({0: (5, 2), 1: (9, 8)})
    world.save_steps = 7
    world.until(lambda w: len(w.begun) == 2)
    first, second = world.begun
    assert first.fork.start is None
    assert second.fork.start == "1-7", "the start cannot have been too late"


def test_two_trips_late_in_a_long_run_with_all_defaults() -> None:
    world = World(spec=spec(), max_steps=5200, save_steps=50, trips={0: (5020, 4990), 1: (5060, 5030)})
    world.steps = 4700
    world.checkpoints = [PolicyVersion(0, step) for step in (50, 3200, 4100, 4500, 4600, 4650, 4700)]
    world.run(limit=4000)
    assert [one.fork.start for one in world.begun] == ["0-4950", "0-4900"]
    assert world.state.phase is RunPhase.FINISHED
    assert PolicyVersion(0, 50) in world.checkpoints


def test_the_budget_within_so_many_steps_ends_the_run() -> None:
    world = world_of({0: (13, 9), 1: (11, 9), 2: (12, 9)})
    world.run()
    assert len(world.begun) == 2
    assert world.state.phase is RunPhase.GAVE_UP
    assert world.machines == {}
    assert "rolled back 2 times within 500 steps" in world.state.reason
    told = "last healthy: checkpoint 0-4, see `grpo-orch checkpoints export 0-4 FOLDER`"
    assert world.state.reason.endswith(told)


def test_whole_budget_counts_over_any_steps_between() -> None:
    trips = {0: (10, 8), 1: (20, 18), 2: (30, 28), 3: (38, 36)}
    world = world_of(trips, budget=RollbackBudget(recent=9, recent_steps=1))
    world.run()
    assert len(world.begun) == 3
    assert world.state.phase is RunPhase.GAVE_UP
    assert "the limit of policies.kl.budget.total" in world.state.reason


def test_run_abandoned_without_checkpoint_ends() -> None:
    world = world_of({0: (3, 1)}, budget=RollbackBudget(total=0))
    world.save_steps = 10
    world.run()
    assert world.state.phase is RunPhase.GAVE_UP
    assert world.state.reason.endswith("last healthy: the start")


def test_pause_returns_the_machines_and_waits_for_a_person() -> None:
    world = world_of({0: (13, 9)}, action="pause")
    world.run()
    assert (world.state.phase, world.machines) == (RunPhase.PAUSED, {})
    assert "checkpoint 0-8" in world.state.reason
    world.commands = [Command("c1", "rollback")]
    world.take_over()
    world.run()
    assert world.begun[0].fork.start == "0-8"
    assert world.begun[0].cause is Cause.USER
    assert world.state.phase is RunPhase.FINISHED


def test_alert_notifies_once_and_lets_the_run_continue() -> None:
    world = world_of({0: (13, 9)}, action="alert")
    world.guarded = False  # as the trainer's guard is with this action
    world.run()
    assert len(world.of(Diverged)) == 1
    assert not world.begun
    assert world.state.phase is RunPhase.FINISHED


def test_manual_rollback_uses_the_commands_target_and_changes() -> None:
    world = world_of({})
    world.until(lambda w: w.steps >= 9)
    world.commands = [Command("c1", "rollback", "0-4", {"beta": 0.5})]
    world.run()
    (one,) = world.begun
    assert (one.cause, one.fork.start, one.fork.changes, one.fork.skipped) == (
        Cause.USER,
        "0-4",
        {"beta": 0.5},
        (),
    )
    assert len(world.of(CommandTaken)) == 1
    assert world.timelines["trainer-0-i1", 2] == 1


def test_manual_rollback_to_a_retired_target_begins_nothing() -> None:
    world = world_of({})
    world.until(lambda w: w.steps >= 9)
    world.commands = [Command("c1", "rollback", "0-3")]
    world.run()
    assert not world.begun
    (told,) = [one for one in world.of(PitfallFound) if isinstance(one, PitfallFound)]
    assert told.advice.startswith("the rollback was refused: checkpoint 0-3 is no longer in the store; ")
    assert world.state.phase is RunPhase.FINISHED


def test_manual_rollback_goes_to_start_or_newest_checkpoint() -> None:
    for asked, start in (("start", None), (None, "0-8")):
        world = world_of({})
        world.until(lambda w: w.steps >= 9)
        world.commands = [Command("c1", "rollback", asked)]
        world.until(lambda w: bool(w.begun))
        assert world.begun[0].fork.start == start
        assert world.begun[0].fork.changes["beta"] == 0.08


def test_users_rollback_renews_the_budget() -> None:
    world = world_of({0: (13, 9)}, budget=RollbackBudget(total=1))
    world.until(lambda w: bool(w.of(FleetMoved)))
    world.commands = [Command("c1", "rollback", "0-4", {"beta": 0.5})]
    world.until(lambda w: w.state.timeline == 2)
    world.trips = {2: (20, 17)}
    world.until(lambda w: len(w.begun) == 3)
    assert world.begun[2].cause is Cause.DIVERGED


def test_finished_run_continues_with_more_steps() -> None:
    world = world_of({})
    world.run()
    assert (world.state.phase, world.steps) == (RunPhase.FINISHED, 40)
    world.max_steps = 50  # as TRL is told by the fork's change
    world.commands = [Command("c1", "rollback", "0-40", {"max_steps": 50.0})]
    world.take_over()
    world.run()
    (one,) = world.begun
    assert (one.cause, one.fork.start, one.fork.changes) == (Cause.USER, "0-40", {"max_steps": 50})
    assert (world.state.phase, world.steps) == (RunPhase.FINISHED, 50)


def test_a_finished_run_does_not_go_back() -> None:
    world = world_of({})
    world.run()
    world.commands = [Command("c1", "rollback", "0-4")]
    world.take_over()
    world.run()
    assert world.state.phase is RunPhase.FINISHED
    assert not world.begun


def test_out_of_memory_keeps_objective_first_and_then_pauses() -> None:
    grpo = {"num_generations": 8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    world = World(spec=replace(with_kl(), grpo={**grpo, "gradient_checkpointing": False}), max_steps=40)
    while world.state.phase is not RunPhase.PAUSED:
        world.until(lambda w: bool(w.up(Role.TRAINER)) and w.steps >= 5)
        count = len(world.begun)
        (trainer,) = world.up(Role.TRAINER)
        world.exit(trainer, exit_codes.OUT_OF_MEMORY)
        world.beat, world.steps = None, 0
        world.until(lambda w, n=count: len(w.begun) > n or w.state.phase is RunPhase.PAUSED)  # type: ignore[misc]  # mypy cannot infer a default's type here
    first, second, third = world.begun
    pieces = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    assert first.fork.changes == pieces
    assert set(first.effects.values()) == {"the same batch and gradient, computed in smaller pieces"}
    assert second.fork.changes == {**pieces, "gradient_checkpointing": True}
    assert third.fork.changes == {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": True,
        "num_generations": 4,
    }
    assert third.fork.start is not None
    assert all(one.cause is Cause.OUT_OF_MEMORY for one in (first, second, third))
    assert "max_completion_length" in world.state.reason
    assert world.machines == {}
    world.commands = [Command("c1", "rollback", third.fork.start, {"max_completion_length": 256.0})]
    world.take_over()
    world.until(lambda w: len(w.begun) == 4)
    assert world.begun[3].fork.changes["max_completion_length"] == 256
    assert isinstance(world.begun[3].fork.changes["max_completion_length"], int), "as the node's TRL wants it"


def test_out_of_memory_without_checkpoints_pauses() -> None:
    world = world_of({})
    world.until(lambda w: w.steps >= 5)
    world.exit("trainer-0-i1", exit_codes.OUT_OF_MEMORY)
    world.until(lambda w: w.state.nodes["trainer-0-i1"].attempt_ended_at_s is not None)
    state = replace(world.state, rollbacks=())
    events = decide(
        state, replace(world.snapshot(), store=Stored(checkpoints=(), ever_stored=True)), world.spec
    ).events
    assert not [event for event in events if isinstance(event, RollbackStarted)]
    assert RunPhase.PAUSED in [event.phase for event in events if isinstance(event, RunMoved)]


def test_nothing_is_decided_while_the_checkpoints_are_not_known() -> None:
    world = world_of({0: (13, 9)})
    world.looking = False
    world.until(lambda w: w.state.diverged is not None)
    for _ in range(10):
        world.tick()
    assert not world.begun
    world.looking = True
    world.tick()
    assert world.begun


def test_run_without_readable_catalog_pauses_until_rollback() -> None:
    world = world_of({0: (13, 9)})
    world.looking = False
    world.until(lambda w: w.state.diverged is not None)
    damaged = replace(world.snapshot(), store=Stored(damaged="catalog/1.json: schema 2; use a newer one"))
    (paused,) = [e for e in decide(world.state, damaged, world.spec).events if isinstance(e, RunMoved)]
    assert paused.phase is RunPhase.PAUSED
    assert paused.reason == (
        "diverged since step 9; catalog/1.json: schema 2; use a newer one; then `grpo-orch rollback`"
    )
    world.journal((paused,))
    asked = replace(damaged, commands=(Command("c1", "rollback"),))
    (told,) = [e for e in decide(world.state, asked, world.spec).events if isinstance(e, PitfallFound)]
    assert told.advice == "the rollback was refused: catalog/1.json: schema 2; use a newer one"
    world.looking, world.commands = True, [Command("c2", "rollback")]
    world.until(lambda w: bool(w.begun))
    assert world.begun[0].fork.start == "0-8"


def test_prompts_are_kept_if_configured() -> None:
    world = world_of({0: (13, 9)}, on_rollback=OnRollback(skip_prompts=False, beta_factor=1.0))
    world.run()
    assert world.begun[0].fork.skipped == ()
    assert "beta" not in world.begun[0].fork.changes


def test_no_rollback_begins_in_a_run_that_ends() -> None:
    world = world_of({0: (13, 9)})
    world.until(lambda w: w.steps >= 10)
    world.commands = [Command("c1", "down")]
    world.run()
    assert world.state.phase is RunPhase.STOPPED
    assert not world.begun
    assert RunMoved(RunPhase.STOPPED, "every machine is gone") in world.of(RunMoved)


def test_checkpoint_stored_by_tripped_guard_may_be_target() -> None:
    world = world_of({0: (13, 9)})
    world.until(lambda w: w.state.diverged is not None)
    working = replace(world.machines["trainer-0-i1"], exit_code=None)
    node = replace(world.state.nodes["trainer-0-i1"], attempt_ended_at_s=None, phase=NodePhase.SERVING)
    state = replace(world.state, rollbacks=(), nodes={**world.state.nodes, node.id: node})
    state = replace(state, diverged=Diverged(0, 13, 9, ("KL 9",), "trainer"), diverged_at_s=world.now_s)
    machines = {**world.machines, node.id: working}

    def decided(**seen: object) -> list[RollbackStarted]:
        snapshot = replace(world.snapshot(), machines=machines, **seen)  # type: ignore[arg-type]  # a snapshot's own fields
        return [e for e in decide(state, snapshot, world.spec).events if isinstance(e, RollbackStarted)]

    assert world.beat is not None
    storing = replace(world.beat, activity="storing", beat_at_s=world.now_s)
    assert not decided(trainer=storing)
    late_s = world.now_s + DIVERGENCE_WAIT_S + 1
    assert not decided(trainer=replace(storing, beat_at_s=late_s), now_s=late_s)
    silent = replace(storing, verdict=None, beat_at_s=late_s)
    assert decided(trainer=silent, now_s=late_s), "a guard that says nothing is not waited for"
    assert decided(trainer=storing, now_s=world.now_s + HEARTBEAT_FRESH_S + 1), "nor is a trainer that is gone"
    end_s = world.now_s + DRAIN_WAIT_S + 1
    assert decided(trainer=replace(storing, beat_at_s=end_s), now_s=end_s), "nor one that never ends"
    got_on = {"trainer_moved_at_s": end_s - 60.0}
    assert not decided(trainer=replace(storing, beat_at_s=end_s), now_s=end_s, **got_on), "it gets on"
    assert not decided(trainer=storing, now_s=end_s, steady_s=1.0), "the store was away: it could not say that"
    assert decided(trainer=storing, now_s=end_s, steady_s=HEARTBEAT_FRESH_S + 1)
