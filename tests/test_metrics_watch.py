"""The controller's own detectors, over rows as a trainer stores them."""

from __future__ import annotations

import itertools

import pytest

from checkpoint.metrics import MetricsWriter, Row, point_of
from checkpoint.store import Store
from orchestrator.metrics_watch import MetricsWatch
from policies.divergence import Detector, Health, Verdict, follow
from policies.snapshot import Trainer, Watched
from policies.timelines import Fork

names = itertools.count()
LIMIT = 0.5
CALM, HIGH = 0.1, 40.0


class Run:
    """A store, a trainer that writes rows into it, and who watches."""

    def __init__(self, logging_steps: int = 1) -> None:
        self.store = Store(f"memory://watch-{next(names)}")
        self.logging_steps = logging_steps
        self.watch = self.watcher()
        self.forks: list[Fork] = []
        self.beat = Trainer("trainer-0-i1", 1, 0, 0, 1000, "training", 1.0)
        self.writer = MetricsWriter(self.store)

    def watcher(self) -> MetricsWatch:
        return MetricsWatch(self.store, LIMIT, self.logging_steps)

    def restarts(self, timeline: int, attempt: int) -> None:
        self.beat = Trainer("trainer-0-i1", attempt, timeline, 0, 1000, "starting", 1.0)
        self.writer = MetricsWriter(self.store)

    def trains(self, first: int, last: int, kl: float, **more: float) -> None:
        beat = self.beat
        for step in range(first, last + 1, self.logging_steps):
            values = {"kl": kl, "reward": 0.5, "grad_norm": 1.0, **more}
            self.writer.append(Row(beat.timeline, step, float(step), beat.attempt, values))
        self.beat = Trainer(beat.node, beat.attempt, beat.timeline, last, 1000, "training", 1.0)

    def looks(self, watch: MetricsWatch | None = None) -> Watched:
        found = (watch or self.watch).look(self.beat, self.forks)
        assert found is not None
        return found

    def by_hand(self, *stretches: tuple[int, int, float]) -> Verdict:
        """The verdict on rows `(first, last, kl)`, told without a store."""
        detector = Detector()
        for first, last, kl in stretches:
            for step in range(first, last + 1, self.logging_steps):
                values = {"kl": kl, "reward": 0.5, "grad_norm": 1.0}
                detector = follow(detector, point_of(Row(0, step, 0.0, 1, values)), LIMIT)
        return detector.verdict


def test_nothing_is_known_before_a_trainer_has_spoken():
    run = Run()
    assert run.watch.look(None, ()) is None
    assert run.looks() == Watched(0, Verdict())


@pytest.mark.parametrize("every", [1, 7, 60])
def test_the_verdict_is_the_same_however_often_it_is_looked(every: int):
    run = Run()
    for first in range(1, 241, every):
        run.trains(first, min(first + every - 1, 240), CALM if first < 180 else HIGH)
        run.looks()
    assert run.looks() == run.looks(run.watcher())
    assert run.looks().verdict.health is Health.TRIPPED


def test_a_row_that_is_late_is_followed_when_it_comes():
    run = Run()
    run.trains(1, 50, CALM)
    run.looks()
    run.beat = Trainer("trainer-0-i1", 1, 0, 60, 1000, "training", 1.0)
    assert run.looks().verdict.step == 50
    run.trains(51, 60, CALM)
    assert run.looks().verdict.step == 60


def test_a_trainer_that_starts_again_is_followed_from_the_stored_rows():
    run = Run()
    run.trains(1, 150, CALM)
    run.looks()
    run.restarts(0, attempt=2)
    run.trains(141, 152, CALM)
    assert run.looks().verdict == run.by_hand((1, 152, CALM))


def test_a_fork_forgets_the_abandoned_steps_and_remembers_those_before():
    run = Run()
    run.trains(1, 120, CALM)
    run.trains(121, 160, HIGH)
    assert run.looks().verdict.health is Health.TRIPPED
    run.forks = [Fork(1, "0-100")]
    run.restarts(1, attempt=2)
    assert run.looks() == Watched(1, run.by_hand((1, 100, CALM)))
    run.trains(101, 140, CALM)
    assert run.looks().verdict == run.by_hand((1, 140, CALM))
    assert run.looks(run.watcher()).verdict == run.by_hand((1, 140, CALM))


def test_an_old_trainers_rows_say_nothing_of_the_new_timeline():
    run = Run()
    run.trains(1, 100, CALM)
    run.forks = [Fork(1, None)]
    run.looks()
    run.trains(101, 140, HIGH)  # it has not seen the fork yet
    assert run.looks() == Watched(1, Verdict())


def test_rows_ten_steps_apart_are_not_looked_for_in_between():
    run = Run(logging_steps=10)
    run.trains(10, 200, CALM)
    assert run.looks().verdict.step == 200
    run.store.get_or_none = lambda _: pytest.fail("nothing can be there yet")  # type: ignore[method-assign]  # told, not asked
    run.beat = Trainer("trainer-0-i1", 1, 0, 209, 1000, "training", 1.0)
    assert run.looks().verdict.step == 200


def test_pitfalls_are_told_once_each_look_has_read_them():
    run = Run()
    run.trains(1, 400, CALM, frac_reward_zero_std=1.0)
    first = run.looks()
    assert first.pitfalls
    assert not run.looks().pitfalls
