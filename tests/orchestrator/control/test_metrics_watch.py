"""The controller's own detectors, over rows as a trainer stores them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NoReturn

import pytest

from grpo_orch.checkpoint.records.metrics import (
    GENERATE_NODE_S,
    GENERATE_S,
    STALENESS,
    MetricsRow,
    MetricsWriter,
    point_of,
)
from grpo_orch.checkpoint.store.document import UnreadableDocuments
from grpo_orch.checkpoint.store.errors import StoreUnavailable
from grpo_orch.checkpoint.store.run_store import Entry, Store
from grpo_orch.orchestrator.control import metrics_watch
from grpo_orch.orchestrator.control.metrics_watch import OBJECTS_PER_READ, MetricsWatch
from grpo_orch.policies.detect.divergence import Detector, Health, Point, Verdict, follow
from grpo_orch.policies.model.spec import KlPolicy
from grpo_orch.policies.model.timelines import Fork
from grpo_orch.policies.tick.snapshot import ControllerVerdict, Trainer

names = itertools.count()
LIMIT = 0.5
CALM, HIGH = 0.1, 40.0


class Counted(Store):
    """Counts what is read, and fails when told."""

    reads = 0
    failing: Callable[[], bool] = staticmethod(lambda: False)

    def get(self, key: str) -> bytes:
        self.reads += 1
        if self.failing():
            raise StoreUnavailable(f"read {key}: 503")
        return super().get(key)

    def entries(self, prefix: str, *, after: str | None = None) -> list[Entry]:
        self.reads += 1
        if self.failing():
            raise StoreUnavailable(f"list {prefix}: 503")
        return super().entries(prefix, after=after)


class Run:
    """A store, a trainer that writes rows into it, and who watches."""

    def __init__(self, logging_steps: int = 1) -> None:
        self.store = Counted(f"memory://watch-{next(names)}", retry_s=0.0)
        self.logging_steps = logging_steps
        self.watch = self.watcher()
        self.forks: list[Fork] = []
        self.beat = Trainer("trainer-0-i1", 1, 0, 0, 1000, "training", 1.0)
        self.writer = MetricsWriter(self.store)

    def watcher(self) -> MetricsWatch:
        return MetricsWatch(self.store, KlPolicy(limit=LIMIT), self.logging_steps)

    def restarts(self, timeline: int, attempt: int) -> None:
        self.beat = Trainer("trainer-0-i1", attempt, timeline, 0, 1000, "starting", 1.0)
        self.writer = MetricsWriter(self.store)

    def goes_back(self, step: int) -> None:
        """A new attempt of the trainer goes on from a checkpoint, and says so once it trains."""
        beat = self.beat
        self.beat = Trainer(beat.node, beat.attempt + 1, beat.timeline, 0, 0, "restoring", 1.0)
        self.looks()
        self.beat = Trainer(beat.node, beat.attempt + 1, beat.timeline, step, 1000, "training", 1.0)
        self.writer = MetricsWriter(self.store)

    def trains(self, first: int, last: int, kl: float, **more: float) -> None:
        beat = self.beat
        for step in range(first, last + 1, self.logging_steps):
            values = {"kl": kl, "reward": 0.5, "grad_norm": 1.0, **more}
            self.writer.append(MetricsRow(beat.timeline, step, float(step), beat.attempt, values))
        stored_step = max(0, last // 50 * 50 - 50)
        self.beat = replace(beat, step=last, activity="training", stored_step=stored_step)

    def looks(self, watch: MetricsWatch | None = None) -> ControllerVerdict:
        """What is said once all rows are read."""
        for _ in range(100):
            found = (watch or self.watch).observe(self.beat, self.forks)
            if found is not None:
                return found
        raise AssertionError("it does not come to an end")

    def by_hand(self, *stretches: tuple[int, int, float]) -> Verdict:
        """The verdict on rows `(first, last, kl)`, told without a store."""
        detector = Detector()
        for first, last, kl in stretches:
            for step in range(first, last + 1, self.logging_steps):
                values = {"kl": kl, "reward": 0.5, "grad_norm": 1.0}
                detector = follow(detector, point_of(MetricsRow(0, step, 0.0, 1, values)), LIMIT)
        return detector.verdict


def test_detector_that_raises_is_reported_and_watching_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises_at_seven(detector: Detector, point: Point, *_: object) -> Detector:
        if point.step == 7:
            raise ValueError("min() arg is an empty sequence")
        return follow(detector, point, LIMIT)

    monkeypatch.setattr(metrics_watch, "follow", raises_at_seven)
    run, unreadable = Run(), UnreadableDocuments()
    run.watch = MetricsWatch(run.store, KlPolicy(limit=LIMIT), 1, unreadable)
    run.trains(1, 30, 0.01)
    assert run.looks().verdict.step == 30
    assert list(unreadable.found) == ["divergence detector"]
    assert "step 7" in unreadable.found["divergence detector"]
    run.trains(31, 60, 9.0)
    assert run.looks().verdict.health is Health.TRIPPED


def test_nothing_is_known_before_a_trainer_has_spoken() -> None:
    run = Run()
    assert run.watch.observe(None, ()) is None
    assert run.looks() == ControllerVerdict(0, Verdict())


@pytest.mark.parametrize("every", [1, 7, 60])
def test_the_verdict_is_the_same_however_often_it_is_looked(every: int) -> None:
    run = Run()
    for first in range(1, 241, every):
        run.trains(first, min(first + every - 1, 240), CALM if first < 180 else HIGH)
        run.looks()
    assert run.looks() == run.looks(run.watcher())
    assert run.looks().verdict.health is Health.TRIPPED


def test_fork_forgets_abandoned_steps_and_keeps_earlier_ones() -> None:
    run = Run()
    run.trains(1, 120, CALM)
    run.trains(121, 160, HIGH)
    assert run.looks().verdict.health is Health.TRIPPED
    run.forks = [Fork(1, "0-100")]
    run.restarts(1, attempt=2)
    assert run.looks() == ControllerVerdict(1, run.by_hand((1, 100, CALM)))
    run.trains(101, 140, CALM)
    assert run.looks().verdict == run.by_hand((1, 140, CALM))
    assert run.looks(run.watcher()).verdict == run.by_hand((1, 140, CALM))


def test_old_trainers_rows_do_not_count_for_new_timeline() -> None:
    run = Run()
    run.trains(1, 100, CALM)
    run.forks = [Fork(1, None)]
    run.looks()
    run.trains(101, 140, HIGH)  # it has not seen the fork yet
    assert run.looks() == ControllerVerdict(1, Verdict())


def test_rows_ten_steps_apart_are_not_looked_for_in_between() -> None:
    run = Run(logging_steps=10)
    run.trains(10, 200, CALM)
    assert run.looks().verdict.step == 200

    def nothing_is_there(key: str) -> NoReturn:
        pytest.fail(f"{key} cannot be there yet")

    run.store.get_or_none = nothing_is_there  # type: ignore[method-assign]  # told, not asked
    run.beat = Trainer("trainer-0-i1", 1, 0, 209, 1000, "training", 1.0)
    assert run.looks().verdict.step == 200


def test_pitfalls_are_reported_once_looks_have_read_them() -> None:
    run = Run()
    run.trains(1, 400, CALM, frac_reward_zero_std=1.0)
    first = run.looks()
    assert first.pitfalls
    assert not run.looks().pitfalls


def test_look_reads_little_and_is_empty_until_caught_up() -> None:
    run = Run()
    for first in range(1, 3000, 100):
        run.trains(first, first + 99, CALM)
    late, said, reads = run.watcher(), list[ControllerVerdict | None](), list[int]()
    while not said or said[-1] is None:
        run.store.reads = 0
        said.append(late.observe(run.beat, run.forks))
        reads.append(run.store.reads)
    assert max(reads) <= OBJECTS_PER_READ + 1
    assert said[:-1] == [None] * (3000 // 100 // OBJECTS_PER_READ)
    assert said[-1] == ControllerVerdict(0, run.by_hand((1, 3000, CALM)))
    run.goes_back(2950)
    assert run.looks(late).verdict == run.by_hand((1, 2950, CALM))


def test_rows_of_earlier_attempt_after_present_start_are_ignored() -> None:
    run = Run()
    run.trains(1, 150, CALM)
    run.trains(151, 190, HIGH)
    assert run.looks().verdict.health is Health.TRIPPED
    run.goes_back(140)
    assert run.looks().verdict == run.by_hand((1, 140, CALM))
    for step in range(141, 200):
        run.trains(step, step, CALM)
        assert run.looks().verdict == run.by_hand((1, step, CALM))
    assert run.looks(run.watcher()) == run.looks()


def test_rows_remade_between_looks_are_read_again() -> None:
    run = Run()
    run.trains(1, 150, CALM)
    run.trains(151, 190, HIGH)
    assert run.looks().verdict.health is Health.TRIPPED
    run.beat = replace(run.beat, attempt=2)
    run.trains(141, 195, CALM)
    assert run.looks().verdict == run.by_hand((1, 195, CALM))


def is_next(numbers: Iterator[int], wanted: int) -> bool:
    return next(numbers) == wanted


def test_a_read_that_fails_loses_no_history() -> None:
    """At each read in turn."""
    for failing in range(8):
        run = Run()
        run.trains(1, 300, CALM)
        run.trains(301, 310, HIGH)
        run.forks = [Fork(1, "0-300")]
        run.restarts(1, attempt=2)
        run.trains(301, 305, CALM)
        reads = itertools.count()
        run.store.failing = functools.partial(is_next, reads, failing)
        for _ in range(3):
            with contextlib.suppress(StoreUnavailable):
                run.watch.observe(run.beat, run.forks)
        run.store.failing = lambda: False
        assert run.looks() == ControllerVerdict(1, run.by_hand((1, 305, CALM)))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_long_follower_knows_what_a_new_reader_does(seed: int) -> None:
    """Steps, restarts, rollbacks and reads that fail, in any order."""
    draw = random.Random(seed)
    run = Run(logging_steps=draw.choice([1, 1, 10]))
    every, step, timeline = run.logging_steps, 0, 0
    for _ in range(40):
        match draw.choice(["train", "train", "train", "back", "fork"]):
            case "train":
                last = step + every * draw.randint(1, 130 // every)
                run.trains(step + every, last, draw.choice([CALM, 0.11, 0.3]), frac_reward_zero_std=draw.random())
                step = last
            case "back":
                step -= min(step, every * draw.randint(0, 250 // every))
                run.goes_back(step)
            case "fork":
                step -= min(step, every * draw.randint(0, 250 // every))
                run.forks.append(Fork(timeline + 1, f"{_timeline_at(run.forks, step)}-{step}" if step else None))
                timeline += 1
                run.beat = Trainer("trainer-0-i1", 1, timeline, 0, 0, "restoring", 1.0)
                run.looks()
                run.beat = Trainer("trainer-0-i1", 1, timeline, step, 1000, "training", 1.0)
                run.writer = MetricsWriter(run.store)
        run.store.failing = lambda: draw.random() < 0.2
        for _ in range(2):
            with contextlib.suppress(StoreUnavailable):
                run.watch.observe(run.beat, run.forks)
        run.store.failing = lambda: False
        assert run.looks().verdict == run.looks(run.watcher()).verdict, seed


def _timeline_at(forks: list[Fork], step: int) -> int:
    """The timeline whose step that is on the present line."""
    for fork in reversed(forks):
        if fork.start_at is None or step > fork.start_at.step:
            return fork.timeline
    return 0


def test_newest_timing_is_of_the_newest_complete_step() -> None:
    run = Run()
    assert run.watch.newest_timing() is None
    for step in range(1, 5):
        values = {GENERATE_S: 2.0 + step, GENERATE_NODE_S: 2.0, STALENESS: 1.0}
        run.writer.append(MetricsRow(0, step, 10.0 * step, 1, values))
    run.beat = replace(run.beat, step=4)
    run.watch.observe(run.beat, run.forks)
    found = run.watch.newest_timing()
    assert found is not None
    assert (found.step_s, found.generate_s, found.staleness) == (10.0, 5.0, 1.0)
