"""Ten thousand steps in as many points as a screen has, and no spike lost."""

from __future__ import annotations

from checkpoint.records.metrics import Row
from orchestrator.web.course import table


def test_a_spike_of_one_step_shows_among_ten_thousand() -> None:
    rows = [Row(0, step, float(step), 1, {"kl": 9.0 if step == 4321 else 0.1}) for step in range(10_000)]
    found = table(rows, "step", 500)
    assert len(found["x"]) == len(found["kl"]) == 500
    highs = [(high or 0.0, x or 0.0) for high, x in zip(found["kl_high"], found["x"], strict=True)]
    assert max(highs)[0] == 9.0
    assert abs(max(highs)[1] - 4321) < 20
    assert set(found["reward"]) == {None}


def test_few_steps_are_all_told_as_they_were_logged() -> None:
    rows = [Row(0, step, 100.0 * step, 1, {"reward": step / 4}) for step in (1, 2, 4)]
    found = table(rows, "time", 500)
    assert found["x"] == [100.0, 200.0, 400.0]
    assert found["reward"] == found["reward_low"] == found["reward_high"] == [0.25, 0.5, 1.0]
    assert table([], "step", 500)["kl_high"] == []
