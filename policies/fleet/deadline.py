"""Whether a run keeps its deadline, and how many rollout nodes that takes: Uniform Progress.

After Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines" (NSDI 2024). A run of S steps
that began at 0 and is to end at T has to have made S t / T of them at time t. One that is ahead may wait for spot;
one that is behind buys on demand, and goes back to spot once it is ahead by two changes of machine. The run aims
at two such changes before its deadline, so that a loss at the very end does not make it late.

Time enough for each step says how many nodes there have to be: a step takes a + b/n (`how_many.StepShape`), so for
T seconds a step n = b / (T - a).
"""

from __future__ import annotations

import math
from calendar import timegm  # arithmetic on dates; it reads no clock
from dataclasses import dataclass

from policies.fleet.how_many import StepShape

CHANGES = 2  # of machine: so many are kept in reserve, and a run that is behind is first so far ahead again
RESERVE_SHARE = 0.1  # of the whole time: a reserve is no larger
LATE_SHARE = 0.1  # of the time left: a run that would be later than this is not sped up in vain
SPARE_SHARE = 0.1  # of the time of a step: nodes go back once the deadline is kept with so much to spare


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


def time_of(deadline: str) -> float:
    """Return `2026-11-30T18:00:00Z`, run.yaml's `policies.fleet.deadline` as it is stored, as seconds since the
    epoch."""
    date, _, clock = deadline.removesuffix("Z").partition("T")
    year, month, day = (int(part) for part in date.split("-"))
    hour, minute, second = (int(part) for part in clock.split(":"))
    return float(timegm((year, month, day, hour, minute, second)))
