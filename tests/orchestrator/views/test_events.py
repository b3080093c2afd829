"""Every event can be told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from grpo_orch.checkpoint.journal import read
from grpo_orch.orchestrator.views.events import event_json, lines, sentence
from grpo_orch.policies.model.events import (
    EVENT_TYPES,
    Diverged,
    DivergenceCleared,
    Event,
    GatewayRestarted,
    JobExited,
    NodeMoved,
    NodeRequested,
    RollbackStarted,
    RunCreated,
    RunMoved,
    StoreSlowed,
)
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.model.vocabulary import Cause, Market, NodePhase, Refusal, Role, RunPhase
from tests.generators.views_world import EVIDENCE, FIRST_FORK, T0, World

OUT_OF_MEMORY = Fork(3, "0-5", {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2})
EFFECTS = {"per_device_train_batch_size": "the same", "gradient_accumulation_steps": "the same", "beta": "other"}
SAMPLES: list[tuple[Event, str]] = [
    (GatewayRestarted("f126b88146738663"), "The gateway is a new process (f126b881)"),  # also a run's first
    (
        NodeRequested("rollout-1-i1", Role.ROLLOUT, "rollout-1", 1, Market.SPOT, "first", 4.0),
        "rollout-1-i1 was requested on spot, for at most 4.00 USD an hour: first",
    ),
    (
        NodeMoved("rollout-0-i1", NodePhase.REFUSED, "no H200 in any zone", Refusal.NO_CAPACITY),
        "rollout-0-i1 was refused, no capacity: no H200 in any zone",
    ),
    (JobExited("trainer-0-i1", 1, -9, 7), "trainer-0-i1 ended with signal 9 at step 7 (attempt 1)"),
    (
        JobExited("trainer-0-i1", 1, 1, 0, "KeyError: 'a'"),
        "trainer-0-i1 ended with exit code 1 at step 0 (attempt 1): KeyError: 'a'",
    ),
    (JobExited("trainer-0-i1", 1, 143, 7), "trainer-0-i1 stopped as requested at step 7 (attempt 1)"),
    (JobExited("trainer-0-i1", 2, 0, 40), "trainer-0-i1 finished its job at step 40 (attempt 2)"),
    (
        Diverged(1, 10, 7, EVIDENCE[:1], "trainer"),
        "The run has diverged since step 7, detected at step 10 by the trainer; "
        "KL 3.21, 41 times its calm level of 0.078",
    ),
    (
        RollbackStarted(FIRST_FORK, Cause.DIVERGED, 10, FIRST_FORK.reason),
        "Rollback from step 10 to checkpoint 0-5, as timeline 1, with learning_rate 0.0005, beta 0.04 and other "
        "prompts instead of those of steps 7 to 10 of timeline 0: diverged since step 7: KL 3.21, 41 times its "
        "calm level of 0.078",
    ),
    (
        RollbackStarted(Fork(2, None), Cause.USER, 30, "asked for by hand"),
        "Rollback from step 30 to the run's start, as timeline 2: asked for by hand",
    ),
    (
        RollbackStarted(OUT_OF_MEMORY, Cause.OUT_OF_MEMORY, 30, "the trainer is out of memory", EFFECTS),
        "Rollback from step 30 to checkpoint 0-5, as timeline 3, with per_device_train_batch_size 4, "
        "gradient_accumulation_steps 2: the trainer is out of memory (per_device_train_batch_size, "
        "gradient_accumulation_steps: the same; beta: other)",
    ),
    (StoreSlowed(20, 0), "The store is slow: the checkpoint of step 20 is postponed; no checkpoint is stored yet"),
]


@pytest.mark.parametrize(("event", "text"), SAMPLES)
def test_an_event_is_one_sentence(event: Event, text: str) -> None:
    assert sentence(event) == text


def an_event(kind: type[Event]) -> Event:
    """One whose texts are the names of its fields."""
    made: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        (of,) = [part for part in get_args(hint) or (hint,) if part not in (NoneType, Ellipsis)][:1]
        values = {str: name, Fork: FIRST_FORK, int: 7, float: 3.0}
        if of not in values and not issubclass(of, Enum):
            continue  # it has a default
        value = values[of] if of in values else next(iter(of))
        made[name] = {} if get_origin(hint) is Mapping else (value,) if get_origin(hint) is tuple else value
    return kind(**made)


@pytest.mark.parametrize("kind", EVENT_TYPES)
def test_the_sentence_of_any_event_names_its_node_and_its_reason(kind: str) -> None:
    event = an_event(EVENT_TYPES[kind])
    told = sentence(event)
    names = {field.name for field in fields(event)} & {"node", "reason", "evidence"}
    assert all(name in told for name in names), told
    assert len(told) > 10
    assert "None" not in told


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
    world.begins_rollback(3, FIRST_FORK, 10)
    _, told, (rollback,) = (lines(record) for record in read(world.store))
    place = {"number": 2, "epoch": 1, "time_s": T0 + 2, "type": "DivergenceCleared", "timeline": 0, "step": 12}
    assert event_json(told[1]) == place | {"text": "The possible divergence has passed at step 12"}
    assert [line.index for line in told] == [0, 1]
    whole = json.loads(json.dumps(event_json(rollback)))
    assert (whole["cause"], whole["from_step"]) == ("diverged", 10)
    assert whole["fork"] == {
        "timeline": 1,
        "start": "0-5",
        "changes": {"learning_rate": 0.0005, "beta": 0.04},
        "skipped": [{"timeline": 0, "first_step": 7, "last_step": 10}],
        "reason": FIRST_FORK.reason,
        "from_step": FIRST_FORK.from_step,
    }
