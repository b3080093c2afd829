"""The summary and the picture of a run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image
from rich.console import Console

from checkpoint.metrics import Row
from orchestrator.views.plots import FaultMark, plot, plot_run
from orchestrator.views.report import Report, build_report, render, to_json
from policies.events import JobExited, JobRestarted, RunMoved
from policies.vocabulary import NodePhase, RunPhase
from tests.views_world import T0, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Ten steps of 10 s. A node is taken at step 3 (and 20 s and 37 tokens with it), the trainer killed at step 6
    goes back to step 5 (and loses 40 s); one held-out score at each end."""
    world = World()
    world.starts()
    at = {1: 20, 2: 30, 3: 40, 4: 70, 5: 80, 6: 140, 7: 150, 8: 160, 9: 170, 10: 180}
    world.rehearses(41, 1, "rollout-1", at_step=3)
    world.moves(43, "rollout-1-i1", NodePhase.GONE, "preempted without notice")
    world.asks_for(43, "rollout-1-i2")
    world.moves(44, "rollout-1-i2", NodePhase.BOOTING)
    world.happens(95, JobExited("trainer-0-i1", 1, -9, 6), JobRestarted("trainer-0-i1", 2, "again"))
    for step in range(1, 11):
        values = {"reward": step / 10, "kl": 0.01 * step, "orch/tokens": 512.0, "orch/tokens_discarded": 0.0}
        values["sampling/sampling_logp_difference/max"] = 2e-6 if step == 4 else 1e-6
        if step == 4:
            values["orch/tokens_discarded"] = 37.0
        if step in (2, 10):
            values["eval_reward"] = step / 20
        world.logs(at[step], step, **values)
    world.saves(80, 5, tmp_path)
    world.saves(181, 10, tmp_path)
    return world


def drawn(report: Report) -> str:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(render(report))
    return console.export_text()


def test_the_report_in_exact_numbers(world: World) -> None:
    report = build_report(world.store, T0 + 184)
    assert (report.steps, report.phase, report.wall_s) == (10, RunPhase.TRAINING, 184.0)
    assert (report.reward_first, report.reward_last) == pytest.approx((0.3, 0.8))
    assert (report.held_out_first, report.held_out_last) == (0.1, 0.5)
    assert (report.kl_last, report.sampling_logp_difference_max) == (0.1, 2e-6)
    assert (report.tokens_generated, report.tokens_regenerated) == (5120, 37)
    assert report.checkpoints == 2
    assert report.restarts == {"rollout-0": 0, "rollout-1": 1, "trainer-0": 1}
    assert [(cost.name, cost.at_step, cost.seconds_lost, cost.tokens_regenerated) for cost in report.faults] == [
        ("kill rollout-1", 3, 20.0, 37),
        ("trainer-0-i1 exited with -9", 6, 50.0, 0),
    ]
    assert (report.faults_survived, report.seconds_lost) == (2, 70.0)
    # USD an hour: trainer 7.20 on demand; rollout 0.90 on spot, 3.60 on demand. All but the lost node from 4 s on.
    rollout_s = 180 + (43 - 4) + (184 - 44)
    assert report.cost_usd == pytest.approx((180 * 7.2 + rollout_s * 0.9) / 3600)
    assert report.cost_all_on_demand_usd == pytest.approx((180 * 7.2 + rollout_s * 3.6) / 3600)


def test_a_run_that_has_ended_costs_no_more_as_time_goes_by(world: World) -> None:
    world.happens(190, RunMoved(RunPhase.FINISHED, "the last step"))
    world.moves(191, "trainer-0-i1", NodePhase.TERMINATING)
    first, later = build_report(world.store, T0 + 200), build_report(world.store, T0 + 86400)
    assert first == later
    assert first.wall_s == 191.0


def test_a_run_without_a_step_has_a_report() -> None:
    report = build_report(World(rehearse=None, kl_limit=None).store, T0 + 5)
    assert (report.steps, report.reward_first, report.reward_last, report.kl_last) == (0, None, None, None)
    assert (report.sampling_logp_difference_max, report.faults, report.cost_usd) == (None, (), 0.0)
    assert "none" in drawn(report)


