"""Every event can be told."""

from __future__ import annotations

import pytest

from checkpoint.journal import read
from orchestrator.views.events import event_json, lines, sentence
from policies.events import (
    EVENT_TYPES,
    CommandTaken,
    Event,
    GatewayRestarted,
    JobExited,
    JobRestarted,
    KlExceeded,
    MachineBought,
    NodeMoved,
    NodeRequested,
    RunCreated,
    RunMoved,
    StoreCaughtUp,
    StoreSlowed,
    TookOver,
)
from policies.vocabulary import Market, NodePhase, Refusal, Role, RunPhase
from tests.views_world import T0, World

SAMPLES: list[tuple[Event, str]] = [
    (RunCreated("digits", "abc"), "Run digits was created"),
    (TookOver("build-7", 42, "up"), "Controller build-7/42 took the run: up"),
    (RunMoved(RunPhase.FINISHED, "the last step"), "Run has finished: the last step"),
    (
        NodeRequested("rollout-0-i2", Role.ROLLOUT, "rollout-0", 2, Market.SPOT, "in place of rollout-0-i1"),
        "rollout-0-i2 was asked for on spot: in place of rollout-0-i1",
    ),
    (
        NodeRequested("trainer-0-i1", Role.TRAINER, "trainer-0", 1, Market.ON_DEMAND, "first"),
        "trainer-0-i1 was asked for on demand: first",
    ),
    (NodeMoved("rollout-0-i1", NodePhase.GONE, "preempted"), "rollout-0-i1 is gone: preempted"),
    (
        MachineBought("rollout-0-i2", Market.SPOT, "aws/us-east-1/us-east-1b g6.xlarge", 0.3, 0.8),
        "rollout-0-i2 has a machine on spot, aws/us-east-1/us-east-1b g6.xlarge, at 0.30 USD an hour",
    ),
    (
        NodeMoved("rollout-0-i1", NodePhase.REFUSED, "no H200 in any zone", Refusal.NO_CAPACITY),
        "rollout-0-i1 was refused, no capacity: no H200 in any zone",
    ),
    (JobExited("trainer-0-i1", 1, -9, 7), "trainer-0-i1 ended with signal 9 at step 7 (attempt 1)"),
    (JobExited("trainer-0-i1", 2, 78, 0), "trainer-0-i1 ended with exit code 78 at step 0 (attempt 2)"),
    (JobExited("trainer-0-i1", 2, 0, 40), "trainer-0-i1 finished its work at step 40 (attempt 2)"),
    (
        JobRestarted("trainer-0-i1", 2, "after exit code -9"),
        "trainer-0-i1 starts its work again (attempt 2): after exit code -9",
    ),
    (GatewayRestarted("0123456789ab"), "The gateway answers as a new process (01234567)"),
    (CommandTaken("0001-ab", "down"), "The command 'down' was taken"),
    (KlExceeded(12, 0.6123, 0.5), "KL 0.612 is above its limit 0.5 at step 12"),
    (
        StoreSlowed(120, 50),
        "The store is slow: the checkpoint of step 120 is put off, the newest stored one is of step 50",
    ),
    (StoreSlowed(20, 0), "The store is slow: the checkpoint of step 20 is put off, none is stored"),
    (StoreCaughtUp(130, 100), "The store has caught up at step 130: it has the checkpoint of 100"),
]


def test_the_samples_are_of_every_type() -> None:
    assert {type(event).__name__ for event, _ in SAMPLES} == set(EVENT_TYPES)


@pytest.mark.parametrize(("event", "text"), SAMPLES)
def test_an_event_is_one_sentence(event: Event, text: str) -> None:
    assert sentence(event) == text


def test_every_phase_and_refusal_has_its_words() -> None:
    runs = {sentence(RunMoved(phase, "because")) for phase in RunPhase}
    nodes = {sentence(NodeMoved("n", phase, "because", refusal)) for phase in NodePhase for refusal in Refusal}
    assert len(runs) == len(RunPhase)
    assert len(nodes) == len(NodePhase) - 1 + len(Refusal)


def test_json_has_the_place_the_fields_and_the_sentence() -> None:
    world = World()
    world.take_over(1)
    world.happens(2, RunCreated("digits", "abc"), KlExceeded(12, 0.75, 0.5))
    _, told = (lines(record) for record in read(world.store))
    assert event_json(told[1]) == {
        "number": 2,
        "epoch": 1,
        "time_s": T0 + 2,
        "type": "KlExceeded",
        "step": 12,
        "kl": 0.75,
        "limit": 0.5,
        "text": "KL 0.75 is above its limit 0.5 at step 12",
    }
    assert [line.index for line in told] == [0, 1]
