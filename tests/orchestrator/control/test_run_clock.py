"""What a controller may take for an unbroken row of looks."""

from __future__ import annotations

from orchestrator.control.run_clock import RunClock, Steadiness


def test_a_row_of_looks_is_broken_by_half_a_minute_without_one() -> None:
    row = Steadiness()
    looks = [row.look(at_s) for at_s in (100.0, 130.0, 160.0, 190.5, 191.5)]
    assert looks == [0.0, 30.0, 60.0, 0.0, 1.0]


def test_a_row_of_looks_begins_anew_after_one_that_failed() -> None:
    row = Steadiness()
    row.look(100.0)
    row.look(101.0)
    row.broke()
    assert [row.look(102.0), row.look(103.0)] == [0.0, 1.0]


def test_a_clock_that_is_set_changes_nothing() -> None:
    walls, counted_s = [5000.0], [100.0]
    clock = RunClock(lambda: walls[0], lambda: counted_s[0])
    walls[0], counted_s[0] = 1.0, 107.0
    assert clock.now_s() == 5007.0