def test_short_runs_average_what_there_is() -> None:
    world = World()
    world.logs(1, 1, reward=0.0)
    world.logs(2, 2, reward=1.0)
    report = build_report(world.store, T0 + 3)
    assert (report.reward_first, report.reward_last) == (0.5, 0.5)


def test_json_has_the_keys_that_programs_read(world: World) -> None:
    plain = json.loads(json.dumps(to_json(build_report(world.store, T0 + 184))))
    assert {
        "steps",
        "reward_first",
        "reward_last",
        "faults_survived",
        "tokens_generated",
        "tokens_regenerated",
        "seconds_lost",
        "cost_usd",
        "cost_all_on_demand_usd",
        "sampling_logp_difference_max",
    } <= set(plain)
    assert plain["phase"] == "training"
    assert plain["faults"][0] == {
        "name": "kill rollout-1",
        "at_step": 3,
        "seconds_lost": 20.0,
        "tokens_regenerated": 37,
        "survived": True,
    }


def test_the_report_is_drawn_in_80_columns(world: World) -> None:
    text = drawn(build_report(world.store, T0 + 184))
    assert max(map(len, text.splitlines())) <= 80
    assert "0.3 → 0.8" in text
    assert "2 of 2" in text
    assert "5,120 generated, 37 made again after a loss" in text
    assert "rollout-1 1, trainer-0 1" in text
    assert "kill rollout-1" in text


BLUE, RED, ORANGE, GREEN = (0x33, 0x66, 0xCC), (0xC0, 0x39, 0x2B), (0xE0, 0x7B, 0x39), (0x2E, 0x8B, 0x6F)


def count(path: Path, colour: tuple[int, int, int]) -> int:
    """Pixels of exactly this colour."""
    pixels = np.rint(image.imread(path)[:, :, :3] * 255).astype(int)
    return int((pixels == np.array(colour)).all(axis=2).sum())


def rows(**metrics: float) -> list[Row]:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return [Row(0, step, T0 + step, 1, {k: v * step for k, v in named.items()}) for step in range(1, 31)]


def test_a_run_is_plotted(world: World, tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    plot_run(world.store, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert count(path, BLUE) > 1000
    assert count(path, ORANGE) > 100  # held out
    assert count(path, RED) > 500  # the KL limit
    assert count(path, GREEN) == 0  # the reward band was not logged


def test_all_series_are_drawn_and_missing_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    whole = rows(reward=0.02, loss=0.01, kl=0.01, orch__reward_min=0.01, orch__reward_max=0.03, eval_reward=0.02)
    plot(whole, 0.5, path)
    assert min(count(path, colour) for colour in (BLUE, ORANGE, GREEN, RED)) > 100
    plot(whole, None, path)
    assert count(path, RED) == 0
    plot(whole, 0.2, path)  # exceeded from step 20 on: points above the line
    above = count(path, RED)
    plot(whole, 0.5, path)
    assert above > count(path, RED)


@pytest.mark.parametrize("logged", [[], rows(unknown=1.0), rows(reward=1.0)[:1]])
def test_a_run_with_little_logged_is_plotted(logged: list[Row], tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    plot(logged, 0.5, path, title="little")
    pixels = image.imread(path)
    assert pixels.shape[:2] == (1430, 1560)
    assert pixels.std() > 0.01


def test_fault_marks_are_drawn(tmp_path: Path) -> None:
    without, with_marks = tmp_path / "a.png", tmp_path / "b.png"
    plot(rows(reward=1.0), None, without)
    plot(rows(reward=1.0), None, with_marks, faults=[FaultMark(10, "kill"), FaultMark(20, "kill")])
    different = (image.imread(without) != image.imread(with_marks)).any(axis=2)
    columns = different[150:420, :740].sum(axis=0)  # the first panel
    assert (columns > 80).sum() >= 2
