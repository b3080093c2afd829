"""What Prometheus reads of a daemon, over HTTP, and the dashboard that is made of it."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from grpo_orch.checkpoint.records.metrics import MetricsRow, StepTiming
from grpo_orch.orchestrator.control import exporter as exporting
from grpo_orch.orchestrator.control.exporter import Exporter, Seen
from grpo_orch.policies.model.vocabulary import Role
from tests.stand_ins.world import World, capped, priced

TIMING = StepTiming(20.0, 12.0, 11.0, 1.5, trainer_idle_s=2.0, fleet_idle_s=8.0, staleness=1.0)
DOCS = Path(__file__).parents[3] / "docs"


def lived(exporter: Exporter) -> World:
    """A run that trains on priced machines, and has lost one, as the exporter was told of it."""
    world, loses = priced(capped(10_000.0), max_steps=1000), True
    while world.steps < 8.0:
        before, known = world.state, len(world.history)
        world.tick()
        events = [event for _, _, events in world.history[known:] for event in events]
        snapshot = world.snapshot()
        row = MetricsRow(0, 7, 1.0, 1, {"kl": 0.25, "reward": 0.5})
        exporter.ticked(before, events, Seen(world.state, snapshot, row, TIMING, 0.125))
        if loses and world.steps >= 4.0:
            loses = False
            world.lose(world.up(Role.ROLLOUT)[0])
        world.advance()
    return world


def samples(text: str) -> dict[str, float]:
    """By name and the labels' values in the order of their names."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(value for _, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_run_is_exported_over_http_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = []

    def start(*given: Any) -> None:
        servers.append(start_http_server(*given)[0])

    monkeypatch.setattr(exporting, "start_http_server", start)
    exporter = Exporter("demo")
    world = lived(exporter)
    exporter.serve(0)  # a port that is chosen before it is taken may be another's by then
    (server,) = servers
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
        told = samples(answer.read().decode())
    server.shutdown()
    server.server_close()
    assert told["grpo_run_phase{training,demo}"] == 1
    assert told["grpo_run_phase{failed,demo}"] == 0
    assert told["grpo_run_step{demo}"] == 7
    assert (told["grpo_run_kl{demo}"], told["grpo_run_reward{demo}"]) == (0.25, 0.5)
    assert told["grpo_run_step_seconds{demo}"] == 20.0
    work = [told[f"grpo_run_work_seconds{{{part},demo}}"] for part in ("generate", "train", "sync")]
    assert work == [12.0, 11.0, 1.5]
    idle = (told["grpo_run_idle_seconds{demo,trainer}"], told["grpo_run_idle_seconds{demo,fleet}"])
    assert (*idle, told["grpo_run_staleness{demo}"]) == (2.0, 8.0, 1.0)
    assert (told["grpo_run_losses_total{rollout,demo}"], told["grpo_run_losses_total{trainer,demo}"]) == (1, 0)
    assert told["grpo_run_nodes{on_demand,serving,trainer,demo}"] == 1
    assert 0.0 < told["grpo_run_spent_usd{demo}"] <= world.spent
    assert told["grpo_daemon_tick_seconds{demo}"] == 0.125


def test_a_port_in_use_is_one_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, capture_logs() as logged:
        Exporter("demo").serve(taken.getsockname()[1])
    assert [(one["event"], one["log_level"]) for one in logged] == [("metrics_port_failed", "warning")]


def test_before_the_first_tick_there_is_nothing_of_the_run() -> None:
    assert b"grpo_run" not in generate_latest(Exporter("demo").registry)


def test_all_dashboard_metrics_are_exported_with_their_labels() -> None:
    exporter = Exporter("demo")
    lived(exporter)
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(generate_latest(exporter.registry).decode()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    page = (DOCS / "metrics.md").read_text().partition("## Gateway")[0].replace("grpo_daemon_process_", "")
    named = {name for text in (page, json.dumps(dashboard)) for name in re.findall(r"grpo_\w+", text)}
    assert len(named) > 12
    assert named <= labels.keys()
    asked = 0
    for target in (target for panel in dashboard["panels"] for target in panel["targets"]):
        (name,) = re.findall(r"grpo_\w+", target["expr"])
        lists = re.findall(r"\bby \(([^)]*)\)", target["expr"])
        wanted = {one.strip() for text in lists for one in text.split(",")}
        wanted |= set(re.findall(r"(\w+)=~", target["expr"]))
        wanted |= set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
        assert wanted <= labels[name] | {"instance", "job"}, target["expr"]
        asked += len(wanted)
    assert asked >= 20


def test_dashboard_shows_only_the_current_phase() -> None:
    """Asked for the whole time in view, each phase that the run has had comes back with the 1 of then."""
    panels = json.loads((DOCS / "grafana.json").read_text())["panels"]
    (phase,) = [one for one in panels if one["type"] == "stat"]
    assert phase["options"]["textMode"] == "name"
    assert [(one["instant"], one["range"]) for one in phase["targets"]] == [(True, False)]
