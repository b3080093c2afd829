"""Which steps are told from the log, and of what they consisted."""

from __future__ import annotations

from grpo_orch.checkpoint.records.metrics import (
    AHEAD_S,
    GENERATE_NODE_S,
    GENERATE_S,
    OWN_GENERATE_S,
    REPLAYED,
    STALENESS,
    TOKENS,
    WAIT_S,
    MetricsRow,
    step_times,
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


def test_step_by_own_generation_counts_separately() -> None:
    own = row(2, 20.0, nodes=0)
    own.values[OWN_GENERATE_S] = 4.0
    rows = [row(1, 10.0), own, row(3, 32.0), row(4, 40.0)]
    assert step_times(rows) == [MeasuredStep(10, 4, 0, 100, trainer_generated_s=4), MeasuredStep(12, 4, 2, 100)]


def test_step_without_logged_node_seconds_has_no_nodes() -> None:
    """Values that are not finite are left out of the log."""
    rows = [
        row(1, 10.0),
        MetricsRow(0, 2, 20.0, 1, {GENERATE_S: 4.0, OWN_GENERATE_S: 4.0}),
        row(3, 30.0),
        row(4, 40.0),
    ]
    assert [step.nodes for step in step_times(rows)] == [0.0, 2.0]


def test_wait_before_own_generation_is_no_part_of_its_step() -> None:
    own = row(2, 320.0, nodes=0)
    own.values.update({OWN_GENERATE_S: 4.0, WAIT_S: 300.0})
    rows = [row(1, 10.0), own, row(3, 332.0), row(4, 340.0)]
    assert step_times(rows)[0] == MeasuredStep(10, 4, 0, 100, trainer_generated_s=4)


def test_rows_without_generation_give_no_timing() -> None:
    assert step_times([MetricsRow(0, n, 10.0 * n, 1, {TOKENS: 9.0}) for n in range(9)]) == []
