"""A viewer whose clock is wrong sees what the run's money is by the clock of the controller that journals."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from grpo_orch.checkpoint.records import documents
from grpo_orch.checkpoint.records.documents import Lease
from grpo_orch.orchestrator.cli import checkpoints
from grpo_orch.orchestrator.cli import look as commands
from grpo_orch.orchestrator.cli.options import Output
from grpo_orch.orchestrator.control.lease import LEASE_CHECKS
from grpo_orch.orchestrator.views import run_view as looking
from grpo_orch.orchestrator.views.run_view import RunObserver, RunTime
from grpo_orch.policies.model.events import RunMoved
from grpo_orch.policies.model.vocabulary import RunPhase
from tests.budget import HANG_S
from tests.generators.views_world import T0, World, look

HOUR_S = 3600.0
OFF_S = (-HOUR_S, HOUR_S, 300 * 24 * HOUR_S)


class Steered:
    """A run whose daemon is on another machine, and renews its lease every 2 s; `off_s`: the viewer's clock."""

    def __init__(self, off_s: float, monkeypatch: pytest.MonkeyPatch, *, is_alive: bool = True) -> None:
        self.world, self.at_s, self.waits, self.is_alive = World(), 3700.0, 0, is_alive
        self.world.starts()
        documents.LEASE.write(self.world.store, renewed(3700.0))
        by_viewer = RunTime(lambda: T0 + self.at_s + off_s, lambda: self.at_s)
        monkeypatch.setattr(looking, "RunTime", lambda: by_viewer)

    def wait(self, seconds: float) -> None:
        self.at_s, self.waits = self.at_s + seconds, self.waits + 1
        if self.is_alive and self.at_s % 2 == 0:
            documents.LEASE.write(self.world.store, renewed(self.at_s))


class Viewer:
    """Looks at a lease, on a machine whose clock is off."""

    def __init__(self, off_s: float = HOUR_S) -> None:
        self.at_s = 0.0
        self.off_s = off_s
        self.time = RunTime(lambda: T0 + self.at_s + self.off_s, lambda: self.at_s)

    def looks(self, at_s: float, lease: Lease | None, told_s: float = 0.0) -> float:
        """What time it is for the run, in seconds after T0."""
        self.at_s = at_s
        return self.time.now_s(lease, T0 + told_s) - T0


def renewed(at_s: float, epoch: int = 1, ahead_s: float = 0.0) -> Lease:
    """By a holder whose journal is so far ahead of the true time."""
    return Lease("a/1", "elsewhere", 1, "1", epoch, T0 + at_s, 15.0, T0 + at_s + ahead_s)


@pytest.mark.parametrize("off_s", OFF_S)
def test_observed_renewal_gives_the_time(off_s: float) -> None:
    viewer = Viewer(off_s)
    viewer.looks(10.0, renewed(8.0))
    assert viewer.looks(14.0, renewed(13.0)) == 13.0
    assert viewer.looks(18.0, renewed(17.75)) == 17.75, "it was seen sooner after it was written"
    assert viewer.looks(22.0, renewed(20.0)) == 21.75
    assert viewer.looks(22.0 + HOUR_S, renewed(20.0)) == 21.75 + HOUR_S, "its holder has died"


def test_possibly_old_lease_gives_only_a_lower_bound_of_time() -> None:
    viewer = Viewer()
    assert viewer.looks(HOUR_S, renewed(8.0)) == 2 * HOUR_S, "the first look"
    assert viewer.looks(2 * HOUR_S, renewed(HOUR_S + 10.0)) == 3 * HOUR_S, "nobody looked for an hour"
    assert Viewer(-HOUR_S).looks(20.0, renewed(8.0)) == 8.0
    assert Viewer(-HOUR_S).looks(20.0, None, told_s=4.0) == 4.0


def test_holder_with_set_clock_gives_its_journals_time() -> None:
    viewer = Viewer(0.0)
    viewer.looks(10.0, renewed(8.0, ahead_s=HOUR_S))
    assert viewer.looks(14.0, renewed(13.0, ahead_s=HOUR_S)) == HOUR_S + 13.0


def test_the_next_holder_has_another_clock() -> None:
    viewer = Viewer(0.0)
    viewer.looks(10.0, renewed(8.0, ahead_s=HOUR_S))
    viewer.looks(14.0, renewed(13.0, ahead_s=HOUR_S))
    assert viewer.looks(18.0, renewed(17.0, epoch=2)) == 17.0


@pytest.mark.parametrize("off_s", OFF_S)
def test_money_is_reckoned_by_the_runs_time(off_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.starts()
    world.is_steered(100.0)
    monkeypatch.setattr(time, "time", lambda: T0 + 3700.0 + off_s)
    monkeypatch.setattr(looking, "TTL_S", HANG_S)  # between two looks
    looker = RunObserver(world.store)
    looker.observe()
    documents.LEASE.write(world.store, renewed(3700.0))
    shown, right = looker.observe().money, look(world, 3700.0).money
    assert shown.spent_usd == pytest.approx(right.spent_usd, abs=0.01)


@pytest.mark.parametrize("off_s", [-HOUR_S, HOUR_S])
def test_one_look_waits_for_a_renewal_where_clocks_differ(off_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    steered = Steered(off_s, monkeypatch)
    looker = RunObserver(steered.world.store)
    assert looker.settle(steered.wait) == pytest.approx(T0 + 3702.0, abs=0.5)
    assert steered.waits == 4
    shown, right = looker.observe().money, look(steered.world, 3702.0).money
    assert shown.spent_usd == pytest.approx(right.spent_usd, abs=0.01)


def test_one_look_waits_for_nothing_where_clocks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    steered = Steered(-3.0, monkeypatch)
    assert RunObserver(steered.world.store).settle(steered.wait) == T0 + 3700.0, "the last renewal"
    assert steered.waits == 0


def test_one_look_at_a_dead_holder_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    steered = Steered(HOUR_S, monkeypatch, is_alive=False)
    assert RunObserver(steered.world.store).settle(steered.wait) == T0 + steered.at_s + HOUR_S
    assert steered.waits == LEASE_CHECKS


def test_one_look_at_a_run_that_has_ended_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    steered = Steered(HOUR_S, monkeypatch)
    steered.world.happens(3690.0, RunMoved(RunPhase.FINISHED, "complete"))
    RunObserver(steered.world.store).settle(steered.wait)
    assert steered.waits == 0


def test_commands_take_the_clock_that_the_daemon_began_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World()
    world.starts()
    world.saves(3000.0, 5, tmp_path)
    set_back = RunTime(lambda: T0 + 3800.0 - HOUR_S, lambda: 0.0)  # since the daemon began
    monkeypatch.setattr(looking, "RunTime", lambda: set_back)
    here = Lease("h/1", socket.gethostname(), 1, "1", 1, T0 + 3700.0 - HOUR_S, 15.0, T0 + 3700.0)
    documents.LEASE.write(world.store, here)
    for module in (commands, checkpoints):
        monkeypatch.setattr(module, "open_run", lambda _: (world.store, documents.read_run(world.store)))
    commands.report(None, Output.JSON)
    assert json.loads(capsys.readouterr().out)["wall_s"] == pytest.approx(3800.0, abs=1.0)
    commands.status(None, False, Output.JSON)
    spent_usd = json.loads(capsys.readouterr().out)["money"]["spent_usd"]
    assert spent_usd == pytest.approx(look(world, 3800.0).money.spent_usd, abs=0.001)
    checkpoints.ls(None, Output.TEXT)
    assert "13:20" in capsys.readouterr().out
