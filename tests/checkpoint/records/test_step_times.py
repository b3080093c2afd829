"""What the log's rows say of the time of steps."""

from __future__ import annotations

import pytest

from grpo_orch.checkpoint.records.metrics import (
    AHEAD_S,
    GENERATE_NODE_S,
    GENERATE_S,
    PARTS,
    PUBLISH_S,
    REPLAYED,
    RESTARTING,
    REWARDS_S,
    STALENESS,
    STORE_S,
    TOKENS,
    TRAINING,
    UNSERVED_S,
    WAIT_S,
    MetricsRow,
    StepTiming,
    median_timing,
    split,
    step_times,
    step_timings,
)
from grpo_orch.policies.costs.steps import MeasuredStep


def row(
    step: int, time_s: float, generate_s: float = 4.0, nodes: int = 2, attempt: int = 1, replayed: bool = False
) -> MetricsRow:
    values = {
        GENERATE_S: generate_s,
        GENERATE_NODE_S: generate_s * nodes,
        TOKENS: 100.0,
        REPLAYED: float(replayed),
    }
    return MetricsRow(0, step, time_s, attempt, values)


def test_each_step_between_two_rows() -> None:
    rows = [row(1, 10.0), row(2, 20.0), row(3, 32.0, nodes=3), row(4, 40.0)]
    assert step_times(rows) == [MeasuredStep(10, 4, 2, 100), MeasuredStep(12, 4, 3, 100)]


def test_generation_ahead_is_separate_from_waiting() -> None:
    rows = [row(number, 10.0 * number) for number in range(1, 4)]
    rows[1].values[AHEAD_S] = 3.0
    rows[2].values[AHEAD_S] = 99.0  # more than there was is none
    for one in rows:
        one.values[STALENESS] = 1.0
    within = row(4, 40.0)
    within.values.update({AHEAD_S: 3.0, STALENESS: 0.0})  # its own generation, beside a part of its training
    assert step_times([*rows, within, row(5, 50.0)])[:3] == [
        MeasuredStep(10, 4, 2, 100, ahead_s=3),
        MeasuredStep(10, 4, 2, 100, ahead_s=4),
        MeasuredStep(10, 4, 2, 100),
    ]


def test_a_generation_that_serves_two_steps_is_theirs_by_half() -> None:
    rows = [row(0, 0.0), *(row(n, 10.0 * n, generate_s=8.0 * (n % 2)) for n in range(1, 6))]
    assert step_times(rows) == [MeasuredStep(10, 4, 2, 50)] * 2


def test_gap_between_trainers_and_replayed_steps_do_not_count() -> None:
    rows = [row(1, 10.0), row(2, 20.0), row(3, 900.0, attempt=2), row(4, 910.0)]
    assert step_times(rows) == [MeasuredStep(10, 4, 2, 100)]
    replayed = row(3, 21.0, generate_s=0.0, replayed=True)
    assert step_times([row(1, 10.0), row(2, 20.0), replayed, row(4, 31.0), row(5, 41.0)]) == [
        MeasuredStep(10, 4, 2, 100),
        MeasuredStep(10, 4, 2, 100),
    ]


def test_rows_without_generation_give_no_timing() -> None:
    assert step_times([MetricsRow(0, n, 10.0 * n, 1, {TOKENS: 9.0}) for n in range(9)]) == []


# What trainer and rollout nodes did in each step, from the rows.


def timed(step: int, time_s: float, generate_s: float = 6.0, **values: float) -> MetricsRow:
    logged = {GENERATE_S: generate_s, GENERATE_NODE_S: 2 * generate_s, PUBLISH_S: 1.0, STALENESS: 0.0}
    return MetricsRow(0, step, time_s, 1, {**logged, **{f"orch/{name}": value for name, value in values.items()}})


def timings(*rows: MetricsRow) -> list[StepTiming]:
    return [timing for _, timing in step_timings(rows)]


def test_steps_in_turns_leave_one_side_idle() -> None:
    # Of 20 s: publish 1, load 2 (a wait of the trainer), generate 6, train 11.
    values = {WAIT_S.removeprefix("orch/"): 2.0, UNSERVED_S.removeprefix("orch/"): 2.0}
    found = timings(timed(1, 0.0), timed(2, 20.0, **values), timed(3, 40.0))
    expected = StepTiming(20.0, 6.0, 11.0, 3.0, trainer_idle_s=8.0, fleet_idle_s=12.0, staleness=0.0)
    assert found == [expected]
    assert (expected.sequential_s, expected.overlapped_s) == (20.0, 14.0)


def test_overlapped_step_is_idle_only_where_measured() -> None:
    # Of 14 s: publish 1, train 11, wait for the last 2 of 12 s in which nodes load and generate.
    values = {"ahead_s": 10.0, "unserved_s": 0.5, "staleness": 1.0}
    found = timings(timed(1, 0.0), timed(2, 14.0, 12.0, **values), timed(3, 28.0))
    assert found == [StepTiming(14.0, 11.5, 11.0, 1.5, trainer_idle_s=2.0, fleet_idle_s=2.0, staleness=1.0)]


def test_steps_of_one_window_share_its_generation() -> None:
    rows = [timed(0, 0.0), timed(1, 15.0, 8.0, staleness=2.0), MetricsRow(0, 2, 25.0, 1, {}), timed(3, 40.0)]
    ((first, timing),) = step_timings(rows)
    assert first is rows[1]
    assert (timing.step_s, timing.generate_s, timing.sync_s, timing.staleness) == (12.5, 4.0, 0.5, 2.0)
    assert timing.fleet_idle_s == pytest.approx(8.5)


def test_median_is_taken_of_each_number() -> None:
    one, other = StepTiming(10, 6, 3, 1, 6, 4, 0.0), StepTiming(20, 8, 5, 3, 2, 0, None)
    third = StepTiming(12, 7, 9, 2, 4, 1, 1.0)
    assert median_timing([one, other, third]) == StepTiming(12, 7, 5, 2, 4, 1, 0.5)
    assert median_timing([]) is None


# Where the time of steps went, from the rows.

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
