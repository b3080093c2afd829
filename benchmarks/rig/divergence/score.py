"""How well the detector tells diverging runs from healthy ones, and how far back its run would go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

from benchmarks.rig.divergence.diverging import SAVE_STEPS
from benchmarks.rig.divergence.traces import Trace
from grpo_orch.orchestrator.simulate.simulated_work import retain
from grpo_orch.policies.detect.divergence import Detector, Health, Point, Verdict, follow
from grpo_orch.policies.model.spec import CheckpointsSpec
from grpo_orch.policies.model.vocabulary import PolicyVersion

LINE_POINTS = 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the detector made of a trace. `kept`: the steps of the checkpoints that retention had left by then."""

    trace: Trace
    trip_step: int | None
    told_onset_step: int | None
    kept: tuple[int, ...] = ()

    @property
    def healthy_steps(self) -> int:
        """How many steps were good until it tripped, or at all."""
        good = self.trace.points[-1].step if self.trace.onset_step is None else self.trace.onset_step - 1
        return good if self.trip_step is None else min(good, self.trip_step)

    @property
    def healthy_points(self) -> int:
        """How many points were logged of the good steps, each step once."""
        return sum(point.step <= self.healthy_steps for point in _in_order(self.trace))

    @property
    def false_trip(self) -> bool:
        """Whether it tripped on a good step."""
        onset = self.trace.onset_step
        return self.trip_step is not None and (onset is None or self.trip_step < onset)

    @property
    def caught(self) -> bool:
        """Whether it tripped on a divergence, at whichever of its steps."""
        return self.trip_step is not None and not self.false_trip

    @property
    def missed(self) -> bool:
        """Whether a divergence passed without a word."""
        return self.trace.onset_step is not None and self.trip_step is None

    @property
    def delay_points(self) -> int:
        """From the first bad update to the trip; 1 where the first point from then on tripped it."""
        onset, trip = self.trace.onset_step or 0, self.trip_step or 0
        return sum(onset <= point.step <= trip for point in _in_order(self.trace))

    @property
    def target_step(self) -> int:
        """The newest checkpoint from before the onset that was told, of those that are left; 0: there is none."""
        return max([step for step in self.kept if step < (self.told_onset_step or 0)], default=0)

    @property
    def has_no_target(self) -> bool:
        """Whether none is left although one from before the told onset was saved."""
        return self.target_step == 0 and (self.told_onset_step or 0) > SAVE_STEPS

    @property
    def target_is_good(self) -> bool:
        """Whether there is one, from before the first bad update."""
        return not self.has_no_target and self.target_step < (self.trace.onset_step or 0)

    @property
    def thrown_away_steps(self) -> int:
        return (self.trip_step or 0) - self.target_step

    @property
    def good_steps_thrown_away(self) -> int:
        """Those that a checkpoint nearer to the onset would have kept."""
        newest = ((self.trace.onset_step or 1) - 1) // SAVE_STEPS * SAVE_STEPS
        return max(0, newest - self.target_step)


@dataclass(frozen=True, slots=True)
class Score:
    """The figures of a set of outcomes; None where there was nothing to compute it from.

    A trip before the onset of a diverging run is a false trip, neither caught nor missed.
    """

    healthy_runs: int
    diverging_runs: int
    missed: int
    false_trips: int
    healthy_tripped: int
    healthy_steps: int
    healthy_points: int
    delay_points_median: float | None
    delay_points_p90: int | None
    target_before_onset_share: float | None
    steps_thrown_away_median: float | None
    good_steps_thrown_away_median: float | None
    without_target: int

    @property
    def false_trips_per_1000(self) -> float:
        """For each 1,000 points logged while all was well: what a run that logs every 20 steps has of them."""
        return 1000 * self.false_trips / max(1, self.healthy_points)


def judge(trace: Trace) -> Outcome:
    """Follow the trace until the detector trips, with checkpoints that are saved and retired as in a run."""
    detector, kept = Detector(), Checkpoints(trace.logging_steps)
    for point in trace.points:
        kept.save_before(point.step, detector.verdict)
        detector = follow(detector, point, trace.limit)
        if detector.verdict.health is Health.TRIPPED:
            return Outcome(trace, detector.verdict.tripped_step, detector.verdict.onset_step, kept.steps)
        kept.save_before(point.step + 1, detector.verdict)
    return Outcome(trace, None, None, kept.steps)


def judge_by_line(trace: Trace, nats: float) -> Outcome:
    """What most people would do: stop where KL is above a line for LINE_POINTS points in a row, or no number."""
    above: list[int] = []
    kept = Checkpoints(trace.logging_steps)
    for point in trace.points:
        kept.save_before(point.step, Verdict())
        kl = point.values.get("kl", 0.0)
        above = [*above, point.step] if kl is None or kl > nats else []
        if len(above) == LINE_POINTS:
            return Outcome(trace, point.step, above[0], kept.steps)
    return Outcome(trace, None, None, kept.steps)


class Checkpoints:
    """What the store holds of a run that saves every SAVE_STEPS, under the default retention."""

    def __init__(self, logging_steps: int) -> None:
        self._logging_steps = logging_steps
        self._listed: list[PolicyVersion] = []
        self._due = SAVE_STEPS

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(one.step for one in self._listed)

    def save_before(self, step: int, verdict: Verdict) -> None:
        """Save what is due before `step`: what a restarted trainer saves again is there already."""
        while self._due < step:
            new = PolicyVersion(0, self._due)
            self._listed = retain(self._listed, new, verdict, (), CheckpointsSpec(), self._logging_steps)
            self._due += SAVE_STEPS


def score(outcomes: Sequence[Outcome]) -> Score:
    """Sum the outcomes up. Delays and targets are those of the divergences that were caught."""
    caught = [one for one in outcomes if one.caught]
    return Score(
        healthy_runs=sum(one.trace.onset_step is None for one in outcomes),
        diverging_runs=sum(one.trace.onset_step is not None for one in outcomes),
        missed=sum(one.missed for one in outcomes),
        false_trips=sum(one.false_trip for one in outcomes),
        healthy_tripped=sum(one.false_trip and one.trace.onset_step is None for one in outcomes),
        healthy_steps=sum(one.healthy_steps for one in outcomes),
        healthy_points=sum(one.healthy_points for one in outcomes),
        delay_points_median=_median(one.delay_points for one in caught),
        delay_points_p90=_p90([one.delay_points for one in caught]),
        target_before_onset_share=sum(one.target_is_good for one in caught) / len(caught) if caught else None,
        steps_thrown_away_median=_median(one.thrown_away_steps for one in caught),
        good_steps_thrown_away_median=_median(one.good_steps_thrown_away for one in caught),
        without_target=sum(one.has_no_target for one in caught),
    )


def _median(values: Iterable[int]) -> float | None:
    found = list(values)
    return median(found) if found else None


def _p90(values: Sequence[int]) -> int | None:
    """The least of them that nine of ten do not exceed."""
    return sorted(values)[ceil(0.9 * len(values)) - 1] if values else None


def _in_order(trace: Trace) -> list[Point]:
    """Each step once: a restarted trainer logs some again."""
    return list({point.step: point for point in trace.points}.values())
