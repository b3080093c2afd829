"""The summary and the picture of a run."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image
from rich.console import Console

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.metrics import MetricsRow
from grpo_orch.orchestrator.views.formatting import Change
from grpo_orch.orchestrator.views.plots import plot, plot_run
from grpo_orch.orchestrator.views.report import Report, render
from grpo_orch.orchestrator.views.view_model import HealthView
from grpo_orch.policies.detect.divergence import Health
from grpo_orch.policies.model import exit_codes
from grpo_orch.policies.model.events import (
    GatewayRestarted,
    JobExited,
    JobRestarted,
    ProbationPassed,
    RunMoved,
)
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.model.vocabulary import Cause, NodePhase, RunPhase
from tests.generators.views_world import EVIDENCE, FIRST_FORK, T0, World, report_of


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
        values: dict[str, Any] = {
            "reward": step / 10,
            "kl": 0.01 * step,
            "orch/tokens": 512.0,
            "orch/tokens_discarded": 0.0,
        }
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


def test_ended_run_shows_why_and_a_running_one_does_not(world: World) -> None:
    assert "why" not in drawn(report_of(world.store, T0 + 184))
    world.happens(185, RunMoved(RunPhase.FINISHED, "complete at step 10; nothing was learnt"))
    assert "complete at step 10; nothing was learnt" in drawn(report_of(world.store, T0 + 186))


def test_the_report_in_exact_numbers(world: World) -> None:
    report = report_of(world.store, T0 + 184)
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
    # USD an hour: trainer 7.20 on demand; rollout 0.90 on spot, 3.60 on demand. All were asked for
    # at 1 s, the successor of the lost one at 43 s.
    rollout_s = 183 + (43 - 1) + (184 - 43)
    cost_usd = (183 * 7.2 + rollout_s * 0.9) / 3600
    assert report.cost_usd == pytest.approx(cost_usd)
    assert report.cost_all_on_demand_usd == pytest.approx((183 * 7.2 + rollout_s * 3.6) / 3600)
    assert report.usd_per_step == pytest.approx(cost_usd / 10)
    assert report.usd_per_million_tokens == pytest.approx(cost_usd / 5120 * 1e6)
    assert (report.store_usd, report.store_unpriced) == (0.0, ""), "on a machine of one's own"
    assert "store" not in drawn(report).split("not counted")[0]


def test_report_estimates_the_cost_of_a_store_in_a_cloud(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    record = documents.read_run(world.store)
    cloud = replace(record, spec=replace(record.spec, cloud="sky"))
    monkeypatch.setattr(documents, "read_run", lambda _: cloud)
    monkeypatch.setattr(world.store, "url", "gs://bucket/run")
    report = report_of(world.store, T0 + 184)
    requests = 184 * (3.5 * 5e-6 + (6 + 4 * (1 + 1 / 60)) * 4e-7) + 10 * 10 * 5e-6
    assert report.store_usd == pytest.approx(requests, rel=0.2)
    assert report.store_unpriced == "its traffic (the machines' cloud is unknown)"
    assert "more, not counting its traffic (the machines' cloud is unknown)" in " ".join(drawn(report).split())


def test_down_and_resume_are_neither_faults_nor_restarts(world: World) -> None:
    before = report_of(world.store, T0 + 184)
    nodes = ("trainer-0-i1", "rollout-0-i1", "rollout-1-i2")
    world.happens(190, RunMoved(RunPhase.STOPPING, "asked for by hand"))
    world.moves(190, "trainer-0-i1", NodePhase.DRAINING)
    world.happens(195, JobExited("trainer-0-i1", 2, exit_codes.STOPPED, 10))
    for node in nodes:
        world.moves(196, node, NodePhase.TERMINATING)
        world.moves(197, node, NodePhase.GONE)
    world.happens(198, RunMoved(RunPhase.STOPPED, "asked for by hand"))
    world.take_over(1000, pid=43)
    world.happens(1000, RunMoved(RunPhase.STARTING, "resumed"))
    for node in ("trainer-0-i2", "rollout-0-i2", "rollout-1-i3"):
        world.asks_for(1001, node)
        world.moves(1002, node, NodePhase.BOOTING)
        world.moves(1010, node, NodePhase.SERVING)
    world.happens(1010, RunMoved(RunPhase.TRAINING, "the trainer sent its first heartbeat"))
    world.happens(1011, GatewayRestarted("resumed"))
    after = report_of(world.store, T0 + 1020)
    assert (after.restarts, after.faults) == (before.restarts, before.faults)


def test_ended_run_costs_no_more_over_time(world: World) -> None:
    world.happens(190, RunMoved(RunPhase.FINISHED, "the last step"))
    world.moves(191, "trainer-0-i1", NodePhase.TERMINATING)
    first, later = report_of(world.store, T0 + 200), report_of(world.store, T0 + 86400)
    assert first == later
    assert first.wall_s == 191.0


def test_a_run_without_a_step_has_a_report() -> None:
    report = report_of(World(rehearse=None, kl_limit=None).store, T0 + 5)
    assert (report.steps, report.reward_first, report.reward_last, report.kl_last) == (0, None, None, None)
    assert (report.sampling_logp_difference_max, report.faults, report.cost_usd) == (None, (), 0.0)
    assert "none" in drawn(report)


def test_the_report_is_drawn_in_80_columns(world: World) -> None:
    text = drawn(report_of(world.store, T0 + 184))
    assert max(map(len, text.splitlines())) <= 80
    assert "0.3 → 0.8" in text
    assert "2 of 2" in text
    assert "5,120 generated, 37 regenerated" in text
    assert "rollout-1 1, trainer-0 1" in text
    assert "kill rollout-1" in text


@pytest.fixture
def rolled_back(world: World) -> World:
    """The run above, which diverged at step 10 and went on from step 5; then a person took it back to 1-7."""
    world.diverges(182, onset_step=7, step=10)
    world.rolls_back(183, FIRST_FORK, 10)
    for step in (6, 7, 8):
        world.logs(190 + 10 * (step - 6), step, timeline=1, reward=0.9, kl=0.05, orch__tokens=500.0)
    world.rolls_back(215, BY_HAND, 8, Cause.USER)
    world.logs(230, 8, timeline=2, reward=1.0, kl=0.06, orch__tokens=400.0)
    return world


BY_HAND = Fork(
    timeline=2,
    start="1-7",
    changes={**FIRST_FORK.changes, "beta": 0.1},
    skipped=FIRST_FORK.skipped,
    reason="asked for by hand",
)


def test_report_lists_rollbacks(rolled_back: World) -> None:
    report = report_of(rolled_back.store, T0 + 231)
    assert (report.timeline, report.steps, report.kl_last) == (2, 8, 0.06)
    assert report.reward_last == pytest.approx((0.4 + 0.5 + 0.9 + 0.9 + 1.0) / 5), "of the line, in its order"
    assert report.tokens_generated == 5120 + 3 * 500 + 400
    assert (report.steps_abandoned, report.tokens_abandoned) == (5 + 1, 5 * 512 + 500)
    assert [fault.name for fault in report.faults] == ["kill rollout-1", "trainer-0-i1 exited with -9"]
    first, second = report.rollbacks
    assert (first.from_version, first.start, first.timeline, first.cause) == ("0-10", "0-5", 1, Cause.DIVERGED)
    assert (first.steps_abandoned, first.tokens_abandoned, first.outcome) == (
        5,
        2560,
        "was replaced by the next rollback",
    )
    assert first.changes == {"learning_rate": Change(0.001, 0.0005), "beta": Change(0.02, 0.04)}
    assert first.skipped == FIRST_FORK.skipped
    assert (second.from_version, second.start, second.timeline, second.cause) == ("1-8", "1-7", 2, Cause.USER)
    assert (second.changes, second.skipped) == ({"beta": Change(0.04, 0.1)}, ())
    assert (second.steps_abandoned, second.tokens_abandoned) == (1, 500)
    assert second.outcome == "is on probation until step 9"
    assert report.health == HealthView()
    assert set(json.loads(json.dumps(asdict(report)))) == set(asdict(report_of(World().store, T0)))


def test_rollbacks_are_drawn_in_80_columns(rolled_back: World) -> None:
    text = drawn(report_of(rolled_back.store, T0 + 231))
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    assert "rollbacks 2; 6 steps and 3,060 tokens discarded" in words
    assert "timeline 1 from 0-10 to checkpoint 0-5; 5 steps and 2,560 tokens discarded" in words
    assert f"reason {FIRST_FORK.reason}" in words
    assert (
        "changed learning_rate 0.001 → 0.0005, beta 0.02 → 0.04; "
        "other prompts instead of those of steps 7 to 10 of timeline 0"
    ) in words
    assert "changed beta 0.04 → 0.1 now is on probation until step 9" in words


def test_passed_rollback_and_one_without_changes_are_reported(world: World) -> None:
    world.rolls_back(183, Fork(1, None, reason="asked [for]"), 10, Cause.USER)
    world.happens(190, ProbationPassed(1, 21))
    report = report_of(world.store, T0 + 191)
    assert (report.rollbacks[0].start, report.rollbacks[0].steps_abandoned) == (None, 10)
    assert (report.steps, report.reward_first) == (0, None)
    words = " ".join(drawn(report).split())
    assert "from 0-10 to the run's start; 10 steps" in words
    assert "reason asked [for] changed only the sampling seeds now has passed its probation" in words


def test_abandoned_run_shows_its_divergence(world: World) -> None:
    world.diverges(182, onset_step=7, step=10)
    world.happens(183, RunMoved(RunPhase.GAVE_UP, "diverged at step 10"))
    report = report_of(world.store, T0 + 184)
    assert report.health == HealthView(Health.TRIPPED, 10, 7, EVIDENCE)
    words = " ".join(drawn(report).split())
    assert f"diverged since step 7: {EVIDENCE[0]}; {EVIDENCE[1]}" in words


BLUE, RED, ORANGE, GREEN = (0x33, 0x66, 0xCC), (0xC0, 0x39, 0x2B), (0xE0, 0x7B, 0x39), (0x2E, 0x8B, 0x6F)
PURPLE = (0x7A, 0x5B, 0xA8)


def count(path: Path, colour: tuple[int, int, int]) -> int:
    """Pixels of exactly this colour."""
    pixels = np.rint(image.imread(path)[:, :, :3] * 255).astype(int)
    return int((pixels == np.array(colour)).all(axis=2).sum())


def rows(**metrics: float) -> list[MetricsRow]:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return [MetricsRow(0, step, T0 + step, 1, {k: v * step for k, v in named.items()}) for step in range(1, 31)]


def test_a_run_is_plotted(world: World, tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    plot_run(world.store, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert count(path, BLUE) > 1000
    assert count(path, ORANGE) > 100  # held out
    assert count(path, RED) > 500  # the KL limit
    assert count(path, GREEN) == count(path, PURPLE) == 0  # neither reward band, loss nor step times were logged


def test_all_series_are_drawn_and_missing_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    whole = rows(reward=0.02, loss=0.01, kl=0.01, orch__reward_min=0.01, orch__reward_max=0.03, eval_reward=0.02)
    plot(whole, 0.5, path)
    assert min(count(path, colour) for colour in (BLUE, ORANGE, GREEN, PURPLE, RED)) > 100
    plot(whole, None, path)
    assert count(path, RED) == 0
    plot(whole, 0.2, path)  # exceeded from step 20 on: points above the line
    above = count(path, RED)
    plot(whole, 0.5, path)
    assert above > count(path, RED)


@pytest.mark.parametrize("logged", [[], rows(unknown=1.0), rows(reward=1.0)[:1]])
def test_a_run_with_little_logged_is_plotted(logged: list[MetricsRow], tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    plot(logged, 0.5, path, title="little")
    pixels = image.imread(path)
    assert pixels.shape[:2] == (1430, 1560)
    assert pixels.std() > 0.01


GREY, SHADE, INK = (0xA9, 0xB0, 0xBA), (0xEC, 0xEE, 0xF1), (0x33, 0x3A, 0x45)


def test_abandoned_steps_are_grey_and_the_fork_is_marked(rolled_back: World, tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    plot_run(rolled_back.store, path)
    assert count(path, GREY) > 500
    assert count(path, SHADE) > 10_000
    whole = rows(reward=0.02, kl=0.01, loss=0.01)
    plot(whole, None, path, rollbacks=[(20, 28)])
    marked = count(path, INK)
    assert count(path, GREY) == 0
    plot(whole, None, path)
    assert (count(path, SHADE), count(path, INK) < marked - 500) == (0, True)


def test_a_runaway_that_was_abandoned_does_not_flatten_the_rest(tmp_path: Path) -> None:
    calm, path = rows(kl=0.01), tmp_path / "plot.png"
    runaway = [MetricsRow(1, step, T0, 1, {"kl": 10.0**step}) for step in range(20, 30)]

    def blue_lines(lost: list[MetricsRow]) -> int:
        """Over how many lines of pixels the KL goes."""
        plot(calm, None, path, lost=lost)
        pixels = np.rint(image.imread(path)[:, :, :3] * 255).astype(int)
        return int((pixels == np.array(BLUE)).all(axis=2).any(axis=1).sum())

    assert blue_lines(runaway) > 0.5 * blue_lines([])


def test_step_times_and_staleness_are_plotted(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    parts = {"generate_s": 0.02, "generate_node_s": 0.02, "publish_s": 0.01, "staleness": 0.05}
    plot(rows(**{f"orch__{name}": value for name, value in parts.items()}), None, path)
    assert min(count(path, colour) for colour in (BLUE, GREEN, PURPLE, ORANGE)) > 100


def test_fault_marks_are_drawn(tmp_path: Path) -> None:
    without, with_marks = tmp_path / "a.png", tmp_path / "b.png"
    plot(rows(reward=1.0), None, without)
    plot(rows(reward=1.0), None, with_marks, faults=[10, 20])
    different = (image.imread(without) != image.imread(with_marks)).any(axis=2)
    columns = different[150:420, :740].sum(axis=0)  # the first panel
    assert (columns > 80).sum() >= 2
