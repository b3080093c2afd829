"""The metrics of a run: one row a step, whatever is restarted."""

from __future__ import annotations

import math
import threading

import pytest

from grpo_orch.checkpoint.records.metrics import (
    REWARD_MAX,
    REWARD_MIN,
    TOKENS,
    MetricsRow,
    MetricsWriter,
    point_at,
    point_of,
    read_chunk,
    read_metrics,
)
from grpo_orch.checkpoint.store import layout
from grpo_orch.checkpoint.store.codec import to_json
from grpo_orch.checkpoint.store.document import UnreadableDocuments
from grpo_orch.checkpoint.store.run_store import Store
from grpo_orch.policies.detect.divergence import Point
from tests.budget import HANG_S


def test_metrics_rows_survive_a_restarted_writer() -> None:
    store = Store("memory://metrics-restarted")
    writer = MetricsWriter(store)
    for step in range(1, 251):
        writer.append(MetricsRow(0, step, float(step), 1, {"reward": step / 10}))
    MetricsWriter(store).append(MetricsRow(0, 240, 999.0, 2, {"reward": 7.0}))  # run again after a restart
    rows = read_metrics(store, 0)
    assert [r.step for r in rows] == list(range(1, 251))
    assert rows[239] == MetricsRow(0, 240, 999.0, 2, {"reward": 7.0}, first_time_s=240.0)
    assert len(store.entries(layout.METRICS)) == 3


class Together(Store):
    """A store that answers a read once another is under way."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.both = threading.Barrier(2)

    def get_or_none(self, key: str) -> bytes | None:
        self.both.wait(HANG_S)
        return super().get_or_none(key)


def test_the_objects_of_a_long_run_are_read_side_by_side() -> None:
    store = Together("memory://metrics-side-by-side")
    for step in (1, 101, 201, 301):
        key = layout.metrics_chunk(0, step)
        store.put(key, to_json(MetricsRow(0, step, float(step), 1, {"reward": 1.0})) + b"\n")
    assert [row.step for row in read_metrics(store)] == [1, 101, 201, 301]


@pytest.mark.parametrize(
    "row",
    [
        MetricsRow(0, 2, 1e300, 1, {}),
        MetricsRow(0, 2, 2.0, 1, {TOKENS: 1e300}),
        MetricsRow(0, 2, 2.0, 1, {}, -1e300),
    ],
)
def test_row_with_an_impossible_time_or_count_is_left_out(row: MetricsRow) -> None:
    """Sums over a run's rows are shown as numbers and times, and JSON has no infinity."""
    store, unreadable = (
        Store(f"memory://metrics-impossible-{row.time_s:g}-{len(row.values)}"),
        UnreadableDocuments(),
    )
    good = MetricsRow(0, 1, 1.0, 1, {TOKENS: 5.0, "reward": 1e300, REWARD_MIN: -1e300, REWARD_MAX: 1e300})
    key = layout.metrics_chunk(0, 1)
    store.put(key, to_json(good) + b"\n" + to_json(row) + b"\n")
    assert read_chunk(store, key, unreadable) == [good]
    assert list(unreadable.found) == [key]


def test_row_gives_detector_the_guards_input() -> None:
    """The row of a step gets more than the log that the guard saw: of an evaluation, of the end of training."""
    logged = {"kl": 0.25, "reward": 1.5, "orch/nonfinite/grad_norm": 1.0}
    added = {
        "orch/tokens": 96.0,
        "orch/nonfinite/eval_reward": 1.0,
        "eval_loss": 0.5,
        "eval_rewards/lower_share/mean": 0.5,
        "train_runtime": 60.0,
        "train_loss": 0.1,
        "total_flos": 0.0,
    }
    for point in (point_at(40, logged), point_of(MetricsRow(0, 40, 1.0, 1, {**logged, **added}))):
        gradients = point.values.get("grad_norm")
        assert gradients is not None
        assert math.isnan(gradients)
        finite = {name: value for name, value in point.values.items() if name != "grad_norm"}
        assert Point(point.step, finite) == Point(40, {"kl": 0.25, "reward": 1.5})
