"""Every event can be told."""

from __future__ import annotations

import json

import pytest

from checkpoint.journal import read
from orchestrator.views.events import event_json, lines, sentence
from policies.model.events import (
    EVENT_TYPES,
    BudgetNeared,
    BudgetReached,
    BudgetRefused,
    BudgetSet,
    BuyingResumed,
    BuyingStopped,
    CapacityMissing,
    CommandTaken,
    DataSetAside,
    DeadlineMissed,
    Diverged,
    DivergenceCleared,
    DivergenceWatched,
    Event,
    Exported,
    FleetMoved,
    FleetSized,
    GatewayRestarted,
    HealthyChosen,
    JobExited,
    JobRestarted,
    MachineBought,
    NodeMoved,
    NodeRequested,
    NodesGenerate,
    Noticed,
    ProbationPassed,
    RebalanceRecommended,
    RollbackBegun,
    RunCreated,
    RunMoved,
    SpecProved,
    StoreCaughtUp,
    StoreSlowed,
    TimelineForked,
    TimelineResumed,
    TookOver,
    TrainerFenced,
    TrainerGenerates,
)
from policies.model.timelines import Fork
from policies.model.vocabulary import Cause, Market, NodePhase, Refusal, Role, RunPhase
from tests.generators.views_world import EVIDENCE, FIRST_FORK, T0, World

