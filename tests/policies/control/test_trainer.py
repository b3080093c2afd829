"""What becomes of a trainer that ends, hangs, gets notice or falls silent, and of its machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from grpo_orch.policies.control.decide import decide
from grpo_orch.policies.control.node_phases import MACHINE_LOST_S
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import JobExited
from grpo_orch.policies.model.vocabulary import NodePhase, Role, RunPhase
from grpo_orch.policies.tick.snapshot import Gateway, Launch, Terminate, Trainer
from tests.stand_ins.world import HOUR_S, World, spec, until_training


def test_trainer_exit_restarts_its_work_on_the_same_machine() -> None:
    world = until_training(World())
    world.exit("trainer-0-i1", 137)
    world.tick()
    assert world.state.nodes["trainer-0-i1"].phase is NodePhase.BOOTING
    world.run()
    assert ("trainer-0-i1", 2) in world.launches
    assert world.state.phase is RunPhase.FINISHED


@pytest.mark.parametrize(
    ("code", "phase"),
    [
        (exit_codes.OK, RunPhase.FAILED),  # its last heartbeat is of step 2 of 10
        (exit_codes.BAD_SPEC, RunPhase.FAILED),
        (exit_codes.NOTHING_LEARNT, RunPhase.FAILED),
        (exit_codes.UNAVAILABLE, RunPhase.TRAINING),
        (exit_codes.UNFIT_MACHINE, RunPhase.TRAINING),
        (exit_codes.NO_INTACT_CHECKPOINT, RunPhase.FAILED),
        (1, RunPhase.TRAINING),
    ],
)
def test_trainers_exit_code_decides_what_follows(code: int, phase: RunPhase) -> None:
    world = until_training(World())
    world.exit("trainer-0-i1", code)
    world.tick()
    assert world.state.phase is phase


def test_exit_0_before_the_first_heartbeat_of_training_fails() -> None:
    """Its heartbeat does not know yet how many steps there are."""
    world = until_training(World())
    assert world.beat is not None
    world.beat = replace(world.beat, step=0, max_steps=0, activity="starting")
    world.exit("trainer-0-i1", exit_codes.OK)
    world.tick()
    assert world.state.phase is RunPhase.FAILED


def test_finished_run_carries_the_trainers_last_line() -> None:
    world = until_training(World())
    assert world.beat is not None
    world.beat = replace(world.beat, step=10, activity="done")
    world.exit("trainer-0-i1", exit_codes.OK, "complete at step 10; nothing was learnt")
    world.tick()
    assert (world.state.phase, world.state.reason) == (
        RunPhase.FINISHED,
        "complete at step 10; nothing was learnt",
    )


def test_failed_runs_reason_has_the_trainers_last_line() -> None:
    world = until_training(World())
    world.exit("trainer-0-i1", exit_codes.BAD_SPEC, "trainer.dataset: it has 1 row")
    world.tick()
    assert "trainer.dataset: it has 1 row; see `grpo-orch logs trainer-0-i1`" in world.state.reason
    assert world.of(JobExited)[-1].reason == "trainer.dataset: it has 1 row"


def until_ended(world: World, ends: Callable[[int], tuple[int, str]], *, before_training: bool) -> World:
    """Let each attempt of the trainer end with what `ends` returns for its number."""
    attempts: set[int] = set()
    for _ in range(2000):
        machine = world.machines.get("trainer-0-i1")
        if machine is not None and machine.exit_code is None and machine.attempt not in attempts:
            if before_training:
                world.beat = Trainer("trainer-0-i1", machine.attempt, 0, 0, 0, "starting", world.now_s)
            attempts.add(machine.attempt)
            world.exit("trainer-0-i1", *ends(len(attempts)))
        if world.tick():
            return world
        world.now_s += 0.5
    raise AssertionError(f"did not end: {world.state}")


@pytest.mark.parametrize(
    ("ends", "attempts", "says"),
    [
        (lambda _: (1, "KeyError: 'a'"), 2, "failed 2 times in the same way before its first step: KeyError: 'a'"),
        (lambda number: (1, f"lost {number}"), 4, "failed 4 times without a step of progress: lost 4"),
        (lambda number: (1, "ab"[number % 3 == 0]), 2, "failed 2 times in the same way before its first step: a"),
        (lambda number: (1, "aba"[number % 2]), 4, "failed 4 times without a step of progress"),
        (lambda _: (137, ""), 4, "failed 4 times without a step of progress; see"),
        (lambda _: (1, ""), 4, "failed 4 times without a step of progress; see"),
        (lambda _: (exit_codes.UNAVAILABLE, "the store is away"), 4, "failed 4 times without a step of progress"),
    ],
)
def test_same_last_line_twice_before_step_1_fails_the_run(
    ends: Callable[[int], tuple[int, str]], attempts: int, says: str
) -> None:
    world = until_ended(World(spec(trainer_restarts=3)), ends, before_training=True)
    assert world.state.phase is RunPhase.FAILED
    assert says in world.state.reason
    assert len(world.of(JobExited)) == attempts


def test_same_last_line_after_a_step_is_tried_again() -> None:
    world = until_training(World(spec(trainer_restarts=3)))
    assert world.beat is not None
    assert world.beat.step > 0
    world = until_ended(world, lambda _: (1, "KeyError: 'a'"), before_training=False)
    assert "the trainer failed 4 times without a step of progress: KeyError: 'a'" in world.state.reason
    assert (world.state.phase, world.machines) == (RunPhase.FAILED, {})


def test_unfit_trainer_machines_are_replaced_until_run_fails() -> None:
    """A GPU falls off the bus, or a mirror that the set-up needs is away, in the middle of a run."""
    world = until_training(World(spec(trainer_restarts=3)))
    world.exit("trainer-0-i1", exit_codes.UNFIT_MACHINE)
    world.run()
    assert ("trainer-0-i2", 1) in world.launches
    assert ("trainer-0-i1", 2) not in world.launches
    assert world.state.phase is RunPhase.FINISHED

    world = until_training(World(spec(trainer_restarts=3)))
    world.fails[Role.TRAINER] = exit_codes.UNFIT_MACHINE
    world.exit("trainer-0-i1", exit_codes.UNFIT_MACHINE)
    world.run()
    assert world.state.phase is RunPhase.FAILED
    assert "the trainer failed 4 times without a step of progress" in world.state.reason


def test_progress_between_failures_forgives_them() -> None:
    world = until_training(World(spec(trainer_restarts=1), max_steps=60))
    for _ in range(6):
        world.exit("trainer-0-i1", 1)
        before = world.steps
        for _ in range(100):
            world.tick()
            world.advance()
            if world.steps > before + 2:
                break
    assert world.state.phase is RunPhase.TRAINING


def test_drained_trainer_machine_ends_once_successor_trains() -> None:
    world = until_training(World(max_steps=10**6))
    world.notice("trainer-0-i1")
    decision = decide(world.state, world.snapshot(), world.spec)
    assert any(isinstance(action, Launch) and action.node == "trainer-0-i2" for action in decision.actions)
    world.let_pass(0.05, dt_s=0.5)
    assert world.up(Role.TRAINER) == ["trainer-0-i2"]
    assert [node.id for node in world.state.live(Role.TRAINER)] == ["trainer-0-i2"]
    assert world.state.failures.count == 0  # it was replaced, and has not failed
    assert world.state.phase is RunPhase.TRAINING


def test_drained_trainer_continues_while_none_is_available() -> None:
    """Its cloud takes nothing, and has nothing: a machine that trains is not returned for a notice."""
    world = until_training(World(max_steps=10**6))
    world.refusing = True
    world.notice("trainer-0-i1")
    before = world.steps
    world.let_pass(1.0)
    assert world.steps > before + HOUR_S / 2
    world.refusing = False
    world.let_pass(0.05, dt_s=0.5)
    assert len(world.up(Role.TRAINER)) == 1
    assert world.up(Role.TRAINER) != ["trainer-0-i1"]


def test_drained_machine_without_a_trainer_is_released() -> None:
    world = until_training(World(max_steps=10**6))
    world.notice("trainer-0-i1")
    world.tick()
    world.exit("trainer-0-i1", 143)
    world.tick()
    assert "trainer-0-i1" not in world.machines


@pytest.mark.parametrize(("contact_s", "given_up"), [(2.0, False), (1000.0, True)])
@pytest.mark.parametrize("for_s", [1000.0, MACHINE_LOST_S + 5.0])
def test_restarting_trainer_is_released_if_gateway_is_heard(
    contact_s: float, given_up: bool, for_s: float
) -> None:
    world = until_training(World())
    world.exit("trainer-0-i1", exit_codes.FAILED)
    while world.state.nodes["trainer-0-i1"].attempt == 1:
        world.tick()
        world.now_s += 1.0
    seen = replace(world.snapshot(), now_s=world.now_s + for_s, members={}, gateway=Gateway(contact_s=contact_s))
    decision = decide(world.state, seen, world.spec)
    assert (Terminate("trainer-0-i1") in decision.actions) is given_up
