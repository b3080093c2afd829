"""Every labelled run there is, judged by the detector and by fixed lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from statistics import median

from benchmarks.rig.divergence.families import CAUSES
from benchmarks.rig.divergence.healthy import Family
from benchmarks.rig.divergence.recorded import recorded_traces
from benchmarks.rig.divergence.score import Outcome, judge, judge_by_line
from benchmarks.rig.divergence.signals import Setting
from benchmarks.rig.divergence.traces import LOGGING_STEPS, Trace, trace
from grpo_orch.policies.detect.divergence import Detector, Point, follow

SETTINGS = {
    "as in the tests": Setting(seed=2),
    "wilder": Setting(
        seed=3,
        kl_sigma=(0.01, 0.5),
        kinship=(0.0, 0.93),
        freedom=3.2,
        completions=(16, 128),
        grad_sigma=(0.05, 0.6),
        spike=(5.0, 5000.0),
    ),
}
EACH = len(LOGGING_STEPS)  # traces a family and setting: each interval of logging in its turn
TIMED = 40  # traces
SYNTHETIC, SEEN, UNSEEN = "synthetic", "recorded, seen", "recorded, unseen"
DETECTOR = "detector"
JUDGES: dict[str, Callable[[Trace], Outcome]] = {
    DETECTOR: judge,
    "line at KL 1": partial(judge_by_line, nats=1.0),
    "line at KL 0.1": partial(judge_by_line, nats=0.1),
}


@dataclass(frozen=True, slots=True)
class Judged:
    """A run and what each judge made of it. `cause`, `setting`: of a synthetic one."""

    set: str
    outcomes: dict[str, Outcome]
    cause: str = ""
    setting: str = ""

    @property
    def name(self) -> str:
        """Of its family, or its own where it was recorded."""
        return self.outcomes[DETECTOR].trace.family


def judge_all() -> list[Judged]:
    """Judge the synthetic runs, on all cores, and those of the recordings that are there."""
    jobs = [
        (cause, setting, family, turn)
        for cause, families in CAUSES.items()
        for setting in SETTINGS
        for family in families.families
        for turn in range(EACH)
    ]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        synthetic = list(pool.map(_judge_synthetic, *zip(*jobs, strict=True), chunksize=EACH))
    return [*synthetic, *_judge_recorded(SEEN, "seen"), *_judge_recorded(UNSEEN, "unseen")]


def microseconds_a_point() -> float:
    """The median over some synthetic traces of what following one point takes."""
    families = [family for cause in CAUSES.values() for family in cause.families]
    taken = []
    for turn in range(TIMED):
        made = trace(families[turn * len(families) // TIMED], SETTINGS["as in the tests"], turn)
        detector, since_s = Detector(), time.perf_counter()
        for point in made.points:
            detector = follow(detector, point, made.limit)
        taken.append((time.perf_counter() - since_s) / len(made.points))
    return 1e6 * median(taken)


def outcomes_of(judged: Sequence[Judged], judge_name: str) -> list[Outcome]:
    return [one.outcomes[judge_name] for one in judged]


def _judge_synthetic(cause: str, setting: str, family: Family, turn: int) -> Judged:
    made = trace(family, SETTINGS[setting], turn)
    return Judged(SYNTHETIC, _judge(made), cause, setting)


def _judge_recorded(name: str, split: str) -> Iterator[Judged]:
    for one in recorded_traces(split):
        yield Judged(name, _judge(one))


def _judge(made: Trace) -> dict[str, Outcome]:
    """Each judge's outcome, with a trace of steps alone: nothing else is scored, and it goes between processes."""
    bare = replace(made, points=tuple(Point(point.step, {}) for point in made.points))
    return {name: replace(judged(made), trace=bare) for name, judged in JUDGES.items()}