SAMPLES: list[tuple[Event, str]] = [
    (RunCreated("digits", "abc"), "Run digits was created"),
    (TookOver("build-7", 42, "up"), "Controller build-7/42 took the run: up"),
    (RunMoved(RunPhase.FINISHED, "the last step"), "Run has finished: the last step"),
    (
        NodeRequested("rollout-0-i2", Role.ROLLOUT, "rollout-0", 2, Market.SPOT, "in place of rollout-0-i1"),
        "rollout-0-i2 was asked for on spot: in place of rollout-0-i1",
    ),
    (
        NodeRequested("rollout-1-i1", Role.ROLLOUT, "rollout-1", 1, Market.SPOT, "first", 4.0),
        "rollout-1-i1 was asked for on spot, for at most 4.00 USD an hour: first",
    ),
    (
        NodeRequested("trainer-0-i1", Role.TRAINER, "trainer-0", 1, Market.ON_DEMAND, "first"),
        "trainer-0-i1 was asked for on demand: first",
    ),
    (NodeMoved("rollout-0-i1", NodePhase.GONE, "preempted"), "rollout-0-i1 is gone: preempted"),
    (
        BuyingStopped("rollout on spot", "3 in a row came to nothing: no work seen within 900 s"),
        "No more machines are bought, rollout on spot, but one now and then to try: 3 in a row came to nothing: "
        "no work seen within 900 s",
    ),
    (BuyingResumed("rollout on spot"), "Machines are bought again, rollout on spot"),
    (
        FleetSized(2, 4, "2.2 make it cheapest"),
        "There are to be 2 rollout nodes in place of 4: 2.2 make it cheapest",
    ),
    (
        RebalanceRecommended("rollout-0-i1", "of 3 machines with one in its pool, the cloud took 1"),
        "rollout-0-i1 has a rebalance recommendation of its cloud: of 3 machines with one in its pool, the cloud "
        "took 1",
    ),
    (
        BudgetReached(480.5, "480.50 USD spent", "pause"),
        "The budget is reached, the run is to pause: 480.50 USD spent",
    ),
    (
        BudgetRefused("rollout", "45.00 USD an hour"),
        "No more rollout machines are bought: 45.00 USD an hour",
    ),
    (BudgetNeared(400.0, 500.0), "400.00 of 500.00 USD are spent, four fifths of the budget"),
    (
        CapacityMissing("rollout", 5.0, "no rollout machine for 60 min; last refused: no_capacity"),
        "The run waits for machines: no rollout machine for 60 min; last refused: no_capacity",
    ),
    (
        DeadlineMissed(1764525600.0, 1764532800.0, 120, 500, 4, 90.4),
        "The deadline, 2025-11-30 18:00 UTC, is out of reach: even 4 rollout nodes, at 90 s a step from step 120 "
        "of 500 on, need until 2025-11-30 20:00 UTC; the run goes on as it pays",
    ),
    (
        DeadlineMissed(1764525600.0, None, 120, 500, 4, None),
        "The deadline, 2025-11-30 18:00 UTC, has passed at step 120 of 500; the run goes on",
    ),
    (BudgetSet(800.0), "The budget is 800.00 USD from now on"),
    (
        MachineBought("rollout-0-i2", Market.SPOT, "aws/us-east-1/us-east-1b g6.xlarge", 0.3, 0.8),
        "rollout-0-i2 has a machine on spot, aws/us-east-1/us-east-1b g6.xlarge, at 0.30 USD an hour "
        "(0.80 on demand)",
    ),
    (
        NodeMoved("rollout-0-i1", NodePhase.REFUSED, "no H200 in any zone", Refusal.NO_CAPACITY),
        "rollout-0-i1 was refused, no capacity: no H200 in any zone",
    ),
    (JobExited("trainer-0-i1", 1, -9, 7), "trainer-0-i1 ended with signal 9 at step 7 (attempt 1)"),
    (JobExited("trainer-0-i1", 2, 78, 0), "trainer-0-i1 ended with exit code 78 at step 0 (attempt 2)"),
    (
        JobExited("trainer-0-i1", 1, 1, 0, "KeyError: 'a'"),
        "trainer-0-i1 ended with exit code 1 at step 0 (attempt 1): KeyError: 'a'",
    ),
    (JobExited("trainer-0-i1", 1, 143, 7), "trainer-0-i1 ended, as it was told to, at step 7 (attempt 1)"),
    (JobExited("trainer-0-i1", 2, 0, 40), "trainer-0-i1 finished its work at step 40 (attempt 2)"),
    (
        JobRestarted("trainer-0-i1", 2, "after exit code -9"),
        "trainer-0-i1 starts its work again (attempt 2): after exit code -9",
    ),
    (GatewayRestarted("0123456789ab"), "The gateway answers as a new process (01234567)"),
    (CommandTaken("0001-ab", "down"), "The command 'down' was taken"),
    (
        DivergenceWatched(0, 9, 7, EVIDENCE),
        "Watched at step 9: off since step 7; KL 3.21, 41 times its calm level of 0.078; "
        "reward 0.1, down from 0.8",
    ),
    (DivergenceCleared(0, 12), "What was watched has passed at step 12"),
    (
        Diverged(1, 10, 7, EVIDENCE[:1], "trainer"),
        "The run has diverged since step 7, seen at step 10 by the trainer; "
        "KL 3.21, 41 times its calm level of 0.078",
    ),
    (Diverged(1, 10, 7, (), "controller"), "The run has diverged since step 7, seen at step 10 by the controller"),
    (
        RollbackBegun(FIRST_FORK, Cause.DIVERGED, 10, FIRST_FORK.reason),
        "Rollback from step 10 to checkpoint 0-5, as timeline 1, with learning_rate 0.0005, beta 0.04 and other "
        "prompts for those of steps 7 to 10 of timeline 0: diverged since step 7: KL 3.21, 41 times its calm "
        "level of 0.078",
    ),
    (
        RollbackBegun(Fork(2, None), Cause.USER, 30, "asked for by hand"),
        "Rollback from step 30 to the run's start, as timeline 2: asked for by hand",
    ),
    (
        RollbackBegun(
            Fork(3, "0-5", {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
            Cause.OUT_OF_MEMORY,
            30,
            "the trainer is out of memory",
            {
                "per_device_train_batch_size": "the same",
                "gradient_accumulation_steps": "the same",
                "beta": "other",
            },
        ),
        "Rollback from step 30 to checkpoint 0-5, as timeline 3, with per_device_train_batch_size 4, "
        "gradient_accumulation_steps 2: the trainer is out of memory (per_device_train_batch_size, "
        "gradient_accumulation_steps: the same; beta: other)",
    ),
    (TimelineForked(1), "Timeline 1 is in the store: no trainer of an older one goes on"),
    (TrainerFenced(1), "The old trainer has ended, as timeline 1 wants"),
    (TimelineResumed(1, 5), "Timeline 1 is trained, from step 5"),
    (FleetMoved(1, "1-5"), "The fleet serves timeline 1, policy 1-5"),
    (ProbationPassed(1, 16), "Timeline 1 has passed its probation at step 16"),
    (HealthyChosen("0-5"), "The last healthy checkpoint is 0-5; its weights are to be exported"),
    (HealthyChosen(None), "There is no healthy checkpoint: none is from before the divergence"),
    (Exported("0-5", "exports/0-5"), "The weights of 0-5 are exported to exports/0-5 in the store"),
    (Exported("0-5", ""), "The weights of 0-5 could not be exported; `grpo-orch checkpoints verify 0-5` says why"),
    (Noticed("overfitting", 40, "the reward rises [alone]"), "Noticed at step 40: the reward rises [alone]"),
    (
        StoreSlowed(120, 50),
        "The store is slow: the checkpoint of step 120 is put off, the newest stored one is of step 50",
    ),
    (StoreSlowed(20, 0), "The store is slow: the checkpoint of step 20 is put off, none is stored"),
    (
        TrainerGenerates(130, 320.0),
        "No rollout node is there, and no machine for 5:20 min: from step 130 on the trainer generates by itself",
    ),
    (TrainerGenerates(130), "No rollout node is there: from step 130 on the trainer generates by itself"),
    (
        NodesGenerate(133, 840.0),
        "From step 133 on rollout nodes generate again, after 14:00 min in which the trainer did",
    ),
    (StoreCaughtUp(130, 100), "The store has caught up at step 130: it has the checkpoint of 100"),
    (SpecProved(), "The trainer can work with run.yaml: rollout nodes are asked for from now on"),
    (
        DataSetAside("commands/000-x.json", "Input data was truncated"),
        "commands/000-x.json in the store cannot be read and is left out: Input data was truncated",
    ),
]


def test_the_samples_are_of_every_type() -> None:
    assert {type(event).__name__ for event, _ in SAMPLES} == set(EVENT_TYPES)


@pytest.mark.parametrize(("event", "text"), SAMPLES)
def test_an_event_is_one_sentence(event: Event, text: str) -> None:
    assert sentence(event) == text


def test_every_phase_and_refusal_has_its_words() -> None:
    runs = {sentence(RunMoved(phase, "because")) for phase in RunPhase}
    refusals = set(Refusal) - {Refusal.NEVER_SERVED, Refusal.SOON_BROKEN}  # of machines that a cloud gave
    nodes = {sentence(NodeMoved("n", phase, "because", refusal)) for phase in NodePhase for refusal in refusals}
    assert len(runs) == len(RunPhase)
    assert len(nodes) == len(NodePhase) - 1 + len(refusals)


def test_json_has_the_place_the_fields_and_the_sentence() -> None:
    world = World()
    world.take_over(1)
    world.happens(2, RunCreated("digits", "abc"), DivergenceCleared(0, 12))
    _, told = (lines(record) for record in read(world.store))
    assert event_json(told[1]) == {
        "number": 2,
        "epoch": 1,
        "time_s": T0 + 2,
        "type": "DivergenceCleared",
        "timeline": 0,
        "step": 12,
        "text": "What was watched has passed at step 12",
    }
    assert [line.index for line in told] == [0, 1]


def test_json_has_a_rollback_s_fork_whole() -> None:
    world = World()
    world.take_over(1)
    world.begins_rollback(2, FIRST_FORK, 10)
    told = json.loads(json.dumps(event_json(lines(read(world.store)[-1])[0])))
    assert told["fork"] == {
        "timeline": 1,
        "start": "0-5",
        "changes": {"learning_rate": 0.0005, "beta": 0.04},
        "skipped": [{"timeline": 0, "first_step": 7, "last_step": 10}],
        "reason": FIRST_FORK.reason,
        "from_step": FIRST_FORK.from_step,
    }
    assert (told["cause"], told["from_step"]) == ("diverged", 10)
