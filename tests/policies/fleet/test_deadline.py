"""Where a run is on the way to its deadline, and how many nodes make it in time."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import assume, given
from hypothesis import strategies as st

from grpo_orch.policies.costs.steps import StepShape
from grpo_orch.policies.fleet.deadline import DeadlineProgress, nodes_for, time_of

HOUR_S = 3600.0
seconds = st.floats(1.0, 2000.0)


def course(hours: float = 0.0, step: int = 0, whole_h: float = 10.0, steps: int = 400) -> DeadlineProgress:
    return DeadlineProgress(hours * HOUR_S, 0.0, whole_h * HOUR_S, 300.0, step, steps)


def test_progress_is_linear_up_to_a_reserve_before_deadline() -> None:
    assert course().target_s == 10 * HOUR_S - 600
    assert course(whole_h=1.0).target_s == 0.9 * HOUR_S  # a short run keeps no more than a tenth
    half_h = (10 * HOUR_S - 600) / 2 / HOUR_S
    assert course(half_h).expected() == 200
    assert course(20.0).expected() == 400
    assert course(half_h, 199).is_behind
    assert not course(half_h, 200).is_behind
    assert not course(half_h, 200).is_safe
    assert course(half_h, 200 + 7).is_safe  # two starts of 300 s are 6.8 steps


def test_the_numbers_of_an_hour_lost() -> None:
    shape = StepShape(60.0, 120.0)
    assert nodes_for(course(), shape, 8) == 5  # 88.5 s a step
    assert nodes_for(course(step=100), shape, 8) == 3  # 118 s
    assert nodes_for(course(2.0, 40), shape, 8) == 7  # 78.3 s
    assert nodes_for(course(4.0, 40), shape, 8) == 0  # 75 s with all, an hour and a half too late
    assert nodes_for(course(3.5, 100), shape, 8) == 8  # as late as a measurement is off
    assert nodes_for(course(step=100), shape, 8, spare=0.1) == 3  # of 106.2 s
    assert nodes_for(course(11.0, 399), shape, 8) == 0


@given(seconds, st.floats(0.0, 5000.0), st.floats(0.0, 12.0), st.integers(0, 399), st.integers(1, 12))
def test_so_many_are_in_time_and_fewer_are_not(a: float, b: float, hours: float, step: int, most: int) -> None:
    now, shape = course(hours, step), StepShape(a, b)
    found = nodes_for(now, shape, most)
    assert 0 <= found <= most
    if found == 0:
        assert now.end_s(shape, most) > now.deadline_s
    elif found < most:
        assert now.end_s(shape, found) <= now.target_s + 1e-3
        assert found == 1 or now.end_s(shape, found - 1) >= now.target_s - 1e-3


@given(seconds, st.floats(1.0, 5000.0), st.floats(0.0, 9.0), st.integers(0, 398), st.integers(1, 12))
def test_less_progress_never_reduces_the_fleet(a: float, b: float, hours: float, step: int, most: int) -> None:
    shape = StepShape(a, b)
    assume(not course(hours, step).is_late(shape, most))
    assert nodes_for(course(hours, step), shape, most) >= nodes_for(course(hours, step + 1), shape, most)


@given(st.floats(0.1, 9.0), st.integers(0, 399))
def test_run_on_schedule_keeps_its_time_per_step(hours: float, step: int) -> None:
    """So who is ahead needs no more nodes than at the start, whatever it waited for."""
    now = course(hours, step)
    assume(step >= now.expected())
    assert now.step_s >= course().step_s * (1 - 1e-9)


@given(st.integers(0, 4_000_000_000))
def test_a_stored_time_reads_as_it_was_written(at_s: int) -> None:
    assert time_of(datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")) == at_s
