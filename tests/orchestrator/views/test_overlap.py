"""What a user sees of generation ahead of training: in status, report, plot, run page and rollbacks."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from grpo_orch.checkpoint.records.metrics import StepTiming
from grpo_orch.orchestrator.views.report import render
from grpo_orch.orchestrator.views.screen import Screen
from grpo_orch.orchestrator.views.view_model import to_json
from grpo_orch.policies.model.spec import Replicas, RolloutSpec
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.model.vocabulary import Cause
from tests.generators.views_world import T0, World, look, report_of
from tests.orchestrator.web.test_site import ask

STEPS = 6
# Of a step of 20 s: publish 1, load 2, generate 6, train 11. Then of 12 s: publish 1, train 11, all else hidden.
IN_TURNS = {"generate_s": 6.0, "wait_s": 2.0, "unserved_s": 2.0, "staleness": 0.0}
OVERLAPPED = {"generate_s": 8.0, "ahead_s": 8.0, "unserved_s": 2.0, "staleness": 1.0}
LOGGED: dict[int, tuple[float, dict[str, float]]] = {0: (20.0, IN_TURNS), 1: (12.0, OVERLAPPED)}
TIMINGS = {
    0: StepTiming(20.0, 6.0, 11.0, 3.0, trainer_idle_s=8.0, fleet_idle_s=12.0, staleness=0.0),
    1: StepTiming(12.0, 6.0, 11.0, 3.0, trainer_idle_s=0.0, fleet_idle_s=4.0, staleness=1.0),
}
SENTENCES = {
    0: "with rollout.max_staleness: 1 a step would take about 14 s instead of 20 s",
    1: "with rollout.max_staleness: 1 a step takes 12 s instead of about 20 s",
}


def world_at(staleness: int, replicas: int = 2) -> World:
    nodes = Replicas(min=min(1, replicas), max=replicas)
    world = World(rollout=RolloutSpec(max_staleness=staleness, replicas=nodes))
    world.starts()
    took_s, values = LOGGED[staleness]
    logged: dict[str, Any] = {f"orch__{name}": value for name, value in values.items()}
    for step in range(1, STEPS + 1):
        tokens = {"orch__tokens": 100.0, "orch__publish_s": 1.0, "orch__generate_node_s": 12.0}
        world.logs(20 + took_s * step, step, 0, reward=0.5, **logged, **tokens)
    return world


def text_of(drawable: Any, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(drawable)
    return " ".join(console.export_text().split())


@pytest.mark.parametrize("staleness", [0, 1])
def test_status_shows_work_idle_seconds_and_staleness(staleness: int) -> None:
    view = look(world_at(staleness), 150)
    assert view.step_timing == TIMINGS[staleness]
    assert to_json(view)["step_timing"]["fleet_idle_s"] == TIMINGS[staleness].fleet_idle_s
    words = {
        0: "generate 6 s · train 11 s · sync 3 s · idle: trainer 8 s, fleet 12 s · staleness 0",
        1: "generate 6 s · train 11 s · sync 3 s · idle: trainer 0 s, fleet 4 s · staleness 1",
    }[staleness]
    assert f"median {words}" in text_of(Screen(view, 40))


@pytest.mark.parametrize("staleness", [0, 1])
def test_report_shows_the_gain_of_overlap(staleness: int) -> None:
    report = report_of(world_at(staleness).store, T0 + 150)
    assert (report.step_timing, report.overlap) == (TIMINGS[staleness], SENTENCES[staleness])
    drawn = text_of(render(report))
    assert f"overlap {SENTENCES[staleness]}" in drawn
    assert f"staleness {staleness}" in drawn


def test_run_without_nodes_gets_no_overlap_advice() -> None:
    report = report_of(world_at(0, replicas=0).store, T0 + 150)
    assert report.overlap is None
    assert "overlap" not in text_of(render(report))


@pytest.mark.parametrize("staleness", [0, 1])
def test_run_page_has_a_series_of_each(staleness: int) -> None:
    present = ask(world_at(staleness), "/series")[0]["present"]
    timing, known = TIMINGS[staleness], STEPS - 2  # neither of the first, nor of the newest, which is not over
    assert present["generate_s"] == [None, *[timing.generate_s] * known, None]
    assert present["trainer_idle_s"] == [None, *[timing.trainer_idle_s] * known, None]
    assert present["fleet_idle_s"] == [None, *[timing.fleet_idle_s] * known, None]
    assert present["staleness"] == [None, *[float(staleness)] * known, None]


def test_rollback_counts_windows_that_were_generated_ahead() -> None:
    world = world_at(1)
    world.rolls_back(200, Fork(1, "0-4", reason="asked for"), STEPS, Cause.USER)
    world.logs(230, 5, 1, orch__tokens=90.0, orch__unused_windows=2.0, orch__unused_tokens=150.0)
    report = report_of(world.store, T0 + 231)
    (rollback,) = report.rollbacks
    assert (rollback.steps_abandoned, rollback.tokens_abandoned) == (2, 200)
    assert (rollback.windows_unused, rollback.tokens_unused) == (2, 150)
    assert (report.windows_unused, report.tokens_unused) == (2, 150)
    words = "2 steps and 350 tokens discarded, 150 of the tokens in 2 windows that no logged step used"
    assert f"rollbacks 1; {words}" in text_of(render(report), 200)
    told = ask(world, "/rollbacks?format=json")[0]["rollbacks"][0]
    assert (told["windows_unused"], told["tokens_unused"], told["discarded_text"]) == (2, 150, words)
