"""A viewer whose clock is wrong sees what the run's money is by the clock of the controller that journals."""

from __future__ import annotations

import time

import pytest

from checkpoint.records import documents
from checkpoint.records.documents import Lease
from orchestrator.views import looker as looking
from orchestrator.views.looker import Looker, RunTime
from tests.budget import HANG_S
from tests.generators.views_world import T0, World, look

HOUR_S = 3600.0
OFF_S = (-HOUR_S, HOUR_S, 300 * 24 * HOUR_S)


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
def test_a_renewal_that_was_seen_tells_what_time_it_is(off_s: float) -> None:
    viewer = Viewer(off_s)
    viewer.looks(10.0, renewed(8.0))
    assert viewer.looks(14.0, renewed(13.0)) == 13.0
    assert viewer.looks(18.0, renewed(17.75)) == 17.75, "it was seen sooner after it was written"
    assert viewer.looks(22.0, renewed(20.0)) == 21.75
    assert viewer.looks(22.0 + HOUR_S, renewed(20.0)) == 21.75 + HOUR_S, "its holder has died"


def test_a_renewal_that_may_be_old_tells_only_what_time_it_is_at_least() -> None:
    viewer = Viewer()
    assert viewer.looks(HOUR_S, renewed(8.0)) == 2 * HOUR_S, "the first look"
    assert viewer.looks(2 * HOUR_S, renewed(HOUR_S + 10.0)) == 3 * HOUR_S, "nobody looked for an hour"
    assert Viewer(-HOUR_S).looks(20.0, renewed(8.0)) == 8.0
    assert Viewer(-HOUR_S).looks(20.0, None, told_s=4.0) == 4.0


def test_a_holder_whose_clock_was_set_tells_the_time_of_its_journal() -> None:
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
    looker = Looker(world.store)
    looker.look()
    documents.LEASE.write(world.store, renewed(3700.0))
    shown, right = looker.look().money, look(world, 3700.0).money
    assert shown.spent_usd == pytest.approx(right.spent_usd, abs=0.01)
