"""Where the time of steps went, from the rows."""

from __future__ import annotations

import pytest

from grpo_orch.checkpoint.records.metrics import (
    AHEAD_S,
    GENERATE_S,
    PARTS,
    PUBLISH_S,
    RESTARTING,
    REWARDS_S,
    STORE_S,
    TRAINING,
    WAIT_S,
    MetricsRow,
    split,
)

VALUES = {WAIT_S: 3.0, GENERATE_S: 10.0, REWARDS_S: 1.0, PUBLISH_S: 2.0, STORE_S: 4.0}


def test_unattributed_time_is_training() -> None:
    (one,) = split([MetricsRow(0, 1, 100.0, 1, {}), MetricsRow(0, 2, 130.0, 1, VALUES)])
    assert one.steps == 1
    assert one.seconds == {
        "waiting for nodes": 3.0,
        "generating": 10.0,
        "rewards": 1.0,
        "publishing weights": 2.0,
        "storing": 4.0,
        TRAINING: 10.0,
        RESTARTING: 0.0,
    }


def test_generation_that_training_hides_is_no_part_of_a_step() -> None:
    values = {**VALUES, AHEAD_S: 8.0}
    (one,) = split([MetricsRow(0, 1, 100.0, 1, {}), MetricsRow(0, 2, 130.0, 1, values)])
    assert (one.seconds["generating"], one.seconds[TRAINING]) == (2.0, 18.0)


@pytest.mark.parametrize(("timeline", "attempt"), [(0, 2), (1, 1)])
def test_between_two_lives_it_is_the_new_start(timeline: int, attempt: int) -> None:
    (one,) = split([MetricsRow(0, 9, 100.0, 1, {}), MetricsRow(timeline, 7, 400.0, attempt, VALUES)])
    assert (one.steps, one.seconds[RESTARTING], one.seconds[TRAINING]) == (1, 300.0, 0.0)


@pytest.mark.parametrize("took_s", [-5.0, 0.0, 4.0, 11.0, 200.0])
def test_parts_add_up_to_the_step_for_any_log(took_s: float) -> None:
    values = {**VALUES, WAIT_S: -7.0}
    (one,) = split([MetricsRow(0, 1, 100.0, 1, {}), MetricsRow(0, 5, 100.0 + took_s, 1, values)])
    assert sum(one.seconds.values()) == max(0.0, took_s)
    assert min(one.seconds.values()) == 0.0
    assert tuple(one.seconds) == PARTS
    assert one.steps == 4
