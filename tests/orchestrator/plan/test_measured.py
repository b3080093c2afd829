"""What a run's log tells of its steps."""

from __future__ import annotations

import pytest

from grpo_orch.checkpoint.records import metrics
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.orchestrator.plan.steps import measure
from tests.generators.views_world import World


def test_the_newest_steps_of_a_run() -> None:
    world = World()
    assert measure(world.store) is None  # nothing is logged yet
    for step in range(1, 6):
        values = {
            metrics.GENERATE_S: 6.0,
            metrics.GENERATE_NODE_S: 12.0,
            metrics.TOKENS: 1000.0,
            "completions/mean_length": 100.0 + step,
            metrics.PUBLISHED_BYTES: 20.0,
            metrics.WEIGHTS_BYTES: 1000.0,
        }
        world.logs(10 * step, step, 0, **values)
    found = measure(world.store)
    assert found is not None
    assert (found.steps, found.step_s) == (4, 10.0)
    assert found.timing is not None
    assert (found.timing.generate_s, found.timing.train_s) == (6.0, 4.0)
    assert found.completion_tokens == pytest.approx(103.5)  # of the steps that were timed: 2 to 5
    assert found.sent_share == pytest.approx(0.02)
    assert found.shape is not None
    assert found.shape.seconds(2) == pytest.approx(10.0)


def test_a_step_that_stands_for_several() -> None:
    world = World()
    for step in (5, 10, 15):
        world.logs(10 * step, step)
    found = measure(world.store)
    assert found is not None
    assert (found.steps, found.step_s) == (2, 10.0)
    assert (found.timing, found.completion_tokens, found.sent_share) == (None, None, None)


def test_a_store_without_a_run() -> None:
    assert measure(Store("memory://plan-without-a-run")) is None


def test_a_rollback_and_the_time_that_it_took_are_no_step() -> None:
    world = World()
    for time_s, step, timeline in ((10, 1, 0), (20, 2, 0), (30, 3, 0), (900, 2, 1), (905, 3, 1)):
        world.logs(time_s, step, timeline)
    found = measure(world.store)
    assert found is not None
    assert (found.steps, found.step_s) == (1, 5.0)
