"""Whether a run keeps its deadline, and how many rollout nodes that takes: Uniform Progress.

After Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines" (NSDI 2024). A run of S steps
that began at 0 and is to end at T has to have made S t / T of them at time t. One that is ahead may wait for spot;
one that is behind buys on demand, and goes back to spot once it is ahead by two changes of machine. The run aims
at two such changes before its deadline, so that a loss at the very end does not make it late.

Time enough for each step says how many nodes there have to be: a step takes a + b/n (`steps.StepShape`), so for
T seconds a step n = b / (T - a).
"""

from __future__ import annotations

import math
from calendar import timegm  # arithmetic on dates; it reads no clock
from dataclasses import dataclass

from policies.costs.steps import StepShape
from policies.model.spec import RunSpec
from policies.model.state import RunState
from policies.model.vocabulary import Market, Role, kind_of
from policies.tick.snapshot import BEFORE_TRAINING, Trainer

CHANGES = 2  # of machine: so many are kept in reserve, and a run that is behind is first so far ahead again
RESERVE_SHARE = 0.1  # of the whole time: a reserve is no larger
LATE_SHARE = 0.1  # of the time left: a run that would be later than this is not sped up in vain
SPARE_SHARE = 0.1  # of the time of a step: nodes are returned once the deadline is kept with that much to spare
BOOT_S = 300.0  # of a rollout node, before one has served


@dataclass(frozen=True, slots=True)
class Course:
    """Where a run is on the way to its deadline. Times: seconds since the epoch; `step` is less than `steps`."""

    now_s: float
    begun_s: float  # when its trainer first trained
    deadline_s: float
    change_s: float  # from a request until a node works
    step: int
    steps: int

    @property
    def left(self) -> int:
        """Steps to make."""
        return self.steps - self.step

    @property
    def aim_s(self) -> float:
        """When it is to be done: the deadline, less the reserve."""
        whole_s = max(0.0, self.deadline_s - self.begun_s)
        return self.deadline_s - min(CHANGES * self.change_s, RESERVE_SHARE * whole_s)

    @property
    def step_s(self) -> float:
        """Seconds that each step left may take; 0 once there is no time."""
        return max(0.0, self.aim_s - self.now_s) / self.left

    def expected(self, in_s: float = 0.0) -> float:
        """Steps that a run of even progress has made by now, or some seconds later."""
        whole_s = self.aim_s - self.begun_s
        passed = (self.now_s + in_s - self.begun_s) / whole_s if whole_s > 0 else 1.0
        return self.steps * min(1.0, max(0.0, passed))

    @property
    def is_behind(self) -> bool:
        return self.step < math.floor(self.expected())

    @property
    def is_safe(self) -> bool:
        """Whether it stays ahead through so many changes of machine."""
        return self.step >= self.expected(CHANGES * self.change_s)

    def end_s(self, shape: StepShape, nodes: int) -> float:
        """When it is done with so many nodes, one or more, and no loss."""
        return self.now_s + self.left * shape.seconds(nodes)

    def is_late(self, shape: StepShape, most: int) -> bool:
        """Whether the deadline is out of reach even with `most` nodes: by more than a measurement is off."""
        end_s = self.end_s(shape, most)
        return end_s - LATE_SHARE * (end_s - self.now_s) > self.deadline_s


def nodes_for(course: Course, shape: StepShape, most: int, spare: float = 0.0) -> int:
    """Return how many nodes, `most` at most, make the steps left in time; 0 where none of that would help.

    Args:
        course: where the run is.
        shape: of a step, as measured.
        most: nodes that there may be.
        spare: a share of each step's time that is to be left over.
    """
    if course.is_late(shape, most):
        return 0
    needed = shape.nodes((1 - spare) * course.step_s)
    return most if needed >= most else max(1, math.ceil(needed))


def course_of(state: RunState, spec: RunSpec, trainer: Trainer | None, now_s: float) -> Course | None:
    """Return where the run is on the way to its deadline; None where it has none, or while no trainer trains: one
    that restores does not report its step, and without `grpo.max_steps` there is no number of steps left."""
    deadline, begun_s = spec.policies.fleet.deadline, state.proved_at_s
    if deadline is None or begun_s is None or trainer is None or trainer.activity in BEFORE_TRAINING:
        return None
    if trainer.timeline != state.timeline or trainer.step >= trainer.max_steps:
        return None
    change_s = min(boot_s(state), spec.policies.boot_timeout_s)
    return Course(now_s, begun_s, time_of(deadline), change_s, trainer.step, trainer.max_steps)


def boot_s(state: RunState) -> float:
    """Seconds from a rollout node's request until it works, as last seen: on demand, else on spot."""
    kinds = [state.kinds.get(kind_of(Role.ROLLOUT, market)) for market in (Market.ON_DEMAND, Market.SPOT)]
    return next((kind.boot_s for kind in kinds if kind is not None and kind.boot_s is not None), BOOT_S)


def nodes_in_time(course: Course | None, shape: StepShape, most: int, present: int) -> int:
    """Return how many rollout nodes the deadline takes, where `present` are there or wanted; 0: it asks for none.

    Fewer than present are enough only once they leave a tenth of each step's time over.
    """
    if course is None:
        return 0
    needed = nodes_for(course, shape, most)
    return min(present, nodes_for(course, shape, most, SPARE_SHARE)) if 0 < needed < present else needed


def time_of(deadline: str) -> float:
    """Return `2026-11-30T18:00:00Z`, run.yaml's `policies.fleet.deadline` as it is stored, as seconds since the
    epoch."""
    date, _, clock = deadline.removesuffix("Z").partition("T")
    year, month, day = (int(part) for part in date.split("-"))
    hour, minute, second = (int(part) for part in clock.split(":"))
    return float(timegm((year, month, day, hour, minute, second)))
