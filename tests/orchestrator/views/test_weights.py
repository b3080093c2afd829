"""What the weights take, as status and report tell it."""

from __future__ import annotations

import io
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from grpo_orch.checkpoint.records import documents, metrics
from grpo_orch.checkpoint.records.metrics import MetricsRow
from grpo_orch.orchestrator.views import report
from grpo_orch.orchestrator.views.screen import Screen
from grpo_orch.orchestrator.views.view_model import WeightsView, newest_weights, weights_view
from grpo_orch.policies.serving.gateway_status import GatewayStatus, VersionSpread
from tests.generators.views_world import T0, World, report_of, run_view

MIB = 2**20


def logged(step: int, policies: int, sent_mib: float, publish_s: float) -> MetricsRow:
    values = {
        metrics.PUBLISHED: float(policies),
        metrics.PUBLISHED_BYTES: sent_mib * MIB * policies,
        metrics.WEIGHTS_BYTES: 1000.0 * MIB * policies,
        metrics.PUBLISH_S: publish_s * policies,
        metrics.ENCODE_S: 0.25 * policies,
    }
    return MetricsRow(0, step, T0 + step, 1, values)


SPREADS = [
    VersionSpread("0-8", 3, 3, 4.0, 5.0, 2.0, 20 * MIB, 1.0),
    VersionSpread("0-9", 3, 2, 6.0, 9.0, 3.0, 30 * MIB, 1.5),
    VersionSpread("0-10", 3),
]


def test_newest_weights_are_shown_for_one_policy() -> None:
    rows = [logged(10, 1, 500.0, 9.0), logged(20, 10, 20.0, 3.0), MetricsRow(0, 21, T0 + 21, 1, {"reward": 1.0})]
    assert newest_weights(rows, SPREADS) == WeightsView(
        10, 1000.0 * MIB, 20.0 * MIB, 3.0, 0.25, 3, 2, 3.0, 30 * MIB, 1.5, 6.0, 9.0
    )
    assert newest_weights(rows[-1:], SPREADS) is None
    assert newest_weights([], ()) is None


def test_weights_are_summarised_by_means_and_medians() -> None:
    view = weights_view([logged(1, 1, 30.0, 4.0), logged(2, 1, 10.0, 2.0)], SPREADS[:2])
    assert view is not None
    assert (view.policies, view.sent_bytes, view.publish_s, view.encode_s) == (2, 20.0 * MIB, 3.0, 0.25)
    assert (view.fetch_s, view.fetched_bytes, view.first_ready_s, view.last_ready_s) == (2.5, 25 * MIB, 5.0, 7.0)


def test_status_and_report_show_them_on_80_columns() -> None:
    world = World()
    world.starts()
    values: dict[str, Any] = {"reward": 0.5, **logged(1, 1, 123.4, 12.3).values}
    world.logs(30, 1, **values)
    world.beats(41, 1)
    status = GatewayStatus("boot", "0-1", versions=[VersionSpread("0-1", 2, 2, 12.3, 15.0, 10.1, 123 * MIB, 2.2)])
    view = run_view(world.store, T0 + 42, status)
    assert view.weights is not None
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(Screen(view))
    line = next(one for one in console.export_text().splitlines() if one.startswith("weights"))
    assert line.split(maxsplit=1)[1] == "123.4 MiB in 12.3 s (12.3 % of total); all ready in 12.3 to 15.0 s"
    documents.members((0, 1, 1)).write(world.store, replace(status, seq=1))
    documents.gateway((0, 1, 1)).write(world.store, documents.GatewayAddress("http://h:1", "boot"))
    told = report_of(world.store, T0 + 42)
    assert asdict(told)["weights"] == asdict(view.weights)
    console.print(report.render(told))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "encoded in 0.2 s, sent 12.1 s later; fetched in 10.1 s" in text
