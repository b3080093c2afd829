"""The metrics of a run: one row a step, whatever is restarted."""

from __future__ import annotations

from checkpoint import layout
from checkpoint.metrics import MetricsWriter, Row, read_metrics
from checkpoint.store import Store


def test_metrics_rows_survive_a_restarted_writer():
    store = Store("memory://metrics-restarted")
    writer = MetricsWriter(store)
    for step in range(1, 251):
        writer.append(Row(0, step, float(step), 1, {"reward": step / 10}))
    MetricsWriter(store).append(Row(0, 240, 999.0, 2, {"reward": 7.0}))  # run again after a restart
    rows = read_metrics(store, 0)
    assert [r.step for r in rows] == list(range(1, 251))
    assert rows[239] == Row(0, 240, 999.0, 2, {"reward": 7.0}, first_time_s=240.0)
    assert len(store.entries(layout.METRICS)) == 3
