"""What trainer and rollout nodes did in each step, from the rows."""

from __future__ import annotations

import pytest

from grpo_orch.checkpoint.records.metrics import (
    GENERATE_NODE_S,
    GENERATE_S,
    OWN_GENERATE_S,
    PUBLISH_S,
    REPLAYED,
    STALENESS,
    UNSERVED_S,
    WAIT_S,
    MetricsRow,
    StepTiming,
    median_timing,
    step_timings,
)


def row(step: int, time_s: float, generate_s: float = 6.0, **values: float) -> MetricsRow:
    logged = {GENERATE_S: generate_s, GENERATE_NODE_S: 2 * generate_s, PUBLISH_S: 1.0, STALENESS: 0.0}
    return MetricsRow(0, step, time_s, 1, {**logged, **{f"orch/{name}": value for name, value in values.items()}})


def timings(*rows: MetricsRow) -> list[StepTiming]:
    return [timing for _, timing in step_timings(rows)]


def test_steps_in_turns_leave_one_side_idle() -> None:
    # Of 20 s: publish 1, load 2 (a wait of the trainer), generate 6, train 11.
    values = {WAIT_S.removeprefix("orch/"): 2.0, UNSERVED_S.removeprefix("orch/"): 2.0}
    found = timings(row(1, 0.0), row(2, 20.0, **values), row(3, 40.0))
    expected = StepTiming(20.0, 6.0, 11.0, 3.0, trainer_idle_s=8.0, fleet_idle_s=12.0, staleness=0.0)
    assert found == [expected]
    assert (expected.sequential_s, expected.overlapped_s) == (20.0, 14.0)


def test_overlapped_step_is_idle_only_where_measured() -> None:
    # Of 14 s: publish 1, train 11, wait for the last 2 of 12 s in which nodes load and generate.
    values = {"ahead_s": 10.0, "unserved_s": 0.5, "staleness": 1.0}
    found = timings(row(1, 0.0), row(2, 14.0, 12.0, **values), row(3, 28.0))
    assert found == [StepTiming(14.0, 11.5, 11.0, 1.5, trainer_idle_s=2.0, fleet_idle_s=2.0, staleness=1.0)]


def test_steps_of_one_window_share_its_generation() -> None:
    rows = [row(0, 0.0), row(1, 15.0, 8.0, staleness=2.0), MetricsRow(0, 2, 25.0, 1, {}), row(3, 40.0)]
    ((first, timing),) = step_timings(rows)
    assert first is rows[1]
    assert (timing.step_s, timing.generate_s, timing.sync_s, timing.staleness) == (12.5, 4.0, 0.5, 2.0)
    assert timing.fleet_idle_s == pytest.approx(8.5)


def test_replayed_steps_and_restarts_have_no_timing() -> None:
    replayed = row(2, 10.0, 0.0, **{REPLAYED.removeprefix("orch/"): 1.0})
    later = MetricsRow(0, 3, 500.0, 2, {GENERATE_S: 4.0, GENERATE_NODE_S: 4.0})
    assert timings(row(1, 0.0), replayed, later) == []


def test_trainer_that_generates_itself_is_not_idle() -> None:
    own = MetricsRow(0, 2, 10.0, 1, {GENERATE_S: 6.0, OWN_GENERATE_S: 6.0, GENERATE_NODE_S: 0.0})
    (found,) = timings(row(1, 0.0), own, row(3, 20.0))
    assert (found.trainer_idle_s, found.fleet_idle_s, found.train_s, found.staleness) == (0.0, 0.0, 4.0, None)


def test_median_is_taken_of_each_number() -> None:
    one, other = StepTiming(10, 6, 3, 1, 6, 4, 0.0), StepTiming(20, 8, 5, 3, 2, 0, None)
    third = StepTiming(12, 7, 9, 2, 4, 1, 1.0)
    assert median_timing([one, other, third]) == StepTiming(12, 7, 5, 2, 4, 1, 0.5)
    assert median_timing([]) is None
